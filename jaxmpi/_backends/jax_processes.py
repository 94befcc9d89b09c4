"""JAX's own processes, which the ranks join, and the address at which they find rank 0.

Backend "xla" stands on them. On backend "mpi" a program may ask for them, too, for libraries that
read `jax.process_index()`.

JAX wants one address of rank 0 for all processes, and ends a process that does not reach it after a
minute, without a Python error. A host has several addresses, its name may stand for loopback
(Debian maps it to 127.0.1.1), and the network of the compute nodes often has no default route. So
rank 0 listens at each address that it may have, the other hosts try them, and JAX gets one that all
have reached.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax

from jaxmpi import _jaxcompat
from jaxmpi._job.process import jax_collectives, settings

__all__ = ["join_jax_processes"]

LOOPBACK = "127.0.0.1"
NOWHERE = "192.0.2.1"  # an address of nobody: the route to it is the default route
TRY_SECONDS = 5.0  # to connect to an address, and to be answered
TOKEN_BYTES = 16
UNREACHABLE = (OSError, UnicodeError)  # the second one: of a text that is no name of a host
SIOCGIFADDR = 0x8915  # of Linux: the address of an interface

R = TypeVar("R")
Exchange = Callable[[object], list]  # returns the arguments of all ranks


class Address(NamedTuple):
    """Where rank 0 can be reached."""

    host: str
    bind: str  # where it listens: `host`, or all addresses if that is none of its own
    port: int


def join_jax_processes(rank: int, size: int, one_host: bool, exchange: Exchange) -> None:
    """Have JAX's processes find each other, before JAX starts.

    `jax.process_index()` is the rank then. In a job of one host, they listen at loopback only.

    **Collective:** every rank calls it.

    Args:
      rank: of this process.
      size: the number of ranks.
      one_host: whether all ranks are on this host.
      exchange: returns the arguments of all ranks, as MPI's allgather does.

    Raises:
      RuntimeError: on all ranks: on one of them JAX has started already, or
        `jax.distributed.initialize` was called with other numbers or not on all of them, or the
        processes do not reach each other.
    """
    obstacle = _obstacle(rank, size)
    states = exchange((jax.distributed.is_initialized(), obstacle))
    if obstacle:
        raise RuntimeError(f"init: {obstacle}")
    for other, (_, its_obstacle) in enumerate(states):
        if its_obstacle:
            raise RuntimeError(f"init: rank {other} cannot join the others: {its_obstacle}")
    joined = [other for other, (has_joined, _) in enumerate(states) if has_joined]
    if len(joined) == size:
        return
    if joined:
        raise RuntimeError(
            f"init: jax.distributed.initialize was called on rank {joined[0]}, and not on all "
            "ranks. Leave that call out: jaxmpi.init() makes it."
        )
    _choose_collectives()
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        found = _from_rank_0(rank, exchange, lambda: Address(LOOPBACK, *_bindable(LOOPBACK)))
        _jaxcompat.gloo_listens_at(LOOPBACK)
    else:
        found = find_address(rank, socket.gethostname(), exchange)
        _jaxcompat.gloo_listens_at(_own_address(found.host))
    host, bind, port = found
    address = f"{host}:{port}"
    _bypass_proxies(host)
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


def _obstacle(rank: int, size: int) -> str:
    """Return why this process cannot join JAX's processes, and what to do; "" if it can."""
    if jax.distributed.is_initialized():
        index, count = jax.process_index(), jax.process_count()
        if (index, count) != (rank, size):
            return (
                f"jax.distributed.initialize has made this process {index} of {count}, and it is "
                f"rank {rank} of {size} in MPI. Leave that call out: jaxmpi.init() makes it, on "
                "the mpi backend with jax_processes=True."
            )
    elif _jaxcompat.backends_started():
        return (
            "JAX has started already, and its processes must join before that. Call jaxmpi.init() "
            "before any code that makes an array or asks for devices, imports that do so included."
        )
    else:
        return _why_not_collectives()
    return ""


