"""Any fault of one rank, anywhere, ends the job as promised, in seconds, with nothing left.

`make test-all ONLY=faults` runs all cells, and with `--tables` their seconds go to
docs/tables/faults.md; the other suites run a cell of each kind.
"""

import itertools
import os
import re
import time
from pathlib import Path

import pytest
import tables
from programs import segments_left
from test_monitor import end, jaxmpi_run

MODES = ("eager", "jit", "scan", "evaluation", "save")
RANKS = (2, 3, 4)
WAYS = ("native", "mpi4jax", "xla")

MISMATCH = "RankMismatchError"
# {fault: what ends the job}; "each" in it means every rank, and "" that the job goes on
ENDS = {
    "raise": "RuntimeError: a fault on purpose",
    "exit": "has exited|exited with code|did not end in order|has ended",
    "exit 3": "has exited|exited with code|did not end in order|has ended",
    "kill": "was killed by signal 9",
    "stop": "does not answer: it is stopped",
    "delay": "",
    "nan": "",
    "shape": MISMATCH,
    "dtype": MISMATCH,
    "extra": f"{MISMATCH}|has exited|did not come|has ended",
    "missing": f"{MISMATCH}|has exited|did not come|has ended",
    "recompile": "",
    "before init": "has not joined the others in jaxmpi.init|did not end in order|ended first",
    "broken stdout": "has exited|exited with code|did not end in order|has ended",
    "many files": "has exited|exited with code|did not end in order|has ended",
    "forked child": "",
    "spawned worker": "",
}
# one rank's has the NaN
ENDS_IN = {("nan", "save"): f"{MISMATCH}: save: leaf \\['batch'\\] is not equal on all ranks"}
SECONDS = 25.0  # from the fault to the end of the job

CELLS = [*itertools.product(ENDS, MODES, RANKS, WAYS)]
FEW = [(kind, MODES[i % 5], (2, 3)[i % 2], WAYS[i % 3]) for i, kind in enumerate(ENDS)]


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode", "ranks", "way"),
    [pytest.param(*c, marks=[] if c in FEW else pytest.mark.faults) for c in CELLS],
)
def test_a_fault_ends_as_promised(kind, mode, ranks, way, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_BACKEND", "xla" if way == "xla" else "mpi")
    if way != "xla":
        monkeypatch.setenv("JAXMPI_TRANSPORT", way)
    if kind != "spawned worker":  # which imports JAX
        monkeypatch.setenv("JAXMPI_STALL_SECONDS", "2")
        monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "5")
    before = set(os.listdir("/dev/shm"))
    script = Path(__file__).with_name("fault_script.py")
    code, output, _, left = end(
        jaxmpi_run(ranks, script, mode, kind, tmp_path / "saved"), str(tmp_path), timeout=120
    )
    seconds = time.time() - max(map(float, re.findall(r"now (\d+\.\d+)", output)))
    assert not left, f"still running: {left}\n{output}"
    assert not segments_left(before), output
    ending = ENDS_IN.get((kind, mode), ENDS[kind])
    if not ending:
        assert code == 0 and output.count("the same on all ranks: True") == ranks, output
        if kind == "nan" and mode in ("jit", "scan"):
            assert f"skipped {3 if mode == 'scan' else 1}" in output, output
    else:
        assert code and re.search(ending, output), output
        if MISMATCH in (ending, ENDS[kind]) or (kind, mode) in ENDS_IN:
            assert len(set(re.findall(rf"\[(\d+)\] .*{MISMATCH}", output))) == ranks, output
    assert seconds < SECONDS, output
    row = [kind, mode, ranks, way, round(seconds, 1), "ends" if ending else "goes on"]
    tables.record("faults", row)
