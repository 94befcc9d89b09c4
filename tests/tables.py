"""Record and write the tables of docs/tables whose rows take long to measure: `pytest --tables`.

    make test-all ONLY=faults TESTS="--tables -n 0"    # seconds, with nothing beside it
    make test-all ONLY=environments TESTS=--tables

A test that has its result calls `record`; when all tests have run, conftest.py calls `write`.
"""

import json
import os
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "build" / "tables"
PAGES = ROOT / "docs" / "tables"


def wanted():
    """Whether pytest was given `--tables`."""
    return os.environ.get("JAXMPI_WRITE_TABLES") == "1"


def record(name, row):
    """Keep a row (a JSON value) for a table, if tables are written."""
    # pytest-xdist's workers append to one file
    if wanted():
        RECORDED.mkdir(parents=True, exist_ok=True)
        with open(RECORDED / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


def write():
    """Write the tables of which rows were recorded, and forget the rows."""
    pages = {"plain-faults": "faults"}  # of the tables that are not on a page of their own name
    named = {"faults": faults, "plain-faults": plain_faults, "environments": environments}
    for name, table in named.items():
        recorded = RECORDED / f"{name}.jsonl"
        if recorded.exists():
            rows = [json.loads(line) for line in recorded.read_text().splitlines()]
            replace(
                PAGES / f"{pages.get(name, name)}.md",
                name,
                lambda old, table=table, rows=rows: table(rows, old),
            )
            recorded.unlink()


def replace(page, name, new):
    """Replace the text between `<!-- name -->` and `<!-- end of name -->` by new(text)."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = page.read_text().split(begin)
    old, tail = rest.split(end)
    page.write_text(head + begin + new(old) + end + tail)


def faults(cells, old):
    """Return the table of seconds from a fault to the end of its job, by fault and kind of program.

    Args:
      cells: lists of fault, kind of program, ranks, transport or backend, seconds, and "ends" or
        "goes on"; of several numbers of ranks, the table has the longest time.
      old: the table as it was; its rows stay for faults that were not tried.
    """
    from test_faults import ENDS, MODES, WAYS

    seconds = defaultdict(list)
    modes_by_ending = defaultdict(lambda: defaultdict(set))
    for fault, mode, _, way, time, ending in cells:
        seconds[fault, mode, way].append(time)
        modes_by_ending[fault][ending].add(mode)
    old_rows = {line.split("|")[1].strip(): line for line in old.splitlines()}
    lines = ["| fault | the job | " + " | ".join(MODES) + " |", "|---|---|" + "---|" * len(MODES)]
    for fault in ENDS:
        if fault not in modes_by_ending:
            lines += [old_rows[fault]] if fault in old_rows else []
            continue
        endings = modes_by_ending[fault]
        first, *others = sorted(endings, key=lambda ending: -len(endings[ending]))
        promise = [first]
        for other in others:
            promise.append(f"{other} in {', '.join(sorted(endings[other]))}")
        row = [fault, "; ".join(promise)]
        for mode in MODES:
            times = [seconds[fault, mode, way] for way in WAYS if seconds[fault, mode, way]]
            row.append(" / ".join(f"{max(found):.1f}" for found in times))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def plain_faults(cells, old):
    """Return the table of seconds from a fault to the end of its job, of plain JAX programs.

    Args:
      cells: lists of fault, program, ranks and seconds; of several numbers of ranks, the table has
        the longest time.
      old: the table as it was; its times stay for cells that were not tried.
    """
    from plain_jax.test_plain_faults import ENDS, PROGRAMS

    seconds = defaultdict(list)
    for fault, program, _, time in cells:
        seconds[fault, program].append(time)
    old_cells = {row[0]: row[1:] for row in map(cells_of, old.splitlines())}
    lines = ["| fault | " + " | ".join(PROGRAMS) + " |", "|---|" + "---|" * len(PROGRAMS)]
    for fault in ENDS:
        before = old_cells.get(fault) or [""] * len(PROGRAMS)
        row = [fault]
        for program, then in zip(PROGRAMS, before, strict=True):
            found = seconds[fault, program]
            row.append(f"{max(found):.1f}" if found else then)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def cells_of(line):
    """Return the texts of the cells of a table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def environments(rows, old):
    """Return the table of environments and how a job fares in each, without local paths.

    Args:
      rows: lists of the environment's name, the way in which the job is started, and its error.
      old: unused, as all rows are written anew.
    """
    from test_environments import ENVIRONMENTS, TITLES

    errors = {name: error for name, _, error in rows}
    lines = ["| environment | started by | what becomes of it |", "|---|---|---|"]
    for environment in ENVIRONMENTS:
        text = errors.get(environment.name, "-")
        text = re.sub(r"^(\[\d+\] )?(jaxmpi\._errors\.|jaxmpi \w+: )?", "", text)
        text = re.sub(r"/[^\s']*/(?=[^\s'/])", ".../", text)
        text = text.replace(os.uname().nodename, "node1").replace("|", "\\|")
        lines.append(f"| {environment.name} | {TITLES[environment.how]} | {text or 'works'} |")
    return "\n".join(lines) + "\n"
