"""NCCL, which carries XLA's collectives on NVIDIA GPUs: its version, and ranks that share a GPU.

NCCL before 2.30 refuses two ranks on one GPU ("Duplicate GPU detected"). From 2.30 on it takes them
where `NCCL_MULTI_RANK_GPU_ENABLE` is 1. NVLS, NVLink's sums in the switch, does not work between
ranks of one GPU. The kernels of NCCL spin until those of the other ranks run, too, so each may
use a few of the GPU's multiprocessors only (`NCCL_MAX_CTAS`). Two processes run kernels at the same
time under CUDA's Multi-Process Service (MPS) only; without it their contexts take turns.

Which NCCL is loaded: JAX's CUDA plugin loads `nvidia/nccl/lib/libnccl.so.2` of the Python package
by its path, before anything else, and only without that package the library of LD_LIBRARY_PATH.
The dynamic loader looks names up in what is loaded already, so a library of this name that the
program has loaded before comes first.
"""

import ctypes
import os
from collections.abc import MutableMapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from jaxmpi._errors import MPIError

__all__ = ["MPS_PIPES", "Nccl", "allow_sharing", "check_versions", "find", "mps_folder", "why_not"]

LIBRARY = "libnccl.so.2"
PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # both install nvidia/nccl/lib/libnccl.so.2
SHARING = (2, 30)  # the first version that takes several ranks on one GPU
MULTIPROCESSORS = 8  # for the kernels of all ranks on a GPU together
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"  # of the MPS daemon where the variable is not set


class Nccl(NamedTuple):
    """The NCCL that a process loads, or has loaded."""

    version: tuple[int, ...] = ()  # such as (2, 30, 7); empty if none was found
    source: str = ""  # a package, or the path or name of the library

    def __str__(self) -> str:
        if not self.version:
            return "no NCCL"
        return f"NCCL {'.'.join(map(str, self.version))}"


def find() -> Nccl:
    """Find the NCCL that JAX has loaded, or will load, in this process; no GPU is needed.

    A library that no package describes is loaded, to ask it.
    """
    # RTLD_NOLOAD: an error if the library is not loaded yet
    if (loaded := _ask(LIBRARY, os.RTLD_NOLOAD | os.RTLD_NOW)).version:
        return loaded._replace(source=f"loaded {LIBRARY}")
    if (path := _packaged()) is None:
        return _ask(LIBRARY)
    installed = []
    for package in PACKAGES:
        try:
            installed.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    # Two packages write the same file, and one that is none of ours may come first on the path.
    if len(installed) == 1 and path.is_relative_to(_home(installed[0][0])):
        package, version = installed[0]
        return Nccl(_numbers(version), package)
    return _ask(str(path))


def _packaged() -> Path | None:
    """Return the library of the package `nvidia.nccl`, where that is installed."""
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no package nvidia
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "lib", LIBRARY)
        if path.exists():
            return path
    return None


def _home(package: str) -> Path:
    """Return the folder that a distribution is installed in."""
    return Path(str(metadata.distribution(package).locate_file("")))


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 30, 7) for "2.30.7.post1"."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _ask(library: str, mode: int = os.RTLD_NOW) -> Nccl:
    """Ask a library for its version; it is loaded if it is not yet."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library, mode=mode).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return Nccl()
    if failed:
        return Nccl()
    # 23007 is 2.30.7, and before 2.9 the major number counted thousands
    major, rest = divmod(number.value, 10_000 if number.value >= 10_000 else 1000)
    return Nccl((major, *divmod(rest, 100)), library)


def why_not(nccl: Nccl) -> str:
    """Return why several ranks cannot share a GPU over this NCCL; "" if they can."""
    if not nccl.version:
        return "no NCCL was found"
    if nccl.version < SHARING:
        return f"{nccl} takes one rank on a GPU"
    return ""


def check_versions(everyone: Sequence[Nccl]) -> None:
    """Raise an error on every rank if the ranks have different versions of NCCL.

    NCCL refuses these, too, but its text does not reach all ranks. Ranks on which no NCCL was
    found count as equal to all.

    Args:
      everyone: the NCCL of each rank.

    Raises:
      MPIError: two ranks have different versions.
    """
    known = [(rank, nccl) for rank, nccl in enumerate(everyone) if nccl.version]
    for rank, nccl in known[1:]:
        first_rank, first = known[0]
        if nccl.version != first.version:
            raise MPIError(
                f"init: rank {first_rank} has {first} ({first.source}), and rank {rank} has {nccl} "
                f"({nccl.source}).",
                advice="Install the same version on every host, or set JAXMPI_BACKEND=mpi.",
            )


def allow_sharing(
    everyone: Sequence[Nccl],
    on_gpu: Sequence[Sequence[int]],
    rank: int,
    environ: MutableMapping[str, str],
) -> str:
    """Set NCCL's variables on the ranks that share a GPU; return how they communicate, in words.

    What the user has set stays. Call it before JAX starts.

    Args:
      everyone: the NCCL of each rank, of equal versions.
      on_gpu: for each rank, the ranks that have its GPU.
      rank: this rank.
      environ: `os.environ`.

    Raises:
      MPIError: NCCL cannot do that on one of the ranks that share a GPU. Raised on every rank.
    """
    for ranks in on_gpu:
        if len(ranks) < 2:
            continue
        for one in ranks:
            if why := why_not(everyone[one]):
                raise MPIError(
                    f"init: ranks {[*ranks]} share a GPU on backend xla, and {why} "
                    f"(on rank {one}).",
                    advice=f"Install NCCL {'.'.join(map(str, SHARING))} or later on every host "
                    f"(pip install --upgrade {_package()}), start one rank per GPU, or set "
                    "JAXMPI_BACKEND=mpi.",
                )
    most = max(map(len, on_gpu), default=0)
    if most < 2:
        return ""
    # These must be equal on all ranks of a communicator, also on those with a GPU of their own.
    wanted = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, MULTIPROCESSORS // most)),
    }
    for name, value in wanted.items():
        if not environ.get(name):
            environ[name] = value
    folder = mps_folder(environ)
    mps = f"CUDA MPS in {folder}" if folder else "no CUDA MPS: `jaxmpi run --mps` starts it"
    return f"{everyone[rank]} with NCCL_MAX_CTAS={environ['NCCL_MAX_CTAS']}, {mps}"


def _package() -> str:
    """Return the name of the package to install: the one of CUDA 12 where JAX has that plugin."""
    of_12 = find_spec("jax_cuda12_plugin") and not find_spec("jax_cuda13_plugin")
    return PACKAGES[1] if of_12 else PACKAGES[0]


def mps_folder(environ: MutableMapping[str, str]) -> str:
    """Return the folder of the pipes of CUDA's Multi-Process Service; "" if it does not run.

    CUDA uses MPS in a process where this folder has the pipe of a daemon.
    """
    folder = environ.get(MPS_PIPES) or DEFAULT_PIPES
    return folder if Path(folder, "control").exists() else ""
