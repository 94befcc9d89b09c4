"""Find the state of a train step that must be equal on all ranks, by how a mean updates it.

A step returns the next value of an argument under the same path. An output is *replicated state* if

1. it depends on the result of a collective, through data and not only through a branch,
2. that collective has more to reduce than the state itself, such as gradients of a batch, and
   returns an array, unless the output is a single number, and
3. it is equal on all ranks if the state and the numbers among the arguments are, whatever the batch
   of each rank.

`p - rate * mean(g)` is replicated state, and so are Adam's moments. Not replicated: a Markov chain,
the environment or the local model of a rank (no collective, or the rank's own data), a `pmean` of
local models (equal after the call, whatever it was before), whatever depends on a PRNG key that
may be the rank's own. By condition 2, neither is a rank's part of something that the ranks compute
together: weights of particles that are divided by their sum over all ranks, a domain whose time
step is the least of all ranks, models that a mean of all models attracts.

What replicated state is computed from must be equal before the step, too, or the ranks differ for
ever: `p`, and also `rate`. An input counts if it is combined with the result of a collective on the
way to the new state, and does not if it only enters a collective, as a weight or a sample count
does:

    p' = p - rate * psum(n * g) / psum(n)     p and rate count; n and what g is made of do not

An all-gather does not end a path: with `sharded`, each rank updates its shard at its own rate after
the mean, and the shards are gathered. With `fully_shard` they are not, and are outputs: other
values on each rank, which are updated at one rate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import JaxprEqn
from jax.tree_util import KeyPath

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, calls_python, role
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.forgotten_mean import NextValue
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._analysis.replication import may_vary
from jaxmpi._analysis.traced_program import TracedProgram
from jaxmpi._axis import AXIS
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._marks import Differs, Equal, mark_of
from jaxmpi._per_rank_state import is_per_rank_leaf, path_marks_of

__all__ = ["CarriedState", "carried_state"]


class CarriedState(NamedTuple):
    """Inputs of a program that must be equal on all ranks; arrays from outside are the first ones.

    Attributes:
      state: the inputs that replicated state is computed from.
      keys: PRNG keys on which further state depends.
      with_equal_keys: the inputs that must be equal, too, if these keys are equal on all ranks.
      numbers: the inputs of one element from which replicated state, or a shard of an array of all
        ranks, is computed after a mean, and which no mean updates themselves, such as a learning
        rate or a count.
    """

    state: tuple[int, ...]
    keys: tuple[int, ...]
    with_equal_keys: tuple[int, ...]
    numbers: tuple[int, ...]


# The analysis. Sets of inputs are ints, with bit i for input i: a program has thousands of values.


class Origin(NamedTuple):
    """Inputs that a value is computed from.

    Attributes:
      direct: those that reach the value on a path without a collective.
      applied: those that are combined with the result of a collective on some path, with no
        allreduce after that point.
      after_mean: whether the value depends on the result of a collective, through data.
      reduced: the number of elements of the largest such result to which an input contributed that
        is no state; 0 for none.
    """

    direct: int = 0
    applied: int = 0
    after_mean: bool = False
    reduced: int = 0


BOTTOM = Origin()


class _Bits(NamedTuple):
    """Sets of inputs, and bits beside those of the inputs.

    Attributes:
      rank: the value depends on the rank, whatever the inputs.
      group: it is the result of a collective of groups, which may differ between these.
      equal: the inputs that are equal on all ranks if these are right.
      data: the inputs that are no state, such as a batch or a key, and `rank`.
    """

    rank: int
    group: int
    equal: int
    data: int


def _join(values: Sequence[Origin]) -> Origin:
    if len(values) == 1:  # of most equations
        return values[0]
    direct, applied, after_mean, reduced = 0, 0, False, 0
    for value in values:
        direct |= value.direct
        applied |= value.applied
        after_mean = after_mean or value.after_mean
        reduced = max(reduced, value.reduced)
    return Origin(direct, applied, after_mean, reduced)


def _combined(operands: Sequence[Origin]) -> Origin:
    """Return the origin of a value that is computed from these.

    An operand meets the result of a collective in another operand. One operand may be such a result
    or an input, as after a branch, and then nothing has met.
    """
    joined = _join(operands)
    if len(operands) == 1 or not joined.after_mean:
        return joined
    applied = joined.applied
    means = [operand.after_mean for operand in operands]
    for i, operand in enumerate(operands):
        if operand.direct and (any(means[:i]) or any(means[i + 1 :])):
            applied |= operand.direct
    return joined._replace(applied=applied)


def _select(eqn: JaxprEqn, operands: list[Origin]) -> list[Origin]:
    """Return the origin of `where(predicate, x, y)`."""
    predicate, *cases = operands
    return [_decided(_join(cases), predicate)]


def _after_inner(eqn: JaxprEqn, operands: list[Origin], results: list[Origin]) -> list[Origin]:
    """Return the origins of a branch's results, which its predicate has selected."""
    if op_of(eqn) is not Op.COND:
        return results
    return [_decided(result, operands[0]) for result in results]


