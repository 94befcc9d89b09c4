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


class Row(NamedTuple):
    """Cells of a row of the table, as text."""

    collective: str
    arrays: str = ""
    sent: str = ""
    messages: str = ""
    times: str = ""
    where: str = ""
    seconds: str = ""


HEAD = Row("collective", "arrays", "sent per rank", "messages", "times", "where", "seconds")


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
    size = backend.place.size
    ranks = f"{size} {'rank' if size == 1 else 'ranks'} ({backend.name})"
    if not entries:
        return f"{title} on {ranks}: nothing is sent\n"
    costs = [cost(entry, backend) for entry in entries]
    rows: list[Sequence[str]] = [HEAD]
    for entry, each in zip(entries, costs, strict=True):
        rows.append(_row(entry, each, seconds))
    rows.append(_total(entries, costs, seconds))
    if seconds is None:
        rows = [row[:-1] for row in rows]
    lines = [f"  {line}\n" for line in _aligned(rows)]
    return f"{title} on {ranks}:\n{''.join(lines)}"


def _row(entry: Entry, each: Cost, seconds: Callable[[Cost], float] | None) -> Row:
    """Return the row of an entry."""
    messages = str(each.messages)
    if entry.overlapped:
        messages += f" ({entry.overlapped} overlapped with computation)"
    return Row(
        entry.name,
        _arrays(entry),
        _bytes(each.sent_bytes),
        messages,
        "?" if entry.times is None else str(entry.times),
        _where(entry),
        f"{seconds(each):.1e}" if seconds else "",
    )


def _total(
    entries: Sequence[Entry], costs: Sequence[Cost], seconds: Callable[[Cost], float] | None
) -> Row:
    """Return the row of the sums over the entries, each as often as it is carried out."""
    messages, sent_bytes, total_seconds, where = 0, 0.0, 0.0, ""
    for entry, each in zip(entries, costs, strict=True):
        if entry.times is None:
            where = "without the collectives of unknown times"
            continue
        messages += entry.times * each.messages
        sent_bytes += entry.times * each.sent_bytes
        if seconds is not None:
            total_seconds += entry.times * seconds(each)
    return Row(
        "total",
        sent=_bytes(sent_bytes),
        messages=str(messages),
        where=where,
        seconds=f"{total_seconds:.1e}" if seconds else "",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with its cells below those of the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _arrays(entry: Entry) -> str:
    if len(entry.arrays) == 1:
        shape, dtype = entry.arrays[0]
        return f"{dtype}{list(shape)}"
    return f"{len(entry.arrays)} of {'/'.join(sorted({dtype for _, dtype in entry.arrays}))}"


def _where(entry: Entry) -> str:
    """Return the loops around an entry, and the first lines of its collectives."""
    lines = ", ".join(entry.source[:2])
    if len(entry.source) > 2:
        lines += ", ..."
    return f"{entry.path} {lines}".strip()


def _bytes(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
