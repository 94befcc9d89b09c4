"""Plan of a traced program: rounds of local computation, messages and loops, computed once.

A value's level is the number of rounds of communication that it depends on. All collectives of one
level are independent of each other, so the mean of a tree of 161 gradients is one message, and the
number of rounds is that of the longest chain, which no other order can undercut.

`explain`, the facts that the ranks compare, and the rewriting for a transport read the plan, so
that they cannot differ.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import communicates, kind, kinds, other_effects
from jaxmpi._analysis.constant_sums import constant_sums
from jaxmpi._analysis.inner_jaxprs import subjaxprs
from jaxmpi._analysis.primitives import Op, op_of
from jaxmpi._backends.base import Collective, Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.messages import Group, Messages, groups_of, messages_of

__all__ = ["Entry", "Plan", "Round", "entries_of", "plan_of"]


class Round(NamedTuple):
    """A round of a program, in the order of its execution.

    Attributes:
      local: equations that send nothing.
      messages: what is sent, at once or while the next round begins.
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
      jaxpr: an opened program, or the inside of one of its loops.
      size: the number of ranks.
      rounds: without local work that no output needs.
      about_ranks: the kind of each equation that has to do with the ranks, by its id.
      inside: the plans of its loops and branches, by the id of their jaxprs.
    """

    jaxpr: AnyJaxpr
    size: int
    rounds: list[Round]
    about_ranks: Mapping[int, str]
    inside: Mapping[int, "Plan"]

    @property
    def has_loops(self) -> bool:
        """Return whether a loop or a branch communicates."""
        return any(each.loops for each in self.rounds)

    def of(self, jaxpr: AnyJaxpr) -> "Plan":
        """Return the plan of a jaxpr inside."""
        return self.inside[id(jaxpr)]


def plan_of(
    jaxpr: AnyJaxpr, size: int, *, combine: bool = True, overlap: Overlap | None = None
) -> Plan:
    """Return the plan of an opened program.

    A collective is carried out whether its result is used or not: another rank may use it.

    Args:
      jaxpr: of `trace.prepared`, after `means.fuse_means` where the program is final.
      size: the number of ranks.
      combine: False where every collective is to stay a call of its own.
      overlap: of the transport; None where all messages are carried out at once.
    """
    inner, _ = _jaxcompat.parts(jaxpr)
    about_ranks, not_sent = kinds(jaxpr), constant_sums(jaxpr)
    inside: dict[int, Plan] = {}
    for eqn in inner.eqns:
        if about_ranks.get(id(eqn)) == "loop":
            for part in subjaxprs(eqn):
                inside[id(part)] = plan_of(part, size, combine=combine, overlap=overlap)

    def is_sent(eqn: JaxprEqn) -> bool:
        return id(eqn) in about_ranks and communicates(eqn) and id(eqn) not in not_sent

    rounds: list[Round] = []
    for local, remote in _levels(_needed(inner, about_ranks), is_sent):
        groups = groups_of(remote, size, combine)
        messages = messages_of(groups, local, jaxpr, overlap)
        ahead = [eqn for eqn in remote if kind(eqn) == "ahead"]
        loops = [eqn for eqn in remote if kind(eqn) == "loop"]
        rounds.append(Round(local, messages, ahead, loops))
    return Plan(jaxpr, size, rounds, about_ranks, inside)


def _needed(jaxpr: Jaxpr, about_ranks: Mapping[int, str]) -> Iterator[JaxprEqn]:
    """Return what is sent, and what an output, an effect or a message depends on, in order."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        sends = id(eqn) in about_ranks and communicates(eqn)
        if sends or other_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return reversed(kept)


def _levels(
    eqns: Iterable[JaxprEqn], is_sent: Callable[[JaxprEqn], bool]
) -> list[tuple[list[JaxprEqn], list[JaxprEqn]]]:
    """Return the local equations, and those that send something, of each level."""
    level_of: dict[Var, int] = {}  # of a value
    local: dict[int, list[JaxprEqn]] = defaultdict(list)
    remote: dict[int, list[JaxprEqn]] = defaultdict(list)
    last_effect = 0
    for eqn in eqns:
        level = 0
        for v in eqn.invars:
            if not isinstance(v, Literal):
                level = max(level, level_of.get(v, 0))
        sends = is_sent(eqn)
        after = level + 1 if sends else level
        if other_effects(eqn):  # these keep their order
            level = max(level, last_effect)
            after = level + 1 if sends else level
            last_effect = after
        (remote if sends else local)[level].append(eqn)
        level_of.update(dict.fromkeys(eqn.outvars, after))
    return [(local[level], remote[level]) for level in sorted({*local, *remote})]


