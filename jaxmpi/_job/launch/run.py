"""`jaxmpi run`, from the command line to the exit code. Nothing here imports JAX or MPI.

A job that has failed starts again as often as --restarts says, on the hosts and the number of ranks
that `Restarts` chooses.
"""

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxmpi._job.launch import plain_jax
from jaxmpi._job.launch.machine import prepare, survey
from jaxmpi._job.launch.mpiexec import (
    LaunchError,
    Mpiexec,
    check_library,
    environment,
    find_launcher,
    identify,
    segment_variable,
)
from jaxmpi._job.launch.mps import mps_daemon
from jaxmpi._job.launch.options import Request, parse
from jaxmpi._job.launch.placement import (
    check_arguments,
    check_counts,
    command,
    named_hosts,
    on_other_nodes,
    on_this_host_alone,
    plan,
    same_host,
    with_hosts,
)
from jaxmpi._job.launch.scaling import Point, picture, table
from jaxmpi._job.launch.supervisor import Outcome, open_streams, say, supervise
from jaxmpi._job.process import compiled_files, run_dir, settings

__all__ = ["Restarts", "run"]

PICTURE = "scaling.svg"  # of --scaling, in the working directory
MOST_FAILURES = 1  # of a host: after one more, restarts leave it out

# what the user sets here holds for ranks on other hosts, too
_EXPORTED = ("JAXMPI_", "JAX_", "XLA_", "NCCL_", "MPITRAMPOLINE_")


def run(arguments: Sequence[str]) -> int:
    """Run `jaxmpi run` and return its exit code: that of the job, or 2 if no job was started."""
    open_streams()
    try:
        prepare(os.environ)
        request = parse(arguments)
        check_counts(request, os.environ)
        if request.mps and on_other_nodes(request.mpi_options, os.environ):
            raise LaunchError(
                "--mps starts CUDA's Multi-Process Service on this host, and the job has others. "
                "Start `nvidia-cuda-mps-control -d` on each host, and leave --mps out."
            )
        mpiexec = identify(find_launcher(request.mpiexec, os.environ))
        check_arguments(request, mpiexec.launcher)
        library = check_library(mpiexec)
    except LaunchError as error:
        say(str(error))
        return 2
    try:
        return _run_all(request, mpiexec, library)
    except LaunchError as error:
        say(str(error))
        return 2


def _run_all(request: Request, mpiexec: Mpiexec, library: str) -> int:
    """Run the job until it ends in order or no restart is left; return its exit code.

    Raises:
      LaunchError: the job cannot be started for the first time, as `_run_once` says.
    """
    if request.scaling:
        return _scale(request, mpiexec, library)
    with tempfile.TemporaryDirectory(prefix="jaxmpi-") as folder:
        restarts, failures = Restarts(request, Path(folder)), 0
        outcome = _run_once(request, mpiexec, library, failures)
        while outcome.failed:
            refused = bool(outcome.count_refusal) and request.restarts > 0
            if failures == request.restarts and not refused:
                break
            try:
                if refused:  # the program has not failed: it never ran
                    request = restarts.after_refused(request, outcome.count_refusal)
                    say(
                        f"starts on {request.ranks} ranks instead, which does not count as a "
                        "restart"
                    )
                else:
                    request, changed = restarts.after(request, outcome.host)
                    failures += 1
                    words = f" {changed}" if changed else ""
                    say(f"restart {failures} of {request.restarts}{words}")
                outcome = _run_once(request, mpiexec, library, failures)
            except LaunchError as error:
                say(f"no restart: {error}")
                break
        return outcome.code


def _run_once(request: Request, mpiexec: Mpiexec, library: str, attempt: int) -> Outcome:
    """Run the job; its ranks find in JAXMPI_RESTART how often it has failed before.

    Args:
      request: what the user asked for.
      mpiexec: the launcher.
      library: the path of the MPI library.
      attempt: how often the job has failed before.

    Raises:
      LaunchError: the job's MPS daemon does not start, or MPI's launcher cannot be started, as
        where the command line is too long.
    """
    # anew for each attempt: a rank that a fault of the GPU has ended leaves the daemon's server so
    daemon: contextlib.AbstractContextManager[dict[str, str]] = contextlib.nullcontext({})
    if request.mps:
        daemon = mps_daemon(os.environ)
    variable = ""  # on other hosts the folder would be missing
    if on_this_host_alone(request.mpi_options, os.environ):
        variable = segment_variable(mpiexec, os.environ, request.mpi_options)
    with daemon as mps, run_dir.segment_folder(variable, os.environ) as segments:
        return _run_with(request, mpiexec, library, attempt, {**mps, **segments})


def _run_with(
    request: Request, mpiexec: Mpiexec, library: str, attempt: int, variables: Mapping[str, str]
) -> Outcome:
    """Run the job as `_run_once`, with these variables for its ranks, too."""
    decided = plan(request, mpiexec, survey(), os.environ)
    say(decided.summary)
    folder = tempfile.mkdtemp(prefix="jaxmpi-")
    added = {
        **decided.environ,
        **plain_jax.variables(mpiexec, library, request.mpi_options, os.environ),
        **_terminal(os.environ),
        **variables,
        "JAXMPI_RUN_DIR": folder,
        "JAXMPI_RESTART": str(attempt),
    }
    if kept := compiled_files.folder_of(os.environ, settings.get("JAXMPI_CACHE_BYTES")):
        added["JAXMPI_CACHE_DIR"] = kept
    for_launcher = environment(mpiexec, os.environ, request.mpi_options, folder)
    exported = [*added]
    for name in os.environ:
        if name not in added and name.startswith(_EXPORTED):
            exported.append(name)
    return supervise(
        command(
            request,
            mpiexec,
            decided.flags,
            exported,
            plain_jax.names_for_jax(mpiexec.launcher),
        ),
        {**os.environ, **added, **for_launcher},
        folder,
        mpiexec.launcher,
        [*named_hosts(request.mpi_options, os.environ)],
    )


