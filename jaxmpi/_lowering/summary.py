"""Summary of the collectives of a program, known before it runs."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import Collective, Overlap
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.buckets import messages_of
from jaxmpi._lowering.combine import schedule
from jaxmpi._lowering.inner_jaxprs import subjaxprs
from jaxmpi._lowering.primitives import Op, op_of

__all__ = ["Entry", "summary"]


class Around(NamedTuple):
    """The loops and branches around a collective."""

    path: str
    times: int | None
    order: tuple[int, ...]


AT_THE_TOP = Around("", 1, ())


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


def summary(
    jaxpr: AnyJaxpr,
    size: int,
    *,
    combine: bool = True,
    overlap: Overlap | None = None,
    around: Around = AT_THE_TOP,
) -> Iterator[Entry]:
    """Yield the collectives of an opened program on `size` ranks, in their order of execution."""
    levels = schedule(jaxpr, size, combine)
    sent = {
        id(eqn)
        for level in levels
        for eqn in (*level.loops, *(eqn for group in level.groups for eqn in group.eqns))
    }
    place = {
        key: i
        for i, key in enumerate(
            id(eqn) for eqn in _jaxcompat.parts(jaxpr)[0].eqns if id(eqn) in sent
        )
    }
    for level in levels:
        messages = messages_of(level, jaxpr, overlap)
        for group in messages.groups:
            distinct = {
                (id(e.invars[0]), str(e.params)): (e, t)
                for e, t in zip(group.eqns, group.translations, strict=True)
            }
            avals = [
                translation.operand(eqn.invars[0].aval) for eqn, translation in distinct.values()
            ]
            arrays = [(tuple(aval.shape), aval.dtype.name) for aval in avals]
            source = tuple(filter(None, dict.fromkeys(map(_jaxcompat.source_line, group.eqns))))
            order = (*around.order, *(place[id(eqn)] for eqn in group.eqns))
            params = tuple(map(_params, group.eqns))
            yield Entry(
                group.call,
                tuple(arrays),
                around.path,
                around.times,
                source,
                order,
                params,
                *messages.counts(group),
            )
        for eqn in level.loops:
            yield from _inside(
                eqn, size, combine, overlap, around._replace(order=(*around.order, place[id(eqn)]))
            )


def _params(eqn: JaxprEqn) -> str:
    """Return "reduce_scatter axis_name=('ranks',) scatter_dimension=0 tiled=False" for example."""
    given = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None]
    return " ".join([eqn.primitive.name, *given])


def _inside(
    eqn: JaxprEqn, size: int, combine: bool, overlap: Overlap | None, around: Around
) -> Iterator[Entry]:
    name, op = eqn.primitive.name, op_of(eqn)
    for i, inner in enumerate(subjaxprs(eqn)):
        step, times = f"{name}:{i}" if op is Op.COND else name, None
        if op is Op.SCAN:
            step, times = (
                f"scan[{eqn.params['length']}]",
                around.times and around.times * eqn.params["length"],
            )
        path = f"{around.path}/{step}" if around.path else step
        yield from summary(
            inner, size, combine=combine, overlap=overlap, around=Around(path, times, around.order)
        )
