"""Constant sums: sums over the ranks of numbers that every rank knows, which are not sent.

The gradient of a loss that is averaged over p ranks has one: the sum of the cotangent 1/p. Instead
of sending it, each rank multiplies its number by the number of ranks.

That is right only if the number is equal on all ranks. It follows from literals, and a literal is a
Python number, which may differ between ranks. So the ranks compare the text of the equations that
these sums depend on (`control_slice`).

A rank's number of samples may differ, and then its sum must be sent. It appears as a reduction over
an array's elements, whose shape that text does not show, or as a literal that is summed as it is.
So only a number that is computed from literals by a division, as 1/p is, counts as a constant.
"""

from collections.abc import Sequence
from enum import IntEnum

from jax.extend.core import JaxprEqn

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import BRANCHES_AND_LOOPS, Role, role
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.primitives import Op, Trait, has, is_sum, op_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["constant_sums"]


class Number(IntEnum):
    """Origin of a value: literals of the program, or other. The join is the largest."""

    CONSTANT = 0  # from literals alone, and all elements of the array are one number
    QUOTIENT = 1  # CONSTANT, and computed with a division
    UNKNOWN = 2  # anything else


def _join(values: Sequence[Number]) -> Number:
    return max(values, default=Number.CONSTANT)


def _unknown(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    return [Number.UNKNOWN] * len(eqn.outvars)


def _local(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    if not has(eqn, Trait.KEEPS_CONSTANTS):
        return _unknown(eqn, operands)
    if op_of(eqn) is Op.DIVIDE:
        return [_join([*operands, Number.QUOTIENT])]
    return [_join(operands)]


def _allreduce(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    return [Number.CONSTANT] if _is_constant_sum(eqn, operands) else _unknown(eqn, operands)


def _is_constant_sum(eqn: JaxprEqn, operands: list[Number]) -> bool:
    """Return whether an equation, whose operands have these facts, sums a QUOTIENT over ranks."""
    return is_sum(eqn) and operands == [Number.QUOTIENT] and role(eqn) is Role.COLLECTIVE


# The rules stop at calls, loops and branches. To find the sums in the body of a loop, call
# `constant_sums` on the body.
ANALYSIS = Analysis(
    Number.CONSTANT,
    _join,
    {
        **dict.fromkeys((*BRANCHES_AND_LOOPS, Op.CALL, Op.LINEAR_SOLVE), _unknown),
        Op.ALLREDUCE: _allreduce,
    },
    _local,
    constants=Number.UNKNOWN,
)


@_jaxcompat.kept_with_jaxpr
def constant_sums(jaxpr: AnyJaxpr) -> set[int]:
    """Return the ids of the equations that sum a constant over the ranks, and so send nothing.

    Args:
      jaxpr: an inlined program, or the jaxpr of one of its loops or branches. Equations inside of
        its own loops and branches are not included.
    """
    found: set[int] = set()

    def visit(
        eqn: JaxprEqn, operands: list[Number], results: list[Number], control: Number
    ) -> None:
        if op_of(eqn) is Op.ALLREDUCE and _is_constant_sum(eqn, operands):
            found.add(id(eqn))

    ins = [Number.UNKNOWN] * len(_jaxcompat.parts(jaxpr)[0].invars)
    propagate(ANALYSIS, jaxpr, ins, visit)
    return found
