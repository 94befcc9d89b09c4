"""JAX's own processes: who can join them, and at which address of rank 0."""

import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxmpi._backends import jax_processes
from jaxmpi._backends.jax_processes import find_address, join_jax_processes

NOBODY = "198.51.100.9"  # an address that is none of this host, and of nobody


def on_threads(size, act):
    """Return what `act(rank, exchange)` returns or raises on each of `size` ranks, as threads."""
    barrier, told = threading.Barrier(size), [None] * size

    def rank_acts(rank):
        def exchange(mine):
            told[rank] = mine
            barrier.wait(30)
            everyone = list(told)
            barrier.wait(30)
            return everyone

        try:
            return act(rank, exchange)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_acts, range(size)))


def addresses(hosts):
    """Return what the ranks of these hosts find."""
    return on_threads(len(hosts), lambda rank, exchange: find_address(rank, hosts[rank], exchange))


def test_the_first_address_that_all_hosts_reach_is_taken(monkeypatch):
    monkeypatch.setattr(jax_processes, "TRY_SECONDS", 1.0)
    monkeypatch.setattr(jax_processes, "_candidates", lambda: [NOBODY, "127.0.0.3", "127.0.0.4"])
    found = addresses(["a", "a", "b", "c", "b"])
    assert len(set(found)) == 1
    assert found[0][:2] == ("127.0.0.3", "127.0.0.3")
    with socket.create_server(found[0][1:]):  # the port is free for JAX
        pass


def test_an_address_that_one_host_does_not_reach_is_not_taken(monkeypatch):
    tried = jax_processes._try

    def one_is_cut_off(address, token):
        cut = address.host == "127.0.0.3" and threading.current_thread().name.startswith("host c")
        return "No route to host" if cut else tried(address, token)

    def try_all(which, token):
        return [one_is_cut_off(address, token) for address in which]

    def act(rank, exchange):
        threading.current_thread().name = f"host {'abc'[rank]}"
        return find_address(rank, "abc"[rank], exchange)

    monkeypatch.setattr(jax_processes, "_try_all", try_all)
    monkeypatch.setattr(jax_processes, "_candidates", lambda: ["127.0.0.3", "127.0.0.4"])
    assert [found.host for found in on_threads(3, act)] == ["127.0.0.4"] * 3


@pytest.mark.parametrize(
    ("candidates", "why"),
    [
        ([NOBODY], rf"{NOBODY} from b: .+\)"),
        (["no.such.name.invalid"], "no.such.name.invalid from b: "),
        ([], "it has no address"),
    ],
)
def test_an_address_that_nobody_reaches_is_an_error_on_all_ranks(monkeypatch, candidates, why):
    monkeypatch.setattr(jax_processes, "TRY_SECONDS", 1.0)
    monkeypatch.setattr(jax_processes, "_candidates", lambda: candidates)
    found = addresses(["a", "b", "b"])
    assert len(set(found)) == 1
    assert re.search(rf"rank 0's host, a, that all hosts reach.*{why}.*Set JAXMPI_HOST", found[0])


@pytest.mark.parametrize("name", ["Listening", "_interface_addresses", "_try_all"])
def test_what_fails_on_one_rank_is_an_error_on_all(monkeypatch, name):
    def no_more(*_):
        raise OSError(24, "Too many open files")

    if name == "_try_all":
        monkeypatch.setattr(jax_processes, "ThreadPoolExecutor", no_threads)
    elif name == "Listening":
        monkeypatch.setattr(jax_processes.Listening, "at", no_more)
    else:
        monkeypatch.setattr(jax_processes, name, no_more)
    found = addresses(["a", "b", "b"])
    assert len(set(found)) == 1
    why = "can't start new thread" if name == "_try_all" else "rank 0 cannot listen .*Too many open"
    assert re.search(rf"init: .*{why}", found[0])


def no_threads(*_):
    raise RuntimeError("can't start new thread")


def test_somebody_else_at_the_same_address_is_not_rank_0(monkeypatch):
    """An address such as a container bridge's is each host's own, and leads to another program."""
    listening = jax_processes.Listening.at(["127.0.0.3"])
    try:
        (address,), token = listening.addresses, listening.token
        assert jax_processes._try(address, token) == ""
        assert jax_processes._try(address, bytes(16)) == "somebody else answered"
    finally:
        listening.close()
    assert jax_processes._try(address, token) == "Connection refused"


def test_a_stranger_who_says_nothing_holds_nobody_up():
    listening = jax_processes.Listening.at(["127.0.0.3"])
    try:
        (address,), token = listening.addresses, listening.token
        with socket.create_connection(address[1:]), socket.create_connection(address[1:]):
            assert jax_processes._try(address, token) == ""
    finally:
        listening.close()


