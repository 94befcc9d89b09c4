"""In any environment a job works, or one sentence says why not and the exit code is not 0.

Nothing is left of the job.

`make test-all ONLY=environments` tries them all, and with TESTS=--tables it writes the table of
docs/tables/environments.md; the other suites try a few.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
import tables
from programs import segments_left

BIN = Path(sys.executable).parent
SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jaxmpi

def mean(x):
    return jaxmpi.tree_allreduce(x)

if __name__ == "__main__":
    world = jaxmpi.init()
    n = world.size
    got = jaxmpi.jit(mean)(jnp.arange(4.0) + world.rank)
    want = np.arange(4.0) + (n - 1) / 2
    ranks = jaxmpi.allgather_object(world.rank)
    if not np.allclose(np.asarray(got), want) or ranks != list(range(n)):
        raise SystemExit("wrong numbers")
    print(f"fine on {world.rank} of {n}", flush=True)
"""
LAUNCH = """
import jaxmpi
if __name__ == "__main__":
    lines = jaxmpi.launch(lambda: f"fine on {jaxmpi.rank()} of {jaxmpi.size()}", 2)
    print(*lines, sep="\\n", flush=True)
"""
HOW = {
    "run": [str(BIN / "jaxmpi"), "run", "-n", "2", "@SCRIPT@"],
    "xla": ["env", "JAXMPI_BACKEND=xla", str(BIN / "jaxmpi"), "run", "-n", "2", "@SCRIPT@"],
    "mpi4jax": [
        "env",
        "JAXMPI_TRANSPORT=mpi4jax",
        str(BIN / "jaxmpi"),
        "run",
        "-n",
        "2",
        "@SCRIPT@",
    ],
    "mpirun": [str(BIN / "mpirun"), "-n", "2", sys.executable, "@SCRIPT@"],
    "alone": [sys.executable, "@SCRIPT@"],
    "launch": [sys.executable, "@LAUNCH@"],
    "doctor": [str(BIN / "jaxmpi"), "doctor", "-n", "1"],
}
TITLES = {
    "run": "`jaxmpi run`",
    "xla": "`jaxmpi run`, xla",
    "mpi4jax": "`jaxmpi run`, mpi4jax",
    "mpirun": "`mpirun`",
    "alone": "`python`",
    "launch": "`jaxmpi.launch`",
    "doctor": "`jaxmpi doctor`",
}


class Environment(NamedTuple):
    """One environment: what bash does before the command, and what becomes of it."""

    name: str
    setup: str = ""
    refused: str = ""  # the sentence; "" where it works
    how: str = "run"
    spaces: str = ""  # for `unshare`: own mounts, network, host name; needs root
    few: bool = False  # runs with the other tests, too


