"""The environment variables of jaxmpi: one table, checked once, first of all, on all ranks.

`pytest --tables` with this file writes the table into docs/api.md.
"""

import re
from itertools import product
from pathlib import Path

import pytest
import tables
from test_launch import end, start

import jaxmpi
from jaxmpi.__main__ import main
from jaxmpi._job.process import joining, settings

PAGE = Path(__file__).parents[3] / "docs/api.md"
BEGIN, CLOSE = "<!-- settings -->\n", "<!-- end of settings -->"
SECONDS = [name for name in settings.SETTINGS if name.endswith("SECONDS")]
COUNTS = ["JAXMPI_NODE_RANKS", "JAXMPI_RESTART", "JAXMPI_CACHE_BYTES"]
SWITCHES = ["JAXMPI_EXPLAIN", "JAXMPI_TTY"]
WORDS = ["JAXMPI_BACKEND", "JAXMPI_TRANSPORT", "JAXMPI_COMPILE"]
NO_SECONDS = ("soon", "-1", "nan", "inf", "-inf", "1e10", "1e999", "0x10", "1,5", " ")
NO_COUNTS = ("two", "-1", "nan", "inf", "1.5", "1e3", "9" * 30)
REFUSED = [
    *product(SECONDS, NO_SECONDS),
    *product(COUNTS, NO_COUNTS),
    *product([*SWITCHES, "JAXMPI_CHECK"], ("2", "-1", "yes", "nan")),
    *product(WORDS, ("nccl", "MPI", "1", "mpi ")),
    ("JAXMPI_NODE_RANKS", "0"),
    ("JAXMPI_TUNE", "1"),
    ("JAXMPI_TUNE", "chunks"),
    ("JAXMPI_TUNE", "chunks="),
    ("JAXMPI_TUNE", "chunks=0"),
    ("JAXMPI_TUNE", "pieces=3"),
    ("JAXMPI_TUNE", "chunks=3 small_bytes=1"),
    ("JAXMPI_TUNE", "chunks=3,"),
    ("JAXMPI_TUNE", "small_bytes=60001"),
]


def written(page):
    return page.read_text().split(BEGIN)[1].split(CLOSE)[0]


def test_the_documented_table_is_that_of_the_code():
    if tables.wanted():
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + settings.table() + CLOSE + rest.split(CLOSE)[1])
    assert written(PAGE) == settings.table(), "docs/api.md is not up to date: test with --tables"


def test_every_variable_that_the_code_reads_is_in_the_table():
    """All variables are in the table and read through it, except where `settings` cannot be."""
    package = Path(jaxmpi.__file__).parent
    sources = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    named, read = set(), set()
    for text in sources.values():
        named.update(re.findall(r"JAXMPI_[A-Z]+(?:_[A-Z]+)*", text))
        read.update(re.findall(r"environ\W+(?:get\W+)?(JAXMPI_\w+)", text))
    named.remove(joining._RANK_VARIABLE)  # ranks set it for their children
    assert named == set(settings.SETTINGS)
    assert read <= {"JAXMPI_RUN_DIR", "JAXMPI_MPIEXEC", "JAXMPI_CACHE_DIR"}


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_what_is_refused_is_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"^{name} is {re.escape(repr(text))}\. It is [^.]+\.$"):
        settings.check()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *[(name, "0", 0) for name in SECONDS],
        *[(name, "0.5", 0.5) for name in SECONDS],
        *[(name, "1e9", 1e9) for name in SECONDS],
        ("JAXMPI_NODE_RANKS", "1", 1),
        ("JAXMPI_RESTART", "0", 0),
        ("JAXMPI_RESTART", "", 0),
        ("JAXMPI_NODE_RANKS", "", None),
        ("JAXMPI_STALL_SECONDS", "", 60),
        ("JAXMPI_STALL_END_SECONDS", "", None),
        ("JAXMPI_BACKEND", "", "auto"),
        ("JAXMPI_TUNE", "", None),
        ("JAXMPI_TUNE", "0", {}),
        ("JAXMPI_TUNE", "chunks=3,small_bytes=0", {"chunks": 3, "small_bytes": 0}),
        *[(name, "1", True) for name in SWITCHES],
        *[(name, "0", False) for name in SWITCHES],
        *[(name, "", False) for name in SWITCHES],
        ("JAXMPI_CHECK", "0", "0"),
        ("JAXMPI_CHECK", "1", "1"),
        ("JAXMPI_CHECK", "", None),
    ],
)
def test_what_is_allowed(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert settings.get(name) == value


@pytest.mark.parametrize(
    ("stall", "end", "refused"),
    [("", "59", True), ("2", "1.5", True), ("2", "2", False), ("2", "0", False), ("0", "1", False)],
)
def test_a_job_does_not_end_before_it_reports_the_wait(monkeypatch, stall, end, refused):
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", stall)
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", end)
    if not refused:
        settings.check()
        return
    with pytest.raises(ValueError, match=rf"^JAXMPI_STALL_END_SECONDS is {end}, below"):
        settings.check()


def test_jaxmpi_run_starts_nothing_with_a_bad_value(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "nan")
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    assert main(["run", "-n", "2", str(tmp_path / "script.py")]) == 2
    assert (
        capfd.readouterr().err
        == "jaxmpi run: JAXMPI_STALL_SECONDS is 'nan'. It is a number of seconds, from 0 to 1e9.\n"
    )


SCRIPT = """
import os, sys
ranks, name, value = sys.argv[1:]
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) in ranks.split(","):
    os.environ[name] = value
import jaxmpi
try:
    jaxmpi.init()
except Exception as error:
    os.write(1, f"caught {type(error).__name__}: {error}\\n".encode())
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name", "value", "said"),
    [
        (
            "1",
            "JAXMPI_STALL_SECONDS",
            "nan",
            ["ValueError: init: JAXMPI_STALL_SECONDS is 'nan'", "MPIError: init: rank 1"],
        ),
        (
            "1",
            "JAXMPI_BACKEND",
            "nccl",
            ["ValueError: init: JAXMPI_BACKEND is 'nccl'", "MPIError: init: rank 1"],
        ),
        (
            "0,1,2",
            "JAXMPI_CHECK",
            "2",
            ["ValueError: init: JAXMPI_CHECK is '2'. It is 0 or 1."] * 3,
        ),
        (
            "2",
            "JAXMPI_NODE_RANKS",
            "1",
            ["RankMismatchError: init: JAXMPI_NODE_RANKS is unset on rank 0 and 1 on rank 2."] * 3,
        ),
        (
            "1",
            "JAXMPI_TRANSPORT",
            "mpi4jax",
            ["RankMismatchError: init: JAXMPI_TRANSPORT is 'auto' on rank 0 and 'mpi4jax'"] * 3,
        ),
        (
            "1",
            "JAXMPI_BACKEND",
            "xla",
            ["RankMismatchError: init: backend is 'auto' on rank 0 and 'xla' on rank 1."] * 3,
        ),
    ],
)
def test_every_rank_raises_whoever_has_the_value(tmp_path, monkeypatch, ranks, name, value, said):
    for other in ("JAXMPI_TRANSPORT", "JAXMPI_BACKEND"):
        monkeypatch.delenv(other, raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output, _ = end(start("-n", 3, tmp_path / "script.py", ranks, name, value))
    assert code and output.count("caught ") == 3, output
    for text in set(said):
        assert output.count(text) >= said.count(text), output
    # the others name the variable, too
    assert output.count(f"{name} is {value!r}") in (0, 3), output
