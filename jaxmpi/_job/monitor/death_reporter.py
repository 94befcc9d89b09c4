"""A small process that names the rank that was killed, where MPI's launcher does not.

MPICH's mpiexec kills the other ranks as soon as one is gone, and prints only a process id. No rank
is left to name it. So `start_on_nodes` starts a process beside the ranks of each node: this file,
run without site-packages. It ends with the ranks: silently when one of them tells it that the job
ends in order, and otherwise with a line that names the first rank that was gone.
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
    from jaxmpi._backends.mpi_ranks import MpiRanks

__all__ = ["connect", "start", "start_on_nodes"]

_CREDENTIALS = "3i"  # struct ucred: process, user and group id
_FIRST_MESSAGE = "2i"  # the first message of a rank: its number, and the number of ranks


def start_on_nodes(backend: "MpiRanks") -> Callable[[], None]:
    """Start a death reporter on each node, unless something else names a killed rank.

    **Collective:** every rank calls it.

    Returns:
      A function that ends the death reporter; call it when the job ends in order.
    """
    place = backend.place
    if backend.launcher.names_killed_rank:
        return lambda: None
    supervised = os.path.isdir(os.environ.get("JAXMPI_RUN_DIR", ""))
    address = start() if place.local_rank == 0 and not supervised else ""
    # By node, the address of its lowest rank.
    addresses = dict(reversed(backend.allgather_object((place.node, address))))
    return (
        connect(addresses[place.node], place.rank, place.size)
        if addresses[place.node]
        else lambda: None
    )


def start() -> str:
    """Start the death reporter of this host; return its address, "" if it does not start.

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
    """Have the death reporter watch this process as a rank; return a function that ends it."""
    link = socket.socket(socket.AF_UNIX)
    # The kernel closes the files of a process last opened first. So the death reporter sees this
    # one close before the launcher notices that the rank is gone and kills the others.
    link.connect(bytes.fromhex(address))
    # The death reporter may have ended, and another user may have taken its address.
    if _peer(link)[1] != os.geteuid():
        link.close()
        return lambda: None
    link.sendall(struct.pack(_FIRST_MESSAGE, rank, size))

    def dismiss() -> None:
        with contextlib.suppress(OSError):
            link.sendall(b"!")
            link.close()

    return dismiss


def _listen() -> None:
    """Print the address, and watch in a child process, so that `start` returns."""
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
    """Wait until a rank is gone and report it, or until a rank tells that the job ends in order.

    Any user of this host can connect. Another user's connection is closed unread, and no peer is
    waited for.
    """
    epoll = select.epoll()  # returns events in the order in which they came
    epoll.register(listener, select.EPOLLIN)
    epoll.register(starter, select.EPOLLIN)
    links: dict[int, socket.socket] = {}
    # Rank, size and process by file: the link and the process's pidfd. A child of the rank may hold
    # the link open when the rank is gone, and its pidfd tells.
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
        elif fd in links and fd not in ranks:  # a rank's first message
            said = links[fd].recv(struct.calcsize(_FIRST_MESSAGE))
            if len(said) < struct.calcsize(_FIRST_MESSAGE):
                links.pop(fd).close()
                continue
            if not ranks:
                epoll.unregister(starter)  # it is a rank: from now on its own files tell
            pid = _peer(links[fd])[0]
            ranks[fd] = *struct.unpack(_FIRST_MESSAGE, said), pid
            with contextlib.suppress(ProcessLookupError):  # gone already, which the link tells
                process = os.pidfd_open(pid)
                ranks[process] = ranks[fd]
                epoll.register(process, select.EPOLLIN)
        # The process that started this one is gone without a rank, or a rank ends in order.
        elif fd not in ranks or (fd in links and links[fd].recv(1)):
            return
        # A rank's link or process is gone.
        else:
            _report(*ranks[fd], mark)
            return


def _peer(link: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a connection, and its user."""
    credentials = link.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    pid, user, _ = struct.unpack(_CREDENTIALS, credentials)
    return pid, user


def _report(rank: int, size: int, pid: int, mark: str) -> None:
    """Write which rank was the first to end: a line for the user, and a record after `mark`."""
    host = os.uname().nodename
    line = (
        f"jaxmpi: [rank {rank}/{size} on {host}] was the first to end (pid {pid}): killed, crashed "
        "or by os._exit. The job ends.\n"
    )
    if mark:
        record = {"rank": rank, "pid": pid, "host": host, "cause": "ended", "joined": True}
        line += f"{mark}{json.dumps([record])}\n"
    # At once: the launcher soon stops passing on what ranks write. It names the signal itself.
    os.write(2, line.encode())


if __name__ == "__main__":
    _listen()
