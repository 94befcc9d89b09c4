"""Restarts that know hosts: one that fails twice is left out, others join, bits stay equal."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxmpi._job.launch import run, supervisor
from jaxmpi._job.launch.find_failure import End, find_failure
from jaxmpi._job.launch.host_ranks import MpiDaemons
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.options import parse
from jaxmpi._job.launch.placement import named_hosts, same_host, with_hosts
from jaxmpi._job.launch.run import Restarts
from jaxmpi._job.process import run_dir
from jaxmpi._job.process.failure import MARK, Cause, Failure, find_marked, find_stalled, to_json
from jaxmpi._job.process.launchers import MPICH
from jaxmpi._job.process.run_dir import Member


def request(tmp_path, *options, hosts="a slots=2\nb slots=2\nc slots=2\n", ranks=6):
    (tmp_path / "hosts.txt").write_text(hosts)
    return parse(
        [
            "-n",
            str(ranks),
            "--restarts",
            "9",
            *options,
            "--hostfile",
            str(tmp_path / "hosts.txt"),
            "--",
            "-c",
            "pass",
        ]
    )


def test_a_host_that_fails_twice_is_left_out(tmp_path):
    first = request(tmp_path, "--min-ranks", "3")
    restarts = Restarts(first, tmp_path)
    again, said = restarts.after(first, "b.example.org")
    assert again == first and not said
    again, said = restarts.after(again, "a")
    assert again == first and not said
    again, said = restarts.after(again, "b.example.org")
    assert again.ranks == 4 and said == "without b, which failed twice"
    assert named_hosts(again.mpi_options, {}) == {"a": 2, "c": 2}
    with pytest.raises(
        LaunchError,
        match=r"a, b failed twice, and the other hosts have room for 2 ranks of the 3 that",
    ):
        restarts.after(again, "a")


def test_without_min_ranks_all_ranks_must_find_room(tmp_path):
    first = request(tmp_path, ranks=4)
    restarts = Restarts(first, tmp_path)
    restarts.after(first, "b")
    again, _ = restarts.after(first, "b")
    assert again.ranks == 4 and named_hosts(again.mpi_options, {}) == {"a": 2, "c": 2}
    restarts.after(again, "c")
    with pytest.raises(LaunchError, match="room for 2 ranks of the 4"):
        restarts.after(again, "c")


def test_hosts_join_at_a_restart(tmp_path):
    first = request(tmp_path, "--min-ranks", "1")
    restarts = Restarts(first, tmp_path)
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\nc slots=2\nd slots=3 # new\n")
    again, said = restarts.after(first, "")
    assert again.ranks == 9 and said == "with d" and again.mpi_options == first.mpi_options
    restarts.after(again, "c")
    again, said = restarts.after(again, "c")
    assert again.ranks == 7 and said == "without c, which failed twice; with d"
    assert (tmp_path / "hosts").read_text() == "a slots=2\nb slots=2\nd slots=3\n"


def test_hosts_that_are_gone_leave_too_little_room(tmp_path):
    first = request(tmp_path)
    restarts = Restarts(first, tmp_path)
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\n")
    with pytest.raises(LaunchError, match=r"^the named hosts have room for 4 ranks of the 6 that"):
        restarts.after(first, "")


@pytest.mark.parametrize("each", [1, 2])
def test_a_host_of_a_batch_systems_file_is_left_out(each, tmp_path, monkeypatch):
    """There a name stands as often as the node takes ranks."""
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "hosts.txt"))
    names = [name for name in "abc" for _ in range(each)]
    first = request(tmp_path, "--min-ranks", "1", hosts="\n".join(names), ranks=3 * each)
    restarts = Restarts(first, tmp_path)
    restarts.after(first, "b")
    again, said = restarts.after(first, "b")
    assert again.ranks == 2 * each and said == "without b, which failed twice"
    assert named_hosts(again.mpi_options, os.environ) == {"a": each, "c": each}
    written = (tmp_path / "hosts").read_text().splitlines()
    assert written[1:] == [name for name in names if name != "b"] and written[0].startswith("#")


def test_hosts_without_slots_keep_the_number_of_ranks(tmp_path):
    first = request(tmp_path, hosts="a slots=0\nb slots=0\n", ranks=4)
    restarts = Restarts(first, tmp_path)
    assert restarts.after(first, "a") == (first, "")
    (tmp_path / "hosts.txt").write_text("a slots=0\nb slots=0\nc slots=4\n")
    assert restarts.after(first, "") == (first, "")


def test_where_no_host_is_known_there_is_one_rank_less(tmp_path):
    first = request(tmp_path, "--min-ranks", "4")
    restarts = Restarts(first, tmp_path)
    sizes, now = [], first
    for _ in range(3):
        now, said = restarts.after(now, "")
        sizes.append(now.ranks)
        assert not said and now.mpi_options == first.mpi_options
    assert sizes == [5, 4, 4]
    alone = replace(first, mpi_options=())
    assert Restarts(alone, tmp_path).after(alone, "a")[0].ranks == 5


def plain(ranks, *options):
    return parse(["-n", str(ranks), "--restarts", "2", *options, "--", "-c", "pass"])


def test_numbers_of_ranks_that_are_refused_are_not_taken_again(tmp_path):
    first = plain(6, "--min-ranks", "3")
    restarts = Restarts(first, tmp_path)
    now, _ = restarts.after(first, "")
    assert now.ranks == 5
    now = restarts.after_refused(now, "64 rows")
    assert now.ranks == 4
    now, _ = restarts.after(now, "")
    assert now.ranks == 3
    now = restarts.after_refused(now, "64 rows on 3")
    assert now.ranks == 4  # on which it has run
    now, _ = restarts.after(now, "")
    assert now.ranks == 4
    assert restarts.after_refused(now, "a state of 6").ranks == 6
    with pytest.raises(
        LaunchError,
        match=r"on no number of ranks from 3 to 6.*\n  3 ranks: 64 rows on 3\n  4 ranks: a st",
    ):
        restarts.after_refused(replace(now, ranks=6), "x")


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize("what", ["restarts", "scaling"])
def test_only_a_first_job_that_cannot_start_is_no_job(monkeypatch, capfd, what, failed):
    """A later one leaves the exit code of the job before it, or of a comparison that fails."""
    code = 7 if what == "restarts" else 0

    def run_once(*_):
        if not outcomes:
            raise LaunchError("the launcher is gone")
        return outcomes.pop()

    outcomes = [supervisor.Outcome(code, failed=bool(code), rates=(1.0,))] * failed
    monkeypatch.setattr(run, "_run_once", run_once)
    asked = plain(2) if what == "restarts" else replace(plain(2), scaling=(1, 2, 3))
    if not failed:
        with pytest.raises(LaunchError, match="the launcher is gone"):
            run._run_all(asked, None, "")
        return
    assert run._run_all(asked, None, "") == (code or 1)
    assert "the launcher is gone" in capfd.readouterr().err


def test_without_min_ranks_a_number_that_is_refused_is_the_only_one(tmp_path):
    first = plain(3)
    with pytest.raises(LaunchError, match="on no number of ranks from 3 to 3"):
        Restarts(first, tmp_path).after_refused(first, "x")


def test_on_named_hosts_a_number_that_is_refused_is_not_exceeded(tmp_path):
    first = request(tmp_path, "--min-ranks", "3")
    restarts = Restarts(first, tmp_path)
    now = restarts.after_refused(first, "x")
    assert now.ranks == 5 and now.mpi_options == first.mpi_options
    restarts.after(now, "b")
    now, _ = restarts.after(now, "b")
    assert now.ranks == 4 and restarts.after_refused(now, "y").ranks == 3
    with pytest.raises(LaunchError, match="on no number of ranks from 3 to 3"):
        restarts.after_refused(replace(now, ranks=3), "z")  # without b there is no room for 6


REFUSES = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi
what, folder, best = sys.argv[1:]
jaxmpi.init(axes={"a": 2, "b": -1} if what == "axes" else None)
n, best = jaxmpi.size(), int(best)
print(f"start {os.environ['JAXMPI_RESTART']} on {n} ranks", flush=True)
params = {"w": jnp.ones(6)}
if what == "batches":
    loader = jaxmpi.batches(np.arange(64.0), 8)
elif what == "micro":
    tx = jaxmpi.distributed(optax.sgd(0.1), micro_batches=4)
    stack = jax.tree.map(lambda x: jnp.stack([x] * (4 // n + (4 % n > 0))), params)
    jaxmpi.jit(lambda p: tx.update(stack, tx.init(p), p)[0])(params)
elif what == "window":
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(0.1)), 3)
    run = {"state": tx.init(params)}
    if jaxmpi.latest(folder) is None:
        step = jaxmpi.jit(lambda s, r: tx.update({"w": jnp.full(6, r)}, s, params)[1])
        run["state"] = step(run["state"], jnp.float32(jaxmpi.rank()))
        jaxmpi.save(folder, 1, run, background=False)
        os.kill(os.getpid(), 9) if jaxmpi.rank() == 1 else jaxmpi.barrier()
    run = jaxmpi.restore(folder, run)
elif what == "own":
    if n != best:
        raise jaxmpi.RankCountError(f"it wants {best} ranks")
elif what == "caught":
    try:
        jaxmpi.batches(np.arange(64.0), 8)
    except ValueError as error:
        assert isinstance(error, jaxmpi.RankCountError)
    raise KeyError("another one")
elif what == "chained":
    try:
        jaxmpi.batches(np.arange(64.0), 8)
    except ValueError as error:
        raise RuntimeError("no data") from error
print("went on", flush=True)
"""


