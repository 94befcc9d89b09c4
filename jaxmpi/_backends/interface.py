"""Interface of the backends: `Ranks`, and the `Transport` that carries their programs.

`Ranks` are what a job's Python code asks, outside of programs: objects, barriers, comparisons. Each
has a `Transport`, which is asked while programs are traced and lowered. Both are abstract, and each
implementation is final:

| backend | ranks | transport |
|---|---|---|
| single | `one_process.Single` | `one_process.Identity` |
| simulate | `one_process.Simulated` | `one_process.Stack` |
| mpi | `mpi_ranks.MpiRanks` | `native.Native` or `mpi4jax.Mpi4jax` |
| xla | `mpi_ranks.MpiRanks` | `xla.Xla` |

No caller asks which of them it has: it asks to do something, and where the layers above have
several ways to do it, it hands them over (`Lowering`, `Limits`, `Ranks.eager`, `Ranks.executor`),
and the backend takes the one that is right for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxmpi._backends.base import (
    Branch,
    Collective,
    Explain,
    Message,
    Place,
    Registry,
    Target,
)
from jaxmpi._backends.program_log import ProgramLog
from jaxmpi._job.process.busy import note_end_of_work
from jaxmpi._job.process.communicating_thread import Turn
from jaxmpi._votes import Outcome, Vote

__all__ = [
    "Arrays",
    "Limits",
    "LocalArrays",
    "Lowering",
    "Processes",
    "Ranks",
    "Transport",
    "long_operation",
    "nesting_error",
]

R = TypeVar("R")  # a result
T = TypeVar("T")
Tree = TypeVar("Tree")  # a pytree of arrays


class Lowering(ABC, Generic[R]):
    """Ways to make a traced program one of a transport: `Transport.lower` takes one of them."""

    @abstractmethod
    def as_it_is(self, target: Target) -> R:
        """Return the program of one rank, whose collectives are `target.run`."""

    @abstractmethod
    def stacked(self, target: Target) -> R:
        """Return the program of all ranks at once: a `vmap` over their stacked arrays."""

    @abstractmethod
    def on_mesh(self, target: Target, mesh: Mesh) -> R:
        """Return a `shard_map` of the program over a mesh of one device a rank."""

    @abstractmethod
    def in_order(self, target: Target, transport: "Transport") -> R:
        """Return the program with its messages in order, by the effects of `transport`."""


class Limits(ABC):
    """Checks of a traced program, each a NotImplementedError: `Transport.check` makes some."""

    @abstractmethod
    def no_references_from_outside(self) -> None:
        """Refuse a use of a reference that the function has from outside."""

    @abstractmethod
    def no_references_in_branches(self) -> None:
        """Refuse a branch that uses a reference."""

    @abstractmethod
    def no_ordered_effects(self) -> None:
        """Refuse an ordered print or callback, which JAX has for one device only."""


class Arrays(ABC):
    """Arrays of this rank, as the programs of a transport take and return them."""

    @abstractmethod
    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """Return arrays of this rank as programs take them; the list itself if they all are."""

    @abstractmethod
    def wrap_tree(self, tree: Tree) -> Tree:
        """Return a tree of arrays as programs take them; the tree itself if they all are."""

    @abstractmethod
    def local(self, tree: Tree) -> Tree:
        """Return this rank's arrays of a tree that a program has returned; nothing is copied."""


class LocalArrays(Arrays):
    """Arrays of this process alone: programs take and return them as they are."""

    def wrap(self, leaves: list[ArrayLike]) -> list[ArrayLike]:
        """Return the list itself."""
        return leaves

    def wrap_tree(self, tree: Tree) -> Tree:
        """Return the tree itself."""
        return tree

    def local(self, tree: Tree) -> Tree:
        """Return the tree itself."""
        return tree


