"""Messages that one call of a program starts, and a later call receives."""

from collections.abc import Mapping

from jax.extend.core import JaxprEqn, Var

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Collective
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.combine import Group
from jaxmpi._lowering.primitives import Op, op_of

__all__ = ["call_of", "number_of"]


def call_of(eqn: JaxprEqn) -> Collective:
    """The collective that an equation of kind "ahead" starts."""
    return Collective(
        eqn.params["kind"], eqn.params["op"], groups=eqn.params["axis_index_groups"] or ()
    )


def number_of(group: Group, jaxpr: AnyJaxpr) -> Var | None:
    """The variable with the number of the message that a group's collectives were sent ahead in; None for any others."""
    sent = _sent(jaxpr)
    first = sent.get(_operand(group.eqns[0]))
    if first is None or [_operand(eqn) for eqn in group.eqns] != [id(v) for v in first.outvars]:
        return None
    return first.invars[-1]


@_jaxcompat.kept_with_jaxpr
def _sent(jaxpr: AnyJaxpr) -> Mapping[int, JaxprEqn]:
    """The equations of what was sent ahead, by the ids of their results."""
    inner, _ = _jaxcompat.parts(jaxpr)
    return {id(v): eqn for eqn in inner.eqns if op_of(eqn) is Op.SENT_AHEAD for v in eqn.outvars}


def _operand(eqn: JaxprEqn) -> int:
    return id(eqn.invars[0])
