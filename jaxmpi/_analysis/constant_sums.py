"""Constant sums: sums over the ranks of numbers that every rank knows, which are not sent.

The gradient of every mean of a loss has one, of the cotangent 1/p. It multiplies by the number of
ranks. A constant may be a Python number that each rank has its own of, and so the ranks compare the
text of what these sums follow from (`control_slice`). That text has no shapes: what depends on one,
such as a count of samples, is sent, as is a number that is summed as it stands. So only those
constants count that were divided by a number.
"""

from collections.abc import Sequence
from enum import IntEnum

from jax.extend.core import JaxprEqn

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import BRANCHES_AND_LOOPS, kind
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.primitives import Op, Trait, has, is_sum, op_of
from jaxmpi._jaxcompat import AnyJaxpr

__all__ = ["constant_sums"]


class Number(IntEnum):
    """Kind of a value, by how it follows from the numbers in a program."""

    CONSTANT = 0  # from literals alone, with one number everywhere in the array
    QUOTIENT = 1  # the same, with a division on the way
    UNKNOWN = 2


def _join(values: Sequence[Number]) -> Number:
    return max(values, default=Number.CONSTANT)


def _unknown(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    return [Number.UNKNOWN] * len(eqn.outvars)


def _local(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    if not has(eqn, Trait.KEEPS_CONSTANTS):
        return _unknown(eqn, operands)
    is_quotient = op_of(eqn) is Op.DIVIDE
    return [_join([*operands, Number.QUOTIENT] if is_quotient else operands)]


def _allreduce(eqn: JaxprEqn, operands: list[Number]) -> list[Number]:
    return [Number.CONSTANT] if _is_constant_sum(eqn, operands) else _unknown(eqn, operands)


def _is_constant_sum(eqn: JaxprEqn, operands: list[Number]) -> bool:
    return is_sum(eqn) and operands == [Number.QUOTIENT] and kind(eqn) == "collective"


# The sums in a loop are found when its body is asked about by itself.
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
    """Return the sums of an opened program that are not sent, by the ids of their equations."""
    found: set[int] = set()

    def visit(
        eqn: JaxprEqn, operands: list[Number], results: list[Number], control: Number
    ) -> None:
        if op_of(eqn) is Op.ALLREDUCE and _is_constant_sum(eqn, operands):
            found.add(id(eqn))

    ins = [Number.UNKNOWN] * len(_jaxcompat.parts(jaxpr)[0].invars)
    propagate(ANALYSIS, jaxpr, ins, visit)
    return found
