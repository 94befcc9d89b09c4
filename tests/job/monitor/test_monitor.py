"""A rank that is gone ends the job in seconds, and is named; nothing runs on. Plain mpirun, too."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmpi._job.launch import mpiexec

SCRIPT = """
import os, signal, subprocess, sys, time
import jax, jax.numpy as jnp
import jaxmpi
rank = jaxmpi.init().rank
what, where = sys.argv[1:]
step = jax.jit(lambda x: jaxmpi.tree_allreduce(x) + jnp.sum(jnp.sin(x)) * 0)
program = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x) + jnp.sum(jnp.sin(x)) * 0)
x = jnp.arange(float(1_000_000 if where == "jit-large" else 10))
for i in range(10_000):
    if rank == 1 and i == 5:
        if what == "raise":
            raise ValueError("boom on one")
        if what.startswith("exit"):
            sys.exit(int(what[4:]))
        if what == "kill, and the launcher is slow":
            launcher = os.getppid()
            os.kill(launcher, signal.SIGSTOP)
            later = f"sleep 0.8; kill -CONT {launcher}"
            subprocess.Popen(["sh", "-c", later], start_new_session=True)
        if what.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
    x = {"eager": jaxmpi.tree_allreduce, "program": program}.get(where, step)(x)
    if where == "objects":
        jaxmpi.allgather_object(i)
"""


def crowded(launcher):
    """The options of a launcher that runs more ranks than there are cores."""
    if launcher.vendor == "Open MPI":
        return ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    # waiting ranks sleep, as they do under `jaxmpi run`
    return ["-genv", "I_MPI_THREAD_YIELD", "3"] if launcher.vendor == "Intel MPI" else []


def mpirun(ranks, *args):
    launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
    return [launcher.path, *crowded(launcher), "-n", str(ranks), sys.executable, *args]


def jaxmpi_run(ranks, *args):
    return [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), *args]


def end(command, marker, timeout=40):
    """Run to the end; returns exit code, output, seconds, and the processes that are left."""
    environ = {**os.environ, "JAXMPI_TEST_MARKER": marker}
    start = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
    ) as job:
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            for pid in left(marker):
                os.kill(pid, signal.SIGKILL)
            pytest.fail(
                f"still running after {timeout} s:\n{job.communicate()[0].decode(errors='replace')}"
            )
    seconds = time.monotonic() - start
    deadline = time.monotonic() + 3.0
    while left(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return job.returncode, output.decode(errors="replace"), seconds, left(marker)


def left(marker):
    """The processes of a job, told by a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if (
                f"JAXMPI_TEST_MARKER={marker}".encode() in path.read_bytes()
                and path.parent.name != str(os.getpid())
            ):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


