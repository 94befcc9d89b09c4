"""`jaxmpi doctor`: is everything there, does it fit together, and how fast is it?

What may not work is tried in processes of its own.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence

from jaxmpi._job.launch.machine import Machine, prepare, survey
from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.tools import checks, installed
from jaxmpi._job.tools.finding import Finding
from jaxmpi._job.tools.speed import speed

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Print what was found; the exit code is 1 if something is broken."""
    parser = argparse.ArgumentParser(
        prog="jaxmpi doctor",
        description="Look at this environment: is everything there, does it fit together, is it fast?",
    )
    parser.add_argument(
        "-n",
        type=int,
        default=0,
        metavar="N",
        help="ranks to measure with; default: 2, or 1 on one core",
    )
    parser.add_argument(
        "--report", action="store_true", help="as a block to be pasted into an issue"
    )
    options = parser.parse_args(arguments)
    try:
        prepare(os.environ)
    except LaunchError as error:
        sys.stderr.write(f"jaxmpi doctor: {error}\n")
        return 2
    machine = survey()
    ranks = options.n or min(2, machine.cores)
    if options.report:
        sys.stdout.write("<details><summary>jaxmpi doctor</summary><pre>\n")
    sys.stdout.write(f"jaxmpi doctor, on {os.uname().nodename}:\n")
    broken = False
    for finding in look(ranks, machine):
        broken = broken or finding.verdict == "broken"
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    sys.stdout.write("Something is broken: see above.\n" if broken else "jaxmpi works here.\n")
    if options.report:
        sys.stdout.write("</pre></details>\n")
    return int(broken)


def look(ranks: int, machine: Machine) -> Iterator[Finding]:
    """Everything, from what the rest needs to what needs the rest."""
    yield Finding("ok", "Python", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")
    yield Finding(
        "ok",
        "system",
        f"{os.uname().machine}, Linux {os.uname().release}, {' '.join(platform.libc_ver())}",
    )
    yield installed.package()
    yield checks.the_jax()
    yield installed.dtypes()
    yield from checks.cores(ranks, machine)
    yield checks.compiled()
    yield checks.devices(ranks)
    mpi = [*checks.mpi()]
    yield from mpi
    yield installed.cuda_in_mpi()
    yield checks.native(
        instead=all(finding.verdict != "broken" for finding in mpi if finding.topic == "mpi4jax")
    )
    if not any(finding.verdict == "broken" for finding in mpi):
        yield from speed(ranks, machine)
