"""Interface of a backend, which carries the messages between ranks.

A backend is an object with the attributes and methods of `Backend`. `run` stands in traced code;
the rest is called from Python, outside of it. The layers above know nothing else of how ranks talk
to each other.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmpi._backends.groups import described
from jaxmpi._job.process.busy import note_end_of_work
from jaxmpi._job.process.communicating_thread import Turn

__all__ = [
    "ArrayType",
    "Backend",
    "Collective",
    "Message",
    "Overlap",
    "Place",
    "ProcessGroup",
    "Registry",
    "Started",
    "fingerprint_of",
    "long_operation",
]

T = TypeVar("T")
ArrayType: TypeAlias = tuple[tuple[int, ...], str]  # shape and dtype


class Message(NamedTuple):
    """Contents of one message of a program: the title of its collective, and its arrays."""

    title: str
    arrays: tuple[ArrayType, ...] = ()

    def __str__(self) -> str:
        if not self.arrays:
            return self.title
        arrays = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.arrays)
        return f"{self.title} of {arrays}"


def fingerprint_of(text: str) -> int:
    """A number of 62 bits that differs where texts do: its negative is an int64, too."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class Collective(NamedTuple):
    """One collective operation on a list of arrays.

    With n the number of ranks that take part and x of shape s, `kind` gives
    allreduce [s] -> [s], y = op_r x_r;
    bcast [s] -> [s], y = x_root;
    allgather [s] -> [n, s], y[r] = x_r;
    alltoall [n, s] -> [n, s], y_q[r] = x_r[q];
    reduce_scatter [n, s] -> [s], y_q = op_r x_r[q];
    permute [s] -> [s], y_q = x_p for each pair (p, q) of `pairs`, zero for a q that is in none;
    compare, of no array, compares the fingerprint; compare_later does so at the first call of a
    program, and later ones are compared with the next message.
    """

    kind: str
    # "sum" | "max" | "min" | "prod", of allreduce and reduce_scatter; "mean" of floats where the
    # backend divides
    op: str = ""
    root: int = 0  # of bcast
    # of permute: (from, to), each rank at most once on either side
    pairs: tuple[tuple[int, int], ...] = ()
    # of the program that it is part of, for transports that compare it on the way
    fingerprint: int = 0
    # within each of these, whose ranks count from 0; () for all ranks as one group
    groups: tuple[tuple[int, ...], ...] = ()
    place: int = 0  # which message of its program it is, from 1, for the same transports

    @property
    def title(self) -> str:
        """Text for users: "allreduce sum", "bcast from 1" or "allgather over island"."""
        detail = {"bcast": f"from {self.root}", "permute": str(list(self.pairs))}.get(
            self.kind, self.op
        )
        over = f"over {described(self.groups)}" if self.groups else ""
        return " ".join(filter(None, (self.kind, detail, over)))

    def count(self, size: int) -> int:
        """Return the number of ranks that take part, in a job of `size`."""
        return len(self.groups[0]) if self.groups else size

    def out_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """The shape that an operand of shape `shape` comes back with, in a job of `size` ranks."""
        if self.kind == "allgather":
            return (self.count(size), *shape)
        return shape[1:] if self.kind == "reduce_scatter" else shape


# In traced code, of the arrays of a message that a program has sent ahead: its number; or, with
# that, what it has brought.
SendAhead = Callable[[Collective, Sequence[jax.Array]], jax.Array]
Take = Callable[[Collective, Sequence[jax.Array], jax.Array], list[jax.Array]]

