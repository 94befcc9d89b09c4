"""`jaxmpi run`: from the command line to the exit code. Nothing here imports jax or MPI."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxmpi._job.launch.machine import prepare, survey
from jaxmpi._job.launch.mpiexec import (
    LaunchError,
    Mpiexec,
    check_library,
    environment,
    find_launcher,
    identify,
)
from jaxmpi._job.launch.options import Request, parse
from jaxmpi._job.launch.output import open_streams, say
from jaxmpi._job.launch.placement import check_counts, command, named_hosts, on_other_nodes, plan
from jaxmpi._job.launch.restart import Restarts
from jaxmpi._job.launch.scaling import Point, picture, table
from jaxmpi._job.launch.supervisor import Outcome, supervise
from jaxmpi._job.process import compiled_files, settings

__all__ = ["run"]

PICTURE = "scaling.svg"  # of --scaling, in the working directory

# what the user sets here holds for ranks on other hosts, too
_EXPORTED = ("JAXMPI_", "JAX_", "XLA_", "NCCL_")


def run(arguments: Sequence[str]) -> int:
    """Run `jaxmpi run` and return its exit code: that of the job, or 2 where no job was started."""
    open_streams()
    try:
        prepare(os.environ)
        request = parse(arguments)
        check_counts(request, os.environ)
        mpiexec = identify(find_launcher(request.mpiexec, os.environ))
        check_library(mpiexec)
    except LaunchError as error:
        say(str(error))
        return 2
    if request.scaling:
        return _scale(request, mpiexec)
    with tempfile.TemporaryDirectory(prefix="jaxmpi-") as folder:
        restarts, failures = Restarts(request, Path(folder)), 0
        while True:
            outcome = _run_once(request, mpiexec, failures)
            refused = bool(outcome.refused_count) and request.restarts > 0
            if not outcome.failed or (failures == request.restarts and not refused):
                return outcome.code
            try:
                if refused:  # the program has not failed: it never ran
                    request = restarts.after_refused(request, outcome.refused_count)
                    say(
                        f"starts on {request.ranks} ranks instead, which does not count as a "
                        "restart"
                    )
                else:
                    request, changed = restarts.after(request, outcome.host)
                    failures += 1
                    say(
                        f"restart {failures} of {request.restarts}"
                        + (f" {changed}" if changed else "")
                    )
            except LaunchError as error:
                say(f"no restart: {error}")
                return outcome.code


def _scale(request: Request, mpiexec: Mpiexec) -> int:
    """Run the program on each number of ranks, and compare its throughput."""
    points, cores = [], survey().cores
    for ranks in request.scaling:
        outcome = _run_once(replace(request, ranks=ranks), mpiexec, 0)
        if outcome.code:
            return outcome.code
        if not outcome.rates:
            say(
                "the program has noted no throughput to compare. Call `jaxmpi.Throughput.read` in "
                "it, once an epoch, say."
            )
            return 1
        hosts = on_other_nodes(request.mpi_options, os.environ)
        points.append(Point(ranks, outcome.rates, crowded=ranks > cores and not hosts))
    sys.stdout.write(table(points))
    try:
        picture(points, PICTURE)
        sys.stdout.write(f"A plot is in {PICTURE}.\n")
    except ImportError:
        sys.stdout.write("For a plot of it: pip install matplotlib\n")
    return 0


def _run_once(request: Request, mpiexec: Mpiexec, attempt: int) -> Outcome:
    """Run the job; its ranks find in JAXMPI_RESTART how often it has failed before."""
    decided = plan(request, mpiexec, survey(), os.environ)
    say(decided.summary)
    run_dir = tempfile.mkdtemp(prefix="jaxmpi-")
    added = {
        **decided.environ,
        **_terminal(os.environ),
        "JAXMPI_RUN_DIR": run_dir,
        "JAXMPI_RESTART": str(attempt),
    }
    if kept := compiled_files.folder_of(os.environ, settings.get("JAXMPI_CACHE_BYTES")):
        added["JAXMPI_CACHE_DIR"] = kept
    own = environment(mpiexec, os.environ, request.mpi_options, run_dir)
    environ = {**os.environ, **added, **own}
    exported = [
        *added,
        *(name for name in os.environ if name not in added and name.startswith(_EXPORTED)),
    ]
    words = command(request, mpiexec, decided.flags, exported)
    return supervise(words, environ, run_dir, mpiexec.launcher, [*named_hosts(request.mpi_options)])


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Tell the ranks, who see pipes only, that their stderr ends up on a terminal, and how wide it is."""
    if not os.isatty(2):
        return {}
    return {
        "JAXMPI_TTY": "1",
        "COLUMNS": environ.get("COLUMNS", str(os.get_terminal_size(2).columns)),
    }
