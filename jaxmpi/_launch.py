"""`jaxmpi run`: decide what to tell MPI's launcher, which _mpiexec.py finds and _supervise.py runs.

None of the three imports jax or MPI.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from jaxmpi._mpiexec import Launcher, LaunchError, check_library, find_launcher, identify
from jaxmpi._supervise import Outcome, preemption_seconds, say, supervise

__all__ = ["Machine", "Plan", "Request", "command", "parse", "plan", "run"]

_OWN = ("-n", "-np", "--np", "--mpiexec", "--bind-to", "--threads", "--restarts", "--min-ranks")  # each takes a value
# MPI's options that place ranks: given one of them, ours stay away.
_PLACING = (
    "--?(map-by|bind-to|host|H|hosts|(default-)?hostfile|machinefile|f|oversubscribe|cpu-set|cpu-list|use-hwthread-cpus"
    "|npernode|npersocket|N|ppn|perhost|rankfile|rankmap|configfile)(=.*)?$"
)

# Where Open MPI 5 and 4 put the files of a job on the launcher's host. By default that is a folder in /tmp named after the
# launcher's process id: one that a killed job has left makes the job fail that has the same id, days later.
_SESSIONS = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")

# Open MPI looks at the arguments of the program, too: it makes --bind-to --bindto and refuses an --mca with one value, and
# both MPIs split at a colon. So arguments that look like options travel as one that does not.
_UNPACK = "import json, os, sys; os.execv(sys.executable, [sys.executable, *json.loads(sys.argv[1])])"


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    ranks: int
    mpiexec: str | None
    bind_to: str | None
    threads: int | None
    huge_pages: bool
    restarts: int
    min_ranks: int | None
    mpi_options: tuple[str, ...]
    program: tuple[str, ...]  # what follows `python` in the command of a rank


@dataclass(frozen=True)
class Machine:
    """What there is here."""

    cores: int  # physical ones, which we may use
    bindable: bool  # whether a launcher may bind to them
    root: bool  # whether we are
    huge_pages: bool  # whether a process gets huge pages if it asks for them, and not otherwise


@dataclass(frozen=True)
class Plan:
    """Options for the launcher, variables for the ranks, and the line that tells the user."""

    flags: tuple[str, ...]
    environ: dict[str, str]
    summary: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. See `jaxmpi run --help`.")


def parse(arguments: Sequence[str]) -> Request:
    """Tell our options, MPI's and the program apart.

    The program starts at the first argument that ends in .py, at -m, or after --; before it, what is not ours is MPI's.

    Raises:
        LaunchError: An option is wrong, or there is no program.
    """
    own: list[str] = []
    mpi_options: list[str] = []
    rest = list(arguments)
    while rest and rest[0] not in ("--", "-m") and not rest[0].endswith(".py"):
        name = rest[0].partition("=")[0]
        if rest[0] in _OWN:
            own, rest = own + rest[:2], rest[2:]
        elif name in _OWN or name in ("-h", "--help", "--no-huge-pages") or re.fullmatch(r"-n\d+", name):
            own.append(rest.pop(0))
        else:
            mpi_options.append(rest.pop(0))
    program = rest[1:] if rest[:1] == ["--"] else rest

    parser = _Parser(
        prog="jaxmpi run",
        usage="jaxmpi run -n N [options] [MPI's options] {script.py | -m module | -- program} [arguments]",
        description="Run a Python program on N ranks. Options not listed here go to MPI's launcher as they are.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "-np", "--np", dest="ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--mpiexec", metavar="PATH", help="MPI's launcher; default: $JAXMPI_MPIEXEC, or beside this Python")
    parser.add_argument("--bind-to", metavar="WHAT", help="core, none, or another of the launcher's words; default: core")
    parser.add_argument("--threads", type=int, metavar="K", help="threads of a rank; default: its share of the cores")
    parser.add_argument("--no-huge-pages", action="store_true", help="leave malloc as it is, slower but with smaller pages")
    parser.add_argument("--restarts", type=int, default=0, metavar="K", help="start a job that has failed again, up to K times")
    parser.add_argument(
        "--min-ranks", type=int, metavar="M", help="with --restarts: each time on one rank less, but on M at least"
    )
    options = parser.parse_args(own)

    if options.ranks < 1:
        raise LaunchError(f"-n is {options.ranks}, and a job needs a rank. Give -n 1 or more.")
    if options.threads is not None and options.threads < 1:
        raise LaunchError(f"--threads is {options.threads}, and a rank needs a thread. Give --threads 1 or more.")
    if options.restarts < 0:
        raise LaunchError(
            f"--restarts is {options.restarts}. Give how often a job that has failed is started again, 0 or more."
        )
    if options.min_ranks is not None and not 1 <= options.min_ranks <= options.ranks:
        raise LaunchError(f"--min-ranks is {options.min_ranks}. Give a number from 1 to the {options.ranks} ranks of -n.")
    if options.min_ranks is not None and not options.restarts:
        raise LaunchError("--min-ranks says what a restart may do without. Give --restarts K, too.")
    try:
        preemption_seconds()
    except ValueError as error:
        raise LaunchError(f"JAXMPI_PREEMPTION_SECONDS must be a number of seconds ({error}).") from error
    if not program or program == ["-m"]:
        raise LaunchError("no program to run. It must end in .py, or come after -m or --.")
    if not program[0].startswith("-") and not os.path.exists(program[0]):
        raise LaunchError(f"there is no file {program[0]} in {os.getcwd()}. Check the path of the script.")
    return Request(
        options.ranks,
        options.mpiexec,
        options.bind_to,
        options.threads,
        not options.no_huge_pages,
        options.restarts,
        options.min_ranks,
        tuple(mpi_options),
        tuple(program),
    )


def survey() -> Machine:
    """Count the cores, of which hyperthreads are parts, and see whether malloc would have to ask for huge pages."""
    cpus = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))  # the kernel grants what the cpuset allows
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    files = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
    cores = {path.read_text() if path.exists() else str(path) for path in files}
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return Machine(
        cores=len(cores),
        bindable=cpus == allowed,  # both MPIs bind within the cpuset, but beyond a narrower mask (taskset), where others run
        root=os.getuid() == 0,
        huge_pages=huge_pages.exists() and "[madvise]" in huge_pages.read_text(),
    )


def plan(request: Request, launcher: Launcher, machine: Machine, environ: Mapping[str, str]) -> Plan:
    """Place the ranks and share out the cores; pure.

    Each rank is bound to cores // ranks cores of its own. With more ranks than cores nothing is bound. A variable that the
    user has set stays as it is.
    """
    ranks, cores, open_mpi = request.ranks, machine.cores, launcher.vendor == "Open MPI"
    share, crowded = max(1, cores // ranks), ranks > cores
    placed = any(re.match(_PLACING, option) for option in request.mpi_options)
    default = None if placed else "none" if crowded or not machine.bindable else "core"
    bind = request.bind_to or default
    per_core = bind == "core" and not crowded and not placed

    flags: list[str] = []
    if open_mpi:
        flags += ["--allow-run-as-root"] * machine.root
        if not placed:
            flags += ["--map-by", "slot:OVERSUBSCRIBE"] * crowded + ["--map-by", f"slot:PE={share}"] * per_core
        if bind:
            flags += ["--bind-to", f"{bind}:overload-allowed" if crowded and bind != "none" else bind]
    elif launcher.vendor == "MPICH" and bind:
        flags += ["-bind-to", f"core:{share}" if per_core else bind]  # Intel MPI binds each rank to its share by itself

    threads = request.threads or share
    wanted = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)}  # XLA's CPU client reads NPROC
    if huge := request.huge_pages and machine.huge_pages and "GLIBC_TUNABLES" not in environ:
        wanted["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # XLA allocates its temporaries anew at each step
    told = [f"{name}={environ[name]} kept" for name in wanted if name in environ]
    if not open_mpi:
        wanted["PYTHONUNBUFFERED"] = "1"  # Open MPI gives ranks a pseudo-terminal, where whole lines come at once and untorn
    elif crowded:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"

    where = {"core": f"bound to {_count(share, 'core')} each", "none": "not bound"} if not placed else {}
    said = [
        "oversubscribed" if crowded else "",
        "" if machine.bindable else "CPU affinity restricted",
        "placed by MPI's options" if placed else "",
        where.get(bind, f"bound to {bind}") if bind else "",
        f"{_count(threads, 'thread')} each",
        "huge pages" if huge else "",
        *told,
        "as root" if machine.root else "",
    ]
    head = f"{_count(ranks, 'rank')}, {launcher.vendor} {launcher.version} ({launcher.path}), {_count(cores, 'core')}"
    return Plan(
        flags=tuple(flags),
        environ={name: value for name, value in wanted.items() if name not in environ},
        summary=f"{head}: {', '.join(filter(None, said))}",
    )


def command(request: Request, launcher: Launcher, flags: Sequence[str], exported: Sequence[str]) -> list[str]:
    """Write the launcher's command line; `exported` are the variables that ranks on other hosts need, too."""
    exports = [word for name in exported for word in ("-x", name) if launcher.vendor == "Open MPI"]  # the others export all
    mpi = [launcher.path, "-n", str(request.ranks), *flags, *exports, *request.mpi_options]
    if any(argument == ":" or argument.startswith("-") for argument in request.program[1:]):
        return [*mpi, sys.executable, "-I", "-S", "-c", _UNPACK, json.dumps(request.program)]
    return [*mpi, sys.executable, *request.program]


