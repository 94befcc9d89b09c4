"""Which MPI libraries this process has loaded: calls that are meant for one of two may reach the other.

A second one comes with a package that was built against another MPI than mpi4py (h5py, petsc4py,
mpi4jax), or by LD_PRELOAD.
"""

import ctypes
import os
import re
from collections.abc import Iterable

__all__ = ["library_of", "loaded", "mpi_libraries"]

# What an MPI has beside its library: bindings for other languages, and parts of its own.
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
    """Those paths that are MPI libraries, sorted: libmpi.so.40, libmpich.so.12, libmpi_cray.so."""
    found = set()
    for path in paths:
        name = os.path.basename(path)
        if re.fullmatch(r"libmpi(ch|_abi|_cray|_gnu|_intel)?[\w-]*\.so[.\d]*", name) and not any(
            x in name for x in BESIDE
        ):
            found.add(path)
    return sorted(found)


def loaded() -> list[str]:
    """The MPI libraries of this process."""
    return mpi_libraries(path for _, _, path in _mapped())


def library_of(extension: str) -> str | None:
    """The MPI library that an extension module calls, by its file; None if that cannot be told."""
    function = getattr(ctypes.CDLL(extension), "MPI_Init_thread", None)
    if function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    paths = [path for start, end, path in _mapped() if start <= address < end]
    return paths[0] if mpi_libraries(paths) else None


def _mapped() -> list[tuple[int, int, str]]:
    """(start, end, path) of each part of a file in memory whose name may be that of an MPI library."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/libmpi" in line:
                addresses, path = line.split()[0], line.split(maxsplit=5)[5].strip()
                start, end = (int(x, 16) for x in addresses.split("-"))
                found.append((start, end, path))
    return found
