"""MPI inside compiled programs, with mpi4jax."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import _jaxcompat
from jaxmpi._backends import bucketing, extension
from jaxmpi._backends.base import Collective
from jaxmpi._backends.communicator import Communicator
from jaxmpi._backends.groups import Groups, named_groups, position
from jaxmpi._backends.mpi_library import import_mpi4py
from jaxmpi._backends.process_group import MpiProcessGroup
from jaxmpi._backends.start_checks import check_platforms, find_mpi4jax, gathered
from jaxmpi._backends.wire_dtypes import from_carrier, mean_as_sum, reduce_rows, to_carrier
from jaxmpi._backends.within_groups import through_all

__all__ = ["Mpi"]


class Mpi(MpiProcessGroup):
    """Ranks whose programs talk with mpi4jax."""

    name = "mpi"
    transport = "mpi4jax"
    description = ""  # of how messages travel between nodes
    nests = needs_mpi4jax = True

    def __init__(self, launched: int) -> None:
        """Join the other ranks; `launched` is how many of them the launcher's environment speaks of."""
        mpi = import_mpi4py(launched)
        self._mpi4jax: Any = find_mpi4jax(launched) if self.needs_mpi4jax else None
        super().__init__(mpi)
        check_platforms(gathered(launched, jax.default_backend))
        self._programs = mpi.COMM_WORLD.Dup()
        # of this rank's group, for each way to part the ranks
        self._communicators: dict[tuple[tuple[int, ...], ...], Communicator] = {}
        self.index = extension.rank_value(self.place.rank)
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN, "prod": mpi.PROD}

    def name_axes(self, axes: Mapping[str, int]) -> None:
        """Name axes beside AXIS, and connect the ranks of each group; every rank calls it."""
        super().name_axes(axes)
        for groups in named_groups(self.axes):
            number, place = position(groups, self.place.rank)
            self._communicators[groups] = self._mpi.COMM_WORLD.Split(number, place)
            self._connect(groups)

    def _connect(self, groups: Groups) -> None:
        """Make the other objects that a transport needs."""

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """mpi4jax's ordered effect, which keeps all its calls in program order."""
        probe = jax.make_jaxpr(lambda x: self._mpi4jax.bcast(x, 0, comm=self._programs))
        return frozenset(
            map(_jaxcompat.allow_in_checkpoint, probe(jax.ShapeDtypeStruct((), np.float32)).effects)
        )

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one MPI call for each of the messages of `bucketing.messages`."""
        if not self.connects(call):
            return through_all(self.run, call, xs, self.index())
        if call.kind == "reduce_scatter":  # mpi4jax has none; the same bytes travel in an alltoall
            rows = self.run(Collective("alltoall", groups=call.groups), xs)
            return [reduce_rows(x, call.op) for x in rows]
        size = call.count(self.place.size)
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
        carried = [to_carrier(x, call).reshape(rows_in, -1) if x.size else None for x in xs]
        received: list[list[jax.Array]] = [[] for _ in xs]
        for dtype in sorted({x.dtype for x in carried if x is not None}, key=str):
            columns = [x.shape[1] if x is not None and x.dtype == dtype else 0 for x in carried]
            limit = bucketing.MAX_ITEMS // rows_in
            for message in bucketing.messages(columns, dtype.itemsize, max_items=limit):
                parts = [
                    lax.slice_in_dim(carried[p.leaf], p.start, p.stop, axis=1) for p in message
                ]
                sent = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
                got = self._call(call, sent).reshape(rows_out, -1)
                ends = np.cumsum([p.stop - p.start for p in message])
                for piece, part in zip(message, jnp.split(got, ends[:-1], axis=1), strict=True):
                    received[piece.leaf].append(part)
        return received

    def connects(self, call: Collective) -> bool:
        """Return whether the ranks of each group have a communicator, as those along axes of `init` do."""
        return not call.groups or call.groups in self._communicators

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """The bytes of each message that `run` sends for arrays like these."""
        rows = call.count(self.place.size) if call.kind in ("alltoall", "reduce_scatter") else 1
        columns: dict[np.dtype, list[int]] = {}
        for array in arrays:
            carried = jax.eval_shape(partial(to_carrier, call=call), array)
            columns.setdefault(carried.dtype, []).append(prod(carried.shape) // rows)
        return [
            sum(piece.stop - piece.start for piece in message) * rows * dtype.itemsize
            for dtype, counts in columns.items()
            for message in bucketing.messages(
                counts, dtype.itemsize, max_items=bucketing.MAX_ITEMS // rows
            )
        ]

    def _call(self, call: Collective, x: jax.Array) -> jax.Array:
        """One MPI call on a `[rows, columns]` array."""
        comm = self._communicators[call.groups] if call.groups else self._programs
        if call.kind == "allreduce":
            return self._mpi4jax.allreduce(x, self._ops[call.op], comm=comm)
        if call.kind == "bcast":
            return self._mpi4jax.bcast(x, call.root, comm=comm)
        if call.kind == "permute":
            here, nobody = self.place.rank, self._mpi.PROC_NULL
            source = next((p for p, q in call.pairs if q == here), nobody)
            dest = next((q for p, q in call.pairs if p == here), nobody)
            got = self._mpi4jax.sendrecv(x, x, source, dest, comm=comm)
            return got if source != nobody else jnp.zeros_like(x)
        return getattr(self._mpi4jax, call.kind)(x, comm=comm)

    def close(self) -> None:
        """Free the communicators, and the programs that were compiled for them."""
        super().close()
        for comm in (self._programs, *self._communicators.values()):
            comm.Free()


def _out(call: Collective, x: jax.Array, pieces: Sequence[jax.Array], size: int) -> jax.Array:
    """Return the result of an operand from the pieces that were received."""
    shape = call.out_shape(x.shape, size)
    if not pieces:
        return jnp.zeros(shape, x.dtype)
    whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    return from_carrier(whole.reshape(shape), x.dtype, call)