def _decided(value: Origin, predicate: Origin) -> Origin:
    """Return the origin of a value that a predicate has selected.

    A predicate is no data: a value does not depend on a mean only because that decides. But what
    decides whether a mean is applied, such as a flag, must be equal on all ranks.
    """
    applied = value.applied | predicate.direct if value.after_mean else value.applied
    return value._replace(direct=value.direct | predicate.direct, applied=applied)


def _is_decision(eqn: JaxprEqn) -> bool:
    """Return whether the results of an equation are only true or false."""
    return all(getattr(v.aval, "dtype", None) == jnp.bool_ for v in eqn.outvars)


def _analysis(bits: _Bits) -> Analysis[Origin]:
    """Return the analysis of a program, given its sets of inputs."""

    def local(eqn: JaxprEqn, operands: list[Origin]) -> list[Origin]:
        found = _combined(operands)
        if found.after_mean and _is_decision(eqn):
            found = _join(operands)._replace(after_mean=False, reduced=0)
        if calls_python(eqn):
            found = found._replace(direct=found.direct | bits.rank)
        return [found] * len(eqn.outvars)

    def collective(eqn: JaxprEqn, operands: list[Origin]) -> list[Origin]:
        if role(eqn) is not Role.COLLECTIVE:  # over array axes: those of a vmap inside
            return local(eqn, operands)
        operand, op = _combined(operands), op_of(eqn)
        if operand == BOTTOM and op in (Op.ALLREDUCE, Op.ALL_GATHER):  # the number of ranks
            return [BOTTOM] * len(eqn.outvars)
        has_data = operand.reduced > 0 or bool(operand.direct & bits.data)
        direct, applied = bits.rank, 0
        if op in (Op.ALLREDUCE, Op.ALL_GATHER):
            direct = bits.group if eqn.params.get("axis_index_groups") else 0
            applied = operand.applied if op is Op.ALL_GATHER else 0
        results: list[Origin] = []
        for v in eqn.outvars:
            results.append(Origin(direct, applied, True, v.aval.size if has_data else 0))
        return results

    def index(eqn: JaxprEqn, operands: list[Origin]) -> list[Origin]:
        return [Origin(bits.rank if role(eqn) is Role.RANK else 0)]

    def mark(eqn: JaxprEqn, operands: list[Origin]) -> list[Origin]:
        (operand,) = operands
        if isinstance(mark_of(eqn), Equal):
            operand = operand._replace(direct=operand.direct & bits.equal)
        elif isinstance(mark_of(eqn), Differs):
            operand = operand._replace(direct=operand.direct | bits.rank)
        return [operand]

    return Analysis(
        bottom=BOTTOM,
        join=_join,
        rules={
            Op.ALLREDUCE: collective,
            Op.ALL_GATHER: collective,
            Op.REDUCE_SCATTER: collective,
            Op.ALL_TO_ALL: collective,
            Op.PERMUTE: collective,
            Op.AXIS_INDEX: index,
            Op.MARK: mark,
            Op.SELECT: _select,
        },
        otherwise=local,
        constants=BOTTOM,  # tables are equal on all ranks, as literals are
        after_inner=_after_inner,
    )


