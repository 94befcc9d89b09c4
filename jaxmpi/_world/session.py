"""Session: the state of a job from `init` to `finalize`, and the place of this process in it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import jax
from jax import lax

from jaxmpi import _axis
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.mpi_ranks import MpiRanks
from jaxmpi._consistency import compare
from jaxmpi._consistency.mismatch import Call
from jaxmpi._errors import NotInitializedError, RankCountError
from jaxmpi._job.monitor.end_watch import EndWatch
from jaxmpi._job.monitor.flight_recorder import Recorder
from jaxmpi._job.monitor.live import Live
from jaxmpi._job.monitor.monitor import Monitor
from jaxmpi._job.monitor.neighbor_exchange import NeighborExchange
from jaxmpi._job.monitor.preemption import AgreedPreemption, LocalPreemption, Preemption
from jaxmpi._job.monitor.watchdog import Watchdog
from jaxmpi._lowering.explain import Speed
from jaxmpi._world.world import World

__all__ = [
    "Session",
    "SessionState",
    "begin",
    "check_root",
    "current",
    "finalize",
    "initialized",
    "is_first_pmap",
    "local_rank",
    "local_size",
    "monitor",
    "neighbors",
    "preemption",
    "rank",
    "ranks_unknown_to_jax",
    "set_speed",
    "size",
    "speed",
    "state",
    "watch",
    "within",
    "world",
]


class SessionState(Protocol):
    """State of a layer above that lives in the Session."""

    def close(self) -> None:
        """Wait for operations under way; called once, at the end of the session."""


S = TypeVar("S", bound=SessionState)


@dataclass
class Session:
    """The state of a job.

    Attributes:
      backend: the ranks; a forked child has a copy that refuses to communicate.
      world: what `init` returned.
      monitor: the thread that watches the other ranks, where there are any.
      neighbors: the comparison of values with those of the neighbors, where the monitors exchange
        messages.
      preemption: how SIGTERM stops the ranks, by the monitor or without one.
      speed: of messages between the ranks, once `explain` has measured it.
      pmaps: the lines that have called a `jax.pmap`.
      began: when the session began, by `time.monotonic`.
      states: state of the layers above, by its class.
      forked: whether this process is a forked child of the rank.
      thread: the thread that has entered the block of `within`; None outside of such a block.
    """

    backend: Ranks
    world: World
    monitor: Monitor | None = None
    neighbors: NeighborExchange | None = None
    preemption: Preemption | None = None
    speed: Speed | None = None
    pmaps: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    states: dict[type, SessionState] = field(default_factory=dict)
    forked: bool = False
    thread: int | None = None


_session: Session | None = None
_entering = threading.Lock()  # held while a block of `within` begins


def begin(backend: Ranks, world: World) -> None:
    """Begin a session: `current` and `world` return these from now on."""
    global _session
    _session = Session(backend, world)


def watch(backend: MpiRanks) -> None:
    """Start the monitor, which watches the other ranks.

    **Collective:** every rank calls it.
    """
    assert _session is not None
    monitor = _session.monitor = Monitor(backend)
    if monitor.listening:
        # Its messages may arrive as soon as the thread runs on all ranks.
        _session.neighbors = NeighborExchange(monitor)
        _session.preemption = AgreedPreemption(monitor, backend.place.size, backend.place.rank)
        monitor.start()
        # These live in the monitor, which calls them.
        EndWatch(monitor, Watchdog(monitor, Recorder(monitor)))
        Live(monitor)
        monitor.connect_hosts()


@contextmanager
def within(session: Session) -> Iterator[World]:
    """Use another session in a `with` block.

    It shares the states of the session around it, if there is one.

    Raises:
      RuntimeError: another thread is inside of such a block. A process has one session, which all
        of its threads use.
    """
    global _session
    session.thread = threading.get_ident()
    with _entering:
        if _session is not None and _session.thread not in (None, session.thread):
            raise RuntimeError(
                "simulate: another thread of this process is in a simulate block. Leave that block "
                "before this one begins, or use two processes."
            )
        before, _session = _session, session
    if before is not None:
        session.began, session.states = before.began, before.states
        session.preemption = before.preemption
    try:
        yield session.world
    finally:
        _session = before
        if before is None:
            _close(session)
        if before is None or session.preemption is not before.preemption:
            _release(session)


def finalize() -> None:
    """Forget the World, so that `init` can be called again; not needed at the end of a script.

    On the xla backend `init` cannot be called again: JAX's processes join each other once.

    **Collective:** every rank calls it.

    Raises:
      RankMismatchError: on every rank, if one of them calls something else.
    """
    global _session
    if _session is not None and not _session.forked:
        compare.check_consistent(_session.backend, Call.of("finalize"))
        _close(_session)
        if _session.monitor is not None:
            _session.monitor.leave()
        _release(_session)
        _session.backend.close()
    _session = None


def _close(session: Session) -> None:
    for its_state in session.states.values():
        its_state.close()


def _release(session: Session) -> None:
    """Let SIGTERM end this process again."""
    if session.preemption is not None:
        session.preemption.release()
        session.preemption = None


def state(cls: Callable[[float], S]) -> S:
    """Return the session's object of a class of a layer above.

    The first call makes it, with the time at which the session began.
    """
    assert _session is not None
    if cls not in _session.states:
        _session.states[cast(type, cls)] = cls(_session.began)
    return cast(S, _session.states[cast(type, cls)])


def current(function: str) -> Ranks:
    """Return the backend, or raise a NotInitializedError that names `function`."""
    if _session is None:
        raise NotInitializedError(function)
    return _session.backend


def world() -> World | None:
    """Return the World, or None before `init`."""
    return None if _session is None else _session.world


def monitor() -> Monitor | None:
    """Return this rank's monitor, or None if there is none that can talk to the others."""
    monitor = None if _session is None else _session.monitor
    return monitor if monitor is not None and monitor.listening else None


