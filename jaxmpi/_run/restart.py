"""What a restart runs on: hosts that have failed twice are left out, those that have joined the hosts' file take part."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxmpi._run.hosts import named_hosts, same_host, with_hosts
from jaxmpi._run.mpiexec import LaunchError
from jaxmpi._run.options import Request

__all__ = ["Restarts"]

MOST_FAILURES = 1  # of a host: with another one it is left out


@dataclass
class Restarts:
    """The hosts of a job from start to start.

    Attributes:
      first: what the command line asked for.
      failures: of hosts, by their names in the file or the option.
      folder: for the file of those that are left.
    """

    first: Request
    folder: Path
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._slots = named_hosts(self.first.mpi_options)

    def after(self, request: Request, host: str) -> tuple[Request, str]:
        """What to run next, after a job on `request` has failed on `host`; and what to tell the user.

        Without named hosts, or where no one knows which failed, it is one rank less with `--min-ranks`, or else the same.

        Raises:
          LaunchError: too few hosts are left.
        """
        now = named_hosts(self.first.mpi_options)
        blamed = next((name for name in now if host and same_host(name, host)), "")
        if not now or not self._slots or not (blamed or set(now) != set(self._slots)):
            fewer = request.ranks if request.min_ranks is None else max(request.min_ranks, request.ranks - 1)
            return replace(request, ranks=fewer), ""
        self.failures[blamed] += bool(blamed)
        out = [name for name in now if self.failures[name] > MOST_FAILURES]
        left = {name: number for name, number in now.items() if name not in out}
        joined = {name: number for name, number in left.items() if name not in self._slots}
        ranks = self._ranks(left, joined)
        needed = self.first.min_ranks or self.first.ranks
        if ranks < needed:
            raise LaunchError(
                f"{', '.join(out)} failed twice, and the other hosts have room for {ranks} ranks of the {needed} that are "
                "needed. Add hosts to the file, or give --min-ranks a smaller number."
            )
        options = with_hosts(self.first.mpi_options, left, self.folder) if out else self.first.mpi_options
        said = [f"without {', '.join(out)}, which failed twice"] * bool(out) + [f"with {', '.join(joined)}"] * bool(joined)
        return replace(request, ranks=ranks, mpi_options=options), "; ".join(said)

    def _ranks(self, left: Mapping[str, int], joined: Mapping[str, int]) -> int:
        """As many as at first and as those that joined take, as far as there is room, by as many ranks a slot as at first."""
        each = max(1, -(-self.first.ranks // sum(self._slots.values())))
        return min(each * sum(left.values()), self.first.ranks + each * sum(joined.values()))
