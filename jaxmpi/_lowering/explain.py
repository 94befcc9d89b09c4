"""Cost of the collectives of a program in messages and bytes, and the table of `explain`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.wire import of_all
from jaxmpi._lowering.plan import Entry

__all__ = ["Cost", "Speed", "cost", "table"]


class Cost(NamedTuple):
    """Cost of one execution of an entry, on each rank."""

    messages: int  # calls of MPI, or of XLA's collective
    sent_bytes: float  # by an algorithm that sends the fewest bytes, such as a ring
    arrays: int = 1  # the number of arrays in these messages


class Speed(NamedTuple):
    """Measured speed of messages between these ranks.

    Attributes:
      sent_bytes: the bytes of each measured message, in ascending order.
      seconds: the seconds that each of these took.
      array_seconds: the additional seconds for each array of a message after the first.
    """

    sent_bytes: Sequence[float]
    seconds: Sequence[float]
    array_seconds: float = 0.0

    def seconds_of(self, cost: Cost) -> float:
        """Return the predicted seconds of a cost, interpolated between measured messages.

        Larger messages are extrapolated from the last two measured ones.
        """
        if not cost.messages:
            return 0.0
        size = cost.sent_bytes / cost.messages
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sent_bytes[-1] - self.sent_bytes[-2])
        beyond = max(0.0, size - self.sent_bytes[-1]) * max(0.0, slope)
        one = float(np.interp(size, self.sent_bytes, self.seconds)) + beyond
        return cost.messages * one + max(0, cost.arrays - cost.messages) * self.array_seconds


def cost(entry: Entry, backend: Ranks) -> Cost:
    """Return the cost of an entry on the ranks of `backend`."""
    call, arrays = entry.call, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in entry.arrays]
    if not backend.transport.connects(call):
        call, arrays = of_all(call, arrays, backend.place.size)
    # Bytes to send per byte of the operand [s], or of [n, s], on n ranks.
    size = call.count(backend.place.size)
    share = {"allreduce": 2 * (size - 1) / size, "allgather": size - 1, "permute": 1.0}.get(
        call.kind, (size - 1) / size
    )
    # The transport packs, splits and widens arrays as it needs.
    sent = backend.transport.messages(call, arrays)
    return Cost(max(len(sent), entry.started), share * sum(sent), len(arrays))


def table(
    title: str,
    entries: Sequence[Entry],
    backend: Ranks,
    seconds: Callable[[Cost], float] | None = None,
) -> str:
    """Return the entries and their costs as lines of text.

    Args:
      title: the name of the program.
      entries: the entries of `plan.entries_of`.
      backend: the ranks.
      seconds: returns the seconds of a cost; without it that column is left out.
    """
    ranks = f"{backend.place.size} rank{'s' * (backend.place.size > 1)} ({backend.name})"
    if not entries:
        return f"{title} on {ranks}: nothing is sent\n"
    costs = [cost(entry, backend) for entry in entries]
    rows = [("collective", "arrays", "sent per rank", "messages", "times", "where", "seconds")]
    for entry, each in zip(entries, costs, strict=True):
        where = " ".join(
            filter(
                None, (entry.path, ", ".join(entry.source[:2]) + ", ..." * (len(entry.source) > 2))
            )
        )
        took = f"{seconds(each):.1e}" if seconds else ""
        times = "?" if entry.times is None else str(entry.times)
        overlapped = (
            f" ({entry.overlapped} overlapped with computation)" if entry.overlapped else ""
        )
        rows.append(
            (
                entry.name,
                _arrays(entry),
                _bytes(each.sent_bytes),
                f"{each.messages}{overlapped}",
                times,
                where,
                took,
            )
        )
    known = [
        (entry.times, each)
        for entry, each in zip(entries, costs, strict=True)
        if entry.times is not None
    ]
    messages, sent = (sum(times * each[i] for times, each in known) for i in (0, 1))
    total = f"{sum(times * seconds(each) for times, each in known):.1e}" if seconds else ""
    rows.append(
        (
            "total",
            "",
            _bytes(sent),
            str(messages),
            "",
            "without the collectives of unknown times" * (len(known) < len(rows) - 1),
            total,
        )
    )
    columns = [column for column in zip(*rows, strict=True) if seconds or column[0] != "seconds"]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return f"{title} on {ranks}:\n" + "".join(f"  {line}\n" for line in lines)


def _arrays(entry: Entry) -> str:
    if len(entry.arrays) == 1:
        shape, dtype = entry.arrays[0]
        return f"{dtype}{list(shape)}"
    return f"{len(entry.arrays)} of {'/'.join(sorted({dtype for _, dtype in entry.arrays}))}"


def _bytes(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
