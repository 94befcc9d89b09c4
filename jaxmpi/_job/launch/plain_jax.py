"""Variables for plain JAX programs: those that call `jax.distributed.initialize()`, unchanged.

JAX reads them when it is imported, before the program can do anything. With them, XLA's collectives
on CPUs run over the native transport, and `jax.distributed.initialize()` finds the other ranks. A
program that calls `jaxmpi.init` is not affected: its backends choose for themselves.
"""

import random
import socket
from collections.abc import Mapping, Sequence

from jaxmpi._job.launch.mpiexec import Mpiexec
from jaxmpi._job.launch.placement import named_hosts, on_other_nodes
from jaxmpi._job.process import jax_collectives, launchers

__all__ = ["variables"]

LOOPBACK = "127.0.0.1"
# JAX reads the coordinator's address from the variable by which Open MPI 4 tells its ranks where
# mpirun is. Its port is FIRST_PORT plus the number of the job, in units of JOB_UNIT.
ORTE_URI = "OMPI_MCA_orte_hnp_uri"
JOB_UNIT, PORTS = 2**12, 2**12
FIRST_PORT = 65536 - PORTS


def variables(
    mpiexec: Mpiexec, library: str, options: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables for the ranks; empty where JAX uses no CPUs, or cannot use the library.

    A variable that the user has set keeps its value.

    Args:
      mpiexec: the launcher.
      library: the path of the MPI library that mpi4py loads.
      options: MPI's options of the user.
      environ: the variables of the user.
    """
    if not jax_collectives.only_cpus(environ):
        return {}
    added = _coordinator(mpiexec, options, environ)
    path = jax_collectives.find_library()
    if path is not None and not jax_collectives.why_not():
        added |= {
            jax_collectives.LIBRARY_VARIABLE: str(path),
            jax_collectives.IMPLEMENTATION: "mpi",
        }
        if library.startswith("/"):
            added[jax_collectives.MPI_VARIABLE] = library
    return {name: value for name, value in added.items() if name not in environ}


def _coordinator(
    mpiexec: Mpiexec, options: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return by which variables `jax.distributed.initialize()` finds rank 0.

    JAX knows the ranks of Open MPI and of Slurm. Open MPI 4 sets the variable itself.
    """
    if mpiexec.launcher is not launchers.OPEN_MPI_5 or ORTE_URI in environ:
        return {}
    here = not on_other_nodes(options, environ)
    host = LOOPBACK if here else _address(next(iter(named_hosts(options)), ""))
    if not host:
        return {}
    port = _free_port()
    return {ORTE_URI: f"{(port - FIRST_PORT) * JOB_UNIT}.0;tcp://{host}:{port}"}


def _free_port() -> int:
    """Return a port that JAX can derive from a job's number, and that is free on this host."""
    ports = random.SystemRandom().sample(range(FIRST_PORT + 1, FIRST_PORT + PORTS), PORTS - 1)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    return ports[0]


def _address(host: str) -> str:
    """Return the address of a host; that of this one, as others see it, if it has no name."""
    try:
        return socket.gethostbyname(host or socket.gethostname())
    except OSError:
        return ""
