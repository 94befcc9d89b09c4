"""Find a forgotten mean: train state that is equal on all ranks before a call and not after it.

An output is carried where an argument has the same path, shape and dtype, and the output is that
argument plus something, as a parameter is plus its update. Whether it was equal on all ranks is
known when the program runs.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.core import JaxprEqn, Literal
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.primitives import Op, Trait, has
from jaxmpi._analysis.replication import may_vary
from jaxmpi._analysis.text import Text
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import leaf_name
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = ["Carried", "pairs"]

SHOWN = 3  # outputs
Sources: TypeAlias = frozenset[int]  # numbers of inputs
NO_INPUT: Sources = frozenset()


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
        varies = may_vary(
            jaxpr, [i not in equal for i in range(count)], constants=False, marked=False
        )
        if not any(varies[pair.output] for pair in found):
            return None
        added = propagate(ADDED, jaxpr, [frozenset({i}) for i in range(count)])
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
        varies = may_vary(self._jaxpr, [not same for same in equal], constants=False, marked=False)
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


# Which inputs are added into a value


def _union(values: Sequence[Sources]) -> Sources:
    return NO_INPUT.union(*values)


def _nothing(eqn: JaxprEqn, operands: list[Sources]) -> list[Sources]:
    return [NO_INPUT] * len(eqn.outvars)


def _local(eqn: JaxprEqn, operands: list[Sources]) -> list[Sources]:
    if has(eqn, Trait.KEEPS_VALUE):
        return operands
    return [_union(operands)] if has(eqn, Trait.ADDS_UP) else _nothing(eqn, operands)


ADDED = Analysis(
    bottom=NO_INPUT,
    join=_union,
    rules={
        Op.SUBTRACT: lambda eqn, operands: operands[:1],
        Op.SELECT: lambda eqn, operands: [_union(operands[1:])],
        Op.CLAMP: lambda eqn, operands: operands[1:2],
        Op.GET: lambda eqn, operands: operands[:1],
        Op.SWAP: lambda eqn, operands: operands[:1],
    },
    otherwise=_local,
)
