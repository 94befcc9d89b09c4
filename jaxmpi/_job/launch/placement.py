"""Where each rank runs, on how many cores, and with which variables; the launcher's command line.

The hosts come from MPI's options of the user, or from the batch system. From them follow the ranks
of a node, its share of the cores for each, and the launcher's options and variables for that.
"""

import contextlib
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmpi._job.launch.machine import Machine
from jaxmpi._job.launch.mpiexec import LaunchError, Mpiexec
from jaxmpi._job.launch.options import Request
from jaxmpi._job.process import launchers
from jaxmpi._job.process.launchers import Launcher

__all__ = [
    "Plan",
    "check_arguments",
    "check_counts",
    "command",
    "host_names",
    "named_hosts",
    "on_other_nodes",
    "on_this_host_alone",
    "plan",
    "same_host",
    "with_hosts",
]

MOST_RANKS = 2**31 - 1  # MPI numbers them by a C int
MOST_WORD_BYTES = 128 << 10  # of an argument or a variable, for Linux

# Open MPI looks at the arguments of the program, too: it makes --bind-to --bindto and refuses an
# --mca with one value, and both MPIs split at a colon. So arguments that look like options travel
# as one that does not.
_UNPACK = (
    "import json, os, sys; "
    "os.execv(sys.executable, [sys.executable, *map(json.loads, sys.argv[1:])])"
)

# A comment in a file of hosts that we write: each of its lines takes one rank.
_LINE_PER_RANK = "# a line for each rank"


# Hosts


