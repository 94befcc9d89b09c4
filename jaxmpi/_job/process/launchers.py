"""The table of launchers: one row for each program that starts the ranks of MPI jobs.

A row holds the variables that a rank finds in its environment, the launcher's options, and how it
reports a rank that failed. All other code asks the table, so a new launcher is one row. Rows are in
the order in which their variables count: a rank that mpirun starts inside an allocation of Slurm is
one of mpirun.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = [
    "FLUX",
    "INTEL_MPI",
    "LAUNCHERS",
    "MPICH",
    "OPEN_MPI_4",
    "OPEN_MPI_5",
    "PBS",
    "SLURM",
    "Field",
    "Launched",
    "Launcher",
    "find_by_version_text",
    "find_for_library",
    "first_number",
    "launched",
    "names",
]

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Launcher:
    """One launcher. A field that is empty says that there is nothing of the kind.

    Options are named without their dashes. In an option or a value that `jaxmpi run` adds,
    `{share}` stands for the cores of a rank and `{bind}` for what ranks are bound to. Patterns of
    output apply to text whose white space is collapsed; their groups are the fields `rank`, `pid`,
    `host`, `signal`, `code` and `abort` (the code of MPI_Abort).
    """

    name: str  # of a launcher that belongs to an MPI library: its vendor, as mpi4py has it
    manager: str = ""  # the process manager, where several MPIs share it

    # The environment of a rank
    rank: tuple[str, ...] = ()  # variables, the first that is set counts
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # set in every process that this launcher has started, and by it
    identity: tuple[str, ...] = ()  # together, they differ between any two ranks
    job: tuple[str, ...] = ()  # equal in all processes of a job, and in no other job
    daemons: tuple[str, ...] = ()  # the processes that start ranks; how their names begin
    one_host: Pairs = ()  # for a job of one host: MPI opens no port to the network
    one_host_without_shared_memory: Pairs = ()  # the same, where /dev/shm has no room for MPI

    # The environment of a batch job
    node_file: str = ""  # the variable with the path of a list of hosts
    node_list: str = ""  # the variable with the names of the nodes; of one, its name alone
    tasks_per_node: str = ""  # the variable with ranks per node, such as "4(x2),3"

    # The program, and its options
    banner: str = ""  # pattern of its answer to --version; "" where `jaxmpi run` does not use it
    protocol: str = "PMI"  # by which ranks find each other; a library of another one starts alone
    host_list: tuple[str, ...] = ()  # options that name hosts
    host_file: tuple[str, ...] = ()  # options that name a file of hosts
    ranks_per_node: tuple[str, ...] = ()
    placing: tuple[str, ...] = ()  # other options by which a user places or binds ranks
    export: str = ""  # the option that passes a variable to other hosts; "" where all are passed
    arguments: str = ""  # the variable of a rank in which all arguments of its program stand
    as_root: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()  # there are more ranks than cores
    share: tuple[str, ...] = ()  # each rank has cores to itself
    bind: tuple[str, ...] = ()  # ranks are bound to something else, or not bound
    bind_crowded: tuple[str, ...] = ()  # ranks are bound to cores that they share
    needs_path: bool = False  # whether it looks for its own programs on PATH

    # Variables that it or its ranks want
    variables: Pairs = ()
    variables_crowded: Pairs = ()  # there are more ranks than cores
    variables_bind: Pairs = ()  # ranks are bound to something other than their share of the cores
    variables_unbound: Pairs = ()  # ranks are not bound
    scratch: str = ""  # the variable for where it keeps a job's files on its own host
    scratch_excludes: str = ""  # pattern of parameters that a user may have set instead
    scratch_hidden: bool = False  # whether no rank may see the variable
    parameters: tuple[str, ...] = ()  # the program that lists such parameters, and its options

    # How it reports a failure
    names_killed_rank: bool = False  # whether it names a rank that a signal has killed
    verdicts: tuple[str, ...] = ()  # patterns about the rank that ended the job; the first counts
    killed_list: str = ""  # pattern of an entry in its list of all ranks that a signal has ended
    killed_code: Callable[[int], int] | None = None  # its exit code where signal n killed a rank
    lost_hosts: tuple[str, ...] = ()  # patterns about a host that does not answer
    rank_hosts: tuple[str, ...] = ()  # patterns about the host of the rank that ended the job
    proxy_number: str = ""  # pattern of a daemon's command line: the number of its host
    lost_proxy: str = ""  # pattern of what it says, without the host, when it has lost a daemon

    # MPI's files in /dev/shm
    segments: tuple[str, ...] = ()  # how their names begin
    segment_folder: str = ""  # the variable for a folder in the place of /dev/shm
    segment_parameter: str = ""  # a pattern of the names of its parameter


Field = Callable[[Launcher], tuple[str, ...]]  # picks names out of a row

# Open MPI keeps the files of a job in a folder of /tmp that is named after the launcher's process
# id. What a killed job has left there fails a job that has the same id, days later. So `jaxmpi run`
# gives it a folder (`scratch`).
OPEN_MPI_5 = Launcher(
    name="Open MPI",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    # none of those that JAX reads, which `launch/plain_jax` sets under other launchers, too
    marks=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    identity=("PMIX_NAMESPACE", "PMIX_RANK"),
    job=("PMIX_NAMESPACE",),
    daemons=("prte", "mpirun", "mpiexec"),
    # ofi takes a second to find that there is no other host; tcp is the way out where shared
    # memory does not do
    one_host=(("OMPI_MCA_btl", "^ofi,tcp"),),
    one_host_without_shared_memory=(("OMPI_MCA_btl", "^ofi"),),
    banner=r"\(Open MPI\)(?! [1-4]\.)|prterun|PRRTE",
    protocol="PMIx",
    host_list=("host", "H"),
    host_file=("hostfile", "default-hostfile", "machinefile"),
    ranks_per_node=("N", "npernode"),
    placing=(
        *("map-by", "bind-to", "oversubscribe", "cpu-set", "cpu-list", "use-hwthread-cpus"),
        *("npersocket", "rankfile"),
    ),
    export="-x",
    as_root=("--allow-run-as-root",),
    crowded=("--map-by", "slot:OVERSUBSCRIBE"),
    share=("--map-by", "slot:PE={share}", "--bind-to", "core"),
    bind=("--bind-to", "{bind}"),
    bind_crowded=("--bind-to", "{bind}:overload-allowed"),
    variables_crowded=(("OMPI_MCA_mpi_yield_when_idle", "1"),),
    arguments="OMPI_ARGV",
    scratch="PRTE_MCA_prte_local_tmpdir_base",
    scratch_excludes=r"prte_(?:local_|remote_)?tmpdir_base",
    parameters=("prte_info", "--all"),
    names_killed_rank=True,
    verdicts=(
        r"MPI_ABORT was invoked on rank .{1,200}? Proc: \[\[\d+,\d+\],(?P<rank>\d+)\] "
        r"Errorcode: (?P<abort>-?\d+)",
        # Open MPI 4; in another communicator the rank has another number
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD "
        r"with errorcode (?P<abort>-?\d+)",
        r"MPI_ABORT was invoked on rank \d+ in communicator .{1,200}? "
        r"with errorcode (?P<abort>-?\d+)",
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited on signal "
        r"(?P<signal>\d+)",
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exiting improperly",
        r"Process name: \[\S+,(?P<rank>\d+)\] Exit code: (?P<code>\d+)",
    ),
    killed_code=lambda number: 128 + number,
    lost_hosts=(
        r"Remote daemon: \S+ on node (?P<host>\S+)",
        r"A daemon failed to report back .{1,900}? Remote host: (?P<host>\S+)",
    ),
    rank_hosts=(r"process rank \d+ with PID \d+ on node (?P<host>\S+) (?:exited|exiting)",),
    segments=("sm_segment",),
    segment_folder="OMPI_MCA_btl_sm_backing_directory",
    segment_parameter="btl_(?:sm|vader)_backing_directory",
)
OPEN_MPI_4 = replace(
    OPEN_MPI_5,
    daemons=("orted", "mpirun", "mpiexec"),
    banner=r"\(Open MPI\) [1-4]\.|OpenRTE",
    # mpirun sets orte_tmpdir_base for the ranks, and a process that sees both does not start
    scratch="OMPI_MCA_orte_local_tmpdir_base",
    scratch_excludes=r"orte_(?:local_|remote_)?tmpdir_base",
    scratch_hidden=True,
    parameters=("ompi_info", "--all"),
    segments=("vader_segment",),
    segment_folder="OMPI_MCA_btl_vader_backing_directory",
)
MPICH = Launcher(
    name="MPICH",
    manager="Hydra",
    rank=("PMI_RANK",),
    size=("PMI_SIZE", "MPI_WORLD_SIZE"),
    local_rank=("MPI_LOCALRANKID",),
    local_size=("MPI_LOCALNRANKS",),
    marks=("MPI_LOCALNRANKS",),  # others set PMI_RANK and PMI_SIZE, too
    identity=("PMI_FD", "PMI_RANK"),
    daemons=("hydra", "mpirun", "mpiexec"),
    # UCX, which MPICH may use
    one_host=(("UCX_NET_DEVICES", "lo"),),
    one_host_without_shared_memory=(("UCX_NET_DEVICES", "lo"),),
    banner=r"HYDRA|MPICH",
    host_list=("host", "hosts"),
    host_file=("f", "hostfile", "machinefile"),
    ranks_per_node=("ppn", "perhost"),
    placing=("map-by", "bind-to", "rankmap", "configfile"),
    share=("-bind-to", "core:{share}"),
    bind=("-bind-to", "{bind}"),
    bind_crowded=("-bind-to", "{bind}"),
    # Open MPI gives the ranks a pseudo-terminal. Without one, Python would hold their lines back.
    variables=(("PYTHONUNBUFFERED", "1"),),
    verdicts=(
        r"Abort\((?P<abort>-?\d+)\) on node (?P<rank>\d+)",
        r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+) = EXIT CODE: (?P<code>\d+)"
        r"(?:.{1,2000}? \(signal (?P<signal>\d+)\))?",
    ),
    killed_code=lambda number: number,
    rank_hosts=(r"RUNNING AT (?P<host>\S+) = EXIT CODE",),
    proxy_number=r"--proxy-id[\0 ](\d+)",
    lost_proxy=r"control_cb .{0,200}assert \(!closed\) failed",
    segments=("mpich_shm",),
)
INTEL_MPI = replace(
    MPICH,
    name="Intel MPI",
    banner=r"Intel\(R\) MPI",
    share=(),  # it binds each rank to its share of the cores by itself
    bind=(),
    bind_crowded=(),
    needs_path=True,  # its mpirun is a script, which starts the first mpiexec.hydra
    # usleep(0) while a rank waits. Otherwise it spins: on 2 cores, an allgather of 3 ranks took
    # 200 times as long.
    variables_crowded=(("I_MPI_THREAD_YIELD", "3"),),
    # without these it binds each rank to its share of the cores, and with more ranks than cores
    # to one
    variables_bind=(("I_MPI_PIN_DOMAIN", "{bind}"),),
    variables_unbound=(("I_MPI_PIN", "off"),),
    # it lists also the ranks that it has killed itself, because of another one
    killed_list=(
        r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+) "
        r"= KILLED BY SIGNAL: (?P<signal>\d+)"
    ),
    killed_code=lambda number: 255,
    proxy_number="",
    lost_proxy="",
    segments=("Intel_MPI",),
)
MVAPICH = Launcher(
    name="MVAPICH",
    rank=("MV2_COMM_WORLD_RANK",),
    size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    marks=("MV2_COMM_WORLD_SIZE",),
)
PALS = Launcher(
    name="PALS",
    rank=("PALS_RANKID",),
    size=("PALS_SIZE",),
    local_rank=("PALS_LOCAL_RANKID",),
    local_size=("PALS_LOCAL_SIZE",),
    marks=("PALS_RANKID",),
)
FLUX = Launcher(
    name="Flux",
    rank=("FLUX_TASK_RANK",),
    size=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    marks=("FLUX_TASK_RANK",),
    identity=("FLUX_JOB_ID", "FLUX_TASK_RANK"),
    daemons=("flux-shell",),
)
SLURM = Launcher(
    name="Slurm",
    rank=("PMIX_RANK", "SLURM_PROCID"),  # the first one by srun --mpi=pmix
    size=("SLURM_STEP_NUM_TASKS",),
    local_rank=("SLURM_LOCALID",),
    marks=("SLURM_STEP_NUM_TASKS",),
    identity=("SLURM_STEP_ID", "SLURM_PROCID"),
    daemons=("slurmstepd",),
    node_list="SLURM_JOB_NODELIST",
    tasks_per_node="SLURM_TASKS_PER_NODE",
)
PBS = Launcher(name="PBS", node_file="PBS_NODEFILE")  # MPI's own launcher starts the ranks

# Intel's banner comes before MPICH's, whose words it has, too.
_MPI = (OPEN_MPI_5, OPEN_MPI_4, INTEL_MPI, MPICH, MVAPICH)
LAUNCHERS: tuple[Launcher, ...] = (*_MPI, PALS, FLUX, SLURM, PBS)


class Launched(NamedTuple):
    """The facts about a process that its launcher's variables state; None where they do not."""

    launcher: Launcher | None  # the one that has started the process
    rank: int | None
    size: int  # 1 without a launcher
    local_rank: int | None
    local_size: int | None

    @property
    def by(self) -> str:
        """Return " by Flux", or "" where nothing tells which launcher it was."""
        return f" by {self.launcher.manager or self.launcher.name}" if self.launcher else ""


