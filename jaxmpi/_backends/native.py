"""The native transport, `jaxmpi._native`: shared memory within a node, MPI between nodes.

It carries every collective. A call is one message for all its arrays, in place where XLA allows it.
With each message the ranks compare its fingerprint, so the programs of this transport need no other
comparison. Arrays of a GPU are staged through pinned memory of the host.

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
from typing import Any, NamedTuple

import jax
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


class Sent(NamedTuple):
    """A message that a program of this rank sends, for error messages and reports."""

    program: int  # the program's fingerprint
    message: Message  # the collective and its arrays
    position: int  # among the messages of its program, from 1; 0 if it is not one of them


def on_host() -> bool:
    """Return whether the arrays of this process are in the memory of the CPU."""
    return jax.default_backend() == "cpu"


class Native(Mpi):
    """Ranks whose programs talk through `jaxmpi._native`."""

    transport, fuses_mean, compares_inline, needs_mpi4jax = "native", True, True, False

    def __init__(self, launched: int) -> None:
        """Join the other ranks; `launched` is how many the launcher's environment speaks of."""
        native = extension.load()
        super().__init__(launched)
        self.native = native
        # the number of the transport of each way to divide the ranks into groups
        self._transports: dict[tuple[tuple[int, ...], ...], int] = {}
        self._opened = Transports(self._mpi, native, self.place)
        self._sent: dict[int, Sent] = {}  # by fingerprint
        host = on_host()
        # also in a job of GPUs
        for target in ("compare", "collective", "start", "wait", "send_ahead", "take"):
            handler = "host" if target == "collective" else target
            jax.ffi.register_ffi_target(f"jaxmpi_{target}", native.handler(handler), platform="cpu")
        self.encodes_int8 = host
        extension.register_int8(native)
        if not host:
            for target, handler in (
                ("compare", "compare"),
                ("collective", "gpu"),
                ("start", "start_gpu"),
                ("wait", "wait"),
            ):
                jax.ffi.register_ffi_target(
                    f"jaxmpi_{target}", native.handler(handler), platform="CUDA"
                )
        self._opened.open(self._programs, ())
        self.description = self._opened.description
        # a number that was restored from a checkpoint of another job is none of this job's
        native.count_ahead_from(self._programs.bcast(random.getrandbits(62)))

    def _connect(self, groups: Groups) -> None:
        """Open the transport of this rank's group."""
        members = groups[position(groups, self.place.rank)[0]]
        self._transports[groups] = self._opened.open(self._communicators[groups], members)

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """The ordered effect of all calls, as a set."""
        return frozenset({_jaxcompat.ordered_effect()})

    def carries(self, call: Collective) -> bool:
        """Return whether all ranks compare fingerprints in it; a group compares its own."""
        return not call.groups

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one message for all arrays."""
        if call.kind in ("compare", "compare_later"):
            text = "no message yet, in another call of this program"
            fingerprint = self._fingerprint(call, Message(text))
            native_calls.compare(self, fingerprint, later=call.kind == "compare_later")
            return []
        if not self.connects(call):
            return through_all(self.run, call, xs, self.index())
        fingerprint = self._fingerprint(call, _message(call, xs))
        outs = native_calls.run(carried(call, xs, self._fits), call, self, fingerprint)
        return received(call, xs, outs)

    def transport_of(self, call: Collective) -> int:
        """Return the number of the transport that carries a collective."""
        return self._transports[call.groups] if call.groups else 0

    def _fingerprint(self, call: Collective, message: Message) -> int:
        """Return the fingerprint of a message, and keep what it describes."""
        fingerprint = fingerprint_of(f"{call.fingerprint} {call.place} {message}")
        self._sent[fingerprint] = Sent(call.fingerprint, message, call.place)
        return fingerprint

    def _fits(self, dtype: np.dtype) -> bool:
        """Return whether the extension reduces and moves arrays of this dtype."""
        return dtype.name in self.native.dtypes

    @property
    def overlap(self) -> Overlap | None:
        """Settings of the thread that sends while a program computes; by default between nodes only."""
        asked, tuning, host = settings.get("JAXMPI_OVERLAP"), self._opened.tuning, on_host()
        # its gain on GPUs has not been measured yet
        if asked == "0" or (asked == "auto" and (self._opened.nodes == 1 or not host)):
            return None
        ahead = (self._send_ahead, self._take) if self.concurrent and host else ()
        return Overlap(tuning.small_bytes, tuning.bucket_bytes, self.connects, self._start, *ahead)

    def _start(
        self, call: Collective, xs: Sequence[jax.Array], bucket: bool, first: bool
    ) -> Started:
        fingerprint = self._fingerprint(call, _message(call, xs))
        sent, wait = native_calls.start(
            carried(call, xs, self._fits), call, self, fingerprint, bucket=bucket, first=first
        )

        def wait_for(before: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = wait(before)
            return received(call, xs, outs[: len(xs)]), outs[len(xs) :]

        return Started(sent, wait_for)

    def _send_ahead(self, call: Collective, xs: Sequence[jax.Array]) -> jax.Array:
        fingerprint = self._fingerprint(call, _message(call, xs))
        return native_calls.send_ahead(carried(call, xs, self._fits), call, self, fingerprint)

    def _take(
        self, call: Collective, xs: Sequence[jax.Array], number: jax.Array
    ) -> list[jax.Array]:
        fingerprint = self._fingerprint(call, _message(call, xs))
        outs = native_calls.take(carried(call, xs, self._fits), number, call, self, fingerprint)
        return received(call, xs, outs)

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message that `run` sends for arrays of these shapes."""
        sent = carried_shapes(call, arrays, self._fits)
        return [sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)]

    # outside

    def set_mismatch_handler(
        self, explain: Callable[[int, str | Message, Sequence[int]], str]
    ) -> None:
        """Have `explain` write the error where the fingerprints of a message differ.

        Every rank of the message's group calls it, on the thread that communicates, with the
        fingerprint of its program, what it was about to send, and the ranks of the group, or ()
        for all.
        """

        def handler(fingerprint: int, transport: int, calls: int) -> str:
            members = self._opened.members[transport]
            _, call = (False, 0) if members else self._call_that_differs(calls)
            earlier = Sent(fingerprint, Message("a program of an earlier init"), 0)
            sent = self._sent.get(call or fingerprint, earlier)
            text = str(sent.message)
            if sent.position:
                text += f", message {sent.position} of the program"
            return explain(sent.program, text, members)

        self._explain = explain
        self.native.on_mismatch(handler)

    def _call_that_differs(self, calls: int) -> tuple[bool, int]:
        """Find the first call in which the ranks differ, before a message in which they do.

        All ranks forget these calls.

        Args:
          calls: how many calls this rank made before its message that are not compared yet.

        Returns:
          Whether the ranks' calls differ, and the fingerprint of this rank's first call that
          does; 0 where it sent the message instead.
        """
        first, made = self.native.calls_before(calls)
        everyone = self.gather_details((first, made))
        self.native.forget_calls()
        begin = max(first for first, _ in everyone)
        columns = zip_longest(*(theirs[begin - first :] for first, theirs in everyone), fillvalue=0)
        number = next((i for i, column in enumerate(columns, begin) if len(set(column)) > 1), None)
        if number is None:
            return False, 0
        return True, made[number - first] if number < calls else 0

    def _of(self, ranks: Sequence[int]) -> Communicator:
        for groups, number in self._transports.items():
            if ranks and self._opened.members[number] == ranks:
                return self._communicators[groups]
        return self._objects

    def extremes(self, fingerprint: int, title: str = "", program: int = 0) -> tuple[int, int]:
        """Return the smallest and largest fingerprint, compared in the order of the messages."""
        self._entitle(fingerprint, title, program)
        try:
            with self._enter():
                smallest, largest, calls = self.native.compare(fingerprint)
        except RuntimeError as error:  # a message that was sent ahead has failed
            if self.registry.found and str(self.registry.found[0]) in str(error):
                raise self.registry.found.pop() from None
            raise
        if smallest != largest:
            differ, call = self._call_that_differs(calls)
            if differ:
                earlier = Sent(program or fingerprint, Message(title), 0)
                sent = self._sent.get(call, earlier)
                self._explain(sent.program, sent.message, ())
                raise self.registry.found.pop()
        return smallest, largest

    def progress(self) -> tuple[int, bool]:
        """Return the number of collectives entered, and whether this rank is in one."""
        entered, inside = super().progress()
        started, ended = self.native.messages()
        return entered + started, inside or started > ended

    def doing(self) -> int:
        """Return the fingerprint of the last message."""
        return self.native.last_fingerprint()

    def events(self) -> list[Sequence[Any]]:
        """Return the last messages: number, fingerprint, bytes, start, all_entered, end."""
        return self.native.events()

    def waits(self) -> list[tuple[int, int]]:
        """Return when the last waits for messages began and ended, in monotonic nanoseconds."""
        return self.native.waits()

    def exposed_ns(self) -> int | None:
        """Return the nanoseconds for which programs have waited for messages."""
        return self.native.exposed_ns()

    def described(self, fingerprint: int) -> tuple[int, str | Message]:
        """Return (program fingerprint, title or message) for a message fingerprint."""
        sent = self._sent.get(fingerprint)
        return (sent.program, sent.message) if sent else super().described(fingerprint)

    def close(self) -> None:
        """Free the communicators, the shared memory, and the programs that were compiled for them."""
        super().close()
        self._opened.close()


def _message(call: Collective, xs: Sequence[jax.Array]) -> Message:
    return Message(call.title, tuple((x.shape, str(x.dtype)) for x in xs))