def job(tmp_path, what, *options, best=2, ranks=3):
    (tmp_path / "script.py").write_text(REFUSES)
    command = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        str(ranks),
        *options,
        str(tmp_path / "script.py"),
        what,
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "saved"), str(best)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["axes", "batches", "micro", "own", "chained"])
def test_a_number_of_ranks_that_the_program_refuses_is_no_failure(what, tmp_path):
    code, output = job(tmp_path, what, "--restarts", "1", "--min-ranks", "1")
    assert code == 0 and output.count("went on") == 2, output
    assert (
        "starts on 2 ranks instead" in output
        and "start 0 on 2 ranks" in output
        and "restart 1" not in output
    ), output


@pytest.mark.slow
def test_an_accumulated_window_goes_on_with_as_many_ranks(tmp_path):
    code, output = job(tmp_path, "window", "--restarts", "1", "--min-ranks", "2")
    assert code == 0 and output.count("went on") == 3, output
    assert (
        "start 1 on 2 ranks" in output
        and "saved by 3 ranks" in output
        and "starts on 3 ranks instead" in output
    ), output


@pytest.mark.slow
def test_where_no_number_of_ranks_is_left_each_is_named_with_its_reason(tmp_path):
    code, output = job(tmp_path, "own", "--restarts", "9", "--min-ranks", "1", best=5)
    others = output.replace("no restart", "").replace("count as a restart", "")
    assert code == 1 and "restart" not in others, output
    assert re.search(
        r"no number of ranks from 1 to 3.*\n  1 ranks: it wants 5 ranks\n  2 ranks: .*\n  3 ranks: "
        r"it wants",
        output,
    )


