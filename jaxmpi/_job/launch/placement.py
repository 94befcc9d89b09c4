"""What MPI's launcher is told: where each rank runs, on how many cores, with which variables."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxmpi._job.launch.hosts import on_other_nodes, ranks_of_a_node
from jaxmpi._job.launch.mpiexec import Launcher, LaunchError
from jaxmpi._job.launch.options import Request

__all__ = ["Machine", "Plan", "check_counts", "command", "plan", "survey"]

MOST_RANKS = 2**31 - 1  # MPI numbers them by a C int

# Options of MPI that place ranks: if the user passes one of them, we add none. Other nodes may have
# other cores: ranks there are not bound, and run in any number, where Open MPI would refuse more
# than cores.
_PLACING = (
    "--?(map-by|bind-to|oversubscribe|cpu-set|cpu-list|use-hwthread-cpus|npernode|npersocket|N|ppn|perhost|rankfile|rankmap"
    "|configfile)(=.*)?$"
)

# Open MPI looks at the arguments of the program, too: it makes --bind-to --bindto and refuses an
# --mca with one value, and both MPIs split at a colon. So arguments that look like options travel
# as one that does not.
_UNPACK = (
    "import json, os, sys; os.execv(sys.executable, [sys.executable, *json.loads(sys.argv[1])])"
)


@dataclass(frozen=True)
class Machine:
    """The cores, permissions and huge pages of this host."""

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


def survey() -> Machine:
    """Count the cores, of which hyperthreads are parts, and see whether malloc would have to ask for huge pages."""
    cpus = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        # the kernel grants what the cpuset allows
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    files = (
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus
    )
    cores = {path.read_text() if path.exists() else str(path) for path in files}
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return Machine(
        cores=len(cores),
        # both MPIs bind within the cpuset, but beyond a narrower mask (taskset), where others run
        bindable=cpus == allowed,
        root=os.getuid() == 0,
        huge_pages=huge_pages.exists() and "[madvise]" in huge_pages.read_text(),
    )


def check_counts(request: Request, environ: Mapping[str, str]) -> None:
    """Refuse numbers that no machine can run: the launcher tries them, and never ends.

    Raises:
        LaunchError: There are more ranks or threads than processes or threads can be.
    """
    here = min(_number("pid_max"), _number("threads-max"))
    ranks = MOST_RANKS if on_other_nodes(request.mpi_options, environ) else min(here, MOST_RANKS)
    for option, number, limit in (
        ("-n", request.ranks, ranks),
        ("--threads", request.threads or 1, here),
    ):
        if number > limit:
            where = "MPI can number" if limit == MOST_RANKS else "this machine can run"
            raise LaunchError(
                f"{option} is {number}, and {where} at most {limit}. Give a smaller number."
            )


def _number(name: str) -> int:
    """A limit of the kernel; what MPI can count where it is not known."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel", name).read_text())
    return MOST_RANKS


def plan(
    request: Request, launcher: Launcher, machine: Machine, environ: Mapping[str, str]
) -> Plan:
    """The launcher's options that place ranks, and each rank's share of the cores: all nodes are taken to have as many.

    Each rank is bound to as many cores of its own as there are for each rank of a node. With more
    ranks than cores, or on several nodes, nothing is bound. A variable that the user has set stays
    as it is.
    """
    layout = _layout(request, machine, environ)
    threads = request.threads or layout.share
    huge = request.huge_pages and machine.huge_pages and "GLIBC_TUNABLES" not in environ
    asked = _for_arithmetic(threads, huge)
    wanted = asked | _for_mpi(launcher, layout)
    said = [
        *_said(layout, machine),
        f"{_count(threads, 'thread')} each" if threads else "threads not set (--threads sets them)",
        "huge pages" if huge else "",
        *(f"{name}={environ[name]} kept" for name in asked if name in environ),
        "as root" if machine.root else "",
    ]
    where = (
        f"{launcher.vendor} {launcher.version} ({launcher.path}), {_count(machine.cores, 'core')}"
    )
    return Plan(
        flags=tuple(_flags(layout, launcher, machine)),
        environ={name: value for name, value in wanted.items() if name not in environ},
        summary=f"{_count(request.ranks, 'rank')}, {where}: {', '.join(filter(None, said))}",
    )