def neighbors() -> NeighborExchange | None:
    """Return the comparison of values with the neighbors; None without a monitor that can talk."""
    return None if _session is None else _session.neighbors


def preemption() -> Preemption:
    """Return how SIGTERM stops the ranks: by the monitor, where there is one."""
    assert _session is not None
    if _session.preemption is None:
        alone = _session.monitor is None
        _session.preemption = LocalPreemption(_session.backend.place.rank, alone=alone)
    return _session.preemption


def speed() -> Speed | None:
    """Return the measured speed of messages between the ranks, or None."""
    return None if _session is None else _session.speed


def set_speed(measured: Speed | None) -> None:
    """Keep the measured speed until `finalize`."""
    assert _session is not None
    _session.speed = measured


def ranks_unknown_to_jax() -> Ranks | None:
    """Return the backend if there are several ranks and JAX knows of one process; else None.

    It is None in a forked child, too.
    """
    if _session is None or _session.forked:
        return None
    backend = _session.backend
    return None if backend.place.size == 1 or jax.process_count() > 1 else backend


def is_first_pmap(line: str) -> bool:
    """Return whether a line calls a `jax.pmap` for the first time in this session."""
    assert _session is not None
    first = line not in _session.pmaps
    _session.pmaps.add(line)
    return first


def initialized() -> bool:
    """Return whether `init` was called, and `finalize` not since."""
    return _session is not None


def check_root(function: str, root: object, size: int | None = None) -> None:
    """Raise a TypeError or ValueError that names `function` unless root is a rank.

    Args:
      function: for the error.
      root: a number of a rank.
      size: the number of ranks of the group; all ranks by default.
    """
    size = size or current(function).place.size
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(
            f"{function}: root is a {type(root).__name__}, and must be a Python int, equal on all "
            "ranks."
        )
    if not 0 <= root < size:
        raise (RankCountError if root > 0 else ValueError)(
            f"{function}: root is {root}, and the ranks are 0 to {size - 1}. Pass one of these."
        )


def rank() -> Any:  # a union would be refused by users' type checkers wherever an int is asked for
    """Return this rank's number, 0 to size - 1; it may stand in a differentiated function.

    It is a Python int; inside of `jaxmpi.jit` it is `lax.axis_index`, an int32 array, as the traced
    program is that of all ranks.
    """
    place = current("rank").place
    return lax.axis_index(_axis.AXIS) if _axis.bound() else place.rank


def size() -> int:
    """Return the number of ranks, a Python int; it may stand in a differentiated function."""
    place = current("size").place
    return int(lax.axis_size(_axis.AXIS)) if _axis.bound() else place.size


def local_rank() -> int:
    """Return this rank's number within its node, 0 to local_size - 1.

    In FluxMPI and Lux this name is the global rank.
    """
    return current("local_rank").place.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current("local_size").place.local_size


# forks


def _before_fork() -> None:
    if _session is not None and _session.monitor is not None:
        _session.monitor.signals.block()
    # For `preempted`, whose handler needs no monitor. As in `Signals.block`: Python would forget a
    # signal that comes to a child before the child has set its handlers.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)
    if _session is not None and _session.monitor is not None:
        _session.monitor.signals.unblock()


def _in_child() -> None:
    """Keep the World of a rank readable in its forked child, and refuse to communicate there."""
    if _session is not None:
        _release(_session)
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)
    if _session is None:
        return
    here = _session.backend
    # a new object, which steps do not know yet
    _session.backend = here.in_forked_child()
    _session.forked = _session.backend is not here
    if _session.monitor is not None:
        _session.monitor.abandon()
        _session.monitor = None


_masks = threading.local()  # the signals that a thread had blocked before it forks
os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