@pytest.mark.slow
def test_a_refusal_that_the_program_handles_is_none(tmp_path):
    code, output = job(tmp_path, "caught", "--restarts", "1", "--min-ranks", "2")
    assert code == 1 and "restart 1 of 1" in output and "instead" not in output, output
    assert "KeyError: 'another one'" in output


@pytest.mark.slow
def test_without_restarts_a_refusal_ends_the_job(tmp_path):
    code, output = job(tmp_path, "batches")
    assert (
        code == 1 and "does not work on this number of ranks: batches: batch_size is 8" in output
    ), output


@pytest.mark.parametrize(
    "options", [("--host", "a:2,b,b"), ("-hosts=a:2,b:2",), ("-x", "V", "-H", "a:2,b:2")]
)
def test_options_with_other_hosts(options, tmp_path):
    assert named_hosts(options, {}) == {"a": 2, "b": 2}
    changed = with_hosts(options, {"b": 2}, tmp_path)
    assert named_hosts(changed, {}) == {"b": 2} and changed[:-1] == options[:-1]


HERE = [Member(0, 3, "a"), Member(1, 4, "a")]
OPEN_MPI = (
    "prterun noticed that process rank 1 with PID 5 on node node2 exited on\n signal 9 (Killed)."
)
MPICH_SAYS = "= PID 12 RUNNING AT node4\n= EXIT CODE: 9"
DAEMON = "HNP daemon   : [prterun-a-1@0,0] on node a\n  Remote daemon: [prterun-a-1@0,2] on node c"
LOST = (
    "A daemon failed to report back after being spawned. This could\n Local host: a\n"
    "  Remote host:   c\n  Daemon exit"
)


