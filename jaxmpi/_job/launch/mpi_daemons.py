"""The processes through which MPICH's launcher reaches the hosts: it does not say which of them it has lost."""

import contextlib
import os
import re
import select
from collections.abc import Sequence
from pathlib import Path

from jaxmpi._job.process.launchers import Launcher

__all__ = ["MpiDaemons", "children"]


class MpiDaemons:
    """Which of the processes ended first."""

    def __init__(self, launcher: Launcher, hosts: Sequence[str]) -> None:
        """`hosts`: as MPI's options name them, in their order."""
        self._launcher = launcher
        self._hosts = hosts if launcher.proxy_number else ()
        self._number: dict[int, int] = {}  # of a host, by process
        self._process: dict[int, int] = {}  # by file descriptor
        self._ended: list[int] = []  # numbers of hosts
        self._epoll = select.epoll()  # what comes first is returned first

    def look(self, launcher: int) -> None:
        """See who has come and who has ended; `launcher`: its process."""
        if len(self._number) < len(self._hosts):
            number = re.compile(self._launcher.proxy_number.encode())
            for pid in children(launcher) - self._number.keys():
                with contextlib.suppress(OSError):  # it is gone already, or the kernel has no pidfd
                    if found := number.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                        self._follow(os.pidfd_open(pid), pid, int(found[1]))
        while events := self._epoll.poll(0.0, maxevents=1):
            fd = events[0][0]
            self._epoll.unregister(fd)
            self._ended.append(self._number[self._process.pop(fd)])
            os.close(fd)

    def lost(self, text: str) -> str:
        """Say on which host the launcher has lost its process, where it says that it has lost one; otherwise "".

        Args:
          text: The last of what the launcher and the ranks wrote.
        """
        number = self._ended[0] if self._ended else len(self._hosts)
        if number >= len(self._hosts) or not re.search(
            self._launcher.lost_proxy, " ".join(text.split())
        ):
            return ""
        return (
            f"MPI's daemon on {self._hosts[number]} ended first: it was killed, or the host failed"
        )

    def close(self) -> None:
        """Follow nobody any more."""
        for fd in (*self._process, self._epoll.fileno()):
            os.close(fd)

    def _follow(self, fd: int, pid: int, number: int) -> None:
        self._number[pid], self._process[fd] = number, pid
        self._epoll.register(fd, select.EPOLLIN)


def children(pid: int) -> set[int]:
    """Return the processes that a process has started, and that live."""
    with contextlib.suppress(OSError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()