class _Layout(NamedTuple):
    """Where the ranks of a node run."""

    share: int  # cores of a rank; 0: unknown
    crowded: bool  # whether there are more ranks than cores
    hosts: bool  # whether some are on other hosts
    placed: bool  # whether MPI's options of the user place them
    bind: str | None  # to what; None: we say nothing
    per_core: bool  # whether each has cores of its own


def _layout(request: Request, machine: Machine, environ: Mapping[str, str]) -> _Layout:
    ranks = ranks_of_a_node(request.ranks, request.mpi_options, environ)
    share, crowded = (
        (max(1, machine.cores // ranks), ranks > machine.cores) if ranks else (0, False)
    )
    hosts = on_other_nodes(request.mpi_options, environ)
    placed = any(re.match(_PLACING, option) for option in request.mpi_options)
    default = None if placed else "none" if hosts or crowded or not machine.bindable else "core"
    bind = request.bind_to or default
    return _Layout(
        share, crowded, hosts, placed, bind, bind == "core" and not (crowded or placed or hosts)
    )


def _flags(layout: _Layout, launcher: Launcher, machine: Machine) -> list[str]:
    """The launcher's options."""
    share, crowded, hosts, placed, bind, per_core = layout
    family = launcher.family
    flags = [*family.as_root] if machine.root else []
    if crowded and not placed and not hosts:
        flags += family.crowded
    if per_core:
        flags += [word.format(share=share) for word in family.share]
    elif bind:
        words = family.bind_crowded if crowded and bind != "none" else family.bind
        flags += [word.format(bind=bind) for word in words]
    return flags


def _said(layout: _Layout, machine: Machine) -> list[str]:
    """What the user is told of the layout."""
    to = f"{_count(layout.share, 'core')} each" if layout.per_core else layout.bind
    bound = "not bound" if layout.bind == "none" else f"bound to {to}"
    return [
        "oversubscribed" if layout.crowded else "",
        "" if machine.bindable else "CPU affinity restricted",
        "placed by MPI's options"
        if layout.placed
        else "on the hosts given"
        if layout.hosts
        else "",
        bound if layout.bind else "",
    ]


def _for_arithmetic(threads: int, huge_pages: bool) -> dict[str, str]:
    """The variables that the arithmetic of a rank wants: its threads, and large pages."""
    # XLA's CPU client reads NPROC
    wanted = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)} if threads else {}
    if huge_pages:
        # XLA allocates its temporaries anew at each step
        wanted["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return wanted


def _for_mpi(launcher: Launcher, layout: _Layout) -> dict[str, str]:
    """The variables that an MPI wants."""
    family = launcher.family
    wanted = dict(family.variables)
    if layout.crowded:
        wanted |= dict(family.variables_crowded)
    if layout.bind == "none":
        wanted |= dict(family.variables_unbound)
    elif layout.bind and not layout.per_core:
        wanted |= {name: value.format(bind=layout.bind) for name, value in family.variables_bind}
    return wanted


def command(
    request: Request, launcher: Launcher, flags: Sequence[str], exported: Sequence[str]
) -> list[str]:
    """Write the launcher's command line; `exported` are the variables that ranks on other hosts need, too."""
    family = launcher.family
    given = {option.partition("=")[0] for option in request.mpi_options}  # by -x NAME=value
    exports = [word for name in exported if name not in given for word in (family.export, name)]
    if not family.export:
        exports = []
    mpi = [launcher.path, "-n", str(request.ranks), *flags, *exports, *request.mpi_options]
    if family.scratch_hidden:
        mpi += ["env", "-u", family.scratch]
    if any(argument == ":" or argument.startswith("-") for argument in request.program[1:]):
        return [*mpi, sys.executable, "-I", "-S", "-c", _UNPACK, json.dumps(request.program)]
    return [*mpi, sys.executable, *request.program]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
