"""Combine collectives of a program into messages.

A value's level is the number of rounds of communication that it depends on. All collectives of one
level and of one kind are independent of each other, so they become one call: the mean of a tree of
161 gradients is one, and the number of rounds is that of the longest chain, which no other order
can undercut.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Collective
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.classify import communicates, follows_from, kind, kinds, other_effects
from jaxmpi._lowering.piggyback import share_messages
from jaxmpi._lowering.primitives import Op, Trait, has, is_sum, op_of
from jaxmpi._lowering.translate import Group, translate

__all__ = ["Group", "Level", "folded", "schedule"]


class Level(NamedTuple):
    """A round: what is local, the messages, those for later calls, and the loops that contain more of them, in this order."""

    local: list[JaxprEqn]
    groups: list[Group]
    ahead: list[JaxprEqn]
    loops: list[JaxprEqn]


@_jaxcompat.kept_with_jaxpr
def schedule(jaxpr: AnyJaxpr, size: int, combine: bool) -> list[Level]:
    """The rounds of an opened program on `size` ranks, without local work that no output needs.

    A collective is carried out whether its result is used or not: another rank may use it.

    Args:
      jaxpr: of `trace.prepared`, after `fuse_mean.fold` where the program is final.
      size: the number of ranks.
      combine: False where every collective is to stay a call of its own.
    """
    what, known = kinds(jaxpr), folded(jaxpr)
    rounds = []
    depth: dict[Var, int] = {}
    levels: dict[int, tuple[list[JaxprEqn], list[JaxprEqn]]] = defaultdict(lambda: ([], []))
    last = 0
    for eqn in _needed(_jaxcompat.parts(jaxpr)[0], what):
        level = max((depth.get(v, 0) for v in eqn.invars if not isinstance(v, Literal)), default=0)
        remote = id(eqn) in what and communicates(eqn) and id(eqn) not in known
        if other_effects(eqn):  # these keep their order
            level = max(level, last)
            last = level + remote
        levels[level][remote].append(eqn)
        depth.update((v, level + remote) for v in eqn.outvars)
    for level in sorted(levels):
        local, remote_eqns = levels[level]
        ahead, loops = (
            [eqn for eqn in remote_eqns if kind(eqn) == what] for what in ("ahead", "loop")
        )
        rounds.append(Level(local, _groups(remote_eqns, size, combine), ahead, loops))
    return rounds


def _groups(eqns: list[JaxprEqn], size: int, combine: bool) -> list[Group]:
    groups: dict[Collective | int, Group] = {}
    for i, eqn in enumerate(eqns):
        if kind(eqn) == "collective":
            translation = translate(eqn, size)
            group = groups.setdefault(
                translation.call if combine else i, Group(translation.call, [], [])
            )
            group.eqns.append(eqn)
            group.translations.append(translation)
    return share_messages(list(groups.values()), size) if combine else list(groups.values())


def _needed(jaxpr: Jaxpr, what: Mapping[int, str]) -> Iterator[JaxprEqn]:
    """The collectives, and the equations that one of them, an output or an effect depends on, in order."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if (
            other_effects(eqn)
            or not needed.isdisjoint(eqn.outvars)
            or (id(eqn) in what and communicates(eqn))
        ):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return reversed(kept)


@_jaxcompat.kept_with_jaxpr
def folded(jaxpr: AnyJaxpr) -> set[int]:
    """The sums, by id, of constants that were divided by a number: they multiply by the number of ranks, and nothing is sent.

    The gradient of every mean of a loss has one, of the cotangent 1/p. A constant may be a Python
    number that each rank has its own of, and so the ranks compare the text of what these sums
    follow from (`control_slice`). That text has no shapes: what depends on one, such as a count of
    samples, is sent, as is a number that is summed as it stands.
    """
    constant: set[Var] = set()
    quotients: set[int] = set()  # these, by id
    found = set()
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        if not follows_from(constant, eqn):
            continue
        if has(eqn, Trait.KEEPS_CONSTANTS):
            constant.update(eqn.outvars)
            if op_of(eqn) is Op.DIVIDE or not quotients.isdisjoint(map(id, eqn.invars)):
                quotients.update(map(id, eqn.outvars))
        elif (
            is_sum(eqn)
            and kind(eqn) == "collective"
            and not quotients.isdisjoint(map(id, eqn.invars))
        ):
            constant.update(eqn.outvars)
            found.add(id(eqn))
    return found