# The state of a program


def carried_state(
    traced: TracedProgram, candidates: Sequence[NextValue], *, rows: bool = False
) -> CarriedState | None:
    """Return the inputs of a program that must be equal on all ranks; None if there are none.

    Args:
      traced: the program.
      candidates: of `forgotten_mean.next_values`.
      rows: whether the arguments have a leading axis of one, as in a pmap.
    """
    shards = [i for i, path in enumerate(traced.outs) if _is_shard(path)]
    if not candidates and not shards:
        return None
    inner, _ = _jaxcompat.parts(traced.jaxpr)
    inputs = _classified(traced, candidates, rows)
    bits = _bits(inputs, len(inner.invars), traced.captured_count)
    origins, keys = _origins(traced.jaxpr, inputs, bits)
    # Only what its next value is computed from is state: gradients that are averaged are not.
    carried = (1 << traced.captured_count) - 1
    for each in candidates:
        origin = origins[each.output]
        carried |= (origin.direct | origin.applied) & 1 << each.source
    state, numbers = inputs.state & carried, inputs.numbers
    allowed = (state | numbers) & ~keys
    expected = allowed | keys  # inputs that are equal on all ranks, if nothing is wrong
    if any(origins[each.output].direct & bits.group for each in candidates):
        # A value that was reduced in groups may be equal on all ranks after a second reduction.
        differs = [not expected >> i & 1 for i in range(len(inner.invars))]
        may_differ = may_vary(traced.jaxpr, differs, constants=False)
        origins = _without_group(origins, may_differ, bits.group)
    trained, found, found_with_keys, its_keys = 0, 0, 0, 0
    for each in candidates:
        origin, source = origins[each.output], 1 << each.source
        if _is_update(origin, source):
            trained |= source
        if not _is_replicated(origin, source, inner.outvars[each.output].aval, expected):
            continue
        if origin.direct & keys:
            found_with_keys |= origin.applied
            its_keys |= origin.direct & keys
        else:
            found |= origin.applied
    for i in shards:
        found |= origins[i].applied & numbers
    found, found_with_keys = found & allowed, found_with_keys & allowed
    if not found and not found_with_keys:
        return None
    return CarriedState(
        _indices(found & state),
        _indices(its_keys),
        _indices(found_with_keys & ~found & state),
        _indices(found & numbers & ~trained),
    )


class _Inputs(NamedTuple):
    """Inputs that are equal on all ranks if the user has made no mistake, as sets.

    Attributes:
      state: those that an output is the next value of, and arrays from outside.
      numbers: those of one element among the arguments.
      keys: PRNG keys.
      raw_keys: arrays of numbers that may be keys.
    """

    state: int
    numbers: int
    keys: int
    raw_keys: int


def _classified(traced: TracedProgram, candidates: Sequence[NextValue], rows: bool) -> _Inputs:
    """Return the sets of inputs; `rows` is as in `carried_state`."""
    captured = traced.captured_count
    state, numbers, keys, raw_keys = (1 << captured) - 1, 0, 0, 0
    for each in candidates:
        state |= 1 << each.source
    for i, v in enumerate(_jaxcompat.parts(traced.jaxpr)[0].invars):
        if i >= captured and not _is_equal_leaf(traced.ins[i - captured]):
            continue
        if _is_key(v.aval):
            keys |= 1 << i
        elif _may_be_key(v.aval):
            raw_keys |= 1 << i
        elif i >= captured and _is_number(v.aval, rows):
            numbers |= 1 << i
    return _Inputs(state, numbers, keys, raw_keys)