def test_a_name_that_stands_for_loopback_here_listens_at_all_addresses(monkeypatch):
    """On Debian, /etc/hosts has 127.0.1.1 for the host's own name; others know its address."""
    monkeypatch.setattr(jax_processes, "_candidates", lambda: ["localhost"])
    assert [found[:2] for found in addresses(["a", "b"])] == [("localhost", "0.0.0.0")] * 2


@pytest.mark.parametrize("name", ["a..b", "x" * 70, "no.such.name.invalid"])
def test_a_text_that_is_no_name_is_an_error_on_all_ranks(name, monkeypatch):
    monkeypatch.setenv("JAXMPI_HOST", name)
    found = addresses(["a", "b"])
    assert found[0] == found[1] and f"({name} from b: " in found[0]


def test_addresses_of_this_host_are_those_that_others_may_reach(monkeypatch):
    monkeypatch.delenv("JAXMPI_HOST", raising=False)
    found = jax_processes._candidates()
    assert found and not any(each.startswith("127.") for each in found)
    assert "127.0.0.1" in [*jax_processes._interface_addresses()]
    monkeypatch.setenv("JAXMPI_HOST", "node7")
    assert jax_processes._candidates() == ["node7"]


def test_what_keeps_one_rank_from_joining_is_an_error_on_all(monkeypatch):
    monkeypatch.setattr(
        jax_processes, "_obstacle", lambda rank, _: "JAX has started." if rank == 1 else ""
    )
    found = on_threads(3, lambda rank, exchange: join_jax_processes(rank, 3, True, exchange))
    named = "init: rank 1 cannot join the others: JAX has started."
    assert found == [named, "init: JAX has started.", named]


def test_processes_of_jax_on_one_rank_only_are_an_error_on_all(monkeypatch):
    monkeypatch.setattr(jax_processes, "_obstacle", lambda *_: "")
    initialized = threading.local()
    monkeypatch.setattr(
        jax.distributed, "is_initialized", lambda: getattr(initialized, "is", False)
    )

    def act(rank, exchange):
        setattr(initialized, "is", rank == 1)
        return join_jax_processes(rank, 2, True, exchange)

    found = on_threads(2, act)
    assert found == [found[0]] * 2 and "was called on rank 1, and not on all" in found[0]


def test_processes_of_jax_that_are_not_the_ranks_are_named(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    join_jax_processes(1, 2, True, lambda mine: [mine, mine])  # they are
    with pytest.raises(
        RuntimeError,
        match=r"made this process 1 of 2, and it is rank 0 of 2 in MPI. Leave that call out",
    ):
        join_jax_processes(0, 2, True, lambda mine: [mine, mine])


@pytest.mark.parametrize(
    ("local_size", "named", "own", "address", "bind", "gloo", "nccl"),
    [
        (2, None, "10.0.0.7", "127.0.0.1", "127.0.0.1", "127.0.0.1", "lo"),
        (2, "node1", "10.0.0.7", "127.0.0.1", "127.0.0.1", "127.0.0.1", "lo"),
        (1, None, "127.0.0.3", "127.0.0.3", "127.0.0.3", "127.0.0.3", None),
        (1, "127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.2", "127.0.0.3", None),
        # an address that leads here
        (1, "198.51.100.9", "10.0.0.7", "198.51.100.9", "0.0.0.0", "10.0.0.7", None),
        # a name that stands for loopback here, where no other host comes
        (1, "localhost", "127.0.0.1", "localhost", "0.0.0.0", "10.0.0.8", None),
    ],
)
def test_the_addresses_at_which_xla_listens(
    monkeypatch, local_size, named, own, address, bind, gloo, nccl
):
    """XLA listens at addresses of the job's hosts only, and at loopback alone for one host."""
    seen = {}
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda address, *_, **options: seen.update(options, address=address),
    )
    compat = jax_processes._jaxcompat
    monkeypatch.setattr(compat, "gloo_listens_at", lambda host: seen.update(gloo=host))
    monkeypatch.setattr(compat, "backends_started", lambda: False)
    monkeypatch.setattr(jax_processes, "_towards", lambda host: own)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax_processes, "_candidates", lambda: [named or own])
    monkeypatch.setattr(jax_processes, "_reachable", lambda: ["10.0.0.8"])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "to be removed afterwards")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    join_jax_processes(0, 2, local_size == 2, lambda mine: [mine, mine])
    port = seen["address"].rpartition(":")[2]
    assert (seen["address"], seen["coordinator_bind_address"]) == (
        f"{address}:{port}",
        f"{bind}:{port}",
    )
    assert (seen["gloo"], os.environ.get("NCCL_SOCKET_IFNAME")) == (gloo, nccl)
