"""Find a forgotten mean: train state that is equal on all ranks before a call but not after it.

An output counts as the next value of an input if it has the same path, shape and dtype, and depends
on the input, in whatever form: p - lr·g, 0.99·p + 0.01·g, p·exp(-lr·g), p / |p|, a history that is
shifted. A gradient does not count, although it has the path of a parameter and depends on it: it
does so through the equations of a backward pass alone, and a next value does not.

It is checked in two steps:

1. when the program is traced, `DivergenceCheck.find` selects the outputs that may differ between
   the ranks although their inputs are equal;
2. at the first call, the ranks compare checksums of all inputs (`_jit.first_call`), and
   `DivergenceCheck.warning` names the selected outputs whose inputs really were equal.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.replication import may_vary
from jaxmpi._analysis.text import Text
from jaxmpi._analysis.traced_program import TracedProgram
from jaxmpi._consistency.findings import Finding
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import is_key, leaf_name, output_name
from jaxmpi._per_rank_state import is_per_rank_leaf

__all__ = ["DivergenceCheck", "NextValue", "next_values"]

Sources: TypeAlias = frozenset[int]  # indices of inputs
NO_INPUT: Sources = frozenset()


class NextValue(NamedTuple):
    """An output that may be the next value of an input of the program.

    Attributes:
      source: the index of the input, arrays from outside included.
      output: the index of the output.
      path: the path of the output, for the warning.
    """

    source: int
    output: int
    path: KeyPath


class DivergenceCheck:
    """Outputs of a program that may differ between ranks after a call with equal inputs."""

    def __init__(self, title: str, jaxpr: AnyJaxpr, candidates: Sequence[NextValue]) -> None:
        self._title, self._jaxpr, self._candidates = title, jaxpr, candidates

    @classmethod
    def find(
        cls, title: str, jaxpr: AnyJaxpr, candidates: Sequence[NextValue]
    ) -> "DivergenceCheck | None":
        """Return the check for a program; None if no output needs one.

        Args:
          title: the name of the program, for the warning.
          jaxpr: of `trace.trace`.
          candidates: its `next_values`.
        """
        if not candidates:
            return None
        # Which outputs may differ even if all of the train state is equal?
        state = {each.source for each in candidates}
        count = len(_jaxcompat.parts(jaxpr)[0].invars)
        differs = [i not in state for i in range(count)]
        varies = may_vary(jaxpr, differs, constants=False, marked=False)
        if not any(varies[each.output] for each in candidates):
            return None
        # Of these, which depend on their input, other than as a gradient does?
        sources = propagate(SOURCES, jaxpr, [frozenset({i}) for i in range(count)])
        found: list[NextValue] = []
        for each in candidates:
            if varies[each.output] and each.source in sources[each.output]:
                found.append(each)
        return cls(title, jaxpr, found) if found else None

    @property
    def digest(self) -> str:
        """Digest of the program's equations: equal on ranks with the same program."""
        text, (inner, _) = Text(self._jaxpr), _jaxcompat.parts(self._jaxpr)
        lines = [text.equation(eqn, shapes=False) for eqn in inner.eqns]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def warning(self, equal: Sequence[bool]) -> str:
        """Return the warning for a call, "" for none.

        Args:
          equal: which inputs, arrays from outside first, were equal on all ranks in the call.
        """
        varies = may_vary(self._jaxpr, [not same for same in equal], constants=False, marked=False)
        paths: list[KeyPath] = []
        for each in self._candidates:
            if equal[each.source] and varies[each.output] and each.path not in paths:
                paths.append(each.path)
        if not paths:
            return ""
        names = [output_name(paths[0]), *map(leaf_name, paths[1:])]
        return Finding("forgotten_mean", self._title, names).warning()


def next_values(traced: TracedProgram) -> list[NextValue]:
    """Return each output with each input that has its path, shape and dtype.

    Per-rank leaves are left out.
    """
    inner, _ = _jaxcompat.parts(traced.jaxpr)
    inputs = _inputs_by_key(traced)
    found: list[NextValue] = []
    for output, (path, v) in enumerate(zip(traced.outs, inner.outvars, strict=True)):
        if is_per_rank_leaf(path) or isinstance(v, Literal) or _is_of_each_rank(path, v):
            continue
        for key in _keys(path):
            for source in inputs.get(key, []):
                aval = inner.invars[source].aval
                if (aval.shape, aval.dtype) == (v.aval.shape, v.aval.dtype):
                    found.append(NextValue(source, output, path))
    return found


def _is_of_each_rank(path: KeyPath, v: Var) -> bool:
    """Return whether each rank has its own value by the kind of an output.

    These are typed PRNG keys, and the statistics of BatchNorm, which Linen has in "batch_stats".
    """
    names = {getattr(entry, "key", getattr(entry, "name", None)) for entry in path}
    return is_key(v.aval) or "batch_stats" in names


# Keys by which an output finds its inputs. The key of an input is its path in the argument: the
# first two entries of its path, (args or kwargs, position or name), are left out. An argument that
# is one array has its position or name as the key.


def _inputs_by_key(traced: TracedProgram) -> Mapping[Hashable, list[int]]:
    """Return the indices of the inputs with each key.

    An array that is the only argument has no key: its position says nothing.
    """
    found: dict[Hashable, list[int]] = {}
    for i, path in enumerate(traced.ins, traced.captured_count):
        key = tuple(map(str, path[2:])) or path[1]
        if not is_per_rank_leaf(path) and (len(traced.ins) > 1 or path[2:]):
            found.setdefault(key, []).append(i)
    return found


def _keys(path: KeyPath) -> list[Hashable]:
    """Return the keys of the inputs that an output may be the next value of.

    A function returns the state alone, or a tuple with the state in it; its path does not tell.
    """
    alone = tuple(map(str, path)) or jax.tree_util.SequenceKey(0)
    return [alone, tuple(map(str, path[1:])) or path[0]] if path else [alone]


# Analysis: the inputs that a value depends on, on a path without an equation of a backward pass


def _union(values: Sequence[Sources]) -> Sources:
    return NO_INPUT.union(*values)


def _local(eqn: JaxprEqn, operands: list[Sources]) -> list[Sources]:
    return _after_inner(eqn, operands, [_union(operands)] * len(eqn.outvars))


def _after_inner(eqn: JaxprEqn, operands: list[Sources], results: list[Sources]) -> list[Sources]:
    """Return the sources of an equation's results: none if it belongs to a backward pass."""
    return [NO_INPUT] * len(results) if _jaxcompat.is_transposed(eqn) else results


SOURCES = Analysis(
    bottom=NO_INPUT,
    join=_union,
    otherwise=_local,
    after_inner=_after_inner,
    constants=NO_INPUT,
)
