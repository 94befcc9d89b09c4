"""Files and sockets of a running job, as docs/tables/opened.md lists them; nothing is left."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/tables/opened.md"
SCRIPT = """
import os, sys, time
import jax.numpy as jnp
import jaxmpi
world = jaxmpi.init()
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x))
step(jnp.ones(1000)).block_until_ready()
jaxmpi.preempted()
print(f"ready {os.getpid()}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
BACKENDS = {
    "native": {"JAXMPI_BACKEND": "mpi", "JAXMPI_TRANSPORT": "native"},
    "mpi4jax": {"JAXMPI_BACKEND": "mpi", "JAXMPI_TRANSPORT": "mpi4jax"},
    "xla": {"JAXMPI_BACKEND": "xla"},
}


def environ_of(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def links(pid):
    """Return the targets of a process's open files."""
    found = []
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def address_of(text):
    """Parse an address in /proc/net/tcp or tcp6, as IPv4 where it is one."""
    raw = bytes.fromhex(text.partition(":")[0])
    raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def sockets(processes):
    """Rows of what listens, or receives datagrams."""
    owners = {}
    for pid, who in processes.items():
        for link in links(pid):
            if link.startswith("socket:"):
                owners[link] = who
    rows = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            who = owners.get(f"socket:[{rest[5]}]")
            if who and (state == "0A" or kind.startswith("udp")):
                address = address_of(local)
                where = "all addresses" if address in ("0.0.0.0", "::") else address
                rows.add((who, kind[:3].upper(), where))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if (who := owners.get(f"socket:[{inode}]")) and int(flags, 16) & 0x10000:  # listens
            nowhere = path and path[0].startswith("@")
            rows.add((who, "Unix", "a name in no file system" if nowhere else "in a folder"))
    return rows


def general(name):
    """The name without what differs from job to job."""
    return re.sub(r"[0-9a-f]{16}|(?<=jaxmpi-)[a-z0-9_]{8}|\d+", "*", name)


def files(processes, folders):
    """List the files in the folders and in shared memory, as rows of the table.

    Of a folder of mode 700, only the folder is listed.
    """
    rows = set()
    for title, folder in folders.items():
        for path in folder.iterdir():
            status = path.lstat()
            kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
            rows.add((kind, f"{title}/{general(path.name)}", f"{stat.S_IMODE(status.st_mode):o}"))
            assert status.st_uid == os.geteuid()
    for pid in processes:
        maps = Path(f"/proc/{pid}/maps").read_text()
        mapped = re.findall(r"/dev/shm/.*", maps)
        for link in links(pid):
            if "/memfd:jaxmpi" in link:
                rows.add(("memory of a rank", link.removesuffix(" (deleted)"), "no name"))
        for name in {*mapped, *(link for link in links(pid) if link.startswith("/dev/shm/"))}:
            path, deleted = Path(name.removesuffix(" (deleted)")), name.endswith(" (deleted)")
            mode = "no name" if deleted else f"{stat.S_IMODE(path.lstat().st_mode):o}"
            of_job = re.sub(r"^/dev/shm/jaxmpi-[a-z0-9_]{8}/", "/dev/shm/jaxmpi-*/", str(path))
            host = re.sub(re.escape(os.uname().nodename), "HOST", of_job)
            rows.add(("shared memory", general(re.sub("[0-9a-f]{6,}", "*", host)), mode))
    return rows


def documented():
    return set(
        re.findall(
            r"^\| (.*?) \| (.*?) \| (.*?) \|",
            PAGE.read_text().split("<!-- opened -->")[1],
            re.MULTILINE,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_running_job_opens_is_documented(backend, tmp_path):
    folders = {"TMPDIR": tmp_path / "tmp", "HOME": tmp_path / "home", ".": tmp_path / "work"}
    for folder in folders.values():
        folder.mkdir()
    folders["TMPDIR"].chmod(0o1777)
    script, go, mark = tmp_path / "script.py", tmp_path / "go", uuid.uuid4().hex
    script.write_text(SCRIPT)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environ = {
        **ours,
        **BACKENDS[backend],
        "MARK": mark,
        "TMPDIR": str(folders["TMPDIR"]),
        "HOME": str(folders["HOME"]),
    }
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(script), str(go)]
    options = {"cwd": folders["."], "env": environ, "stdout": -1, "stderr": -1, "text": True}
    with subprocess.Popen(command, **options) as job:
        try:
            pids = []
            while len(pids) < 2 and (line := job.stdout.readline()):
                pids += map(int, re.findall(r"^ready (\d+)", line))
            os.kill(pids[0], signal.SIGUSR1)  # a flight record
            deadline = time.monotonic() + 20
            written = "jaxmpi-flight-*/rank-*.json"
            while not [*folders["TMPDIR"].glob(written)] and time.monotonic() < deadline:
                time.sleep(0.05)
            others = []
            for path in Path("/proc").glob("[0-9]*"):
                if mark.encode() in environ_of(path.name):
                    others.append(int(path.name))
            processes = {pid: "rank" if pid in pids else "launcher" for pid in {*others, *pids}}
            rows = sockets(processes) | files(processes, folders)
        finally:
            go.touch()
            errors = job.communicate(timeout=60)[1]
    assert job.returncode == 0, errors
    assert not (missing := sorted(rows - documented())), "\n".join(map(str, missing))
    # nobody on the network reaches a rank
    assert {row for row in rows if row[0] == "rank"} <= {("rank", "TCP", "127.0.0.1")}
    left = {general(path.name) for folder in folders.values() for path in folder.iterdir()}
    # the flight record was asked for, and compiled programs are kept
    assert left == {"jaxmpi-flight-*-*", ".cache"}, left