def on_other_nodes(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether ranks may run on other nodes.

    They may if MPI's options name hosts, or the batch system has allocated several nodes.
    """
    if _value(options, _host_list()) or _value(options, _host_file()):
        return True
    return len(_allocated(environ)) > 1


def on_this_host_alone(options: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether all ranks are known to run on this host."""
    names = host_names(options)
    for launcher in launchers.LAUNCHERS:
        path = environ.get(launcher.node_file)
        if path and not names:
            with contextlib.suppress(OSError):
                names = [*_count_hosts(Path(path).read_text().split())]
        nodes = environ.get(launcher.node_list)
        if nodes and not names:
            names = [nodes]  # of several, such as "node[1-2]", it is the name of no host
    here = os.uname().nodename
    if names:
        return all(name in ("localhost", "127.0.0.1") or same_host(name, here) for name in names)
    return not _allocated(environ)


def named_hosts(options: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return the hosts that MPI's options name, each with its number of ranks.

    A file that they name is read now. The result is empty if a number is not given. In a batch
    system's own file of nodes, a name stands as often as the node takes ranks, and so may be once.
    """
    if hosts := _value(options, _host_list()):
        return _count_hosts(hosts.split(","))
    path = _value(options, _host_file())
    if path and path in _node_files(environ):
        return _count_hosts(_host_lines(path))
    return _read_hosts(path) if path else {}


def host_names(options: Sequence[str]) -> list[str]:
    """Return the names of the hosts that MPI's options name, in their order, each once."""
    if hosts := _value(options, _host_list()):
        return [*_count_hosts(hosts.split(","))]
    path = _value(options, _host_file())
    return [*_count_hosts(_host_lines(path))] if path else []


def with_hosts(options: Sequence[str], hosts: Mapping[str, int], folder: Path) -> tuple[str, ...]:
    """Return the options with the hosts that they name replaced.

    Args:
      options: MPI's options, which name hosts or a file of hosts.
      hosts: the new hosts, each with its number of ranks.
      folder: where a new file of hosts is written.
    """
    listed = ",".join(f"{name}:{number}" for name, number in hosts.items())
    changed: list[str] = []
    for option in options:
        before = changed[-1] if changed else ""
        name, equals, value = option.partition("=")
        follows = "=" not in before  # whether `option` may be the value of the option before it
        if follows and re.match(_host_list(), before):
            option = listed
        elif follows and re.match(_host_file(), before):
            option = _write_hosts(option, hosts, folder)
        elif equals and re.match(_host_list(), option):
            option = f"{name}={listed}"
        elif equals and re.match(_host_file(), option):
            option = f"{name}={_write_hosts(value, hosts, folder)}"
        changed.append(option)
    return tuple(changed)


def same_host(one: str, other: str) -> bool:
    """Return whether two names belong to one host.

    They do if they are equal, equal up to the domain, or have an address in common.
    """
    labels = [name.partition(".")[0] for name in (one, other)]
    if one == other or (labels[0] == labels[1] and not labels[0].isdigit()):
        return True
    return bool(_addresses(one) & _addresses(other))


def _ranks_of_a_node(ranks: int, options: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Return how many of the ranks run on the node that has most of them.

    Returns None if hosts are named without the number of ranks that each takes.
    """
    if each := re.search(r"\d+", _value(options, _option(lambda row: row.ranks_per_node))):
        return min(ranks, int(each[0]))
    node_files = _node_files(environ)
    if hosts := _value(options, _host_list()):
        slots = [*_count_hosts(hosts.split(",")).values()]
    elif (path := _value(options, _host_file())) and path not in node_files:
        slots = [*_read_hosts(path).values()]
        if not slots:
            return None
    else:
        slots = _allocated(environ)
    return min(ranks, max(slots) * -(-ranks // sum(slots))) if sum(slots) else ranks


def _node_files(environ: Mapping[str, str]) -> list[str | None]:
    """Return the paths of the batch systems' files of nodes; None for one that has none."""
    return [environ.get(launcher.node_file) for launcher in launchers.LAUNCHERS]


def _allocated(environ: Mapping[str, str]) -> list[int]:
    """Return the ranks that each of the batch system's nodes takes; empty without one."""
    for launcher in launchers.LAUNCHERS:
        if path := environ.get(launcher.node_file):
            with contextlib.suppress(OSError):
                return [*_count_hosts(Path(path).read_text().split()).values()]
    slots: list[int] = []
    for launcher in launchers.LAUNCHERS:
        # such as "4(x2),3"
        text = environ.get(launcher.tasks_per_node, "")
        for ranks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            slots += [int(ranks)] * int(times or 1)
    return slots


def _read_hosts(path: str) -> dict[str, int]:
    """Read the hosts of a file, each with its number of ranks; empty if a number is missing.

    A line is "node1 slots=4" or "node1:4"; or "node1" stands there as often as it takes ranks.
    """
    hosts = _host_lines(path)
    known = _is_line_per_rank(path) or all(":" in host or hosts.count(host) > 1 for host in hosts)
    return _count_hosts(hosts) if known else {}


def _host_lines(path: str) -> list[str]:
    """Read the lines of a file of hosts as "node1:4", or "node1" where there is no number."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    except OSError:
        return []
    return [re.sub(r"\s+(.*\s)?slots=(\d+).*", r":\2", line).split()[0] for line in lines if line]


def _write_hosts(path: str, hosts: Mapping[str, int], folder: Path) -> str:
    """Write a file of hosts in the syntax of another one, and return its path."""
    before = Path(path).read_text()
    lines = []
    if "slots=" in before:
        lines = [f"{name} slots={number}" for name, number in hosts.items()]
    elif any(":" in line for line in _host_lines(path)):
        lines = [f"{name}:{number}" for name, number in hosts.items()]
    else:
        lines.append(_LINE_PER_RANK)
        for name, number in hosts.items():
            lines += [name] * number
    file = folder / "hosts"
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)


def _is_line_per_rank(path: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).read_text().startswith(_LINE_PER_RANK)
    return False


def _count_hosts(hosts: Sequence[str]) -> dict[str, int]:
    """Return the ranks of each host in names such as "node1:4"; a name without a number adds 1."""
    counts: Counter[str] = Counter()
    for host in hosts:
        name, _, number = host.partition(":")
        counts[name] += int(number) if number.isdigit() else 1
    return dict(counts)


def _addresses(name: str) -> set[str]:
    """Return the addresses of a host."""
    with contextlib.suppress(OSError, UnicodeError):
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    return set()


def _value(options: Sequence[str], pattern: str) -> str:
    """Return the value of the first option that matches; it follows, or stands behind "="."""
    for option, following in zip(options, [*options[1:], ""], strict=False):
        if re.match(pattern, option):
            return option.partition("=")[2] or following
    return ""


def _option(field: launchers.Field) -> str:
    """Return a pattern for the options that a field of the launchers' table names."""
    return rf"--?({'|'.join(map(re.escape, launchers.names(field)))})(=.*)?$"


def _host_list() -> str:
    return _option(lambda row: row.host_list)


def _host_file() -> str:
    return _option(lambda row: row.host_file)


# The plan


class Plan(NamedTuple):
    """Options for the launcher, variables for the ranks, and the line that tells the user."""

    flags: tuple[str, ...]
    environ: dict[str, str]
    summary: str


class _Layout(NamedTuple):
    """Where the ranks of a node run."""

    share: int  # cores of a rank; 0: unknown
    crowded: bool  # whether there are more ranks than cores
    hosts: bool  # whether some are on other hosts
    placed: bool  # whether MPI's options of the user place them
    bind: str | None  # what they are bound to; None: `jaxmpi run` does not say
    per_core: bool  # whether each has cores to itself


def check_counts(request: Request, environ: Mapping[str, str]) -> None:
    """Refuse numbers that no machine can run: the launcher would try them, and never end.

    Raises:
      LaunchError: there are more ranks or threads than processes or threads can be.
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
    """Return a limit of the kernel, or the largest number of MPI if it is not known."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel", name).read_text())
    return MOST_RANKS


def plan(request: Request, mpiexec: Mpiexec, machine: Machine, environ: Mapping[str, str]) -> Plan:
    """Choose the launcher's options that place ranks, and each rank's share of the cores.

    All nodes are assumed to have as many cores as this one. Each rank is bound to its share. With
    more ranks than cores, or on several nodes, nothing is bound. A variable that the user has set
    keeps its value.
    """
    layout = _layout(request, machine, environ)
    threads = request.threads or layout.share
    huge = request.huge_pages and machine.huge_pages and "GLIBC_TUNABLES" not in environ
    asked = _for_arithmetic(threads, huge)
    wanted = asked | _for_mpi(mpiexec.launcher, layout)
    told = [
        *_describe(layout, machine),
        f"{_count(threads, 'thread')} each" if threads else "threads not set (--threads sets them)",
        "huge pages" if huge else "",
        *(f"{name}={environ[name]} kept" for name in asked if name in environ),
        "as root" if machine.root else "",
    ]
    where = f"{mpiexec.vendor} {mpiexec.version} ({mpiexec.path}), {_count(machine.cores, 'core')}"
    return Plan(
        flags=tuple(_flags(layout, mpiexec.launcher, machine)),
        environ={name: value for name, value in wanted.items() if name not in environ},
        summary=f"{_count(request.ranks, 'rank')}, {where}: {', '.join(filter(None, told))}",
    )


def _layout(request: Request, machine: Machine, environ: Mapping[str, str]) -> _Layout:
    """Decide where the ranks of a node run."""
    options = request.mpi_options
    ranks = _ranks_of_a_node(request.ranks, options, environ)
    share, crowded = 0, False
    if ranks:
        share, crowded = max(1, machine.cores // ranks), ranks > machine.cores
    hosts = on_other_nodes(options, environ)
    placing = _option(lambda row: row.placing + row.ranks_per_node)
    placed = any(re.match(placing, option) for option in options)
    # Other nodes may have other cores: ranks there are not bound, and run in any number, where
    # Open MPI would refuse more than cores. A user who places ranks gets no option of ours.
    if placed:
        default = None
    elif hosts or crowded or not machine.bindable:
        default = "none"
    else:
        default = "core"
    bind = request.bind_to or default
    per_core = bind == "core" and not (crowded or placed or hosts)
    return _Layout(share, crowded, hosts, placed, bind, per_core)


def _flags(layout: _Layout, launcher: Launcher, machine: Machine) -> list[str]:
    """Return the launcher's options."""
    share, crowded, hosts, placed, bind, per_core = layout
    flags = [*launcher.as_root] if machine.root else []
    if crowded and not placed and not hosts:
        flags += launcher.crowded
    if per_core:
        flags += [word.format(share=share) for word in launcher.share]
    elif bind:
        words = launcher.bind_crowded if crowded and bind != "none" else launcher.bind
        flags += [word.format(bind=bind) for word in words]
    return flags


def _describe(layout: _Layout, machine: Machine) -> list[str]:
    """Return what the user is told of the layout."""
    told = []
    if layout.crowded:
        told.append("oversubscribed")
    if not machine.bindable:
        told.append("CPU affinity restricted")
    if layout.placed:
        told.append("placed by MPI's options")
    elif layout.hosts:
        told.append("on the hosts given")
    if layout.per_core:
        told.append(f"bound to {_count(layout.share, 'core')} each")
    elif layout.bind:
        told.append("not bound" if layout.bind == "none" else f"bound to {layout.bind}")
    return told


def _for_arithmetic(threads: int, huge_pages: bool) -> dict[str, str]:
    """Return the variables for a rank's arithmetic: its threads, and huge pages."""
    # XLA's CPU client reads NPROC
    wanted = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)} if threads else {}
    if huge_pages:
        # XLA allocates its temporaries anew at each step
        wanted["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return wanted


def _for_mpi(launcher: Launcher, layout: _Layout) -> dict[str, str]:
    """Return the variables for MPI."""
    wanted = dict(launcher.variables)
    if layout.crowded:
        wanted |= dict(launcher.variables_crowded)
    if layout.bind == "none":
        wanted |= dict(launcher.variables_unbound)
    elif layout.bind and not layout.per_core:
        wanted |= {name: value.format(bind=layout.bind) for name, value in launcher.variables_bind}
    return wanted


def check_arguments(request: Request, launcher: Launcher) -> None:
    """Refuse arguments of the program that a launcher cannot pass on.

    Raises:
      LaunchError: they are longer together than Linux lets the variable be that they are put into.
    """
    length = len(launcher.arguments) + 1
    for word in _program_words(request):
        length += len(word.encode(errors="surrogateescape")) + 1
    if launcher.arguments and length > MOST_WORD_BYTES:
        raise LaunchError(
            f"the arguments of the program have {length} bytes, and {launcher.name} passes at most "
            f"{MOST_WORD_BYTES}. Have the program read them from a file."
        )


def command(
    request: Request,
    mpiexec: Mpiexec,
    flags: Sequence[str],
    exported: Sequence[str],
    before_program: Sequence[str] = (),
) -> list[str]:
    """Return the launcher's command line.

    Args:
      request: what the user asked for.
      mpiexec: the launcher.
      flags: options of the plan.
      exported: names of the variables that ranks on other hosts need.
      before_program: words of each rank's command line before its program.
    """
    launcher = mpiexec.launcher
    given = {option.partition("=")[0] for option in request.mpi_options}  # by -x NAME=value
    exports: list[str] = []
    for name in exported:
        if launcher.export and name not in given:
            exports += [launcher.export, name]
    words = [mpiexec.path, "-n", str(request.ranks), *flags, *exports, *request.mpi_options]
    if launcher.scratch_hidden:
        words += ["env", "-u", launcher.scratch]
    return [*words, *before_program, *_program_words(request)]


def _program_words(request: Request) -> list[str]:
    """Return the command line of a rank; arguments that the launcher would look at are packed."""
    if any(argument == ":" or argument.startswith("-") for argument in request.program[1:]):
        # each by itself, as Linux limits the length of one argument
        packed = map(json.dumps, request.program)
        return [sys.executable, "-I", "-S", "-c", _UNPACK, *packed]
    return [sys.executable, *request.program]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
