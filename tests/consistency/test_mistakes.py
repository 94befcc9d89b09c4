"""The table of docs/mistakes.md says what jaxmpi does after each mistake of its programs.

benchmarks/mistakes.py has the programs, and writes the table.
"""

import re
import sys
from pathlib import Path

import pytest
from programs import run

PROGRAM = "benchmarks/mistakes.py"
PAGE = Path(__file__).parents[2] / "docs" / "tables" / "mistakes.md"

# by mistake: the beginning of its cell, and a text in it
PROMISED = {
    "start": ("error on all ranks", "differ between the ranks before the first step"),
    "order": ("error on all ranks", "rank 1 has another sample 0 than rank 0"),
    "rate": ("error on all ranks", "0.05 on rank 0 and 0.01 on rank 1"),
    "mean": ("warning", "output [0]['b'], [0]['w'] may differ"),
    "average": ("warning", "output [2] may differ"),
    "doubled": ("warning", "is equal on all ranks already"),
    "sum": ("silent", "wrong numbers"),
    "skipped": ("error on all ranks", "which branch is taken may differ"),
    "if": ("error on all ranks", "rank 0 called train, and rank 1 called batches"),
    "batches": ("error on all ranks", "rank 0 called train, and rank 1 called average_metrics"),
    "model": ("error on all ranks", "do not agree"),
}


def cells():
    """Return the cells of jaxmpi in the table."""
    rows = re.findall(r"^\| (?!the mistake)[^|]+\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return dict(zip(PROMISED, rows, strict=True))


@pytest.mark.parametrize("mistake", PROMISED)
def test_the_table_says_what_is_promised(mistake):
    begins, text = PROMISED[mistake]
    cell = cells()[mistake]
    assert cell.startswith(f"{begins}: ") and text in cell


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PROMISED)
def test_a_mistake_has_the_outcome_of_the_table(mistake):
    options = ["--check", "--system", "jaxmpi", "--show", mistake]
    output = run([sys.executable, PROGRAM, *options])  # fails where its class is another one
    begins, text = PROMISED[mistake]
    outcome = output.splitlines()[0]
    assert outcome.startswith(f"jaxmpi, {mistake}: {begins}: ") and text in outcome


@pytest.mark.slow
def test_without_a_mistake_the_numbers_are_right():
    output = run([sys.executable, PROGRAM, "--system", "jaxmpi", "--show", "none"])
    assert output.startswith("jaxmpi, none: right numbers\n")
