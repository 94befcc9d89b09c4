"""A timeline as a picture that any browser shows; Perfetto shows the trace."""

import io
from collections.abc import Sequence

from jaxmpi._job.tools.overlapped import overlapped
from jaxmpi._job.tools.records import Record

__all__ = ["picture"]

WAITS, COMMUNICATES, COMPUTES = "#f0b26a", "#3b76af", "#3f8f5b"
SHOWN = 200  # collectives of a rank: of more, nothing could be told apart; the trace has all


def picture(records: Sequence[Record]) -> str:
    """An SVG with a row of bars for each rank: it waits for the others, then communicates; in between it computes.

    A thin bar below is what it computes while a message travels. It shows each rank's last
    collectives.

    Raises:
      ImportError: there is no matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with rc_context({"text.parse_math": False, "svg.hashsalt": "jaxmpi"}):
        figure = Figure(figsize=(14, 1.5 + 0.5 * len(records)), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds")
        for row, record in enumerate(records):
            for spans, color in zip(_spans(record), (WAITS, COMMUNICATES), strict=True):
                axes.broken_barh(
                    spans, (row - 0.35, 0.5), color=color, linewidth=0, rasterized=True
                )
            since = min((event[3] for event in record["events"][-SHOWN:]), default=0.0)
            meanwhile = [
                (start, end - start) for start, end in overlapped(record) if start >= since
            ]
            axes.broken_barh(
                meanwhile, (row + 0.2, 0.15), color=COMPUTES, linewidth=0, rasterized=True
            )
        axes.set_yticks(
            range(len(records)),
            [f"rank {record['rank']} on {record['host']}" for record in records],
        )
        axes.invert_yaxis()
        labels = {
            WAITS: "waits for the others",
            COMMUNICATES: "communicates",
            COMPUTES: "computes meanwhile",
        }
        handles = [Patch(color=color, label=label) for color, label in labels.items()]
        figure.legend(handles=handles, ncols=3, loc="outside upper right")
        text = io.StringIO()
        figure.savefig(text, format="svg", dpi=150, metadata={"Date": None})
    return text.getvalue()


def _spans(record: Record) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Begin and duration in seconds: until the last rank had come, and from then to the end."""
    waits, communicates = [], []
    last = max((t for event in record["events"] for t in event[3:] if t is not None), default=0.0)
    for *_, start, met, end in record["events"][-SHOWN:]:
        arrived = met if met is not None else end if end is not None else last
        waits.append((start, max(arrived - start, 0.0)))
        if met is not None and end is not None:
            communicates.append((met, max(end - met, 0.0)))
    return waits, communicates
