"""Plan of a traced program: rounds of local computation, messages and loops, computed once.

The level of a value is the number of rounds of communication that it depends on:

    level(input) = 0
    level(result) = max of level(operand) over the operands, + 1 if the equation communicates

An equation with effects, such as a print, is at the level of the last such equation at least, which
keeps their order.

Round k computes the local equations of level k, and then carries out the collectives of level k.
These are independent of each other, so the mean of a tree of 161 gradients is one message. The
number of rounds is the length of the longest chain of collectives, the least that is possible.

The rewriting for a transport and `entries_of` read the plan; `explain` and the signature that the
ranks compare read the entries. So they cannot differ.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import Role, communicates, other_effects, roles
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._backends.base import Collective, Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.means import fuse_means
from jaxmpi._lowering.messages import CoalescedCall, Messages, coalesce, messages_of

__all__ = ["Entry", "Plan", "Round", "entries_of", "plan_of"]


class Round(NamedTuple):
    """A round of a program; its fields are in the order of execution.

    Attributes:
      local: equations that send nothing.
      messages: the collectives of this level, some of which are started while `local` computes.
      ahead: equations that send a message for a later call of the program.
      loops: loops and branches that contain more messages.
    """

    local: list[JaxprEqn]
    messages: Messages
    ahead: list[JaxprEqn]
    loops: list[JaxprEqn]


@dataclass(frozen=True)
class Plan:
    """Plan of a jaxpr on a number of ranks.

    Attributes:
      jaxpr: an inlined program, or a jaxpr inside of one of its loops, with means fused.
      size: the number of ranks.
      rounds: the rounds, without local equations that no output needs.
      roles: of each equation that involves the ranks, by its id.
      inside: plans of the loops and branches that involve the ranks, by the id of their jaxpr
        before means were fused.
    """

    jaxpr: AnyJaxpr
    size: int
    rounds: list[Round]
    roles: Mapping[int, Role]
    inside: Mapping[int, "Plan"]

    @property
    def has_loops(self) -> bool:
        """Return whether a loop or a branch communicates."""
        return any(each.loops for each in self.rounds)

    def of(self, jaxpr: AnyJaxpr) -> "Plan":
        """Return the plan of a jaxpr of one of the loops and branches."""
        return self.inside[id(jaxpr)]


def plan_of(
    jaxpr: AnyJaxpr,
    size: int,
    *,
    combine: bool = True,
    divides: bool | None = None,
    rounds_once: bool = True,
    overlap: Overlap | None = None,
) -> Plan:
    """Return the plan of an inlined program.

    A collective is carried out whether its result is used or not: another rank may use it.

    Args:
      jaxpr: the result of `trace.inline_traced`.
      size: the number of ranks.
      combine: False where every collective is to stay a call by itself.
      divides: whether the transport computes means of all floats (`fuse_means`); None where the
        program may be differentiated later, as a fused mean has no derivative.
      rounds_once: of the transport, as in `Target`.
      overlap: of the transport; None where all messages are carried out at once.

    Raises:
      NotImplementedError, TypeError, ValueError: a collective that is not supported, as in
        `refuse.refuse`.
    """
    # Every rank computes these sums from numbers that all know. The fusion keeps their equations as
    # they are, so that their ids stay valid.
    not_sent = constant_sums(jaxpr)
    if divides is not None:
        jaxpr = fuse_means(
            jaxpr, size, transport_divides=divides, transport_rounds_once=rounds_once
        )
    inner, _ = _jaxcompat.parts(jaxpr)
    role_by_id = roles(jaxpr)
    inside: dict[int, Plan] = {}
    for eqn in inner.eqns:
        if role_by_id.get(id(eqn)) is Role.CONTROL_FLOW:
            for inner_jaxpr in subjaxprs(eqn):
                inside[id(inner_jaxpr)] = plan_of(
                    inner_jaxpr,
                    size,
                    combine=combine,
                    divides=divides,
                    rounds_once=rounds_once,
                    overlap=overlap,
                )

    def is_sent(eqn: JaxprEqn) -> bool:
        return id(eqn) in role_by_id and communicates(eqn) and id(eqn) not in not_sent

    rounds: list[Round] = []
    for local, remote in _levels(_needed(inner, role_by_id), is_sent):
        messages = messages_of(coalesce(remote, size, combine), local, jaxpr, overlap)
        ahead = [eqn for eqn in remote if role_by_id[id(eqn)] is Role.SEND_AHEAD]
        loops = [eqn for eqn in remote if role_by_id[id(eqn)] is Role.CONTROL_FLOW]
        rounds.append(Round(local, messages, ahead, loops))
    return Plan(jaxpr, size, rounds, role_by_id, inside)


def _needed(jaxpr: Jaxpr, role_by_id: Mapping[int, Role]) -> Iterator[JaxprEqn]:
    """Return the equations that communicate, have effects, or that these or an output depend on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        sends = id(eqn) in role_by_id and communicates(eqn)
        if sends or other_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return reversed(kept)


