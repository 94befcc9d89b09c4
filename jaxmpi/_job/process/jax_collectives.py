"""The library that carries JAX's own collectives on CPUs, and the variables by which JAX loads it.

jaxlib opens it when it is loaded itself, before any Python code can run: the variables must be in
the environment when Python starts. `jaxmpi run` sets them for its ranks, and `jaxmpi doctor` prints
them for other launchers. native/mpi_abi.h says how jaxlib calls the library.
"""

import ctypes
import mmap
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "IMPLEMENTATION",
    "LIBRARY",
    "LIBRARY_VARIABLE",
    "MPI_VARIABLE",
    "begin_to_leave",
    "find_library",
    "leave_end_to_monitor",
    "leave_rank_to_monitor",
    "only_cpus",
    "unknown_symbols",
    "why_not",
]

LIBRARY = "libjaxmpi_collectives.so"
LIBRARY_VARIABLE = "MPITRAMPOLINE_LIB"
IMPLEMENTATION = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"  # "mpi", to use it
MPI_VARIABLE = "JAXMPI_LIBMPI"  # the MPI library that it opens

# Versions of jaxlib whose symbols are those of native/mpi_symbols.txt. Others are looked at.
KNOWN_JAXLIB = ("0.10.2",)
_SYMBOL = re.compile(rb"\0(P?MPIX?ABI_\w+)(?=\0)")
# the files of drivers whose devices JAX would use in the place of CPUs
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")


def find_library() -> Path | None:
    """Return the path of the library, beside the extension; None if it is not built."""
    try:
        spec = find_spec("jaxmpi._native")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin).with_name(LIBRARY)
    return path if path.exists() else None


def leave_end_to_monitor(is_left: bool) -> None:
    """Have the library only report long waits if `is_left`; else end the job for them again.

    The monitor knows what all ranks do in a program of jaxmpi: a long wait may be for a rank that
    computes for long. It does not see the collectives of plain JAX beside these programs.
    """
    library = _loaded_library()
    if library is not None:
        library.jaxmpi_leave_end_to_monitor(int(is_left))


def leave_rank_to_monitor() -> None:
    """Have the library neither watch this rank nor write its records: a monitor is about to.

    Where JAX has made its devices already, the library has watched it until now.
    """
    library = _loaded_library()
    if library is not None:
        library.jaxmpi_leave_rank_to_monitor()


def begin_to_leave() -> None:
    """Have the library tell the other ranks that this one has left, once it is idle.

    A rank that waits for it in a collective of plain JAX ends the job then. It is not taken back:
    the script must have ended.
    """
    library = _loaded_library()
    if library is not None:
        library.jaxmpi_begin_to_leave()


@cache
def _loaded_library() -> ctypes.CDLL | None:
    """Return the library if the variables name it, with which jaxlib has opened it; else None."""
    path = os.environ.get(LIBRARY_VARIABLE)
    return ctypes.CDLL(path) if path and path == str(find_library()) else None


def only_cpus(environ: Mapping[str, str]) -> bool:
    """Return whether JAX uses CPUs in this environment: by JAX_PLATFORMS, or without a GPU."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(os.path.exists(path) for path in _ACCELERATORS)


def why_not() -> str:
    """Return why JAX cannot use the library, as a sentence with what to do; "" if it can.

    A symbol that jaxlib asks for and the library lacks would end each process while it imports JAX.
    """
    library = find_library()
    if library is None:
        return (
            "jaxmpi is installed without its extension, and JAX's own collectives run over gloo. "
            "Build it with a C++ compiler."
        )
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return ""
    if version in KNOWN_JAXLIB:
        return ""
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return ""
    unknown = unknown_symbols(Path(spec.submodule_search_locations[0]), library)
    if unknown is None:
        return (
            f"jaxlib {version} has no collectives over MPI, and JAX's own collectives run over "
            "gloo."
        )
    if unknown:
        return (
            f"jaxlib {version} asks for {unknown[0]}, which jaxmpi's library does not have, and "
            "JAX's own collectives run over gloo. Install a newer jaxmpi."
        )
    return ""


def unknown_symbols(jaxlib: Path, library: Path) -> list[str] | None:
    """Return the symbols that jaxlib asks for and a library does not define, sorted.

    It is None where jaxlib asks for none.

    Args:
      jaxlib: the folder of the package.
      library: the path of the library.
    """
    wanted: set[bytes] = set()
    for path in sorted(jaxlib.glob("*.so")):
        wanted |= _names_in(path)
    if not wanted:
        return None
    return sorted(name.decode() for name in wanted - _names_in(library))


def _names_in(path: Path) -> set[bytes]:
    """Return the symbols of MPItrampoline's interface that stand in a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {found[1] for found in _SYMBOL.finditer(data)}
