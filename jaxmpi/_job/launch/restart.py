"""Hosts and ranks of a restart.

Hosts that have failed twice are left out, and those that have joined the hosts' file take part. A
number of ranks that the program has refused is not taken again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.launch.options import Request
from jaxmpi._job.launch.placement import named_hosts, same_host, with_hosts

__all__ = ["Restarts"]

MOST_FAILURES = 1  # of a host: with another one it is left out


@dataclass
class Restarts:
    """The hosts of a job from start to start.

    Attributes:
      first: what the command line asked for.
      failures: of hosts, by their names in the file or the option.
      refused: why the program does not run on a number of ranks, by the number.
      folder: for the file of those that are left.
    """

    first: Request
    folder: Path
    failures: Counter[str] = field(default_factory=Counter)
    refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = named_hosts(self.first.mpi_options)

    def after(self, request: Request, host: str) -> tuple[Request, str]:
        """What to run next, after a job on `request` has failed on `host`; and what to tell the user.

        Without named hosts, or where no one knows which failed, it is one rank less with
        `--min-ranks`, or else the same.

        Raises:
          LaunchError: too few hosts are left.
        """
        now = named_hosts(self.first.mpi_options)
        blamed = next((name for name in now if host and same_host(name, host)), "")
        if not now or not self._slots or not (blamed or set(now) != set(self._slots)):
            fewer = (
                request.ranks
                if request.min_ranks is None
                else max(request.min_ranks, request.ranks - 1)
            )
            return replace(request, ranks=self._accepted(fewer, self._most(request))), ""
        self.failures[blamed] += bool(blamed)
        out = [name for name in now if self.failures[name] > MOST_FAILURES]
        left = {name: number for name, number in now.items() if name not in out}
        joined = {name: number for name, number in left.items() if name not in self._slots}
        ranks = self._ranks(left, joined)
        needed = self.first.min_ranks or self.first.ranks
        if ranks < needed:
            raise LaunchError(
                f"{', '.join(out)} failed twice, and the other hosts have room for {ranks} ranks "
                f"of the {needed} that are "
                "needed. Add hosts to the file, or give --min-ranks a smaller number."
            )
        options = (
            with_hosts(self.first.mpi_options, left, self.folder) if out else self.first.mpi_options
        )
        said = [f"without {', '.join(out)}, which failed twice"] * bool(out) + [
            f"with {', '.join(joined)}"
        ] * bool(joined)
        return replace(request, ranks=self._accepted(ranks, ranks), mpi_options=options), "; ".join(
            said
        )

    def after_refused(self, request: Request, reason: str) -> Request:
        """Return what to run next, after the program has refused the number of ranks of `request`.

        Raises:
          LaunchError: it has refused all numbers that the job may have.
        """
        self.refused[request.ranks] = reason
        return replace(request, ranks=self._accepted(request.ranks - 1, self._most(request)))

    def _most(self, request: Request) -> int:
        """Return how many ranks there may be: on the hosts that are left, there may be room for no more."""
        return request.ranks if named_hosts(request.mpi_options) else self.first.ranks

    def _accepted(self, ranks: int, most: int) -> int:
        """Return the next number of ranks, from `ranks` down, that the program has not refused.

        Where there is none down to --min-ranks, it is the next one above, up to `most`: a number on
        which the job has run may do so again.
        """
        least = self.first.min_ranks or self.first.ranks
        for number in [*range(ranks, least - 1, -1), *range(ranks + 1, most + 1)]:
            if number >= least and number not in self.refused:
                return number
        each = "".join(f"\n  {number} ranks: {why}" for number, why in sorted(self.refused.items()))
        raise LaunchError(
            f"the program runs on no number of ranks from {least} to {most}. Give -n and "
            "--min-ranks "
            f"others, or change it:{each}"
        )

    def _ranks(self, left: Mapping[str, int], joined: Mapping[str, int]) -> int:
        """As many as at first and as those that joined take, as far as there is room, by as many ranks a slot as at first."""
        each = max(1, -(-self.first.ranks // sum(self._slots.values())))
        return min(each * sum(left.values()), self.first.ranks + each * sum(joined.values()))