def _terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that tell the ranks that their stderr ends up on a terminal.

    The ranks see pipes only.
    """
    if not os.isatty(2):
        return {}
    columns = environ.get("COLUMNS", str(os.get_terminal_size(2).columns))
    return {"JAXMPI_TTY": "1", "COLUMNS": columns}


def _scale(request: Request, mpiexec: Mpiexec, library: str) -> int:
    """Run the program on each number of ranks, and compare its throughput; return the exit code.

    Raises:
      LaunchError: the first job cannot be started, as `_run_once` says.
    """
    points, cores = list[Point](), survey().cores
    for ranks in request.scaling:
        try:
            outcome = _run_once(replace(request, ranks=ranks), mpiexec, library, 0)
        except LaunchError as error:
            if not points:
                raise
            say(str(error))
            return 1
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


@dataclass
class Restarts:
    """The hosts and the number of ranks of a job, from start to start.

    A host that has failed twice is left out, and hosts that were added to the file of hosts take
    part. A number of ranks that the program has refused is not chosen again.

    Attributes:
      first: the request of the command line.
      folder: where the file of the remaining hosts is written.
      failures: the number of failures of each host, by its name in the file or the option.
      refused: why the program does not run on a number of ranks, by the number.
    """

    first: Request
    folder: Path
    failures: Counter[str] = field(default_factory=Counter)
    refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = named_hosts(self.first.mpi_options, os.environ)
        if not any(self._slots.values()):  # slots=0 throughout: nothing is known of their room
            self._slots = {}

    def after(self, request: Request, host: str) -> tuple[Request, str]:
        """Return the request to run after a job has failed, and what to tell the user of it.

        If the options name no hosts, or the failed host is not known, the next job has one rank
        less with --min-ranks, and as many otherwise.

        Args:
          request: the request that failed.
          host: the host on which it failed; "" if it is not known.

        Raises:
          LaunchError: too few hosts are left.
        """
        now = named_hosts(self.first.mpi_options, os.environ)
        blamed = next((name for name in now if host and same_host(name, host)), "")
        if blamed:
            self.failures[blamed] += 1
        hosts_changed = set(now) != set(self._slots)
        if now and self._slots and (blamed or hosts_changed):
            return self._on_hosts(request, now)
        fewer = request.ranks
        if request.min_ranks is not None:
            fewer = max(request.min_ranks, request.ranks - 1)
        return replace(request, ranks=self._accepted(fewer, self._most(request))), ""

    def _on_hosts(self, request: Request, now: Mapping[str, int]) -> tuple[Request, str]:
        """Return the request for the hosts that may be used, and what to tell the user of it.

        Args:
          request: the request that failed.
          now: the hosts that are named now, each with its slots.

        Raises:
          LaunchError: too few hosts may be used.
        """
        excluded = [name for name in now if self.failures[name] > MOST_FAILURES]
        used = {name: slots for name, slots in now.items() if name not in excluded}
        added = {name: slots for name, slots in used.items() if name not in self._slots}
        ranks = self._room(used, added)
        needed = self.first.min_ranks or self.first.ranks
        if ranks < needed:
            why = "the named hosts have"
            if excluded:
                why = f"{', '.join(excluded)} failed twice, and the other hosts have"
            raise LaunchError(
                f"{why} room for {ranks} ranks of the {needed} that are needed. Add hosts to the "
                "file, or give --min-ranks a smaller number."
            )
        options, told = self.first.mpi_options, []
        if excluded:
            options = with_hosts(options, used, self.folder)
            told.append(f"without {', '.join(excluded)}, which failed twice")
        if added:
            told.append(f"with {', '.join(added)}")
        ranks = self._accepted(ranks, ranks)
        return replace(request, ranks=ranks, mpi_options=options), "; ".join(told)

    def after_refused(self, request: Request, reason: str) -> Request:
        """Return the request to run after the program has refused a number of ranks.

        Raises:
          LaunchError: it has refused all numbers that the job may have.
        """
        self.refused[request.ranks] = reason
        return replace(request, ranks=self._accepted(request.ranks - 1, self._most(request)))

    def _most(self, request: Request) -> int:
        """Return the largest number of ranks of a restart.

        Named hosts may have no room for more than now.
        """
        return request.ranks if named_hosts(request.mpi_options, os.environ) else self.first.ranks

    def _accepted(self, ranks: int, most: int) -> int:
        """Return the next number of ranks, from `ranks` down, that the program has not refused.

        If there is none down to --min-ranks, it is the next one above, up to `most`: a number on
        which the job has run may do so again.
        """
        least = self.first.min_ranks or self.first.ranks
        for number in [*range(ranks, least - 1, -1), *range(ranks + 1, most + 1)]:
            if number >= least and number not in self.refused:
                return number
        each = "".join(f"\n  {number} ranks: {why}" for number, why in sorted(self.refused.items()))
        raise LaunchError(
            f"the program runs on no number of ranks from {least} to {most}. Give -n and "
            f"--min-ranks others, or change it:{each}"
        )

    def _room(self, used: Mapping[str, int], added: Mapping[str, int]) -> int:
        """Return the number of ranks for these hosts.

        It is the number of the first start and what the added hosts take, as far as there is room.
        A slot takes as many ranks as at the first start.
        """
        ranks_per_slot = max(1, -(-self.first.ranks // sum(self._slots.values())))
        room = ranks_per_slot * sum(used.values())
        return min(room, self.first.ranks + ranks_per_slot * sum(added.values()))
