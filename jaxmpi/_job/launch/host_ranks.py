"""The ranks of this host, as a supervisor sees them: what they say of themselves, and in which order they end."""

import contextlib
import fcntl
import os
import select
import struct
from pathlib import Path

from jaxmpi._job.launch.failure_report import End
from jaxmpi._job.process import run_dir as registry
from jaxmpi._job.process.run_dir import Member

__all__ = ["HostRanks"]


class HostRanks:
    """What is known of the ranks of this host, and in which order they end: MPI's launcher kills all when it misses the first.

    What was read from the run's folder is kept: it is in the temporary folder, from which programs
    remove what is old.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        # ranks that take a SIGTERM, and tell the others, so that all stop in order
        self.preemptible: set[int] = set()
        self.verdict = ""  # of the ranks: why the job has ended
        self.refused_count = ""  # why the ranks do not work in a job of so many of them
        self._members: dict[int, Member] = {}  # of all hosts, by rank
        # by file descriptor: of the rank's pipe, and of the process
        self._open: dict[int, Member] = {}
        self._process: dict[Member, int] = {}
        self._ended: dict[Member, None] = {}  # in order
        self._epoll = select.epoll()  # what comes first is returned first

    def look(self, timeout_seconds: float) -> None:
        """See who has come and who has ended; wait for so long at most until one ends."""
        with contextlib.suppress(OSError):
            os.mkdir(self.run_dir, 0o700)  # it was removed: ranks that leave in order say so in it
        if self._is_ours():
            self.preemptible |= {
                int(path.name.partition("-")[2])
                for path in Path(self.run_dir).glob("preemptible-*")
            }
            for member in registry.members(self.run_dir, skip=self._members):
                self._members[member.rank] = member
                if member.host == os.uname().nodename:
                    # the rank is gone already, or the kernel has no pidfd
                    with contextlib.suppress(OSError):
                        self._follow(
                            os.open(
                                f"{self.run_dir}/rank-{member.rank}.pipe",
                                os.O_RDONLY | os.O_NONBLOCK,
                            ),
                            member,
                        )
                        self._process[member] = os.pidfd_open(member.pid)
                        self._follow(self._process[member], member)  # a child may hold the pipe
        while events := self._epoll.poll(timeout_seconds, maxevents=1):
            self._epoll.unregister(events[0][0])
            self._ended.setdefault(self._open[events[0][0]])
            timeout_seconds = 0.0

    @property
    def members(self) -> list[Member]:
        """The ranks of this host, by rank, as they last described themselves."""
        now = (
            {member.rank: member for member in registry.members(self.run_dir)}
            if self._is_ours()
            else {}
        )
        known = {**self._members, **now}
        return [known[rank] for rank in sorted(known) if known[rank].host == os.uname().nodename]

    def _is_ours(self) -> bool:
        """Whether the folder is still the one that was made for the run, or made anew: in its place others may make one."""
        with contextlib.suppress(OSError):
            return os.lstat(self.run_dir).st_uid == os.geteuid()
        return False

    def all_have_failed(self) -> bool:
        """Whether no rank of this host is left, and one did not leave in order."""
        if not self._open or len(self._ended) < len(set(self._open.values())):
            return False
        return not all(m.left for m in self.members)

    def _follow(self, fd: int, member: Member) -> None:
        self._open[fd] = member
        self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> list[End]:
        """Look for the last time; return who has ended and how, in order."""
        self.look(0.0)
        if self._is_ours():
            self.verdict = registry.verdict(self.run_dir)
            self.refused_count = registry.refused_count(self.run_dir)
        ended = [End(member, _exit_status(self._process.get(member, -1))) for member in self._ended]
        for fd in (*self._open, self._epoll.fileno()):
            os.close(fd)
        return ended


def _exit_status(pidfd: int) -> int | None:
    """Ask for the wait status of a process that is no child of ours: ioctl PIDFD_GET_INFO with PIDFD_INFO_EXIT."""
    info = bytearray(struct.pack("=QQ11Ii", 1 << 3, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(pidfd, 0xC040FF0B, info)
    except (OSError, ValueError):
        return None
    mask, *_, status = struct.unpack("=QQ11Ii", info)
    return status if mask & (1 << 3) else None