NAMES_RANK_1 = re.compile(
    r"the job failed: rank 1 \(pid \d+ on \S+\) exited while others waited for it in a collective"
)


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "ranks"), [(mpirun, 3), (jaxmpi_run, 2)], ids=["mpirun-3", "jaxmpi-run-2"]
)
@pytest.mark.parametrize(
    ("what", "where", "words"),
    [
        (
            "raise",
            "jit",
            [
                r"\[1\] ValueError: boom on one",
                r"rank 1/\d on \S+\] ValueError: boom on one. The job ends",
            ],
        ),
        ("raise", "eager", [r"\[1\] Traceback"]),
        ("exit0", "jit", ["rank 1 has exited while this rank waits"]),
        ("exit3", "eager", ["rank 1 has exited while this rank waits"]),
        ("exit0", "objects", ["rank 1 has exited while this rank waits"]),
        ("exit3", "jit-large", ["rank 1 has exited while this rank waits"]),
        ("raise", "program", [r"\[1\] ValueError: boom on one"]),
        ("exit0", "program", ["rank 1 has exited while this rank waits"]),
        ("kill", "jit", [r"(?i)rank 1\b.*signal:? 9"]),
    ],
)
def test_a_rank_that_goes_ends_the_job(launch, ranks, what, where, words, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, output, seconds, processes = end(launch(ranks, str(script), what, where), str(tmp_path))
    assert code != 0, output
    assert processes == []
    for word in words:
        assert re.search(word, output.replace("\n", " ") if "signal" in word else output), output
    if launch is jaxmpi_run and "exit" in what:
        assert NAMES_RANK_1.search(output), output  # and not the rank that has ended the job
    assert seconds < 20, output  # 10 s from the fault; the start of the ranks takes the rest


SHARDS = """
import numpy as np
import jaxmpi
jaxmpi.init()
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
for x in jaxmpi.shard(np.arange(10.0)):
    print(step(x))
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mpi", "xla"])
def test_a_loop_over_shards_that_is_longer_on_a_rank_says_so(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_BACKEND", backend)
    script = tmp_path / "script.py"
    script.write_text(SHARDS)
    code, output, seconds, processes = end(jaxmpi_run(3, str(script)), str(tmp_path))
    assert code and processes == [] and seconds < 30, output
    place = (
        r"in .*allreduce (mean|sum) of float32\[\] at script.py:5.*\. "
        r"Every rank must make the same calls\. "
    )
    shard = (
        r"jaxmpi\.shard at script\.py:6 has more samples on some ranks than on others: "
        r"loop over jaxmpi\.batches, "
    )
    assert re.search(r"rank 1 has exited while this rank waits for it " + place + shard, output), (
        output
    )


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", r"\[1\] ValueError: boom on one"),
        ("exit0", "rank 1 has exited while this rank waits"),
        ("kill", "rank 1 .*signal 9"),
    ],
)
def test_a_rank_that_goes_ends_the_job_on_xla(what, words, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMPI_BACKEND", "xla")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, output, seconds, processes = end(
        jaxmpi_run(2, str(script), what, "program"), str(tmp_path)
    )
    assert code != 0 and processes == [] and seconds < 20, output
    assert re.search(words, output), output
    assert what != "exit0" or NAMES_RANK_1.search(output), output


@pytest.mark.launcher
@pytest.mark.slow
def test_a_killed_rank_0_is_named_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("rank == 1", "rank == 0"))
    code, output, _, processes = end(mpirun(3, str(script), "kill", "jit"), str(tmp_path))
    assert code != 0 and processes == [], output
    assert re.search(r"(?i)rank 0\b.*signal:? 9", output.replace("\n", " ")), output


@pytest.mark.launcher
@pytest.mark.slow
def test_a_killed_rank_is_named_where_the_launcher_is_slow(tmp_path):
    """The others find out first, and end: they are not the cause."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, output, _, processes = end(
        jaxmpi_run(3, str(script), "kill, and the launcher is slow", "program"), str(tmp_path)
    )
    assert code != 0 and processes == [], output
    assert re.search("the job failed: rank 1 .*signal 9", output), output


FINE = """
import sys, time
import jax.numpy as jnp
import jaxmpi
rank = jaxmpi.init().rank
total = jaxmpi.tree_allreduce(jnp.float32(rank), "sum")
time.sleep(8.0 * (rank == 0))  # rank 0 saves for a while; the others have nothing left to do
jaxmpi.print("end of", rank, float(total))
"""


@pytest.mark.exhaustive
def test_a_slow_rank_at_the_end_is_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FINE)
    code, output, _, processes = end(mpirun(3, str(script)), str(tmp_path))
    assert code == 0 and processes == [], output
    assert sorted(re.findall(r"end of \d 3.0", output)) == [
        "end of 0 3.0",
        "end of 1 3.0",
        "end of 2 3.0",
    ]


PIDS = """rank = jaxmpi.init().rank
jaxmpi_pid = jaxmpi.allgather_object(os.getpid())[1]"""

