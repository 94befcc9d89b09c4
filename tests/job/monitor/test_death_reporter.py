"""The death reporter without `jaxmpi run` listens where any user of the host can connect."""

import os
import re
import socket
import subprocess
import sys

import pytest

from jaxmpi._job.monitor import death_reporter
from jaxmpi._job.process.failure import find_marked

VISITED = """
import os, signal, socket, struct, sys
from jaxmpi._job.monitor import death_reporter
from jaxmpi._job.process.failure import MARK
said, whose = bytes.fromhex(sys.argv[1]), sys.argv[2]
listener = socket.socket(socket.AF_UNIX)
listener.bind("")
listener.listen(8)
kept = []

def child(run):
    mine, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        kept.append(run())
        os.write(theirs, b".")
        signal.pause()
    os.read(mine, 1)
    return pid

def visit():
    link = socket.socket(socket.AF_UNIX)
    link.connect(listener.getsockname())
    link.sendall(said)
    return link

visitor = child(visit)
address = listener.getsockname().hex()
ranks = [child(lambda: death_reporter.connect(address, rank, 2)) for rank in range(2)]
peer = death_reporter._peer
def peer_of(link):
    pid, user = peer(link)
    return pid, user + (whose == "another user" and pid == visitor)

death_reporter._peer = peer_of
os.kill(ranks[1], signal.SIGKILL)
signal.alarm(10)
try:
    death_reporter._watch(listener, os.pidfd_open(os.getppid()), MARK)
finally:
    for pid in (visitor, *ranks):
        os.kill(pid, signal.SIGKILL)
"""
HELLO = "0000000002000000"  # rank 0 of 2


@pytest.mark.parametrize(
    ("said", "whose"),
    [
        *((said, "another user") for said in ("", "00", HELLO, HELLO + "21", "21" * 64)),
        ("", "this user"),
        ("00", "this user"),
    ],
)
def test_the_death_reporter_is_not_silenced_by_a_visitor(said, whose):
    """A visitor cannot silence it, though any user of the host may connect."""
    done = subprocess.run(
        [sys.executable, "-c", VISITED, said, whose], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and re.search(
        r"rank 1/2 on \S+\] was the first to end", done.stderr
    ), done
    (failure,) = find_marked(done.stderr)  # which `jaxmpi run` reads
    assert (failure.rank, failure.host) == (1, os.uname().nodename)
    assert f"(pid {failure.pid})" in done.stderr


def test_a_rank_says_nothing_to_another_users_death_reporter(monkeypatch):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen(1)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        death_reporter.connect(listener.getsockname().hex(), 0, 2)()
        link, _ = listener.accept()
        with link:
            assert link.recv(1) == b""