def _levels(
    eqns: Iterable[JaxprEqn], is_sent: Callable[[JaxprEqn], bool]
) -> list[tuple[list[JaxprEqn], list[JaxprEqn]]]:
    """Return, for each level, its local equations and those that communicate."""
    level_of: dict[Var, int] = {}
    local: dict[int, list[JaxprEqn]] = defaultdict(list)
    remote: dict[int, list[JaxprEqn]] = defaultdict(list)
    last_effect = 0
    for eqn in eqns:
        level = 0
        for v in eqn.invars:
            if not isinstance(v, Literal):
                level = max(level, level_of.get(v, 0))
        sends, has_effects = is_sent(eqn), other_effects(eqn)
        if has_effects:  # prints, callbacks and references keep their order
            level = max(level, last_effect)
        after = level + 1 if sends else level
        if has_effects:
            last_effect = after
        (remote if sends else local)[level].append(eqn)
        level_of.update(dict.fromkeys(eqn.outvars, after))
    return [(local[level], remote[level]) for level in sorted({*local, *remote})]


# Entries, for `explain` and for the comparison between ranks


class Entry(NamedTuple):
    """One call of a program: a collective on many arrays, as `explain` and the signature show it.

    Attributes:
      call: the collective.
      arrays: shape and dtype of each array that goes in.
      path: the loops and branches around it, such as "scan[12]/cond:1"; "" at the top.
      times: how often it is carried out; None where a branch or a while_loop decides.
      source: file and line of each array's collective, without repetitions; empty inside of
        functions of jaxmpi.
      order: the indices of the loops around it, then of its collectives, among the communicating
        equations of their jaxpr, in the order in which the function calls them.
      params: JAX's primitives, each with its parameters.
      started: how many messages are started and waited for later; 0: it is sent at once.
      overlapped: how many of these overlap with computation.
    """

    call: Collective
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    path: str
    times: int | None
    source: tuple[str, ...]
    order: tuple[int, ...] = ()
    params: tuple[str, ...] = ()
    started: int = 0
    overlapped: int = 0

    @property
    def name(self) -> str:
        """Kind and operation of the collective, as "allreduce sum"."""
        return self.call.title

    def __str__(self) -> str:
        first = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.arrays[:3])
        more = f", and {len(self.arrays) - 3} more" if len(self.arrays) > 3 else ""
        where = f" in {self.path}" if self.path else ""
        lines = f" at {', '.join(self.source[:2])}" if self.source else ""
        return f"{self.name} of {first}{more}{where}{lines}"


class LoopContext(NamedTuple):
    """The loops and branches around a collective; the fields are those of `Entry`."""

    path: str = ""
    times: int | None = 1
    order: tuple[int, ...] = ()


TOP_LEVEL = LoopContext()


def entries_of(plan: Plan, context: LoopContext = TOP_LEVEL) -> Iterator[Entry]:
    """Yield the collectives of a plan in their order of execution.

    Messages that are sent ahead have no entry: the call that receives one does.
    """
    index = _program_order(plan)
    for each in plan.rounds:
        for coalesced in each.messages.calls:
            indices = [index[id(eqn)] for eqn in coalesced.eqns]
            yield _entry(coalesced, each.messages, context, indices)
        for eqn in each.loops:
            inside = context._replace(order=(*context.order, index[id(eqn)]))
            yield from _entries_inside(eqn, plan, inside)


def _program_order(plan: Plan) -> dict[int, int]:
    """Return, for the id of each equation that communicates, its index among these in the jaxpr.

    That is the order in which the function calls them; a round executes them in another one.
    """
    sent: set[int] = set()
    for each in plan.rounds:
        sent.update(map(id, each.loops))
        for coalesced in each.messages.calls:
            sent.update(map(id, coalesced.eqns))
    in_order = [id(eqn) for eqn in _jaxcompat.parts(plan.jaxpr)[0].eqns if id(eqn) in sent]
    return {key: i for i, key in enumerate(in_order)}


def _entry(
    coalesced: CoalescedCall, messages: Messages, context: LoopContext, indices: list[int]
) -> Entry:
    arrays: dict[tuple[int, str], tuple[tuple[int, ...], str]] = {}
    for eqn, aval in zip(coalesced.eqns, coalesced.operands(), strict=True):
        # an array that two equations send in the same way is sent once
        arrays[id(eqn.invars[0]), str(eqn.params)] = tuple(aval.shape), aval.dtype.name
    started, overlapped = messages.counts(coalesced)
    return Entry(
        coalesced.call,
        tuple(arrays.values()),
        context.path,
        context.times,
        tuple(filter(None, dict.fromkeys(map(_jaxcompat.source_line, coalesced.eqns)))),
        (*context.order, *indices),
        tuple(map(_parameters, coalesced.eqns)),
        started,
        overlapped,
    )


def _parameters(eqn: JaxprEqn) -> str:
    """Return an equation's primitive and parameters as text.

    For example "reduce_scatter axis_name=('ranks',) scatter_dimension=0 tiled=False".
    """
    given = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None]
    return " ".join([eqn.primitive.name, *given])


def _entries_inside(eqn: JaxprEqn, plan: Plan, context: LoopContext) -> Iterator[Entry]:
    """Yield the collectives of a loop or a branch."""
    op = op_of(eqn)
    for i, inner_jaxpr in enumerate(subjaxprs(eqn)):
        step, times = eqn.primitive.name, None
        if op is Op.COND:
            step = f"{step}:{i}"
        elif op is Op.SCAN:
            step = f"{step}[{eqn.params['length']}]"
            times = context.times and context.times * eqn.params["length"]
        path = f"{context.path}/{step}" if context.path else step
        yield from entries_of(plan.of(inner_jaxpr), LoopContext(path, times, context.order))