INTERRUPTED = """
import hashlib, os, signal, sys, threading, time
import jax.numpy as jnp
import jaxmpi
rank = jaxmpi.init().rank
if rank == 1:
    # "waits": stands in a collective that rank 0 never joins, where Python cannot react
    if sys.argv[1] == "waits":
        jaxmpi.tree_allreduce(jnp.ones(3)).block_until_ready()
    if sys.argv[1] == "has a handler":
        signal.signal(signal.SIGINT, lambda *_: print("caught", flush=True))
        os.kill(os.getpid(), signal.SIGINT)
        jaxmpi.allgather_object(0)  # rank 0 comes later than a rank may take to react
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30 * (sys.argv[1] != "has a handler"))
    except KeyboardInterrupt:
        print("caught", flush=True)
    if sys.argv[1] == "calls":  # C code, for longer than a rank may take to react in a collective
        count, seconds = 1_000_000, 0.0
        while seconds < 3:  # until one call has taken so long
            began = time.perf_counter()
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                hashlib.pbkdf2_hmac("sha256", b"", b"", count)
                time.sleep(30)  # for the interrupt of a call that was too short
            except KeyboardInterrupt:
                seconds = time.perf_counter() - began
            count = int(count * max(1.5, 4 / seconds))
        print("caught again", flush=True)
        time.sleep(4)  # longer than a rank may take to react
elif sys.argv[1] == "waits":
    time.sleep(2)
    os.kill(jaxmpi_pid, signal.SIGINT)
    time.sleep(60)
elif sys.argv[1] == "has a handler":
    time.sleep(4)
    jaxmpi.allgather_object(0)
jaxmpi.barrier()
jaxmpi.print("end of", rank)
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("what", ["catches", "calls", "has a handler"])
def test_an_interrupt_that_the_script_handles_is_its_own(what, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    code, output, _, processes = end(mpirun(2, str(script), what), str(tmp_path))
    assert code == 0 and processes == [], output
    assert ("caught again" in output) == (what == "calls"), output
    assert "caught" in output and "end of 0" in output and "end of 1" in output


@pytest.mark.launcher
@pytest.mark.slow
def test_an_interrupt_ends_a_rank_inside_a_collective(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.replace("rank = jaxmpi.init().rank", PIDS))
    code, output, seconds, processes = end(mpirun(2, str(script), "waits"), str(tmp_path))
    assert code != 0 and processes == [], output
    assert re.search(
        r"rank 1/2 on \S+\] interrupted while it waited inside a collective. The job ends.", output
    ), output
    assert seconds < 20


BROKEN = """
import os, sys
import jax.numpy as jnp
import jaxmpi
what, *streams = sys.argv[1:]
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100 * (what == "files"))]
rank = jaxmpi.init().rank
jaxmpi.tree_allreduce(jnp.float32(rank))
for word in streams:
    whose, name, how = word.split("-")
    if whose in (str(rank), "both"):
        if how == "full":
            setattr(sys, name, open("/dev/full", "w", buffering=1))
        elif how == "closed":
            getattr(sys, name).close()
        elif how == "stuck":
            read, write = os.pipe()
            os.set_blocking(write, False)
            try:
                while True:
                    os.write(write, bytes(4096))
            except BlockingIOError:
                os.set_blocking(write, True)
            setattr(sys, name, os.fdopen(write, "w", buffering=1))
        else:
            setattr(sys, name, None)
class Unprintable(Exception):
    def __str__(self):
        raise ValueError
if rank == 1 and what == "raise":
    raise Unprintable
if rank == 1:
    sys.exit(0)
jaxmpi.tree_allreduce(jnp.float32(rank)).block_until_ready()
print("not reached")
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["exit", "both-stdout-full", "both-stderr-full"],
        ["exit", "both-stdout-closed", "both-stderr-none"],
        ["exit", "0-stdout-stuck", "0-stderr-stuck"],
        ["raise", "1-stdout-none", "1-stderr-full"],
        ["raise", "1-stdout-stuck", "1-stderr-closed"],
        ["files"],
    ],
    ids=" ".join,
)
def test_the_job_ends_whatever_its_streams_and_files_are(tmp_path, words):
    script = tmp_path / "script.py"
    script.write_text(BROKEN)
    code, output, seconds, processes = end(
        ["sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *jaxmpi_run(2, str(script), *words)],
        str(tmp_path),
    )
    assert code and processes == [] and "not reached" not in output, output
    assert seconds < 30, output
    if not any("stuck" in word for word in words):
        why = "rank 1 has exited while this rank waits"
        if words[0] == "raise":
            why = "Unprintable: no message"
        assert re.search(rf"\[rank \d/2 on \S+\] {why}.*The job ends", output), output


WATCHED = """
import sys, time
import jaxmpi
from jaxmpi._world import session
rank = jaxmpi.init().rank
def fails(*_):
    raise SystemError("a defect")
if rank == 0 and sys.argv[1] == "watcher":
    session.monitor().watchers.append(fails)
elif rank == 0:
    session.monitor().signals.wait = fails
time.sleep(1)
print("went on", flush=True)
jaxmpi.barrier()
print("to the end", flush=True)
"""


@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize("what", ["watcher", "signals"])
def test_the_watch_is_watched(tmp_path, what):
    """An exception in one check of the watch is reported, and the watch goes on.

    Where the thread itself fails, the job ends.
    """
    script = tmp_path / "script.py"
    script.write_text(WATCHED)
    code, output, _, processes = end(jaxmpi_run(2, str(script), what), str(tmp_path))
    assert processes == [], output
    if what == "watcher":
        assert (
            code == 0
            and "a defect in jaxmpi's monitor, which goes on" in output
            and output.count("to the end") == 2
        ), output
    else:
        said = (
            r"rank 0/2 on \S+\] the thread that watches this rank has failed "
            r"\(SystemError: a defect\)\. The job ends"
        )
        assert code and re.search(said, output), output


SIGNALS = """
import os, select, signal, socket, sys
from jaxmpi._job.process.signals import Signals
before, later = socket.socketpair(), socket.socketpair()
for end in (*before, *later):
    end.setblocking(False)
what, owners = sys.argv[1], {before[1].fileno(): "before", later[1].fileno(): "later"}
if what == "before":
    signal.set_wakeup_fd(before[1].fileno())
signals = Signals()
calls = []
assert signals.register(signal.SIGUSR1, lambda: calls.append("SIGUSR1"))
if what in ("taken", "given up"):
    signal.set_wakeup_fd(later[1].fileno())
if what == "given up":
    signal.set_wakeup_fd(-1)
if what == "closed":
    signal.set_wakeup_fd(later[1].fileno())
    later[1].close()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGUSR1)
    for call in signals.wait(10.0):
        call()
assert not signals.wait(0.0)
read = lambda pair: pair[0].recv(10) if select.select([pair[0]], [], [], 0)[0] else b""
print(calls, read(before), read(later))
signals.release()
print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, owners.get(signal.set_wakeup_fd(-1)))
"""


@pytest.mark.parametrize(
    ("what", "heard", "owner"),
    [
        ("alone", "b'' b''", None),
        ("before", r"b'\n\n' b''", "before"),
        ("taken", r"b'' b'\n\n'", "later"),
        ("given up", "b'' b''", None),
        ("closed", "b'' b''", None),
    ],
)
def test_a_signal_is_heard_by_all_who_have_had_the_wake_up_file(what, heard, owner):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, what], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines() == [f"['SIGUSR1', 'SIGUSR1'] {heard}", f"True {owner}"], (
        done.stdout + done.stderr
    )