class Transport(ABC):
    """Carries the collectives of compiled programs.

    Attributes:
      name: for people, such as "native".
      description: how messages travel, for the line that `init` prints; "" for nothing to say.
      effects: the JAX effects of `run`.
      arrays: what its programs take and return.
    """

    name: str
    description: str
    arrays: Arrays

    @property
    @abstractmethod
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    @abstractmethod
    def effects(self) -> frozenset[Hashable]:
        """Return the JAX effects of `run`."""

    # in traced code

    @abstractmethod
    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call` on every array of `xs`, where no axis is bound, as under `jax.jit`."""

    @abstractmethod
    def rank(self) -> jax.Array | np.int32:
        """Return this rank, an int32, by the same code on all ranks."""

    @abstractmethod
    def compare(
        self, fingerprint: int, first: Collective | None, calls: Sequence[Collective]
    ) -> Callable[[], None] | None:
        """Return a function that compares a program at its start, in traced code.

        Args:
          fingerprint: that of the program.
          first: its first message, if that is carried out whatever happens.
          calls: all its messages.

        Returns:
          The function; None where the ranks compare the program in another way.
        """

    @abstractmethod
    def compare_branch(
        self, jaxpr: ClosedJaxpr, taken: Branch, branches: Sequence[Branch]
    ) -> ClosedJaxpr:
        """Return a branch of a `lax.cond` with a comparison of what the ranks take.

        Args:
          jaxpr: of the branch.
          taken: what it is.
          branches: all branches of the `lax.cond`.
        """

    @abstractmethod
    def compare_loop(self, messages: Sequence[str]) -> Callable[[], None] | None:
        """Return a function that compares the starts of a loop; None where the ranks cannot.

        Args:
          messages: of one turn, in words.
        """

    # programs

    @abstractmethod
    def target(self) -> Target:
        """Return the operations with which its programs are rewritten."""

    @abstractmethod
    def lower(self, lowering: Lowering[R]) -> R:
        """Make a traced program one of this transport, in one of the ways of `lowering`."""

    @abstractmethod
    def check(self, limits: Limits) -> None:
        """Refuse a program that this transport cannot run, by a NotImplementedError."""

    @abstractmethod
    def nested(self, program: T, api: str, title: str) -> T:
        """Return a program that may stand inside of another traced function.

        Args:
          program: whose effects JAX sees.
          api: the function of jaxmpi, for the error.
          title: of the program, for the error.

        Raises:
          RuntimeError: nothing would keep the order of its collectives there.
        """

    @abstractmethod
    def shared_module(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return the program if all ranks must compile it alike; None if each may for itself."""

    @abstractmethod
    def loops(self, *, xla: T, native: T) -> T:
        """Return one of two forms of a computation, which gives the same bits.

        Args:
          xla: of XLA's operations.
          native: calls of the native extension's loops.
        """

    # messages

    @abstractmethod
    def connects(self, call: Collective) -> bool:
        """Return whether `call` is carried out within its groups, and not through all ranks."""

    @abstractmethod
    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message that `run` sends for arrays like these."""

    @abstractmethod
    def connect(self, axes: Mapping[str, int]) -> None:
        """Connect the ranks of each group along named axes; every rank calls it."""

    @abstractmethod
    def close(self) -> None:
        """Free what it has taken; every rank calls it."""


def nesting_error(backend: str, api: str, title: str) -> RuntimeError:
    """Return the error where a backend cannot keep the order of a program in traced code."""
    return RuntimeError(
        f"{api}: {title} was called inside of jax.jit, jax.grad or another transformation, which "
        f"the {backend} backend does not support. Put the transformation inside of the {api}."
    )


class Ranks(ABC):
    """The ranks of one job, outside of their programs.

    Attributes:
      name: of the backend, for people.
      place: of this process.
      ranks_here: the ranks whose values this process has.
      axes: the names of the ranks and their sizes: AXIS, then those of `init`.
      transport: carries their programs.
      registry: facts that this rank remembers between calls.
      cores_per_rank: cores that a rank may use, on the host with the fewest; the same on all ranks.
      long_operation: with what this rank takes long, for the monitor; "" otherwise.
    """

    name: str
    place: Place
    ranks_here: Sequence[int]
    axes: Mapping[str, int]
    transport: Transport
    registry: Registry
    cores_per_rank: float
    long_operation: str

    @abstractmethod
    def eager(self, *, alone: T, stacked: T, parallel: T) -> T:
        """Return one of three ways to treat values outside of programs.

        Args:
          alone: one rank.
          stacked: all ranks in this process, whose values are stacked where they differ.
          parallel: one rank in each of several processes.
        """

    @abstractmethod
    def check_one_rank_here(self, error: str) -> None:
        """Raise a RuntimeError with this text if this process is several simulated ranks."""

    @abstractmethod
    def executor(
        self, *, inline: "Callable[[Processes], R]", before: "Callable[[Processes], R]"
    ) -> R | None:
        """Make what runs programs of several processes; None where JAX runs them by itself.

        Args:
          inline: makes it where messages of a program compare it.
          before: makes it where the ranks compare a program before each call.
        """

    @abstractmethod
    def lower(self, lowering: Lowering[R]) -> R:
        """Make a traced program one of these ranks, in one of the ways of `lowering`."""

    @abstractmethod
    def allgather_object(self, obj: T) -> list[T]:
        """Return all ranks' picklable objects, in the order of the ranks."""

    @abstractmethod
    def broadcast_object(self, obj: T, root: int) -> T:
        """Return the object of rank `root`; on root, it is `obj` itself."""

    @abstractmethod
    def broadcast_buffer(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite a `[n]` uint8 array with that of rank `root`."""

    @abstractmethod
    def gather_details(self, side: T, ranks: Sequence[int] = ()) -> list[T]:
        """Gather objects while a program of this rank runs, within `ranks` if there are some."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """Return the smallest and largest of the ranks' fingerprints: 16 bytes from each.

        Args:
          fingerprint: that of this rank's call.
          title: of the call, for the monitor.
          program: the fingerprint of the program that the call runs, if it is another one.
        """

    @abstractmethod
    def start_vote(self, vote: Vote, title: str) -> Callable[[], Outcome]:
        """Tell all ranks a vote, and go on.

        The function returned waits for the others' votes; `title` is for the monitor.
        """

    @abstractmethod
    def explain_mismatches(self, explain: Explain) -> None:
        """Have `explain` write the error where messages of a program differ between the ranks.

        Every rank of the message's group calls it, on the thread that communicates, with the
        fingerprint of its program, what it was about to send, and the ranks of the group, or ()
        for all.
        """

    @abstractmethod
    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group; every rank calls it."""

    @abstractmethod
    def check_process(self) -> None:
        """Raise a RuntimeError in a forked child of a rank, which cannot talk to the others."""

    @abstractmethod
    def in_forked_child(self) -> "Ranks":
        """Return another object for these ranks, for a child that this process has forked."""

    @abstractmethod
    def close(self) -> None:
        """Free what `init` took."""


class Processes(Ranks):
    """Ranks that are processes, as far as their programs need them.

    Attributes:
      turn: of the threads.
      ends: for each thread, an output of the last program that it has started.
      concurrent: whether several threads may be inside MPI at once.
    """

    turn: Turn
    ends: dict[int, jax.Array]
    concurrent: bool

    @abstractmethod
    def starting(self, program: int) -> AbstractContextManager[ProgramLog]:
        """Mark this rank as inside a collective while the program with this fingerprint starts.

        JAX may run the program to its end before the call returns. Yields the entry of the log to
        which an output is given that tells when the program has ended.
        """

    @abstractmethod
    def entered(self) -> AbstractContextManager[None]:
        """Mark this rank as inside a collective outside of programs, once these allow one."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the programs that were started have ended; their outputs tell how."""

    @abstractmethod
    def allgather_asleep(self, obj: T) -> list[T]:
        """Gather objects; ranks sleep while they wait, as one may come seconds later."""

    @abstractmethod
    def broadcast_asleep(self, obj: T, ranks: Sequence[int], title: str) -> T:
        """Return the picklable object of the first of these ranks; the others wait for it asleep.

        Every rank calls it, with its own group of ranks. The monitor shows `title` while it waits.
        """

    @abstractmethod
    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Return (program fingerprint, title or message) for a message fingerprint."""


@contextmanager
def long_operation(ranks: Ranks, what: str) -> Iterator[None]:
    """Tell the monitor that this rank is busy with an operation that takes long."""
    before, ranks.long_operation = ranks.long_operation, what
    try:
        yield
    finally:
        ranks.long_operation = before
        note_end_of_work()
