"""The processes of a job that a supervisor follows on its host, and the order in which they end.

MPI's launcher kills all ranks as soon as it misses one, so the order of the ends tells which rank
failed. An epoll object reports the ends: it returns first what came first.
"""

import contextlib
import fcntl
import os
import re
import select
import struct
from collections.abc import Sequence
from pathlib import Path

from jaxmpi._job.launch.find_failure import End
from jaxmpi._job.process import run_dir as registry
from jaxmpi._job.process.failure import Cause, Failure
from jaxmpi._job.process.launchers import Launcher
from jaxmpi._job.process.run_dir import Member

__all__ = ["HostRanks", "MpiDaemons", "children"]


class HostRanks:
    """The ranks of this host: what they have written into the run's folder, and how they end.

    What was read is kept: the folder is in the temporary folder, from which programs remove what
    is old.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        # ranks that handle a SIGTERM, and tell the others, so that all stop in order
        self.preemptible: set[int] = set()
        self.failures: list[Failure] = []  # that ranks have reported
        self.count_refusal = ""  # why the program does not run on this number of ranks
        # by rank; ranks of other hosts are among them where the temporary folder is shared
        self._members: dict[int, Member] = {}
        # by file descriptor: of the rank's pipe, and of the process
        self._open: dict[int, Member] = {}
        self._process: dict[Member, int] = {}
        self._ended: dict[Member, None] = {}  # in the order of their ends
        self._in_order: set[int] = set()  # ranks that had noted an orderly end
        self._epoll = select.epoll()

    def look(self, timeout_seconds: float) -> None:
        """Find ranks that have joined or ended; wait for so long at most until one ends."""
        # If somebody has removed the folder, it is made anew: ranks that leave in order write so.
        with contextlib.suppress(OSError):
            os.mkdir(self.run_dir, 0o700)
        if self._is_ours():
            for path in Path(self.run_dir).glob("preemptible-*"):
                self.preemptible.add(int(path.name.partition("-")[2]))
            known = {rank for rank in self._members if not self._has_called_init_since(rank)}
            for member in registry.members(self.run_dir, skip=known):
                self._forget(member.rank)
                self._members[member.rank] = member
                if member.host == os.uname().nodename:
                    self._follow(member)
        while events := self._epoll.poll(timeout_seconds, maxevents=1):
            self._epoll.unregister(events[0][0])
            self._ended.setdefault(self._open[events[0][0]])
            timeout_seconds = 0.0

    def _has_called_init_since(self, rank: int) -> bool:
        """Return whether a rank that was one of plain JAX has called jaxmpi.init, and so joined."""
        is_plain = not self._members[rank].notes_end
        return is_plain and os.path.exists(self._pipe(rank))

    def _pipe(self, rank: int) -> str:
        return f"{self.run_dir}/rank-{rank}.pipe"

    def _forget(self, rank: int) -> None:
        """Follow a rank no more, if it was followed."""
        for fd in [fd for fd, member in self._open.items() if member.rank == rank]:
            self._process.pop(self._open.pop(fd), None)
            with contextlib.suppress(OSError):  # it has ended, and been unregistered
                self._epoll.unregister(fd)
            os.close(fd)

    def _follow(self, member: Member) -> None:
        """Follow the pipe of a rank, and its process: a child may hold the pipe open."""
        # suppressed: the rank is gone already, has no pipe, or the kernel has no pidfd
        with contextlib.suppress(OSError):
            self._register(os.open(self._pipe(member.rank), os.O_RDONLY | os.O_NONBLOCK), member)
        with contextlib.suppress(OSError):
            self._process[member] = os.pidfd_open(member.pid)
            self._register(self._process[member], member)

    def _register(self, fd: int, member: Member) -> None:
        self._open[fd] = member
        self._epoll.register(fd, select.EPOLLIN)

    @property
    def members(self) -> list[Member]:
        """The ranks of this host, by rank, as they last described themselves."""
        now: dict[int, Member] = {}
        if self._is_ours():
            now = {member.rank: member for member in registry.members(self.run_dir)}
        known = {**self._members, **now}
        return [known[rank] for rank in sorted(known) if known[rank].host == os.uname().nodename]

    def _is_ours(self) -> bool:
        """Return whether the folder belongs to this user: others could make one of its name."""
        with contextlib.suppress(OSError):
            return os.lstat(self.run_dir).st_uid == os.geteuid()
        return False

    def one_has_failed(self) -> bool:
        """Return whether a rank of this host has ended without `leave`, or one has told a failure.

        A rank may tell a failure before it has joined. One of plain JAX that ends without `leave`
        has failed if a signal has killed it.
        """
        if self._is_ours() and registry.reported_failures(self.run_dir):
            return True
        followed = [
            member
            for member in self._ended
            if member.notes_end or _is_killed(_exit_status(self._process.get(member, -1)))
        ]
        gone = {m.rank for m in followed if registry.state(m.pid) == "ended"} - self._in_order
        if gone and self._is_ours():
            others = self._members.keys() - gone
            self._in_order.update(
                member.rank for member in registry.members(self.run_dir, skip=others) if member.left
            )
        return bool(gone - self._in_order)

    def close(self) -> list[End]:
        """Look for the last time; return which ranks have ended and how, in order."""
        self.look(0.0)
        if self._is_ours():
            self.failures = registry.reported_failures(self.run_dir)
            self.count_refusal = registry.count_refusal(self.run_dir)
        ended = [End(member, _exit_status(self._process.get(member, -1))) for member in self._ended]
        for fd in self._open:
            os.close(fd)
        self._epoll.close()
        return ended


def _is_killed(status: int | None) -> bool:
    """Return whether a wait status is known and tells of a signal."""
    return status is not None and os.WIFSIGNALED(status)


def _exit_status(pidfd: int) -> int | None:
    """Return the wait status of a process that is not a child of this one, if the kernel tells."""
    # ioctl PIDFD_GET_INFO; bit 3 of the mask is PIDFD_INFO_EXIT
    info = bytearray(struct.pack("=QQ11Ii", 1 << 3, 0, *[0] * 11, 0))
    try:
        fcntl.ioctl(pidfd, 0xC040FF0B, info)
    except (OSError, ValueError):
        return None
    mask, *_, status = struct.unpack("=QQ11Ii", info)
    return status if mask & (1 << 3) else None


class MpiDaemons:
    """The processes through which MPICH's launcher reaches the hosts.

    MPICH does not say which of its hosts it has lost: it is the one whose process ended first.
    """

    def __init__(self, launcher: Launcher, hosts: Sequence[str]) -> None:
        """Follow the daemons of a launcher that numbers them; otherwise none.

        Args:
          launcher: the launcher's row.
          hosts: the hosts that MPI's options name, in their order.
        """
        self._launcher = launcher
        self._hosts = hosts if launcher.proxy_number else ()
        self._number: dict[int, int] = {}  # of a host, by process
        self._process: dict[int, int] = {}  # by file descriptor
        self._ended: list[int] = []  # numbers of hosts
        self._epoll = select.epoll()

    def look(self, launcher_pid: int) -> None:
        """Find daemons that were started or have ended."""
        if len(self._number) < len(self._hosts):
            pattern = re.compile(self._launcher.proxy_number.encode())
            for pid in children(launcher_pid) - self._number.keys():
                # suppressed: the process is gone already, or the kernel has no pidfd
                with contextlib.suppress(OSError):
                    if found := pattern.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                        fd = os.pidfd_open(pid)
                        self._number[pid], self._process[fd] = int(found[1]), pid
                        self._epoll.register(fd, select.EPOLLIN)
        while events := self._epoll.poll(0.0, maxevents=1):
            fd = events[0][0]
            self._epoll.unregister(fd)
            self._ended.append(self._number[self._process.pop(fd)])
            os.close(fd)

    def find_lost(self, text: str) -> list[Failure]:
        """Return the failure of the first daemon that ended, if the launcher says it lost one.

        Args:
          text: the last of what the launcher and the ranks wrote.
        """
        number = self._ended[0] if self._ended else len(self._hosts)
        if number >= len(self._hosts):
            return []
        if not re.search(self._launcher.lost_proxy, " ".join(text.split())):
            return []
        return [Failure(host=self._hosts[number], cause=Cause.DAEMON)]

    def close(self) -> None:
        """Follow no process any more."""
        for fd in self._process:
            os.close(fd)
        self._epoll.close()


def children(pid: int) -> set[int]:
    """Return the child processes of a process."""
    with contextlib.suppress(OSError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()
