"""Names the rank that was killed, where MPI's launcher does not.

MPICH's mpiexec kills the other ranks as soon as it misses one, and names only a process id; so
nobody inside the job is left to speak. `call` leaves a small process beside the ranks of a node
(this file, run without site-packages), which ends with them: silently when it is told that the job
ends in order, and otherwise with a line about the first rank that was gone.
"""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmpi._backends.process_group import MpiProcessGroup

__all__ = ["call", "connect", "start"]

_CREDENTIALS = "3i"  # struct ucred: process, user and group id
_RANK = "2i"  # what a rank says first: its number, and how many ranks there are


def call(backend: "MpiProcessGroup") -> Callable[[], None]:
    """Leave one on each node where nobody else names a rank that is killed; returns what sends it away."""
    place = backend.place
    if backend.launcher_names_the_killed:
        return lambda: None
    supervised = os.path.isdir(os.environ.get("JAXMPI_RUN_DIR", ""))
    address = start() if place.local_rank == 0 and not supervised else ""
    # of each node, that of its lowest rank
    addresses = dict(reversed(backend.allgather_object((place.node, address))))
    return (
        connect(addresses[place.node], place.rank, place.size)
        if addresses[place.node]
        else lambda: None
    )


def start() -> str:
    """Start the death reporter of this host; returns the address that `connect` takes, "" where there can be none.

    It needs Linux 5.3 or later.
    """
    # not above: the process that it starts runs this file, without jaxmpi's other modules
    from jaxmpi._job.process.failure import MARK

    try:
        # `jaxmpi run` on another host reads a record in the output of the job
        mark = MARK if os.environ.get("JAXMPI_RUN_DIR") else ""
        words = [sys.executable, "-I", "-S", __file__, mark]
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def connect(address: str, rank: int, size: int) -> Callable[[], None]:
    """Have this process watched as a rank of the job; returns what sends the death reporter away."""
    link = socket.socket(socket.AF_UNIX)
    # The kernel closes the files of a process last opened first: the death reporter sees this one
    # close before the launcher misses the rank and kills the others.
    link.connect(bytes.fromhex(address))
    # the death reporter has ended, and another user has taken its address
    if _peer(link)[1] != os.geteuid():
        link.close()
        return lambda: None
    link.sendall(struct.pack(_RANK, rank, size))

    def dismiss() -> None:
        with contextlib.suppress(OSError):
            link.sendall(b"!")
            link.close()

    return dismiss


def _listen() -> None:
    """Print the address, and let a child process do the rest."""
    if not hasattr(os, "pidfd_open"):
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux chooses a name that is in no file system
    listener.listen(1024)
    starter = os.pidfd_open(os.getppid())
    if os.fork():
        os.write(1, listener.getsockname().hex().encode())
        return
    os.setsid()  # the launcher kills process groups
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    _watch(listener, starter, sys.argv[1])


def _watch(listener: socket.socket, starter: int, mark: str = "") -> None:
    """Wait until a rank is gone, and say which one was the first; or until a rank says that the job ends.

    Any user of this host can connect. Another user's connection is closed unread, and nobody is
    waited for.
    """
    epoll = select.epoll()  # what comes first is returned first
    epoll.register(listener, select.EPOLLIN)
    epoll.register(starter, select.EPOLLIN)
    links: dict[int, socket.socket] = {}
    # by file: of the link, and of the process, as a child may hold the link
    ranks: dict[int, tuple[int, int, int]] = {}
    while True:
        fd = epoll.poll(maxevents=1)[0][0]
        if fd == listener.fileno():
            link, _ = listener.accept()
            if _peer(link)[1] == os.geteuid():
                links[link.fileno()] = link
                epoll.register(link, select.EPOLLIN)
            else:
                link.close()
        elif fd in links and fd not in ranks:  # who it is
            said = links[fd].recv(struct.calcsize(_RANK))
            if len(said) < struct.calcsize(_RANK):
                links.pop(fd).close()
                continue
            if not ranks:
                epoll.unregister(starter)  # from now on the ranks' own files tell
            pid = _peer(links[fd])[0]
            ranks[fd] = *struct.unpack(_RANK, said), pid
            with contextlib.suppress(ProcessLookupError):  # it is gone, which the link tells
                process = os.pidfd_open(pid)
                ranks[process] = ranks[fd]
                epoll.register(process, select.EPOLLIN)
        elif fd not in ranks or (fd in links and links[fd].recv(1)):
            return
        else:
            _report(*ranks[fd], mark)
            return


def _peer(link: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user."""
    credentials = link.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    pid, user, _ = struct.unpack(_CREDENTIALS, credentials)
    return pid, user


def _report(rank: int, size: int, pid: int, mark: str) -> None:
    """Write which rank was the first to end: a line for the user, and a record after `mark`."""
    host = os.uname().nodename
    line = f"jaxmpi: [rank {rank}/{size} on {host}] was the first to end (pid {pid}): killed, crashed or by os._exit. The job ends.\n"
    if mark:
        record = {"rank": rank, "pid": pid, "host": host, "cause": "ended", "joined": True}
        line += f"{mark}{json.dumps([record])}\n"
    # At once: the launcher soon stops passing on what it is told. It says itself which signal it
    # was.
    os.write(2, line.encode())


if __name__ == "__main__":
    _listen()
