"""`init` waits for no rank that does not come; processes that a rank starts are no ranks."""

import re
import sys

import pytest
from test_monitor import end, jaxmpi_run, mpirun

from jaxmpi._job.process import joining, run_dir

COMES_LATE = """
import os, signal, sys, time
rank, what = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))), sys.argv[1]
if rank == 1 and what.startswith("MPI"):
    from mpi4py import MPI
    what = what.removeprefix("MPI, ")
if rank == 1:
    if what == "sleep":
        time.sleep(1000)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "exit":
        sys.exit(0)
    elif what == "exit late":
        from jaxmpi._job.process.joining import peers
        while not peers()[0].called:
            time.sleep(0.05)
        time.sleep(0.5)  # less than JAXMPI_STALL_SECONDS
        sys.exit(0)
    elif what == "raise":
        raise ValueError("boom")
    elif "=" in what:
        os.environ.update([what.split("=")])
    elif what == "late":
        from jaxmpi._job.process.joining import peers
        while not peers()[0].called:
            time.sleep(0.05)
        time.sleep(2.5)
import jaxmpi
print(f"rank {jaxmpi.init().rank} of {jaxmpi.size()} is there", flush=True)
jaxmpi.barrier()
print("through", flush=True)
"""


def joined(tmp_path, monkeypatch, launch, ranks, what):
    script = tmp_path / "script.py"
    script.write_text(COMES_LATE)
    monkeypatch.setenv("JAXMPI_STALL_SECONDS", "1")
    monkeypatch.setenv("JAXMPI_STALL_END_SECONDS", "60" if what == "late" else "3")
    return end(launch(ranks, str(script), what), str(tmp_path))


STATES = {
    "sleep": "runs",
    "stop": r"is stopped \(SIGSTOP, or a debugger\)",
    "exit": "has ended",
    "exit late": "has ended",
    "MPI, raise": "runs",
}


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "ranks", "what"),
    [
        (jaxmpi_run, 3, "sleep"),
        (jaxmpi_run, 2, "stop"),
        (jaxmpi_run, 2, "exit"),
        (jaxmpi_run, 2, "exit late"),
        (jaxmpi_run, 2, "MPI, raise"),
        (mpirun, 3, "exit"),
        (mpirun, 3, "exit late"),
    ],
)
def test_a_rank_that_does_not_come_to_init_ends_the_job(tmp_path, monkeypatch, launch, ranks, what):
    code, output, seconds, left = joined(tmp_path, monkeypatch, launch, ranks, what)
    assert code and seconds < 30 and not left and "through" not in output, output
    who = (
        rf"rank 1 \((pid \d+ )?on \S+\) {STATES[what]}, "
        "and has not joined the others in jaxmpi.init"
    )
    # Open MPI ends a job itself where a rank ends after another one has started MPI, and names it.
    # Which of the two comes first is chance where the rank ends early.
    if not ("exit" in what and "rank 1 with PID" in output):
        assert re.search(
            rf"rank 0/{ranks} on \S+\] stalled: has waited [12] s in jaxmpi.init\n  missing: {who}",
            output,
        ), output
        assert re.search(rf"rank 0/{ranks} on \S+\] .*: {who}. The job ends.", output), output
    assert "rank 2 (" not in output
    if launch is jaxmpi_run:
        assert re.search(f"jaxmpi run: the job failed: {who}$", output.strip()), output


@pytest.mark.launcher
@pytest.mark.slow
def test_a_rank_that_comes_late_to_init_is_waited_for(tmp_path, monkeypatch):
    code, output, _, _ = joined(tmp_path, monkeypatch, jaxmpi_run, 2, "late")
    assert code == 0 and output.count("through") == 2, output
    assert (
        len(re.findall(r"rank 0/2 on \S+\] stalled: has waited \d+ s in jaxmpi.init", output)) == 1
    ), output


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "JAXMPI_NODE_RANKS=1",
            "RankMismatchError: init: JAXMPI_NODE_RANKS is unset on rank 0 and 1 on rank 1. Give "
            "every",
        ),
        (
            "JAXMPI_BACKEND=xla",
            "RankMismatchError: init: backend is 'auto' on rank 0 and 'xla' on rank 1. Give every",
        ),
        (
            "JAXMPI_BACKEND=single",
            r"rank 1 (\(.*\) )?(runs|has ended), and has not joined the others in jaxmpi.init",
        ),
    ],
)
def test_a_setting_of_one_rank_only_ends_the_job(tmp_path, monkeypatch, setting, said):
    code, output, seconds, left = joined(tmp_path, monkeypatch, jaxmpi_run, 2, setting)
    assert code and seconds < 30 and not left, output
    assert re.search(said, output), output


