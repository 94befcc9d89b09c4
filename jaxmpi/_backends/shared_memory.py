"""Memory that the ranks of a node share: a file that all of them map, and that has no name any more once they do."""

import mmap
import os
import uuid

from jaxmpi._backends.communicator import Communicator
from jaxmpi._errors import MPIError
from jaxmpi._job.process.run_dir import SEGMENT_PREFIX

__all__ = ["SHARED_MEMORY", "shared_memory"]

SHARED_MEMORY = "/dev/shm"


def shared_memory(world: Communicator, node: Communicator, size: int) -> tuple[int, mmap.mmap]:
    """A file of zeros that all ranks of `node` map, and that has no name any more once they do; on all ranks, or on none."""
    path, mapped, failure = "", None, ""
    if node.rank == 0:  # it makes the file, then the others open it
        path = f"{SHARED_MEMORY}/{SEGMENT_PREFIX}{uuid.uuid4().hex}"
        mapped, failure = _mapped(path, os.O_CREAT | os.O_EXCL, size)
    path, failure = node.bcast((path, failure))
    if node.rank and not failure:
        mapped, failure = _mapped(path, 0, size)
    failures = [other for other in world.allgather(failure) if other]
    if node.rank == 0 and mapped:
        os.unlink(path)
    if mapped and not failures:
        return mapped
    if mapped:
        os.close(mapped[0])
        mapped[1].close()
    raise MPIError(
        f"init: a host cannot share {size >> 20} MiB of memory among its {node.size} ranks: "
        f"{failures[0]}. "
        f"Make room in {SHARED_MEMORY}, or set JAXMPI_TRANSPORT=mpi4jax."
    )


def _mapped(path: str, flags: int, size: int) -> tuple[tuple[int, mmap.mmap] | None, str]:
    """A file and its memory, or why there is none; a file that was made and cannot be mapped is removed."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        if flags:
            os.posix_fallocate(file, 0, size)  # an error now, rather than a bus error later
        return (file, mmap.mmap(file, size)), ""
    except (OSError, ValueError) as error:
        if file >= 0:
            os.close(file)
            if flags:
                os.unlink(path)
        return None, f"{error} on {os.uname().nodename}"