@pytest.mark.parametrize(
    ("text", "joined", "host"),
    [
        ("", HERE, "a"),
        (OPEN_MPI, [], "node2"),
        (MPICH_SAYS, HERE, "node4"),
        (MPICH_SAYS, [], "node4"),
        (DAEMON, [], "c"),
        (DAEMON, HERE, "c"),  # the launcher has killed the ranks here
        (LOST, HERE, "c"),
        ("", [], ""),
    ],
)
def test_the_host_that_failed(text, joined, host):
    ended = [End(joined[0], 9)] if joined else []
    assert find_failure(text, joined, ended).failed_host == host


def test_a_failure_that_ranks_report_is_read_as_it_was_written(tmp_path):
    failures = [
        Failure(1, 17, "node3", Cause.ABSENT, state="stopped"),
        Failure(2, 18, "node3", Cause.ABSENT, state="runs", work="busy: tokenizing, for 9 s"),
        Failure(3, None, "node3", Cause.ABSENT),
    ]
    run_dir.report_failures(str(tmp_path), failures)
    run_dir.report_failures(str(tmp_path), [Failure(9)])  # another one said it first
    found = run_dir.reported_failures(str(tmp_path))
    assert found == failures and found[0].failed_host == "node3"
    assert [failure.describe(1) for failure in found] == [
        "rank 1 (pid 17 on node3) is stopped (SIGSTOP, or a debugger), and has not joined the "
        "others in jaxmpi.init",
        "rank 2 (pid 18 on node3) is busy: tokenizing, for 9 s",
        "rank 3 (on node3) has ended, and has not joined the others in jaxmpi.init",
    ]
    assert run_dir.reported_failures(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("text", ["", "[1]", "[{}]", '["x"]', '[{"cause": "x"}]', '[{"rank": 1'])
def test_a_record_that_others_have_written_into_is_left_out(text):
    whole = '[{"rank": 2, "cause": "ended"}]'
    assert find_marked(f"{MARK}{text}\n{MARK}{whole}\n") == [Failure(2, cause=Cause.ENDED)]


def test_a_rank_that_waited_itself_is_not_the_one_that_others_waited_for():
    """Rank 0 waited for rank 2, which waited for rank 1: see native/plain_rank.cc."""
    stalled = [Failure(rank, cause=Cause.STALLED, joined=True) for rank in range(3)]
    aborts = [Failure(rank, cause=Cause.ABORT, code=1) for rank in range(3)]
    told = [stalled[2], aborts[0], stalled[1], aborts[2]]
    text = "".join(f"{MARK}{to_json([failure])}\n" for failure in told)
    assert find_stalled(text) == [stalled[1]]
    # each waited for another one
    text += f"{MARK}{to_json([aborts[1]])}\n"
    assert find_stalled(text) == [stalled[2], stalled[1]]


def test_ranks_for_which_others_have_waited_are_named_once():
    stalled = Failure(2, 17, "node3", Cause.STALLED, joined=True)
    ended = Failure(1, 16, "node2", Cause.ENDED, joined=True)
    text = f"{MARK}{to_json([ended])}\n{MARK}{to_json([stalled])}\n" * 2
    assert find_stalled(text) == [stalled] and stalled.failed_host == "node3"
    assert stalled.describe(1) == (
        "rank 2 (pid 17 on node3) did not enter a collective in which others waited"
    )


def test_the_first_daemon_of_mpich_that_ended():
    lost = "[mpiexec@a] control_cb (/src/pmiserv_cb.c:280): assert\n (!closed) failed\n"
    waits = "import time; time.sleep(60)"
    daemons = MpiDaemons(MPICH, ["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    processes = [
        subprocess.Popen([sys.executable, "-c", waits, "--proxy-id", str(i)]) for i in range(3)
    ]
    try:
        for _ in range(10):  # as a process has no command line for a moment
            daemons.look(os.getpid())
            time.sleep(0.05)
        assert daemons.find_lost(lost) == []
        for i in (2, 0, 1):
            processes[i].kill()
            processes[i].wait()
        daemons.look(os.getpid())
        assert daemons.find_lost("") == []
        (failure,) = daemons.find_lost(lost)
        assert failure.failed_host == "10.0.0.3"
        assert failure.describe(1) == (
            "MPI's daemon on 10.0.0.3 ended first: it was killed, or the host failed"
        )
    finally:
        daemons.close()
        for process in processes:
            process.kill()
            process.wait()


def test_names_of_one_host():
    assert same_host("node1", "node1.example.org") and same_host("localhost", "127.0.0.1")
    assert not same_host("node1", "node2") and not same_host("10.0.0.1", "10.0.0.2")


SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jaxmpi

folder, until = Path(sys.argv[1]), 12
world, attempt = jaxmpi.init(), int(os.environ["JAXMPI_RESTART"])
tx = jaxmpi.distributed(optax.adam(1e-2))
params = {"w": jnp.linspace(-1, 1, 50)}
state = {"params": params, "opt": tx.init(params), "step": 0}
if jaxmpi.latest(folder / "saved") is not None:
    state = jaxmpi.restore(folder / "saved", state)
data = {"x": np.random.default_rng(0).normal(size=(120, 50)).astype(np.float32)}

@jaxmpi.jit
def step(params, opt, batch):
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(batch["x"] @ p["w"]) ** 2))(params)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt

