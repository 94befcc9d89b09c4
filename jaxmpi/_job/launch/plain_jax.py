"""Variables for plain JAX programs: those that call `jax.distributed.initialize()`, unchanged.

JAX reads them when it is imported, or when the program starts its processes. With them, XLA's
collectives on CPUs run over the native transport, and `jax.distributed.initialize()` finds the
other ranks.

A program that calls `jaxmpi.init` gets them, too. Its backend `mpi` does not use them. Backend
`xla` on CPUs does with JAXMPI_XLA=auto, the default: XLA's collectives then run over the native
transport, and over gloo without these variables.
"""

import json
import random
import socket
import sys
from collections.abc import Mapping, Sequence

from jaxmpi._job.launch.mpiexec import Mpiexec
from jaxmpi._job.launch.placement import host_names, on_other_nodes, same_host
from jaxmpi._job.process import jax_collectives, launchers
from jaxmpi._job.process.launchers import Launcher

__all__ = ["names_for_jax", "variables"]

LOOPBACK = "127.0.0.1"
LOOPBACK_NETWORK = "127."
# An address of no host (RFC 5737), which the default route leads to
ELSEWHERE = "192.0.2.1"
# JAX reads the coordinator's address from the variable by which Open MPI 4 tells its ranks where
# mpirun is. Its port is FIRST_PORT plus the number of the job, in units of JOB_UNIT.
ORTE_URI = "OMPI_MCA_orte_hnp_uri"
JOB_UNIT = 2**12
FIRST_PORT = 65536 - 2**12
PORTS = range(FIRST_PORT + 1, 65536)  # for a job's number above 0

_taken: list[socket.socket] = []  # the names of this process's ports, until it ends

# of `names_for_jax`; not a shell, which drops variables such as BASH_FUNC_module%%
_COPY_NAMES = """
import json, os, sys
for name, source in json.loads(sys.argv[1]).items():
    if source in os.environ:
        os.environ[name] = os.environ[source]
os.execvp(sys.argv[2], sys.argv[2:])
"""


def variables(
    mpiexec: Mpiexec, library: str, options: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for the ranks.

    Those of the library are set all or none: with a library of the user, JAX must not be told to
    use it. None is set where JAX uses a GPU, cannot use the library, or the user has chosen other
    collectives. The coordinator is for CPUs and GPUs. A variable that the user has set keeps its
    value.

    Args:
      mpiexec: the launcher.
      library: the path of the MPI library that mpi4py loads.
      options: MPI's options of the user.
      environ: the variables of the user.
    """
    added = _coordinator(mpiexec, options, environ) | _collectives(library, environ)
    return {name: value for name, value in added.items() if name not in environ}


def names_for_jax(launcher: Launcher) -> list[str]:
    """Return the words before a rank's program by which `jax.distributed.initialize()` knows it.

    JAX reads a rank's number, and the number of ranks, from Open MPI's variables. Another launcher
    has variables of its own, and sets them in the rank only. So a Python without libraries copies
    them, and becomes the program.
    """
    jax_reads = launchers.OPEN_MPI_5
    if launcher.name == jax_reads.name:
        return []
    names = {
        jax_reads.rank[0]: launcher.rank[0],
        jax_reads.size[0]: launcher.size[0],
        jax_reads.local_rank[0]: launcher.local_rank[0],
    }
    return [sys.executable, "-I", "-S", "-c", _COPY_NAMES, json.dumps(names)]


def _collectives(library: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which JAX uses the library for its collectives, or none of them."""
    path = jax_collectives.find_library()
    if path is None or not jax_collectives.only_cpus(environ) or jax_collectives.why_not():
        return {}
    chosen = {
        jax_collectives.LIBRARY_VARIABLE: str(path),
        jax_collectives.IMPLEMENTATION: "mpi",
    }
    for name, value in chosen.items():
        if environ.get(name, value) != value:
            return {}
    if library.startswith("/"):
        chosen[jax_collectives.MPI_VARIABLE] = library
    return chosen


def _coordinator(
    mpiexec: Mpiexec, options: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return by which variables `jax.distributed.initialize()` finds rank 0.

    JAX knows the ranks of Open MPI and of Slurm. Open MPI 4 sets the variable itself; under others,
    the ranks have Open MPI's other variables from `names_for_jax`.
    """
    if mpiexec.launcher is launchers.OPEN_MPI_4 or ORTE_URI in environ:
        return {}
    here, host = _place_of_rank_0(options, environ)
    if not host:
        return {}
    # A port can be tested on this host only.
    port = _free_port() if here else random.SystemRandom().choice(PORTS)
    return {ORTE_URI: f"{(port - FIRST_PORT) * JOB_UNIT}.0;tcp://{host}:{port}"}


def _place_of_rank_0(options: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether rank 0 runs on this host, and the address at which the other ranks reach it.

    Rank 0 runs on the first host that the options name, or on this one. The address is "" if there
    is none that ranks on other hosts can connect to.
    """
    names = host_names(options)
    others = [name for name in names if not _is_this_host(name)]
    if not on_other_nodes(options, environ) or (names and not others):
        return True, LOOPBACK
    if names and names[0] in others:
        return False, _resolve(names[0])
    return True, _own_address(others)


def _is_this_host(name: str) -> bool:
    """Return whether a name belongs to this host."""
    return same_host(name, socket.gethostname()) or _resolve(name).startswith(LOOPBACK_NETWORK)


def _own_address(others: Sequence[str]) -> str:
    """Return an address of this host for other hosts; "" if there is none.

    The name of this host may stand for a loopback address: Debian and Ubuntu map it to 127.0.1.1.
    Ranks of other hosts would connect to themselves there. So the route to another host decides,
    and the name only where none is known.

    Args:
      others: names of other hosts of the job; those that are not known are left out.
    """
    found = [_route_source(_resolve(name)) for name in others]
    found += [_resolve(socket.gethostname()), _route_source(ELSEWHERE)]
    for address in found:
        if address and not address.startswith(LOOPBACK_NETWORK):
            return address
    return ""


def _route_source(address: str) -> str:
    """Return the address from which this host sends to another one; "" without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # of UDP: it looks up the route, and sends nothing
            return str(probe.getsockname()[0]) if address else ""
    except OSError:
        return ""


def _resolve(name: str) -> str:
    """Return the IPv4 address of a host; "" if it is not known."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def _free_port() -> int:
    """Return a port that JAX can derive from a job's number, and that is free on this host.

    No other job of this host is given it while this process runs. JAX's coordinator listens at it
    some seconds later only, and two coordinators can share a port: gRPC sets SO_REUSEPORT. A rank
    may then reach that of the other job, and both jobs fail.
    """
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    for port in ports:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0jaxmpi coordinator {port}")  # one process at a time can have this name
            with socket.socket() as probe:
                probe.bind(("", port))  # the coordinator listens at all addresses
        except OSError:
            name.close()
            continue
        _taken.append(name)
        return port
    return ports[0]
