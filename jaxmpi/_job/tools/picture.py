"""A timeline as a picture (SVG) for any browser; Perfetto shows the trace, which has more."""

import io
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Bars", "picture"]

Span = tuple[float, float]  # begin and end, in seconds

WAITS, TRANSFERS, COMPUTES = "#f0b26a", "#3b76af", "#3f8f5b"
LABELS = {
    WAITS: "waits for the others",
    TRANSFERS: "communicates",
    COMPUTES: "computes meanwhile",
}


class Bars(NamedTuple):
    """The row of one rank."""

    label: str
    waits: Sequence[Span]  # for the other ranks
    transfers: Sequence[Span]  # of messages, once all ranks have come
    computes: Sequence[Span]  # what the program computes during a transfer; a thin bar below


def picture(rows: Sequence[Bars]) -> str:
    """Draw one row of bars per rank; return the SVG.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # Without parse_math a `$` in a host's name is a `$`.
    with rc_context({"text.parse_math": False, "svg.hashsalt": "jaxmpi"}):
        figure = Figure(figsize=(14, 1.5 + 0.5 * len(rows)), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds")
        for row, bars in enumerate(rows):
            for spans, color, low, height in (
                (bars.waits, WAITS, row - 0.35, 0.5),
                (bars.transfers, TRANSFERS, row - 0.35, 0.5),
                (bars.computes, COMPUTES, row + 0.2, 0.15),
            ):
                lengths = [(start, end - start) for start, end in spans]
                axes.broken_barh(lengths, (low, height), color=color, linewidth=0, rasterized=True)
        axes.set_yticks(range(len(rows)), [bars.label for bars in rows])
        axes.invert_yaxis()
        handles = [Patch(color=color, label=label) for color, label in LABELS.items()]
        figure.legend(handles=handles, ncols=3, loc="outside upper right")
        text = io.StringIO()
        figure.savefig(text, format="svg", dpi=150, metadata={"Date": None})
    return text.getvalue()
