"""JAX's own processes: the ranks of a job join them, so that `jax.process_index()` is the rank.

The xla backend stands on them. On the mpi backend a program may ask for them, for libraries that
read `jax.process_index()`.
"""

import contextlib
import os
import socket
from collections.abc import Callable

import jax

from jaxmpi import _jaxcompat
from jaxmpi._job.process import settings

__all__ = ["join_jax_processes"]

LOOPBACK = "127.0.0.1"


def join_jax_processes(
    rank: int, size: int, one_host: bool, from_rank_0: Callable[[object], tuple[str, str, int]]
) -> None:
    """Have JAX's processes find each other, before JAX starts. In a job of one host, they listen at loopback only.

    **Collective:** every rank calls it.

    Args:
      rank: of this process.
      size: the number of ranks.
      one_host: whether all ranks are on this host.
      from_rank_0: returns rank 0's argument on every rank.

    Raises:
      RuntimeError: JAX has started already; `jax.distributed.initialize` was called with other
        numbers; the processes do not reach each other.
    """
    if jax.distributed.is_initialized():
        index, count = jax.process_index(), jax.process_count()
        if (index, count) == (rank, size):
            return
        raise RuntimeError(
            f"init: jax.distributed.initialize has made this process {index} of {count}, and it is "
            f"rank {rank} of {size} in MPI. Leave that call out: jaxmpi.init() makes it, on the "
            "mpi backend with jax_processes=True."
        )
    if _jaxcompat.backends_started():
        raise RuntimeError(
            "init: JAX has started already, and its processes must join before that. Call "
            "jaxmpi.init() before any code that makes an array or asks for devices, imports that "
            "do so included."
        )
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    host = (LOOPBACK if one_host else _host()) if rank == 0 else ""
    host, bind, port = from_rank_0((host, *_bindable(host)) if host else None)
    _jaxcompat.gloo_listens_at(LOOPBACK if one_host else _towards(host))
    address = f"{host}:{port}"
    _pass_proxies(host)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(
            address,
            size,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            coordinator_bind_address=os.environ.get(
                "JAX_COORDINATOR_BIND_ADDRESS", f"{bind}:{port}"
            ),
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"init: JAX's processes could not join each other at {address}: {error} Set "
            "JAXMPI_HOST on rank 0 to an address that all hosts reach."
        ) from error


def _pass_proxies(host: str) -> None:
    """Have gRPC, which JAX's processes talk by, connect to a host without the proxy that http_proxy names."""
    name = "no_grpc_proxy"
    os.environ[name] = ",".join(
        filter(None, [os.environ.get(name) or os.environ.get("no_proxy"), host])
    )
    with contextlib.suppress(AttributeError):  # JAX's warning about it
        jax.config.update("jax_check_proxy_envs", False)


def _host() -> str:
    """An address of this host that the other ranks can reach; JAXMPI_HOST, on rank 0, overrides it."""
    # an address of nobody: the interface that leads outside
    return settings.get("JAXMPI_HOST") or _towards("192.0.2.1")


def _towards(host: str) -> str:
    """The address of this host that another host sees; the name of this host where there is no way to that one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _bindable(host: str) -> tuple[str, int]:
    """The address to listen at, and a free port of it: `host`, or all addresses where that is none of this host's own."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:  # it leads here in another way
            host = "0.0.0.0"
            probe.bind((host, 0))
        return host, int(probe.getsockname()[1])