STUCK = """
import os, signal, sys, time
from jaxmpi._job.process import signals as module
module.INTERRUPT_SECONDS = 0.0
what, mine = sys.argv[1], lambda *_: None
if what == "set before":
    signal.signal(signal.SIGINT, mine)
signals = module.Signals()
before = signal.getsignal(signal.SIGINT)
if what in ("set after", "restored"):
    signal.signal(signal.SIGINT, mine)
    os.kill(os.getpid(), signal.SIGINT)
elif what == "set before":
    os.kill(os.getpid(), signal.SIGINT)
elif what == "handled":
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        pass
else:  # the kernel has delivered it, and Python runs no handler
    os.write(signals._written.fileno(), bytes([signal.SIGINT]))
for call in signals.wait(10.0):
    call()
if what == "restored":
    signal.signal(signal.SIGINT, before)
time.sleep(0.1)
print(signals.interrupt_is_stuck(0.01), signals.interrupt_is_stuck(0.01))
"""


@pytest.mark.parametrize("what", ["stuck", "handled", "set before", "set after", "restored"])
def test_an_interrupt_that_a_handler_of_the_script_gets_is_not_stuck(what):
    done = subprocess.run(
        [sys.executable, "-c", STUCK, what], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == f"{what == 'stuck'} False\n", done.stdout + done.stderr


WITNESSED = """
import os, signal, sys
from jaxmpi._job.monitor import death_reporter
address = death_reporter.start()
ranks = []
for rank in range(3):
    mine, theirs = os.pipe()
    ranks.append(os.fork())
    if not ranks[-1]:
        dismiss = death_reporter.connect(address, rank, 3)
        os.write(theirs, b".")
        os.read(0, 1)  # until told to go on
        dismiss()
        os._exit(0)
    os.read(mine, 1)
print(*ranks, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [0, 2])
def test_the_death_reporter_names_the_first_rank_that_is_killed(killed):
    job = subprocess.Popen(
        [sys.executable, "-c", WITNESSED], stdin=subprocess.PIPE, stdout=-1, stderr=-1, text=True
    )
    pids = list(map(int, job.stdout.readline().split()))
    for pid in (pids[killed], pids[1]):
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
    said = job.communicate("", timeout=20)[1]
    assert re.search(
        rf"rank {killed}/3 on \S+\] was the first to end \(pid {pids[killed]}\)", said
    ), said
    assert said.count("first") == 1


def test_the_death_reporter_is_silent_about_a_job_that_ends_in_order():
    job = subprocess.Popen(
        [sys.executable, "-c", WITNESSED], stdin=subprocess.PIPE, stdout=-1, stderr=-1, text=True
    )
    job.stdout.readline()
    assert job.communicate("...", timeout=20)[1] == ""
