"""The transport of jaxmpi itself, `jaxmpi._native`: shared memory within a node, MPI between nodes.

It carries every collective. A call is one message for all its arrays, in place where XLA lets it.
With each message the ranks compare what they are about to send, so the programs of this transport
need no other comparison. Arrays of a GPU come through pinned memory of the host.

16-bit floats are summed in float32 and rounded once within a node, and between nodes of one rank
each. Between nodes of several ranks, each node's sum is rounded before it is sent, and above 8
nodes, in every round: with p nodes and the unit roundoff u (2**-8 of bfloat16, 2**-11 of float16),
the error of a sum is at most (2 + ceil(log2 p)) · u · Σ_r |x_r|, to first order.
"""

import math
import random
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._backends import extension, native_calls
from jaxmpi._backends.base import Collective, Message, Overlap, Started, fingerprint_of
from jaxmpi._backends.communicator import Communicator
from jaxmpi._backends.groups import Groups, position
from jaxmpi._backends.mpi import Mpi
from jaxmpi._backends.native_transports import Transports
from jaxmpi._backends.wire_dtypes import carried, carried_shapes, received
from jaxmpi._backends.within_groups import through_all
from jaxmpi._job.process import settings

__all__ = ["Native", "on_host"]

TYPES = (
    *(jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.complex128),
    *(jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64),
)


def on_host() -> bool:
    """Return whether the arrays of this process are in the memory of the CPU."""
    return jax.default_backend() == "cpu"


