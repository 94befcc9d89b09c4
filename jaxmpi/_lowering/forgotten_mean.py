"""Find a forgotten mean: train state that is equal on all ranks before a call and not after it.

An output is carried where an argument has the same path, shape and dtype, and the output is that
argument plus something, as a parameter is plus its update. Whether it was equal on all ranks is
known when the program runs.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal, Var
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._axis import DIFFERS, EQUAL
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import leaf_name
from jaxmpi._lowering.classify import CALLS, callee, kind
from jaxmpi._lowering.replication import varying
from jaxmpi._lowering.text import Text
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = ["Carried", "pairs"]

SHOWN = 3  # outputs
# operand i is result i
SAME = (
    "convert_element_type",
    "copy",
    "optimization_barrier",
    "reshape",
    "reduce_precision",
    "name",
)
SUMS = ("add", "add_any", "max", "min")
Sources = frozenset[int]  # numbers of inputs
NONE: Sources = frozenset()


class Pair(NamedTuple):
    """An input of the program, and the output that it is carried to."""

    source: int
    output: int
    name: str  # of the output


class Carried:
    """Outputs of a program that may differ between ranks after a call with equal inputs."""

    def __init__(self, title: str, jaxpr: AnyJaxpr, pairs: Sequence[Pair]) -> None:
        self._title, self._jaxpr, self._pairs = title, jaxpr, pairs

    @classmethod
    def find(
        cls,
        title: str,
        jaxpr: AnyJaxpr,
        ins: Sequence[KeyPath],
        outs: Sequence[KeyPath],
        captured: int,
    ) -> "Carried | None":
        """Return the outputs to watch when the program runs; None if there are none.

        Args:
          title: of the program.
          jaxpr: of `trace.trace`, whose first `captured` inputs are arrays from outside.
          ins: the paths of the arguments' arrays.
          outs: those of the outputs.
          captured: how many there are.
        """
        found = pairs(jaxpr, ins, outs, captured)
        if not found:
            return None
        count = len(_jaxcompat.parts(jaxpr)[0].invars)
        equal = {pair.source for pair in found}
        varies = _may_differ(jaxpr, [i not in equal for i in range(count)])
        if not any(varies[pair.output] for pair in found):
            return None
        added = _added(jaxpr, [frozenset({i}) for i in range(count)])
        found = [
            pair for pair in found if varies[pair.output] and pair.source in added[pair.output]
        ]
        return cls(title, jaxpr, found) if found else None

    @property
    def digest(self) -> str:
        """A digest of the program, equal on ranks with the same program."""
        text, (inner, _) = Text(self._jaxpr), _jaxcompat.parts(self._jaxpr)
        lines = [text.equation(eqn, shapes=False) for eqn in inner.eqns]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def parting(self, equal: Sequence[bool]) -> str:
        """Return the warning for a call, "" for none.

        Args:
          equal: which inputs, arrays from outside first, were equal on all ranks.
        """
        varies = _may_differ(self._jaxpr, [not same for same in equal])
        names = list(
            dict.fromkeys(
                pair.name for pair in self._pairs if equal[pair.source] and varies[pair.output]
            )
        )
        if not names:
            return ""
        more = f" and {len(names) - SHOWN} more outputs" if len(names) > SHOWN else ""
        return (
            f"{self._title}: output {', '.join(names[:SHOWN])}{more} may differ between the ranks "
            "from this call on, and was equal on all of them before. If it is trained, average the "
            "gradients (jaxmpi.distributed, jaxmpi.tree_allreduce). If it should differ, such as a "
            "sum over the batches of a rank, put it into a jaxmpi.PerRankState, or in nnx into an "
            "nnx.BatchStat."
        )


def pairs(
    jaxpr: AnyJaxpr, ins: Sequence[KeyPath], outs: Sequence[KeyPath], captured: int
) -> list[Pair]:
    """Return the pairs of an input and an output with the same path, shape and dtype.

    The arguments are those of `Carried.find`.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    by_path = _by_path(ins, captured)
    kinds = [(v.aval.shape, v.aval.dtype) for v in inner.invars]
    found = []
    for i, (path, v) in enumerate(zip(outs, inner.outvars, strict=True)):
        names = [] if is_per_rank_leaf(path) or isinstance(v, Literal) else _names(path)
        sources = [source for name in names for source in by_path.get(name, [])]
        found += [
            Pair(s, i, leaf_name(path)) for s in sources if kinds[s] == (v.aval.shape, v.aval.dtype)
        ]
    return found