E = Environment
SHM = "mount -t tmpfs -o {} none /dev/shm"
READ_ONLY = """
for d in /tmp /var/tmp; do mount --bind $d $d; mount -o remount,ro,bind $d; done
export TMPDIR=/proc; cd /proc
"""
GONE = "mkdir $TMPDIR/gone; cd $TMPDIR/gone; rmdir $TMPDIR/gone"
LONG = "export TMPDIR=$TMPDIR/$(printf %0200d 0); mkdir $TMPDIR"
NO_SHM = """
d=$TMPDIR/dev; mkdir $d; mount -t tmpfs none $d
for n in null zero full random urandom tty; do touch $d/$n; mount --bind /dev/$n $d/$n; done
mkdir $d/pts; mount --rbind /dev/pts $d/pts; ln -s pts/ptmx $d/ptmx; ln -s /proc/self/fd $d/fd
mount --rbind $d /dev
"""
AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
SLURM = (
    "SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_NTASKS=2 SLURM_NODELIST=$(hostname) "
    "SLURM_TASKS_PER_NODE=2 SLURM_NNODES=1"
)
PROXY = "export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9"
NO_MPI4PY = """
echo "raise ImportError(\\"No module named 'mpi4py'\\")" > $TMPDIR/mpi4py.py
export PYTHONPATH=$TMPDIR
"""
NO_MPI4JAX = "echo 'raise ImportError' > $TMPDIR/mpi4jax.py; export PYTHONPATH=$TMPDIR"
MPICH = """
printf '#!/bin/sh\\necho HYDRA build details, Version: 4.2' > $TMPDIR/m
chmod +x $TMPDIR/m
export JAXMPI_MPIEXEC=$TMPDIR/m
"""
TOO_SMALL = r"cannot share .* MiB of memory among its 2 ranks"
ENVIRONMENTS = [
    E("nothing special"),
    # variables
    E("no HOME", "unset HOME"),
    E("no HOME, xla", "unset HOME", how="xla"),
    E("HOME is not there", "export HOME=/nowhere"),
    E("an empty environment (env -i)", 'exec env -i MARK=$MARK TMPDIR=$TMPDIR "$@"', few=True),
    E(
        "an empty environment, mpirun: Open MPI's own words",
        f'exec env -i MARK=$MARK TMPDIR=$TMPDIR {AS_ROOT} "$@"',
        r"Unable to get the user home directory",
        "mpirun",
    ),
    E("no PATH", "unset PATH"),
    E("an empty PATH", "export PATH="),
    E("LC_ALL=C", "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"),
    E("a locale that is not there", "export LC_ALL=xx_XX.UTF-8"),
    E("PYTHONSAFEPATH", "export PYTHONSAFEPATH=1"),
    E("PYTHONOPTIMIZE=2", "export PYTHONOPTIMIZE=2"),
    E("PYTHONDEVMODE=1", "export PYTHONDEVMODE=1"),
    E("PYTHONWARNINGS=error", "export PYTHONWARNINGS=error"),
    E("PYTHONHASHSEED=0", "export PYTHONHASHSEED=0"),
    E("http_proxy", PROXY),
    E("http_proxy, xla", PROXY, how="xla", few=True),
    E("JAX_PLATFORMS=cpu", "export JAX_PLATFORMS=cpu"),
    E("JAX_PLATFORMS=tpu", "export JAX_PLATFORMS=tpu", r"Unable to initialize backend 'tpu'"),
    E("JAX_ENABLE_X64=1", "export JAX_ENABLE_X64=1"),
    E("JAX_DISABLE_JIT=1", "export JAX_DISABLE_JIT=1"),
    E(
        "a compilation cache that cannot be written",
        "export JAX_COMPILATION_CACHE_DIR=/proc/nowhere",
    ),
    E(
        "several devices in a process",
        "export XLA_FLAGS=--xla_force_host_platform_device_count=3",
        how="xla",
    ),
    E("CUDA_VISIBLE_DEVICES=-1", "export CUDA_VISIBLE_DEVICES=-1"),
    E("OMP_NUM_THREADS is no number", "export OMP_NUM_THREADS=many NPROC=0"),
    E("OMPI_MCA_btl=self,tcp", "export OMPI_MCA_btl=self,tcp"),
    E("OMPI_MCA_btl=self,sm", "export OMPI_MCA_btl=self,sm"),
    E("variables of a Slurm job, without srun", f"export {SLURM}"),
    E("PBS_NODEFILE is not there", "export PBS_NODEFILE=/nowhere"),
    E(
        "OMPI_COMM_WORLD_SIZE of another job",
        "export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        r"2 ranks were launched by Open MPI, but each of them is alone",
        "alone",
    ),
    E(
        "PMI_SIZE of another job",
        "export PMI_SIZE=3",
        r"3 ranks were launched, but each of them is alone",
        "alone",
    ),
    E("JAXMPI_RUN_DIR of another job", "export JAXMPI_RUN_DIR=/nowhere", how="mpirun"),
    E(
        "JAXMPI_STALL_SECONDS=nan",
        "export JAXMPI_STALL_SECONDS=nan",
        r"JAXMPI_STALL_SECONDS is 'nan'\. It is a number of seconds",
    ),
    E(
        "JAXMPI_STALL_SECONDS=inf, mpirun",
        "export JAXMPI_STALL_SECONDS=inf",
        r"init: JAXMPI_STALL_SECONDS is 'inf'\.",
        "mpirun",
    ),
    E(
        "JAXMPI_BACKEND=nccl",
        "export JAXMPI_BACKEND=nccl",
        r"JAXMPI_BACKEND is 'nccl'\. It is one of",
        "alone",
    ),
    E(
        "JAXMPI_NODE_RANKS=0",
        "export JAXMPI_NODE_RANKS=0",
        r"JAXMPI_NODE_RANKS is '0'\. It is a whole number",
    ),
    E("JAXMPI_FLIGHT_DIR is a file", "export JAXMPI_FLIGHT_DIR=/etc/passwd"),
    E(
        "JAXMPI_MPIEXEC is not there",
        "export JAXMPI_MPIEXEC=/nowhere/mpirun",
        r"/nowhere/mpirun is not a program\. Give",
    ),
    E("LD_PRELOAD is not there", "export LD_PRELOAD=/nowhere.so"),
    # the temporary folder
    E("TMPDIR is not there", "export TMPDIR=/nowhere"),
    E("TMPDIR is relative", "cd $TMPDIR; export TMPDIR=."),
    E("TMPDIR with spaces and an accent", 'export TMPDIR="$TMPDIR/a b é"; mkdir "$TMPDIR"'),
    E("a TMPDIR of 200 characters", LONG),
    E("a TMPDIR of 200 characters, xla", LONG, how="xla"),
    E("a TMPDIR of 200 characters, launch", LONG, how="launch", few=True),
    E("a TMPDIR of 200 characters, mpirun", LONG, how="mpirun"),
    E(
        "no temporary folder that can be written",
        READ_ONLY,
        r"there is no folder for temporary files",
        spaces="m",
    ),
    E("no temporary folder, launch", READ_ONLY, r"No usable temporary directory", "launch", "m"),
    E("no temporary folder, alone", READ_ONLY, how="alone", spaces="m"),
    E(
        "no temporary folder, doctor",
        READ_ONLY,
        r"there is no folder for temporary files",
        "doctor",
        "m",
    ),
    # the working directory
    E("a working directory that is gone", GONE, r"the working directory is gone", few=True),
    E("a working directory that is gone, alone", GONE, how="alone"),
    E("a working directory that is gone, launch", GONE, r"the working directory is gone", "launch"),
    E("a working directory that is gone, doctor", GONE, r"the working directory is gone", "doctor"),
    E("a working directory that cannot be written", "cd /proc"),
    E(
        "a working directory with spaces and a line break",
        'mkdir "$TMPDIR/a\nb c"; cd "$TMPDIR/a\nb c"',
    ),
    # limits
    E(
        "file sizes limited to nothing (ulimit -f 0)",
        "ulimit -f 0",
        r"files may not be larger than",
        few=True,
    ),
    E("file sizes limited to 1 MB, run", "ulimit -f 1024", r"files may not be larger than"),
    E(
        "file sizes limited to 1 MB, mpirun",
        "ulimit -f 1024",
        r"File size limit exceeded|signal 25|SIGXFSZ|shared memory",
        "mpirun",
    ),
    E("file sizes limited to 1 MB, alone", "ulimit -f 1024", how="alone"),
    E("file sizes limited to 1 GB", "ulimit -f 1048576"),
    E("64 open files", "ulimit -n 64"),
    E("24 open files", "ulimit -n 24", r"only 24 files may be open at once here"),
    E("a stack of 1 MB", "ulimit -s 1024"),
    E("2 GB of address space", "ulimit -v 2000000"),
    E("no locked memory", "ulimit -l 0"),
    E("no core files", "ulimit -c 0"),
    E("umask 077", "umask 077"),
    E("umask 000", "umask 000"),
    E("the lowest priority (nice 19)", 'exec nice -n 19 "$@"'),
    E("one core (taskset)", 'exec taskset -c 0 "$@"'),
    E("no new privileges", 'exec setpriv --no-new-privs "$@"'),
    # streams and signals
    E("stdin closed", "exec 0<&-"),
    E("stdout closed", "exec 1>&-"),
    E("SIGPIPE ignored", "trap '' PIPE"),
    E("SIGINT ignored", "trap '' INT"),
    E("SIGCHLD ignored", "trap '' CHLD"),
    E("nohup", 'exec nohup "$@" 2>&1'),
    # the machine
    E("no /dev/shm", NO_SHM, spaces="m"),
    E("a /dev/shm of 1 MB", SHM.format("size=1m"), TOO_SMALL, spaces="m"),
    E("a /dev/shm of 1 MB, mpi4jax", SHM.format("size=1m"), how="mpi4jax", spaces="m"),
    E("a /dev/shm of 64 MB", SHM.format("size=64m"), spaces="m"),
    E(
        "a full /dev/shm",
        SHM.format("size=1m") + "; head -c 1048576 /dev/zero > /dev/shm/full",
        TOO_SMALL,
        spaces="m",
    ),
    E("a read-only /dev/shm", SHM.format("ro"), TOO_SMALL, spaces="m"),
    E(
        "no network, not even loopback: Open MPI's own words",
        "",
        r"unable to find network interfaces",
        spaces="n",
    ),
    E("loopback only", "ip link set lo up", spaces="n"),
    E("loopback only, xla", "ip link set lo up", how="xla", spaces="n"),
    E("a host name that does not resolve", "hostname nobody-knows", spaces="u"),
    E("a host name that does not resolve, xla", "hostname nobody-knows", how="xla", spaces="u"),
    E("a host name of 64 characters", "hostname $(printf %064d 0)", spaces="u"),
    E("a process namespace of its own", "mount -t proc proc /proc", spaces="pfm"),
    E("a user without a name", spaces="U"),
    # what is installed
    E("mpi4py is not installed", NO_MPI4PY, r"mpi4py is not installed for"),
    E("mpi4jax is not installed", NO_MPI4JAX),
    E("the launcher of another MPI", MPICH, r"is MPICH's, but mpi4py loads"),
]


