"""Any fault of one rank of a plain JAX program ends the job as promised, with nothing left.

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

PROGRAMS = ("shard_map", "loop", "two axes", "permute", "sharding")
RANKS = (2, 3, 4)
# what the job says, and the launcher's last line, in which {last} is the rank that has the fault
ENDS = {
    "raise": (r"RuntimeError: a fault on purpose", r"the job failed: rank {last} \(pid \d+ on "),
    "exit 3": (r"ends the job, with code 3", r"the job failed: rank {last} \(pid \d+ on "),
    "kill": (r"", r"the job failed: rank {last} \(pid \d+ on .*was killed by signal 9"),
    "stop": (
        r"(it waits for|a permute (to|from)) rank.*It ends the job",
        r"the job failed: rank \d",
    ),
}
SECONDS = 25.0  # from the fault to the end of the job
CELLS = [*itertools.product(ENDS, PROGRAMS, RANKS)]
FEW = [(fault, PROGRAMS[i], (2, 3, 4, 2)[i]) for i, fault in enumerate(ENDS)]

# the arguments of program_that_leaves.py
LEAVES = ("plain", "plain later", "init", "init later")


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "program", "ranks"),
    [pytest.param(*c, marks=[] if c in FEW else pytest.mark.faults) for c in CELLS],
)
def test_a_fault_of_a_plain_program_ends_as_promised(fault, program, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "2")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "5")
    before = set(os.listdir("/dev/shm"))
    script = Path(__file__).with_name("program_with_fault.py")
    code, output, _, left = end(
        jaxmpi_run(ranks, script, program, fault), str(tmp_path), timeout=120
    )
    seconds = time.time() - max(map(float, re.findall(r"now (\d+\.\d+)", output)))
    assert not left, f"still running: {left}\n{output}"
    assert not segments_left(before), output
    said, blamed = ENDS[fault]
    assert code and re.search(said, output), output
    assert re.search(blamed.format(last=ranks - 1), output), output
    assert seconds < SECONDS, output
    tables.record("plain-faults", [fault, program, ranks, round(seconds, 1)])


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("ranks_of_node", [1, 2])
def test_a_rank_that_has_left_is_not_waited_for(ranks_of_node, how, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_NODE_RANKS", str(ranks_of_node))
    before = set(os.listdir("/dev/shm"))
    script = Path(__file__).with_name("program_that_leaves.py")
    code, output, _, left = end(jaxmpi_run(2, script, how), str(tmp_path), timeout=50)
    assert not left, f"still running: {left}\n{output}"
    assert not segments_left(before), output
    assert code, output
    assert re.search(r"rank 1 (of this node )?has (left|ended)", output), output


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("ranks_of_node", [1, 2])
def test_a_rank_at_its_end_whose_thread_communicates_is_waited_for(
    ranks_of_node, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXMPI_NODE_RANKS", str(ranks_of_node))
    script = Path(__file__).with_name("program_that_leaves.py")
    code, output, _, left = end(jaxmpi_run(2, script, "asynchronous"), str(tmp_path), timeout=100)
    assert code == 0 and not left and "done" in output, output
