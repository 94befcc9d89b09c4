"""The transport mpi4jax: MPI's collectives inside compiled programs, one call for each message."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmpi import _jaxcompat
from jaxmpi._backends import extension, primitive, wire
from jaxmpi._backends.base import Branch, Collective, Place, Taken, Target
from jaxmpi._backends.branches import compare_branches, only_together
from jaxmpi._backends.comparison import Comparison, MpiTransport, SeparateComparison
from jaxmpi._backends.groups import named_groups, position
from jaxmpi._backends.interface import Limits, LocalArrays, Lowering, Processes
from jaxmpi._backends.mpi_library import Communicator
from jaxmpi._backends.wire import from_wire, mean_as_sum, reduce_rows, through_all, to_wire

__all__ = ["Mpi4jax"]

R = TypeVar("R")
T = TypeVar("T")


class Mpi4jax(MpiTransport):
    """Programs that talk with mpi4jax."""

    name, description = "mpi4jax", "transport mpi4jax"
    waits_asleep = False  # MPI looks again and again

    def __init__(self, place: Place, mpi: ModuleType, *, mpi4jax: ModuleType) -> None:
        """Take a communicator of all ranks for programs; every rank calls it.

        Args:
          place: of this rank.
          mpi: the module `mpi4py.MPI`.
          mpi4jax: the module.
        """
        self._place, self._mpi, self._mpi4jax = place, mpi, mpi4jax
        self._programs: Communicator = mpi.COMM_WORLD.Dup()
        # of this rank's group, for each way to part the ranks
        self._communicators: dict[tuple[tuple[int, ...], ...], Communicator] = {}
        self._rank = extension.rank_value(place.rank)
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}
        self.arrays = LocalArrays()
        self._comparison: SeparateComparison | None = None  # of these ranks, once they have one
        compare_branches()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._place.size

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """Return mpi4jax's ordered effect, which keeps all its calls in program order."""
        probe = jax.make_jaxpr(lambda x: self._mpi4jax.bcast(x, 0, comm=self._programs))
        return frozenset(
            map(_jaxcompat.allow_in_checkpoint, probe(jax.ShapeDtypeStruct((), np.float32)).effects)
        )

    # programs

    def target(self) -> Target:
        """Return collectives as equations of one primitive."""
        return Target(self.size, partial(primitive.run, transport=self), self.rank)

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one with ordered messages."""
        return lowering.in_order(self.target(), self)

    def check(self, limits: Limits) -> None:
        """Refuse nothing."""

    def nested(self, program: T, api: str, title: str) -> T:
        """Return the program: its effect keeps the order beside other programs."""
        return program

    def shared_module(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return None: MPI tells messages apart by the order of the calls."""
        return None

    def compare(
        self, fingerprint: int, first: Collective | None, calls: Sequence[Collective]
    ) -> Callable[[], None] | None:
        """Return None: the ranks compare a program before each call."""
        return None

    def comparison(self, ranks: Processes, objects: Communicator, maximum: object) -> Comparison:
        """Return a comparison before each program."""
        self._comparison = SeparateComparison(ranks, objects, maximum)
        return self._comparison

    def compare_branch(
        self, jaxpr: ClosedJaxpr, taken: Branch, branches: Sequence[Branch]
    ) -> ClosedJaxpr:
        """Return a branch that begins with an allgather of its number: 4 bytes from each rank.

        Messages of mpi4jax carry no fingerprint. Where the numbers differ, no rank goes on.
        """

        def explain(everyone: np.ndarray) -> str:
            assert self._comparison is not None
            of_ranks = Taken(tuple(branches[i] for i in everyone.tolist()))
            return self._comparison.explain(0, of_ranks, ())

        def gather() -> jax.Array:
            mine = lax.full((1,), taken.number, np.int32)
            return self._mpi4jax.allgather(mine, comm=self._programs).reshape(-1)

        return only_together(jaxpr, gather, explain)

    def compare_loop(self, messages: Sequence[str]) -> Callable[[], None] | None:
        """Return None: the messages of the turns carry nothing to compare."""
        return None

    def rank(self) -> jax.Array | np.int32:
        """Return this rank, an int32."""
        return self._rank()

    # messages

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one MPI call for each of the messages of `wire.messages`."""
        if not self.connects(call):
            return through_all(self.run, call, xs, self.rank())
        if call.kind == "reduce_scatter":  # mpi4jax has none; the same bytes travel in an alltoall
            rows = self.run(Collective("alltoall", groups=call.groups), xs)
            return [reduce_rows(x, call.op) for x in rows]
        size = call.count(self.size)
        if call.op == "mean":
            return mean_as_sum(self.run, call, xs, size)
        received = self._exchanged(call, xs, size)
        return [_out(call, x, pieces, size) for x, pieces in zip(xs, received, strict=True)]

    def _exchanged(
        self, call: Collective, xs: Sequence[jax.Array], size: int
    ) -> list[list[jax.Array]]:
        """Return the received pieces of each array, `[rows, columns]` each."""
        rows_in = size if call.kind == "alltoall" else 1
        rows_out = 1 if call.kind in ("allreduce", "bcast", "permute") else size
        sent_arrays = [to_wire(x, call).reshape(rows_in, -1) if x.size else None for x in xs]
        received: list[list[jax.Array]] = [[] for _ in xs]
        for dtype in sorted({x.dtype for x in sent_arrays if x is not None}, key=str):
            columns = [x.shape[1] if x is not None and x.dtype == dtype else 0 for x in sent_arrays]
            limit = wire.MAX_ITEMS // rows_in
            for message in wire.messages(columns, dtype.itemsize, max_items=limit):
                parts = [
                    lax.slice_in_dim(sent_arrays[p.leaf], p.start, p.stop, axis=1) for p in message
                ]
                sent = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
                got = self._call(call, sent).reshape(rows_out, -1)
                ends = np.cumsum([p.stop - p.start for p in message])
                for piece, part in zip(message, jnp.split(got, ends[:-1], axis=1), strict=True):
                    received[piece.leaf].append(part)
        return received

    def loops(self, *, xla: T, native: T) -> T:
        """Return the form of XLA's operations."""
        return xla

    def connects(self, call: Collective) -> bool:
        """Return whether the groups have communicators, as those along axes of `init` do."""
        return not call.groups or call.groups in self._communicators

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message that `run` sends for arrays like these."""
        rows = call.count(self.size) if call.kind in ("alltoall", "reduce_scatter") else 1
        columns: dict[np.dtype, list[int]] = {}
        for array in arrays:
            sent = jax.eval_shape(partial(to_wire, call=call), array)
            columns.setdefault(sent.dtype, []).append(prod(sent.shape) // rows)
        sent_bytes: list[int] = []
        for dtype, counts in columns.items():
            max_items = wire.MAX_ITEMS // rows
            for message in wire.messages(counts, dtype.itemsize, max_items=max_items):
                sent_columns = sum(piece.stop - piece.start for piece in message)
                sent_bytes.append(sent_columns * rows * dtype.itemsize)
        return sent_bytes

    def _call(self, call: Collective, x: jax.Array) -> jax.Array:
        """Carry out one MPI call on a `[rows, columns]` array."""
        comm = self._communicators[call.groups] if call.groups else self._programs
        if call.kind == "allreduce":
            return self._mpi4jax.allreduce(x, self._ops[call.op], comm=comm)
        if call.kind == "bcast":
            return self._mpi4jax.bcast(x, call.root, comm=comm)
        if call.kind == "permute":
            here, nobody = self._place.rank, self._mpi.PROC_NULL
            source = next((p for p, q in call.pairs if q == here), nobody)
            dest = next((q for p, q in call.pairs if p == here), nobody)
            got = self._mpi4jax.sendrecv(x, x, source, dest, comm=comm)
            return got if source != nobody else jnp.zeros_like(x)
        return getattr(self._mpi4jax, call.kind)(x, comm=comm)

    def connect(self, axes: Mapping[str, int]) -> None:
        """Make a communicator for this rank's group of each kind; every rank calls it."""
        for groups in named_groups(axes):
            number, place = position(groups, self._place.rank)
            self._communicators[groups] = self._mpi.COMM_WORLD.Split(number, place)

    def monitored(self, is_in_program: Callable[[], bool]) -> None:
        """Do nothing: only the monitor ends the job for a long wait."""

    def wait_for_all(self) -> None:
        """Do nothing: a program waits for each message."""

    def close(self) -> None:
        """Free the communicators."""
        for comm in (self._programs, *self._communicators.values()):
            comm.Free()


def _out(call: Collective, x: jax.Array, pieces: Sequence[jax.Array], size: int) -> jax.Array:
    """Return the result of an operand from the pieces that were received."""
    shape = call.out_shape(x.shape, size)
    if not pieces:
        return jnp.zeros(shape, x.dtype)
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    return from_wire(whole.reshape(shape), x.dtype, call)