class Native(Mpi):
    """Ranks whose programs talk through `jaxmpi._native`."""

    transport, fuses_mean, compares_inline, needs_mpi4jax = "native", True, True, False

    def __init__(self, launched: int) -> None:
        """Join the other ranks, as `Mpi` does."""
        _native = extension.load()
        super().__init__(launched)
        self._native = _native
        # the numbers of those of groups; 0 is that of all ranks
        self._transports: dict[tuple[tuple[int, ...], ...], int] = {}
        self._opened = Transports(self._mpi, _native, self.place)
        # what each message says: the word of its program, and what it is
        self._statements: dict[int, tuple[int, Message]] = {}
        self._places: dict[int, int] = {}  # which message of its program each is
        host = on_host()
        # also in a job of GPUs
        for target in ("compare", "collective", "start", "wait", "send_ahead", "take"):
            handler = "host" if target == "collective" else target
            jax.ffi.register_ffi_target(
                f"jaxmpi_{target}", _native.handler(handler), platform="cpu"
            )
        if not host:
            for target, handler in (
                ("compare", "compare"),
                ("collective", "gpu"),
                ("start", "start_gpu"),
                ("wait", "wait"),
            ):
                jax.ffi.register_ffi_target(
                    f"jaxmpi_{target}", _native.handler(handler), platform="CUDA"
                )
        self._opened.open(self._programs, ())
        self.description = self._opened.description
        # a number of another job is none of this one
        _native.count_ahead_from(self._programs.bcast(random.getrandbits(62)))

    def _connect(self, groups: Groups) -> None:
        """The shared memory of this rank's group, and its connections to other nodes."""
        members = groups[position(groups, self.place.rank)[0]]
        self._transports[groups] = self._opened.open(self._communicators[groups], members)

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """An ordered effect of our own."""
        return frozenset({_jaxcompat.ordered_effect()})

    def carries(self, call: Collective) -> bool:
        """Return whether all ranks compare what they send when they carry it out: those of a group compare theirs alone."""
        return not call.groups

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one message for all arrays."""
        if call.kind in ("compare", "compare_later"):
            text = "no message yet, in another call of this program"
            statement = self._statement(call, Message(text))
            native_calls.compare(self, statement, later=call.kind == "compare_later")
            return []
        if not self.connects(call):
            return through_all(self.run, call, xs, self.index())
        return self._send(call, xs, _message(call, xs))

    def transport_of(self, call: Collective) -> int:
        """The number of the transport that carries it."""
        return self._transports[call.groups] if call.groups else 0

    def _send(self, call: Collective, xs: Sequence[jax.Array], message: Message) -> list[jax.Array]:
        """Send one message; the ranks compare what it carries, as text."""
        outs = native_calls.run(
            carried(call, xs, _fits), call, self, self._statement(call, message)
        )
        return received(call, xs, outs)

    def _statement(self, call: Collective, message: Message) -> int:
        statement = fingerprint_of(f"{call.fingerprint} {call.place} {message}")
        self._statements[statement] = call.fingerprint, message
        self._places[statement] = call.place
        return statement

    @property
    def overlap(self) -> Overlap | None:
        """A thread carries messages out while a program computes: by default between nodes, where they take long."""
        asked, tuning, host = settings.get("JAXMPI_OVERLAP"), self._opened.tuning, on_host()
        # of GPUs, it was not measured yet
        if asked == "0" or (asked == "auto" and (self._opened.nodes == 1 or not host)):
            return None
        ahead = (self._send_ahead, self._take) if self.concurrent and host else ()
        return Overlap(tuning.small_bytes, tuning.bucket_bytes, self.connects, self._start, *ahead)

    def _start(
        self, call: Collective, xs: Sequence[jax.Array], bucket: bool, first: bool
    ) -> Started:
        statement = self._statement(call, _message(call, xs))
        sent, wait = native_calls.start(
            carried(call, xs, _fits), call, self, statement, bucket=bucket, first=first
        )

        def wait_for(before: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = wait(before)
            return received(call, xs, outs[: len(xs)]), outs[len(xs) :]

        return Started(sent, wait_for)

    def _send_ahead(self, call: Collective, xs: Sequence[jax.Array]) -> jax.Array:
        return native_calls.send_ahead(
            carried(call, xs, _fits), call, self, self._statement(call, _message(call, xs))
        )

    def _take(
        self, call: Collective, xs: Sequence[jax.Array], number: jax.Array
    ) -> list[jax.Array]:
        outs = native_calls.take(
            carried(call, xs, _fits), number, call, self, self._statement(call, _message(call, xs))
        )
        return received(call, xs, outs)

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """The bytes of each message that `run` sends for arrays like these."""
        sent = carried_shapes(call, arrays, _fits)
        return [sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)]

    # outside

    def set_mismatch_handler(
        self, explain: Callable[[int, str | Message, Sequence[int]], str]
    ) -> None:
        """Have the text of the error made by `explain` where the ranks' messages differ.

        It is called on every rank, or on all of a group, on the thread that communicates, with the
        word of the program, what this rank sends, and the ranks of its group if it is not all.
        """

        def handler(fingerprint: int, transport: int, calls: int) -> str:
            members = self._opened.members[transport]
            _, call = (False, 0) if members else self._call_that_differs(calls)
            program, text = self._statements.get(
                call or fingerprint, (fingerprint, Message("a program of an earlier init"))
            )
            place = self._places.get(call or fingerprint, 0)
            return explain(
                program, f"{text}, message {place} of the program" if place else text, members
            )

        self._explain = explain
        self._native.on_disagreement(handler)

    def _call_that_differs(self, calls: int) -> tuple[bool, int]:
        """Look for a difference in what the ranks have called before messages that differ; all of them forget these calls.

        Args:
          calls: how many calls that were to be compared this rank had made before its message.

        Returns:
          Whether the ranks' calls differ, and the word of this rank's call in the first place where
          they do; 0 where it has sent the message instead.
        """
        first, made = self._native.calls_before(calls)
        everyone = self.gather_details((first, made))
        self._native.forget_calls()
        begin = max(first for first, _ in everyone)
        columns = zip_longest(*(theirs[begin - first :] for first, theirs in everyone), fillvalue=0)
        number = next((i for i, column in enumerate(columns, begin) if len(set(column)) > 1), None)
        if number is None:
            return False, 0
        return True, made[number - first] if number < calls else 0

    def _of(self, ranks: Sequence[int]) -> Communicator:
        groups = next(
            (
                groups
                for groups, i in self._transports.items()
                if ranks and self._opened.members[i] == ranks
            ),
            None,
        )
        return self._communicators[groups] if groups else self._objects

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """The smallest and the largest of the ranks' numbers, in the order of the programs' messages."""
        self._entitle(fingerprint, title, program)
        try:
            with self._enter():
                smallest, largest, calls = self._native.meet(fingerprint)
        except RuntimeError as error:  # of a message that was sent ahead
            if self.registry.found and str(self.registry.found[0]) in str(error):
                raise self.registry.found.pop() from None
            raise
        if smallest != largest:
            differ, call = self._call_that_differs(calls)
            if differ:
                self._explain(
                    *self._statements.get(call, (program or fingerprint, Message(title))), ()
                )
                raise self.registry.found.pop()
        return smallest, largest

    def progress(self) -> tuple[int, bool]:
        """Return the number of collectives entered, and whether this rank is inside one."""
        entered, inside = super().progress()
        started, ended = self._native.messages()
        return entered + started, inside or started > ended

    def doing(self) -> int:
        """The fingerprint of the last message."""
        return self._native.word()

    def events(self) -> list[Sequence[Any]]:
        """The last messages, as `MpiProcessGroup` has them."""
        return self._native.events()

    def waits(self) -> list[tuple[int, int]]:
        """Do what `MpiProcessGroup` does, with the events of the extension."""
        return self._native.waits()

    def exposed_ns(self) -> int | None:
        """Do what `MpiProcessGroup` does, with the events of the extension."""
        return self._native.exposed_ns()

    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Do what `MpiProcessGroup` does, with the events of the extension."""
        return self._statements.get(fingerprint) or super().described(fingerprint)

    def close(self) -> None:
        """Free the communicators, the shared memory, and the programs that were compiled for them."""
        super().close()
        self._opened.close()


def _fits(dtype: np.dtype) -> bool:
    """Return whether the transport knows a dtype."""
    return dtype in TYPES


def _message(call: Collective, xs: Sequence[jax.Array]) -> Message:
    return Message(call.title, tuple((x.shape, str(x.dtype)) for x in xs))