def _bits(inputs: _Inputs, count: int, captured: int) -> _Bits:
    """Return the sets and bits of a program with so many inputs, of which the first are captured.

    Captured arrays count as data, too: a function may have its batch from outside.
    """
    rank, group = 1 << count, 1 << (count + 1)
    arguments = inputs.state >> captured << captured
    of_step = (arguments | inputs.numbers) & ~(inputs.keys | inputs.raw_keys)
    every = (1 << count) - 1 | rank
    return _Bits(rank, group, equal=inputs.state | inputs.numbers, data=every & ~of_step)


def _origins(jaxpr: AnyJaxpr, inputs: _Inputs, bits: _Bits) -> tuple[list[Origin], int]:
    """Return the origins of the outputs, and the set of inputs that are PRNG keys."""
    keys = inputs.keys

    def visit(
        eqn: JaxprEqn, operands: list[Origin], results: list[Origin], control: Origin
    ) -> None:
        # A raw key is an array of numbers that is made a key.
        nonlocal keys
        if op_of(eqn) is Op.MAKE_KEY:
            keys |= operands[0].direct & inputs.raw_keys

    inner, _ = _jaxcompat.parts(jaxpr)
    facts = [Origin(1 << i) for i in range(len(inner.invars))]
    return propagate(_analysis(bits), jaxpr, facts, visit), keys


def _without_group(
    origins: Sequence[Origin], may_differ: Sequence[bool], group: int
) -> list[Origin]:
    """Return the origins of the outputs, without the bit `group` in those that cannot differ."""
    found: list[Origin] = []
    for origin, differs in zip(origins, may_differ, strict=True):
        found.append(origin if differs else origin._replace(direct=origin.direct & ~group))
    return found


def _is_replicated(origin: Origin, source: int, aval: AbstractValue, expected: int) -> bool:
    """Return whether an output is replicated state, by the conditions of the module's docstring.

    Args:
      origin: of the output.
      source: the input whose next value it may be, as a set.
      aval: the type of the output.
      expected: the inputs that are equal on all ranks, if nothing is wrong.
    """
    # condition 1
    if not _is_update(origin, source):
        return False
    # condition 2; `reduced` is 0 if nothing but state was reduced
    if origin.reduced < min(2, aval.size):
        return False
    # condition 3
    return not origin.direct & ~expected


def _is_update(origin: Origin, source: int) -> bool:
    """Return whether an output is an update of an input by the result of a collective.

    The mean of what was there before, or in a branch that itself, is none.
    """
    is_kept = origin.direct & source and not origin.applied & source
    return origin.after_mean and not is_kept


def _is_key(aval: AbstractValue) -> bool:
    """Return whether values of a type are PRNG keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _may_be_key(aval: AbstractValue) -> bool:
    """Return whether an array may hold the numbers of keys, as `jax.random.PRNGKey` returns."""
    return aval.dtype == jnp.uint32 and aval.shape[-1:] in ((2,), (4,))


def _is_number(aval: AbstractValue, rows: bool) -> bool:
    """Return whether values of a type are single numbers."""
    is_numeric = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
    return bool(is_numeric) and (aval.shape == () or (rows and aval.shape == (1,)))


def _is_shard(path: KeyPath) -> bool:
    """Return whether a leaf is a shard of an array that all ranks have together."""
    return any(mark.of is not None and mark.axis == AXIS for mark in path_marks_of(path))


def _is_equal_leaf(path: KeyPath) -> bool:
    """Return whether the leaf at a path is equal on all ranks, by its kind.

    In the state of `sharded` these are the leaves that are no shards, such as a learning rate.
    """
    marks = path_marks_of(path)
    states = [mark for mark in marks if mark.state]
    if not states:
        return not is_per_rank_leaf(path)
    # Over another axis it is equal within each group only.
    if any(mark.of is not None for mark in marks) or any(mark.axis != AXIS for mark in states):
        return False
    return not any(mark.per_rank for mark in marks if not mark.state)


def _indices(bits: int) -> tuple[int, ...]:
    """Return the numbers of the bits that are set."""
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
