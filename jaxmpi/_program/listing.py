"""What a program will send, known before it runs."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxmpi import _jaxcompat
from jaxmpi._backends import Collective
from jaxmpi._program.reading import subjaxprs
from jaxmpi._program.schedule import schedule
from jaxmpi._program.steering import steering

__all__ = ["Entry", "listing", "signature"]


class Entry(NamedTuple):
    """Arrays that one collective carries.

    Attributes:
      call: the collective.
      arrays: shape and dtype of each array that goes in.
      path: the loops and branches around it, such as "scan[12]/cond:1"; "" at the top.
      times: how often it is carried out; None where a branch or a while_loop decides.
      source: file and line of each array's collective, without repetitions; empty inside of jaxmpi's own functions.
    """

    call: Collective
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    path: str
    times: int | None
    source: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as "allreduce sum"."""
        detail = {"bcast": f"from {self.call.root}", "permute": str(list(self.call.pairs))}.get(self.call.kind, self.call.op)
        return f"{self.call.kind} {detail}".strip()

    def __str__(self) -> str:
        first = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.arrays[:3])
        more = f", and {len(self.arrays) - 3} more" if len(self.arrays) > 3 else ""
        where = f" in {self.path}" if self.path else ""
        lines = f" at {', '.join(self.source[:2])}" if self.source else ""
        return f"{self.name} of {first}{more}{where}{lines}"


def listing(jaxpr: Any, size: int, *, together: bool = True, path: str = "", times: int | None = 1) -> Iterator[Entry]:
    """The collectives of an opened program on `size` ranks, in the order in which they are carried out."""
    for level in schedule(jaxpr, size, together=together):
        for group in level.groups:
            distinct = {(id(e.invars[0]), str(e.params)): (e, t) for e, t in zip(group.eqns, group.translations, strict=True)}
            avals = [translation.operand(eqn.invars[0].aval) for eqn, translation in distinct.values()]
            arrays = [(tuple(aval.shape), aval.dtype.name) for aval in avals]
            source = tuple(filter(None, dict.fromkeys(map(_jaxcompat.source_line, group.eqns))))
            yield Entry(group.call, tuple(arrays), path, times, source)
        for eqn in level.loops:
            yield from _inside(eqn, size, together, path, times)


def _inside(eqn: Any, size: int, together: bool, path: str, times: int | None) -> Iterator[Entry]:
    name = eqn.primitive.name
    for i, inner in enumerate(subjaxprs(eqn)):
        step, inner_times = f"{name}:{i}" if name == "cond" else name, None
        if name == "scan":
            step, inner_times = f"scan[{eqn.params['length']}]", times and times * eqn.params["length"]
        inner_path = f"{path}/{step}" if path else step
        yield from listing(inner, size, together=together, path=inner_path, times=inner_times)


def signature(jaxpr: Any, entries: Sequence[Entry]) -> str:
    """A text that is equal where the same is sent in the same order, and the same decides it; source lines don't count."""
    return "\n".join([*(repr(entry._replace(source=())) for entry in entries), *filter(None, [steering(jaxpr)])])
