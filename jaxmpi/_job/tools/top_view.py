"""The rows of `jaxmpi top` for a terminal, for Prometheus and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxmpi._job.tools.rank_rates import Row

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["as_json", "as_prometheus", "as_table"]

COLUMNS = ("rank", "host", "steps/s", "samples/s", "comm", "last", "GB", "GPU GB", "", "collective")
COLORS = {"slow": "yellow", "busy": "cyan", "": "none"}
METRICS = {
    "steps_per_second": "How often the largest message of the rank recurs.",
    "samples_per_second": "Samples that jaxmpi.Throughput has counted.",
    "communication": "Share of the time for which it waits for collectives, and so for other ranks.",
    "last": "Share of the collectives to which the rank came last.",
    "memory_bytes": "Resident memory.",
    "gpu_bytes": "Memory of GPUs.",
}


def as_table(rows: Sequence[Row], errors: Mapping[str, str]) -> "Group":
    """A table of rich, with a line for each rank; `errors` of other hosts, by their names."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for job in dict.fromkeys(row.job for row in rows):
        ranks = [row for row in rows if row.job == job]
        table = Table(
            title=f"job {job}, {len(ranks)} of {ranks[0].size} ranks",
            title_justify="left",
            expand=True,
        )
        for name in COLUMNS:
            text = name in ("rank", "host", "", "collective")
            ratio = 1 if name == "collective" else None  # it takes what the others leave
            table.add_column(
                name,
                justify="left" if text else "right",
                no_wrap=True,
                overflow="ellipsis",
                ratio=ratio,
            )
        for row in ranks:
            table.add_row(*map(Text, _cells(row)), style=COLORS.get(row.verdict, "bold red"))
        parts.append(table)
    if not rows:
        parts.append(Text("no job of several ranks of yours runs here"))
    parts += [Text(f"{host}: {error}", style="red") for host, error in errors.items()]
    return Group(*parts)


def _cells(row: Row) -> list[str]:
    rates = [_number(x, ".4g") for x in (row.steps_per_second, row.samples_per_second)]
    shares = [_number(x, ".0%") for x in (row.communication, row.last)]
    gigabytes = [_number(x and x / 1e9, ".2f") for x in (row.memory_bytes, row.gpu_bytes)]
    return [str(row.rank), row.host, *rates, *shares, *gigabytes, row.verdict, row.doing]


def _number(x: float | None, layout: str) -> str:
    return "-" if x is None else format(x, layout)


def as_json(rows: Iterable[Row], errors: Mapping[str, str]) -> str:
    """One object: the ranks, and what went wrong on the way to other hosts."""
    return json.dumps({"ranks": [row._asdict() for row in rows], "errors": dict(errors)}, indent=1)


def as_prometheus(rows: Sequence[Row]) -> str:
    """Prometheus's text format, version 0.0.4."""
    lines = []
    for name, meaning in METRICS.items():
        lines += [f"# HELP jaxmpi_{name} {meaning}", f"# TYPE jaxmpi_{name} gauge"]
        values = [(row, getattr(row, name)) for row in rows]
        lines += [
            f"jaxmpi_{name}{_labels(row)} {value:.9g}" for row, value in values if value is not None
        ]
    lines += [
        "# HELP jaxmpi_stalled 1 where other ranks wait for this one.",
        "# TYPE jaxmpi_stalled gauge",
    ]
    lines += [
        f"jaxmpi_stalled{_labels(row)} {int(row.verdict not in ('', 'slow', 'busy'))}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _labels(row: Row) -> str:
    return f'{{job="{_quoted(row.job)}",rank="{row.rank}",host="{_quoted(row.host)}"}}'


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