def _by_path(ins: Sequence[KeyPath], captured: int) -> Mapping[Hashable, list[int]]:
    """Return the inputs by their paths without the position of the argument.

    An argument that is one array has its position.
    """
    found: dict[Hashable, list[int]] = {}
    for i, path in enumerate(ins, captured):
        rest = tuple(map(str, path[2:])) or path[1]
        if not is_per_rank_leaf(path) and (len(ins) > 1 or path[2:]):
            found.setdefault(rest, []).append(i)
    return found


def _names(path: KeyPath) -> list[Hashable]:
    """Return the paths that an output may have as an input: alone, or without the tuple."""
    alone = tuple(map(str, path)) or jax.tree_util.SequenceKey(0)
    return [alone, tuple(map(str, path[1:])) or path[0]] if path else [alone]


def _may_differ(jaxpr: AnyJaxpr, ins: Sequence[bool]) -> list[bool]:
    return varying(jaxpr, ins, constants=False, check=False, equal_names=(EQUAL, DIFFERS))


def _added(jaxpr: AnyJaxpr, ins: Sequence[Sources]) -> list[Sources]:
    """For each output, return the inputs that are added into it."""
    inner, _ = _jaxcompat.parts(jaxpr)
    known: dict[Var, Sources] = dict(zip(inner.invars, ins, strict=True))

    def read(v: Atom) -> Sources:
        return NONE if isinstance(v, Literal) else known.get(v, NONE)

    for eqn in inner.eqns:
        xs = [read(v) for v in eqn.invars]
        if any(xs):
            known.update(zip(eqn.outvars, _outs(eqn, xs), strict=False))
    return [read(v) for v in inner.outvars]


def _outs(eqn: JaxprEqn, xs: list[Sources]) -> list[Sources]:
    name = eqn.primitive.name
    if name in SAME:
        return xs
    if name in SUMS:
        return [NONE.union(*xs)]
    if name == "sub":
        return [xs[0]]
    if name == "select_n":
        return [NONE.union(*xs[1:])]
    if name == "clamp":
        return [xs[1]]
    if name in CALLS and kind(eqn) != "collective":
        return _added(*callee(eqn, xs))
    if name == "cond":
        branches = [_added(branch, xs[1:]) for branch in eqn.params["branches"]]
        return [NONE.union(*outs) for outs in zip(*branches, strict=True)]
    if name == "scan":
        consts, carry = _jaxcompat.scan_counts(eqn)
        return _loop(eqn.params["jaxpr"], xs[:consts], xs[consts : consts + carry])
    if name == "while":
        first, last = (
            eqn.params["cond_nconsts"],
            eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
        )
        return _loop(eqn.params["body_jaxpr"], xs[first:last], xs[last:])
    return []


def _loop(body: AnyJaxpr, consts: list[Sources], state: list[Sources]) -> list[Sources]:
    """For each carry of a loop, return the inputs that every iteration adds to."""
    count = len(_jaxcompat.parts(body)[0].invars)  # what is scanned over, too
    while True:
        outs = _added(body, [*consts, *state, *[NONE] * (count - len(consts) - len(state))])[
            : len(state)
        ]
        if (after := [a & b for a, b in zip(state, outs, strict=True)]) == state:
            return state
        state = after