# the processes of a rank

HAS_CHILDREN = """
import multiprocessing, os, signal, subprocess, sys, time, warnings
warnings.filterwarnings("ignore", "os.fork")
import jax.numpy as jnp, numpy as np
import jaxmpi
world = jaxmpi.init(*sys.argv[3:])
again = jaxmpi.init()
what = sys.argv[1]

def load(i):
    return i * i, jaxmpi.size(), jaxmpi.rank()

def main():
    total = lambda x: np.asarray(jaxmpi.tree_allreduce(jnp.asarray(x, jnp.float32), "sum"))
    jaxmpi.preempted()
    # spawn, forkserver and subprocess import JAX again, which takes long
    for k in range(1 if what in ("spawn", "forkserver", "subprocess") else 3):
        if what in ("spawn", "forkserver", "fork"):
            with multiprocessing.get_context(what).Pool(1) as pool:
                got = pool.map(load, range(4))
            sizes = {(size, rank) for _, size, rank in got}
            assert sizes == ({(world.size, world.rank)} if what == "fork" else {(1, 0)}), sizes
            x = [x for x, *_ in got]
        elif what == "subprocess":
            code = "import jaxmpi; print(jaxmpi.init('mpi').size, end='')"
            command = [sys.executable, "-c", code]
            size = int(subprocess.run(command, capture_output=True, check=True).stdout)
            x = [size - 1, 1, 4, 9]
        else:
            child = os.fork()
            if child == 0:
                if what == "exits":
                    sys.exit(7)
                if what == "raises":
                    raise ValueError("of the child")
                time.sleep(100)
            if what == "is killed":
                os.kill(child, signal.SIGTERM)
            status = os.waitpid(child, 0)[1]
            wanted = {"exits": 7 << 8, "raises": 1 << 8, "is killed": signal.SIGTERM}
            assert status == wanted[what], status
            x = [0, 1, 4, 9]
        np.testing.assert_array_equal(total(x), [0, world.size, 4 * world.size, 9 * world.size])
    assert not jaxmpi.preempted()
    print(f"fine {world.rank} of {world.size}", flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("spawn", "mpi"),
        ("forkserver", "mpi"),
        ("fork", "mpi"),
        ("subprocess", "mpi"),
        ("exits", "mpi"),
        ("raises", "mpi"),
        ("is killed", "mpi"),
        ("spawn", "xla"),
        ("exits", "xla"),
    ],
)
def test_a_process_that_a_rank_starts_is_no_rank(tmp_path, what, backend):
    """A child process has its own World, or reads the rank's.

    Its end and its signals are not the rank's.
    """
    script = tmp_path / "script.py"
    script.write_text(HAS_CHILDREN)
    code, output, _, left = end(jaxmpi_run(2, str(script), what, "--", backend), str(tmp_path))
    assert code == 0 and not left and output.count("fine") == 2, output
    assert output.count("ValueError: of the child") == (6 if what == "raises" else 0)


NESTED = """
import os, subprocess, sys
import jaxmpi
world = jaxmpi.init()
if len(sys.argv) > 1:
    total = int(jaxmpi.tree_allreduce(1, "sum"))
    print(f"inner {world.rank} of {world.size}, sum {total}", flush=True)
elif world.rank == 0:
    of_mpi = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
    environ = {k: value for k, value in os.environ.items() if not k.startswith(of_mpi)}
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", __file__, "inner"]
    subprocess.run(command, env=environ, check=True)
jaxmpi.barrier()
"""


def test_an_error_of_init_that_the_script_handles_leaves_no_hook(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMPI_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    run_dir.note_at_exceptions()
    before = sys.excepthook
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"), joining.joining(2):
            raise ValueError("boom")
        assert sys.excepthook is not before
        run_dir.note_at_exceptions()
    with joining.joining(2):
        pass
    assert sys.excepthook is before


@pytest.mark.launcher
@pytest.mark.slow
def test_a_job_within_a_rank_has_ranks_of_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NESTED)
    code, output, _, _ = end(jaxmpi_run(2, str(script)), str(tmp_path))
    assert code == 0, output
    assert sorted(re.findall(r"inner \d of \d, sum \d", output)) == [
        "inner 0 of 2, sum 2",
        "inner 1 of 2, sum 2",
    ], output
