"""The MPI libraries that this process has loaded: of two, one may get the calls for the other.

A second one comes with a package that was built against another MPI than mpi4py (h5py, petsc4py,
mpi4jax), or by LD_PRELOAD.
"""

import ctypes
import os
import re
from collections.abc import Iterable

__all__ = ["library_of", "loaded", "mpi_libraries"]

# Other libraries of an MPI: bindings for other languages, and its own parts.
BESIDE = (
    "mpifh",
    "usempi",
    "fort",
    "cxx",
    "CC",
    "java",
    "f77",
    "f90",
    "f08",
    "gtl",
    "heap",
    "profile",
)


def mpi_libraries(paths: Iterable[str]) -> list[str]:
    """Return the paths that are MPI libraries, sorted.

    Such as libmpi.so.40, libmpich.so.12 and libmpi_cray.so.
    """
    found = set()
    for path in paths:
        name = os.path.basename(path)
        if any(part in name for part in BESIDE):
            continue
        if re.fullmatch(r"libmpi(ch|_abi|_cray|_gnu|_intel)?[\w-]*\.so[.\d]*", name):
            found.add(path)
    return sorted(found)


def loaded() -> list[str]:
    """Return the paths of the MPI libraries of this process."""
    return mpi_libraries(path for _, _, path in _mapped())


def library_of(extension: str) -> str | None:
    """Return the MPI library that an extension module calls; None if that cannot be told."""
    function = getattr(ctypes.CDLL(extension), "MPI_Init_thread", None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    paths = [path for start, end, path in _mapped() if start <= address < end]
    return paths[0] if mpi_libraries(paths) else None


def _mapped() -> list[tuple[int, int, str]]:
    """Return (start, end, path) of each mapping of a file whose name may be an MPI library's."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/libmpi" in line:
                addresses, path = line.split()[0], line.split(maxsplit=5)[5].strip()
                start, end = (int(x, 16) for x in addresses.split("-"))
                found.append((start, end, path))
    return found