def _why_not_collectives() -> str:
    """Return why JAX cannot use what JAXMPI_XLA names for its collectives on CPUs; "" if it can."""
    ours = os.environ.get(jax_collectives.LIBRARY_VARIABLE) == str(jax_collectives.find_library())
    if settings.get("JAXMPI_XLA") != "mpi" or ours:
        return ""
    reason = jax_collectives.why_not() or "Python was started without its variables."
    return (
        f"JAXMPI_XLA is mpi, and jaxlib has not loaded jaxmpi's library: {reason} Start the ranks "
        "with `jaxmpi run`, or set the variables that `jaxmpi doctor` prints."
    )


def _choose_collectives() -> None:
    """Have JAX use what JAXMPI_XLA names for its collectives on CPUs.

    `jaxmpi run` asks JAX for MPI in all programs; "auto" leaves it at what JAX was asked for.
    """
    if (wanted := settings.get("JAXMPI_XLA")) != "auto":
        jax.config.update("jax_cpu_collectives_implementation", wanted)


def _bypass_proxies(host: str) -> None:
    """Have gRPC, by which JAX's processes talk, connect without the proxy that http_proxy names."""
    name = "no_grpc_proxy"
    os.environ[name] = ",".join(
        filter(None, [os.environ.get(name) or os.environ.get("no_proxy"), host])
    )
    with contextlib.suppress(AttributeError):  # JAX's warning about it
        jax.config.update("jax_check_proxy_envs", False)


# the address of rank 0


def find_address(rank: int, host: str, exchange: Exchange) -> Address:
    """Return an address of rank 0 that the ranks of all hosts reach.

    **Collective:** every rank calls it. One rank of each other host connects to rank 0.

    Args:
      rank: of this process.
      host: the name of this host.
      exchange: returns the arguments of all ranks, as MPI's allgather does.

    Raises:
      RuntimeError: on all ranks, there is no such address; the error has what was tried.
    """
    with contextlib.ExitStack() as at_end:

        def listen() -> tuple[list[Address], bytes]:
            listening = Listening.at(_candidates())
            at_end.callback(listening.close)
            return listening.addresses, listening.token

        addresses, token = _from_rank_0(rank, exchange, listen)
        hosts = exchange(host)
        # the first rank of each host but rank 0's tries for its host
        tries = host != hosts[0] and hosts.index(host) == rank
        found = exchange(_try_all(addresses, token) if tries else None)
    failures = []
    for i, address in enumerate(addresses):
        own = [
            f"{address.host} from {each}: {errors[i]}"
            for each, errors in zip(hosts, found, strict=True)
            if errors and errors[i]
        ]
        if not own:
            return address
        failures += own
    raise RuntimeError(
        f"init: JAX's processes need an address of rank 0's host, {hosts[0]}, that all hosts "
        f"reach, and there is none ({'; '.join(failures) or 'it has no address'}). Set JAXMPI_HOST "
        "on rank 0 to an address that all hosts reach, and open its firewall to them."
    )


def _from_rank_0(rank: int, exchange: Exchange, make: Callable[[], R]) -> R:
    """Return what rank 0 makes; where it fails there, raise a RuntimeError on all ranks."""
    made, failure = None, ""
    if rank == 0:
        try:
            made = make()
        except (OSError, RuntimeError) as error:  # there are no sockets or threads any more
            failure = str(error) or type(error).__name__
    made, failure = exchange((made, failure))[0]
    if failure:
        raise RuntimeError(f"init: rank 0 cannot listen for the other ranks: {failure}")
    return made