# In traced code: takes arrays that are to be computed before, and returns what a message has
# brought, and these arrays.
Wait = Callable[[Sequence[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


class Started(NamedTuple):
    """A message on its way."""

    # its arrays, in place: what takes one of them is computed after the start
    sent: Sequence[jax.Array]
    wait: Wait


class Overlap(NamedTuple):
    """Operations that send messages while a program computes."""

    small_bytes: int  # up to here, a message is not cut
    bucket_bytes: int  # of the messages that a large one is cut into
    carries: Callable[[Collective], bool]  # whether such a collective can be started
    # in traced code; whether it is one of several buckets, and the first message that is started
    # before any is waited for
    start: Callable[[Collective, Sequence[jax.Array], bool, bool], Started]
    # where messages may be on their way from one call of a program to the next
    send_ahead: SendAhead | None = None
    take: Take | None = None


class Place(NamedTuple):
    """Where this process stands among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0


@dataclass
class Registry:
    """Facts about the programs of a job, for `_consistency.compare`."""

    # that were traced, by their fingerprints: `compare.Registered`
    programs: dict[int, Any] = field(default_factory=dict)
    run: set[int] = field(default_factory=set)  # fingerprints of programs that all ranks have run
    # on a thread of a program, and not raised yet
    found: list[Exception] = field(default_factory=list)
    # the user's line of the last `shard` that gave the ranks parts of different lengths
    uneven_shard: str = ""
    kinds_reported: bool = False  # that ranks are of different kinds, and compile for themselves


class Backend(Protocol):
    """The ranks of one job, and how they talk."""

    name: str  # for people: the code asks for what follows
    place: Place
    axes: Mapping[str, int]  # the names of the ranks and their sizes: AXIS, then those of `init`
    long_operation: str  # with what takes long, for those who watch
    # whether this process is a forked child of the rank, and cannot talk to the others
    forked: bool
    # whether the ranks are simulated in this process, and what differs between them is stacked
    simulates: bool
    # whether its programs take and return arrays that JAX knows as those of all processes
    global_arrays: bool
    nests: bool  # whether its programs may stand inside of others
    takes_references: bool  # whether its programs may have references as arguments of their loops
    fuses_mean: bool  # whether it carries "mean", and sums short floats in float32
    encodes_int8: bool  # whether its programs may call the loops of native/int8.h
    compares_inline: bool  # whether the ranks compare their programs while these run
    same_module: bool  # whether all ranks must run one compiled program

    @property
    def combines(self) -> bool:
        """Return whether collectives that can travel together do."""

    @property
    def effects(self) -> frozenset[Hashable]:
        """The JAX effects of `run`."""

    @property
    def overlap(self) -> Overlap | None:
        """Operations for collectives beside computation; None if there are none."""

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call` on every array of `xs`, in traced code."""

    def index(self) -> jax.Array | np.int32:
        """This rank's number, an int32, in traced code: a value of the running program, which is the same on all ranks."""

    def carries(self, call: Collective) -> bool:
        """Return whether the message of a collective goes to all ranks, with the program's fingerprint.

        No separate comparison is needed then.
        """

    def connects(self, call: Collective) -> bool:
        """Return whether it carries a collective within its groups, and not through all ranks."""

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """The bytes of each message that `run` sends for arrays like these."""

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """Arrays of this rank as its programs take them; the list itself if they all are."""

    def unwrap(self, x: jax.Array) -> jax.Array:
        """This rank's array of one that a program has returned."""

    def allgather_object(self, obj: T) -> list[T]:
        """All ranks' picklable objects, in the order of the ranks."""

    def broadcast_object(self, obj: object, root: int) -> Any:
        """The object of rank `root`."""

    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite a `[n]` uint8 array with that of rank `root`."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """The minimum and maximum of the ranks' fingerprints; `title` and `program` are for the watchdog and the recorder."""

    def start_vote(self, yes: bool, title: str) -> Callable[[], tuple[bool, bool]]:
        """Tell all ranks yes or no, and go on; the function returned waits for the others: (did any say yes, did all)."""

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group."""

    def close(self) -> None:
        """Free what `init` took."""


class ProcessGroup(Backend, Protocol):
    """A backend whose ranks are processes: what is asked for only where there are others to talk to."""

    registry: Registry
    turn: Turn  # of the threads
    ends: dict[int, Any]  # an output of the last program that each thread has started
    concurrent: bool  # whether several threads may be inside MPI at once

    def starting(self) -> AbstractContextManager[Callable[[Any], None]]:
        """Mark this rank as inside a collective while a program starts.

        Yields a callback that records an output to wait on.
        """

    def gather_details(self, side: Any, ranks: Sequence[int] = ()) -> list[Any]:
        """Gather objects while a program of this rank runs, within `ranks` if there are some."""

    def allgather_asleep(self, obj: Any) -> list[Any]:
        """Gather objects, with ranks that wait asleep; for calls that a rank may reach seconds later."""

    def broadcast_asleep(self, obj: Any, ranks: Sequence[int], title: str) -> Any:
        """The picklable object of the first of these ranks, which may take it long to make; they wait for it asleep."""

    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Return (program fingerprint, title or message) for a message fingerprint."""


@contextmanager
def long_operation(backend: Backend, what: str) -> Iterator[None]:
    """Tell those who watch for stalls that this rank does something that takes long, and is all right."""
    before, backend.long_operation = backend.long_operation, what
    try:
        yield
    finally:
        backend.long_operation = before
        note_end_of_work()