def launched(environ: Mapping[str, str]) -> Launched:
    """Read the variables that launchers set for a rank.

    Several launchers may have set theirs, as mpirun in an allocation of Slurm. The rank is that of
    the first row whose mark is set, or else of the first row; the size is the largest.
    """
    by = None
    for row in reversed(LAUNCHERS):  # the first row counts
        if any(name in environ for name in row.marks):
            by = row
    own = by or Launcher("")
    sizes = _numbers(environ, names(lambda launcher: launcher.size))
    return Launched(
        launcher=by,
        rank=first_number(environ, own.rank + names(lambda launcher: launcher.rank)),
        size=max(sizes, default=1),
        local_rank=first_number(
            environ, own.local_rank + names(lambda launcher: launcher.local_rank)
        ),
        local_size=first_number(
            environ, own.local_size + names(lambda launcher: launcher.local_size)
        ),
    )


def names(field: Field) -> tuple[str, ...]:
    """Return the names in one field of all rows, each once."""
    found: dict[str, None] = {}  # in order
    for launcher in LAUNCHERS:
        found.update(dict.fromkeys(field(launcher)))
    return tuple(found)


def find_by_version_text(text: str) -> Launcher | None:
    """Return the row whose program answers --version with this text."""
    for launcher in LAUNCHERS:
        if launcher.banner and re.search(launcher.banner, text):
            return launcher
    return None


def find_for_library(vendor: str) -> Launcher:
    """Return the row of the launcher that comes with an MPI library.

    An MPI that has no row descends from MPICH.

    Args:
      vendor: the vendor, as mpi4py names it.
    """
    for launcher in LAUNCHERS:
        if launcher.name == vendor:
            return launcher
    return MPICH


def _numbers(environ: Mapping[str, str], variables: tuple[str, ...]) -> list[int]:
    values = [environ.get(name, "") for name in variables]
    return [int(value) for value in values if value.isdigit()]


def first_number(environ: Mapping[str, str], variables: tuple[str, ...]) -> int | None:
    """Return the number in the first of these variables that has one."""
    return next(iter(_numbers(environ, variables)), None)