class Listening:
    """Sockets of rank 0 that send each caller a token, by which it knows that this is rank 0.

    Attributes:
      addresses: where they listen.
      token: random bytes, which the other ranks have got by MPI.
    """

    def __init__(self, sockets: Sequence[socket.socket], addresses: Sequence[Address]) -> None:
        """Answer at sockets that listen, each in a thread."""
        self._sockets, self._is_closed = sockets, False
        self._connections: list[socket.socket] = []
        self.addresses, self.token = list(addresses), secrets.token_bytes(TOKEN_BYTES)
        self._threads = [threading.Thread(target=self._answer, args=(each,)) for each in sockets]
        for thread in self._threads:
            thread.start()

    @classmethod
    def at(cls, hosts: Sequence[str]) -> "Listening":
        """Listen for those who come by one of these addresses or names of this host."""
        sockets, addresses = [], []
        for host in hosts:
            with contextlib.suppress(*UNREACHABLE):  # no socket or no port is left
                bind, port = _bindable(host)
                sockets.append(socket.create_server((bind, port), backlog=4096))
                addresses.append(Address(host, bind, port))
        return cls(sockets, addresses)

    def _answer(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
                # kept until the others have closed it, which leaves the port free
                self._connections.append(connection)
                connection.setblocking(False)
                connection.sendall(self.token)
            except OSError:  # of one connection, or the socket was shut down
                time.sleep(0.01)

    def close(self) -> None:
        """Close the sockets, and wait for the threads."""
        self._is_closed = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # which ends the accept of its thread
        for thread in self._threads:
            thread.join()
        for each in (*self._sockets, *self._connections):
            each.close()


def _try_all(addresses: Sequence[Address], token: bytes) -> list[str]:
    """Return why rank 0 does not answer at each address; "" where it does."""
    try:
        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            return list(pool.map(lambda address: _try(address, token), addresses))
    except RuntimeError as error:  # there are no threads any more
        return [str(error)] * len(addresses)


def _try(address: Address, token: bytes) -> str:
    try:
        place = (address.host, address.port)
        with (
            socket.create_connection(place, timeout=TRY_SECONDS) as connection,
            connection.makefile("rb") as stream,
        ):
            return "" if stream.read(TOKEN_BYTES) == token else "somebody else answered"
    except UNREACHABLE as error:
        return getattr(error, "strerror", None) or str(error)


def _candidates() -> list[str]:
    """Return addresses and names at which other hosts may reach this one, the likely ones first.

    JAXMPI_HOST is the only one where it is set.
    """
    named = settings.get("JAXMPI_HOST")
    return [named] if named else _reachable()


def _reachable() -> list[str]:
    """Return the addresses of this host but loopback's, and its name, the likely ones first."""
    found = [_towards(NOWHERE), *_interface_addresses()]
    with contextlib.suppress(*UNREACHABLE):  # a name that nobody knows
        socket.gethostbyname(socket.gethostname())
        found.append(socket.gethostname())
    return [each for each in dict.fromkeys(found) if each and not each.startswith("127.")]


def _interface_addresses() -> Iterator[str]:
    """Yield the IPv4 address of each network interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without one
                request = struct.pack("256s", name.encode())
                yield socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])


def _own_address(host: str) -> str:
    """Return the address of this host in the network that leads to `host`, or its name.

    A name of this host may stand for loopback here, where no other host comes.
    """
    found = _towards(host)
    if found.startswith("127.") and not host.startswith("127."):
        found = next(iter(_reachable()), "")
    return found or socket.gethostname()


def _towards(host: str) -> str:
    """Return the address of this host that another host sees; "" if no way leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except UNREACHABLE:
            return ""


def _bindable(host: str) -> tuple[str, int]:
    """Return the address to listen at, and a free port of it.

    It is `host`, or all addresses where that is none of this host, or a name that stands for
    loopback here: it may stand for another address elsewhere.
    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
            address, port = probe.getsockname()
            if address == host or not address.startswith("127."):
                return host, int(port)
        except UNREACHABLE:  # it leads here in another way
            pass
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return "0.0.0.0", int(probe.getsockname()[1])