print(f"attempt {attempt}: {world.size} ranks from step {state['step']}", flush=True)
for i, batch in enumerate(jaxmpi.batches(data, 6, seed=0, epoch=0)):
    if i < state["step"] or i >= until:
        continue
    params, opt = step(state["params"], state["opt"], batch)
    state = {"params": params, "opt": opt, "step": i + 1}
    if i + 1 == 5 and attempt == 0:
        jaxmpi.save(folder / "saved", 5, state)
        jaxmpi.barrier()
    if i + 1 == 8 and world.size == 3:
        jax.block_until_ready(state)
        jaxmpi.barrier()
        if world.rank == 0:
            (folder / "kill").touch()
        time.sleep(60)
digest = hashlib.sha256(np.asarray(state["params"]["w"]).tobytes()).hexdigest()
print(f"bits {digest}", flush=True)
"""


@pytest.mark.exhaustive
def test_a_host_of_three_is_killed_twice(tmp_path):
    """The job ends on the other two, with the bits of two ranks from the checkpoint on."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if os.geteuid() or not shutil.which("ip") or not mpirun.exists():
        pytest.skip("needs root, ip and an mpirun, to make hosts")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--restarts", "3", "--min-ranks", "2", "--threads", "1"]
    command = [Path(__file__).with_name("three_hosts.sh"), tmp_path, *options, script, tmp_path]
    environ = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=550, env=environ
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    starts = re.findall(r"attempt (\d): (\d) ranks from step (\d)", said)
    assert [*dict.fromkeys(starts)] == [("0", "3", "0"), ("1", "3", "5"), ("2", "2", "5")], said
    assert "restart 2 of 3 without 10.78.0.3, which failed twice" in said, said
    two = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", "--threads", "1", script, tmp_path]
    alone = subprocess.run([*map(str, two)], capture_output=True, text=True, timeout=300)
    bits = re.findall("bits (.*)", said + alone.stdout)
    assert len(bits) == 4 and len(set(bits)) == 1, said + alone.stdout + alone.stderr