def run(arguments: Sequence[str]) -> int:
    """Run `jaxmpi run` and return its exit code: that of the job, or 2 where no job was started."""
    try:
        request = parse(arguments)
        launcher = identify(find_launcher(request.mpiexec, os.environ))
        check_library(launcher)
    except LaunchError as error:
        say(str(error))
        return 2
    for attempt in range(request.restarts + 1):
        outcome = _run_once(request, launcher, attempt)
        if outcome.stopped or not outcome.code:
            break
        if attempt < request.restarts:
            ranks = request.ranks if request.min_ranks is None else max(request.min_ranks, request.ranks - 1)
            request = replace(request, ranks=ranks)
            say(f"restart {attempt + 1} of {request.restarts}")
    return outcome.code


def _run_once(request: Request, launcher: Launcher, attempt: int) -> Outcome:
    """Run the job; its ranks find in JAXMPI_RESTART how often it has failed before."""
    decided = plan(request, launcher, survey(), os.environ)
    say(decided.summary)
    run_dir = tempfile.mkdtemp(prefix="jaxmpi-")
    added = {**decided.environ, **_terminal(os.environ), "JAXMPI_RUN_DIR": run_dir, "JAXMPI_RESTART": str(attempt)}
    environ = {**os.environ, **added}
    for name in _SESSIONS:
        environ.setdefault(name, run_dir)
    return supervise(command(request, launcher, decided.flags, list(added)), environ, run_dir)


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Tell the ranks, who see pipes only, that their stderr ends up on a terminal, and how wide it is."""
    if not os.isatty(2):
        return {}
    return {"JAXMPI_TTY": "1", "COLUMNS": environ.get("COLUMNS", str(os.get_terminal_size(2).columns))}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