def start(environment, folder):
    """Run the command in its environment; return its exit code, output and leftovers.

    It has its own temporary folder.
    """
    for name, text in (("script", SCRIPT), ("launch", LAUNCH)):
        (folder / f"{name}.py").write_text(text)
    tmp = folder / "tmp"
    tmp.mkdir()
    scripts = {"@SCRIPT@": str(folder / "script.py"), "@LAUNCH@": str(folder / "launch.py")}
    command = [
        "bash",
        "-c",
        f'{environment.setup}\nexec "$@"',
        "bash",
        *(scripts.get(w, w) for w in HOW[environment.how]),
    ]
    if environment.spaces == "U":
        command = ["unshare", "-U", "--map-user=54321", "--map-group=54321", *command]
    elif environment.spaces:
        command = [
            "unshare",
            *["-r"] * bool(os.geteuid()),
            *(f"-{space}" for space in environment.spaces),
            *command,
        ]
    mark = uuid.uuid4().hex
    ours = {}
    for name, value in os.environ.items():
        if not name.startswith(("JAX", "XLA", "PYTEST")):
            ours[name] = value
    as_root = dict(word.split("=") for word in AS_ROOT.split())
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        start_new_session=True,
        env={**ours, **as_root, "MARK": mark, "TMPDIR": str(tmp)},
    ) as job:
        try:
            output = job.communicate(timeout=120)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"it hangs:\n{job.communicate()[0].decode(errors='replace')}")
    deadline = time.monotonic() + 10
    while (running := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Open MPI itself leaves empty folders of processes that were not started by its launcher
    files = []
    for path in tmp.rglob("*"):
        if path.name.startswith("jaxmpi-") or ("ompi." in str(path) and path.is_file()):
            files.append(path)
    return (
        job.returncode,
        output,
        {"processes": running, "files": files, "shared memory": segments_left(before)},
    )


def marked(mark):
    """The processes whose environment holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(e, id=e.name, marks=[] if e.few else pytest.mark.environments)
        for e in ENVIRONMENTS
    ],
)
def test_an_environment(environment, tmp_path):
    code, output, left = start(environment, tmp_path)
    error_lines = []
    if environment.refused:
        lines = output.splitlines()
        error_lines = [line for line in lines if re.search(environment.refused, line)]
        assert code and error_lines, output
        assert code != 2 or "Traceback" not in output, output  # no job was started
    else:
        assert code == 0, output
        wanted = {"alone": 1, "doctor": 0}.get(environment.how, 2)
        assert "1>&-" in environment.setup or output.count("fine on") == wanted, output
    assert not any(left.values()), (left, output)
    error = error_lines[0] if error_lines else ""
    tables.record("environments", [environment.name, environment.how, error])


def test_there_are_many_and_none_twice():
    names = [environment.name for environment in ENVIRONMENTS]
    assert len(names) >= 80 and len(set(names)) == len(names)