# Entries, for `explain` and for the comparison between ranks


class Entry(NamedTuple):
    """Arrays that one collective carries.

    Attributes:
      call: the collective.
      arrays: shape and dtype of each array that goes in.
      path: the loops and branches around it, such as "scan[12]/cond:1"; "" at the top.
      times: how often it is carried out; None where a branch or a while_loop decides.
      source: file and line of each array's collective, without repetitions; empty inside of
        jaxmpi's own functions.
      order: the places of its collectives in the order in which the function calls them, behind
        those of the loops around it.
      params: JAX's primitives, each with its parameters.
      started: how many messages are started and waited for later; 0: it is sent at once.
      beside: how many of these have computation beside them.
    """

    call: Collective
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    path: str
    times: int | None
    source: tuple[str, ...]
    order: tuple[int, ...] = ()
    params: tuple[str, ...] = ()
    started: int = 0
    beside: int = 0

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


class Around(NamedTuple):
    """The loops and branches around a collective; the fields are those of `Entry`."""

    path: str = ""
    times: int | None = 1
    order: tuple[int, ...] = ()


AT_THE_TOP = Around()


def entries_of(plan: Plan, around: Around = AT_THE_TOP) -> Iterator[Entry]:
    """Yield the collectives of a plan in their order of execution."""
    place = _places(plan)
    for each in plan.rounds:
        for group in each.messages.groups:
            yield _entry(group, each.messages, around, [place[id(eqn)] for eqn in group.eqns])
        for eqn in each.loops:
            inside = around._replace(order=(*around.order, place[id(eqn)]))
            yield from _entries_inside(eqn, plan, inside)


def _places(plan: Plan) -> dict[int, int]:
    """Return the places of what is sent, by the ids of the equations, in the program's order."""
    sent: set[int] = set()
    for each in plan.rounds:
        sent.update(map(id, each.loops))
        for group in each.messages.groups:
            sent.update(map(id, group.eqns))
    in_order = [id(eqn) for eqn in _jaxcompat.parts(plan.jaxpr)[0].eqns if id(eqn) in sent]
    return {key: i for i, key in enumerate(in_order)}


def _entry(group: Group, messages: Messages, around: Around, places: list[int]) -> Entry:
    arrays: dict[tuple[int, str], tuple[tuple[int, ...], str]] = {}
    for eqn, aval in zip(group.eqns, group.operands(), strict=True):
        # what is sent for two equations is sent once
        arrays[id(eqn.invars[0]), str(eqn.params)] = tuple(aval.shape), aval.dtype.name
    started, beside = messages.counts(group)
    return Entry(
        group.call,
        tuple(arrays.values()),
        around.path,
        around.times,
        tuple(filter(None, dict.fromkeys(map(_jaxcompat.source_line, group.eqns)))),
        (*around.order, *places),
        tuple(map(_parameters, group.eqns)),
        started,
        beside,
    )


def _parameters(eqn: JaxprEqn) -> str:
    """Return "reduce_scatter axis_name=('ranks',) scatter_dimension=0 tiled=False" for example."""
    given = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None]
    return " ".join([eqn.primitive.name, *given])


def _entries_inside(eqn: JaxprEqn, plan: Plan, around: Around) -> Iterator[Entry]:
    """Yield the collectives of a loop or a branch."""
    op = op_of(eqn)
    for i, part in enumerate(subjaxprs(eqn)):
        step, times = eqn.primitive.name, None
        if op is Op.COND:
            step = f"{step}:{i}"
        elif op is Op.SCAN:
            step = f"{step}[{eqn.params['length']}]"
            times = around.times and around.times * eqn.params["length"]
        path = f"{around.path}/{step}" if around.path else step
        yield from entries_of(plan.of(part), Around(path, times, around.order))
