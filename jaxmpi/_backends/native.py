"""The native transport, `jaxmpi._native`: shared memory within a node, MPI between nodes.

It carries every collective. A call is one message for all its arrays, in place where XLA allows it.
With each message the ranks compare its fingerprint, so the programs of this transport need no other
comparison. Arrays of a GPU are staged through pinned memory of the host.

16-bit floats are summed in float32 and rounded once within a node, and between up to 8 nodes of one
rank each (`Target.rounds_once`). Between nodes of several ranks, each node's sum is rounded before
it is sent, and above 8 nodes, in every round: with p nodes and the unit roundoff u (2**-8 of
bfloat16, 2**-11 of float16), the error of a sum is at most (2 + ceil(log2 p)) · u · Σ_r |x_r|, to
first order. A mean is divided before it is rounded, so that it stays in range; a sum travels as
float32 there, in a program of `jaxmpi.jit` and in `tree_allreduce`.
"""

import math
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmpi import _jaxcompat
from jaxmpi._backends import extension, native_calls, primitive
from jaxmpi._backends.base import (
    Branch,
    Collective,
    Event,
    Explain,
    Message,
    Overlap,
    Place,
    Started,
    Taken,
    Target,
    fingerprint_of,
)
from jaxmpi._backends.branches import compare_branches
from jaxmpi._backends.comparison import Comparison, MpiTransport
from jaxmpi._backends.groups import named_groups, position
from jaxmpi._backends.interface import Limits, LocalArrays, Lowering, Processes
from jaxmpi._backends.mpi_library import Communicator
from jaxmpi._backends.native_transports import Transports
from jaxmpi._backends.wire import off_wire, on_wire, through_all, wire_shapes
from jaxmpi._job.process import settings

__all__ = ["InlineComparison", "Native", "on_host"]

E = TypeVar("E")
R = TypeVar("R")
T = TypeVar("T")


class Sent(NamedTuple):
    """A message that a program of this rank sends, for error messages and reports."""

    program: int  # the program's fingerprint
    message: Message  # the collective and its arrays
    message_index: int  # which message of its program it is, from 1; 0 if it is of none


class Difference(NamedTuple):
    """First call in which the ranks differ.

    Attributes:
      call: the fingerprint of this rank's call; 0 where it sent the message instead.
      taken: the branches, if all ranks were in one.
    """

    call: int
    taken: Taken | None


def on_host() -> bool:
    """Return whether the arrays of this process are in the memory of the CPU."""
    return jax.default_backend() == "cpu"


class Native(MpiTransport):
    """Programs that talk through `jaxmpi._native`."""

    name = "native"
    waits_asleep = False  # and nobody asks: the monitor sees each message

    def __init__(
        self, place: Place, mpi: ModuleType, *, native: extension.Extension, concurrent: bool
    ) -> None:
        """Open the transport of all ranks; every rank calls it.

        Args:
          place: of this rank.
          mpi: the module `mpi4py.MPI`.
          native: the extension.
          concurrent: whether several threads may be inside MPI at once.
        """
        self.place, self.native = place, native
        self._mpi, self._concurrent = mpi, concurrent
        self._programs: Communicator = mpi.COMM_WORLD.Dup()
        self.arrays = LocalArrays()
        self._rank = extension.rank_value(place.rank)
        # for each way to divide the ranks into groups: this rank's communicator, and the number of
        # its transport
        self._communicators: dict[tuple[tuple[int, ...], ...], Communicator] = {}
        self._transports: dict[tuple[tuple[int, ...], ...], int] = {}
        self._opened = Transports(mpi, native, place)
        self._sent: dict[int, Sent] = {}  # by fingerprint
        self._branches: dict[int, Branch] = {}  # by fingerprint, as the ranks compare them
        compare_branches()
        host = on_host()
        # also in a job of GPUs
        for target in ("compare", "branch", "collective", "start", "wait", "send_ahead", "take"):
            handler = "host" if target == "collective" else target
            jax.ffi.register_ffi_target(f"jaxmpi_{target}", native.handler(handler), platform="cpu")
        self._on_host = host
        extension.register_int8(native)
        if not host:
            for target, handler in (
                ("compare", "compare"),
                ("branch", "branch"),
                ("collective", "gpu"),
                ("start", "start_gpu"),
                ("wait", "wait"),
            ):
                jax.ffi.register_ffi_target(
                    f"jaxmpi_{target}", native.handler(handler), platform="CUDA"
                )
        self._opened.open(self._programs, ())
        self.description = ", ".join(filter(None, ["transport native", self._opened.description]))
        # a number that was restored from a checkpoint of another job is none of this job's
        native.count_ahead_from(self._programs.bcast(secrets.randbits(62)))

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.place.size

    def connect(self, axes: Mapping[str, int]) -> None:
        """Open a transport for this rank's group of each kind; every rank calls it."""
        for groups in named_groups(axes):
            number, place = position(groups, self.place.rank)
            comm = self._mpi.COMM_WORLD.Split(number, place)
            self._communicators[groups] = comm
            self._transports[groups] = self._opened.open(comm, groups[number])

    # in traced code

    @cached_property
    def effects(self) -> frozenset[Hashable]:
        """Return the ordered effect of all calls."""
        return frozenset({_jaxcompat.ordered_effect()})

    def rank(self) -> jax.Array | np.int32:
        """Return this rank, an int32."""
        return self._rank()

    def compares(self, call: Collective) -> bool:
        """Return whether all ranks compare fingerprints in `call`; a group compares its own."""
        return not call.groups

    def compare(
        self, fingerprint: int, first: Collective | None, calls: Sequence[Collective]
    ) -> Callable[[], None] | None:
        """Return a function that compares a program; None where its first message does.

        After the first call it travels with the next message, if all ranks take part in all
        messages. Otherwise a rank could wait for those of its group, and these, which have called
        something else, for all ranks.
        """
        if first is not None and self.compares(first):
            return None
        later = all(map(self.compares, calls))
        return partial(primitive.compare_fingerprint, fingerprint, self, later=later)

    def compare_branch(
        self, jaxpr: ClosedJaxpr, taken: Branch, branches: Sequence[Branch]
    ) -> ClosedJaxpr:
        """Return a branch behind its record; the next message to all ranks compares the records."""
        # Ranks may have another program each, if these send the same messages.
        fingerprint = fingerprint_of(f"branch {taken.messages}")
        self._branches.setdefault(fingerprint, taken)
        self._sent[fingerprint] = Sent(0, Message(str(taken)), 0)
        return _jaxcompat.behind(jaxpr, partial(native_calls.record_branch, self, fingerprint))

    def compare_loop(self, messages: Sequence[str]) -> Callable[[], None] | None:
        """Return a function that records that a loop begins, as a branch is recorded."""
        text = f"a loop of {', '.join(messages)}"
        fingerprint = fingerprint_of(text)
        self._sent[fingerprint] = Sent(0, Message(text), 0)
        return partial(native_calls.record_branch, self, fingerprint)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out `call`: one message for all arrays."""
        if call.kind in ("compare", "compare_later"):
            text = "no message yet, in another call of this program"
            fingerprint = self._fingerprint(call, Message(text))
            native_calls.compare_fingerprint(self, fingerprint, later=call.kind == "compare_later")
            return []
        if not self.connects(call):
            return through_all(self.run, call, xs, self.rank())
        fingerprint = self._fingerprint(call, _message(call, xs))
        outs = native_calls.run(on_wire(call, xs, self._fits), call, self, fingerprint)
        return off_wire(call, xs, outs)

    def loops(self, *, xla: T, native: T) -> T:
        """Return the calls of the extension's loops, which are for arrays in the host's memory."""
        return native if self._on_host else xla

    def connects(self, call: Collective) -> bool:
        """Return whether the groups have transports, as those along axes of `init` do."""
        return not call.groups or call.groups in self._transports

    def transport_of(self, call: Collective) -> int:
        """Return the extension's number of the transport for a collective."""
        return self._transports[call.groups] if call.groups else 0

    def _fingerprint(self, call: Collective, message: Message) -> int:
        """Return the fingerprint of a message, and keep what it describes."""
        fingerprint = fingerprint_of(f"{call.fingerprint} {call.message_index} {message}")
        self._sent[fingerprint] = Sent(call.fingerprint, message, call.message_index)
        return fingerprint

    def _fits(self, dtype: np.dtype) -> bool:
        """Return whether the extension reduces and moves arrays of this dtype."""
        return dtype.name in self.native.dtypes

    # programs

    def target(self) -> Target:
        """Return collectives as equations of one primitive, which divide for a mean."""
        run = partial(primitive.run, transport=self)
        # as between.cc does it: see the top of this file
        nodes, few = self._opened.nodes, self._opened.tuning.direct_nodes
        return Target(
            self.size,
            run,
            self.rank,
            overlap=self._overlap(),
            divides=True,
            rounds_once=nodes == 1 or (nodes == self.size and nodes <= few),
        )

    def lower(self, lowering: Lowering[R]) -> R:
        """Make a program one with ordered messages."""
        return lowering.in_order(self.target(), self)

    def check(self, limits: Limits) -> None:
        """Refuse nothing."""

    def nested(self, program: T, api: str, title: str) -> T:
        """Return the program: its effect keeps the order beside other programs."""
        return program

    def shared_module(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return None: tokens keep the messages of each rank's own module in order."""
        return None

    def comparison(self, ranks: Processes, objects: Communicator, maximum: object) -> Comparison:
        """Return a comparison in the messages."""
        return InlineComparison(self, ranks, objects)

    def _overlap(self) -> Overlap | None:
        """Return how a thread sends while a program computes; by default between nodes only."""
        asked, tuning, host = settings.get("JAXMPI_OVERLAP"), self._opened.tuning, on_host()
        # its gain on GPUs has not been measured yet
        if asked == "0" or (asked == "auto" and (self._opened.nodes == 1 or not host)):
            return None
        ahead = (self._send_ahead, self._take) if self._concurrent and host else ()
        return Overlap(
            tuning.small_bytes,
            tuning.bucket_bytes,
            self.connects,
            self._start,
            self.native.end_started,
            *ahead,
        )

    def _start(
        self, call: Collective, xs: Sequence[jax.Array], bucket: bool, first: bool
    ) -> Started:
        fingerprint = self._fingerprint(call, _message(call, xs))
        sent, wait = native_calls.start(
            on_wire(call, xs, self._fits), call, self, fingerprint, bucket=bucket, first=first
        )

        def wait_for(before: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = wait(before)
            return off_wire(call, xs, outs[: len(xs)]), outs[len(xs) :]

        return Started(sent, wait_for)

    def _send_ahead(self, call: Collective, xs: Sequence[jax.Array]) -> jax.Array:
        fingerprint = self._fingerprint(call, _message(call, xs))
        return native_calls.send_ahead(on_wire(call, xs, self._fits), call, self, fingerprint)

    def _take(
        self, call: Collective, xs: Sequence[jax.Array], number: jax.Array
    ) -> list[jax.Array]:
        fingerprint = self._fingerprint(call, _message(call, xs))
        outs = native_calls.take(on_wire(call, xs, self._fits), number, call, self, fingerprint)
        return off_wire(call, xs, outs)

    def messages(self, call: Collective, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
        """Return the bytes of each message that `run` sends for arrays of these shapes."""
        sent = wire_shapes(call, arrays, self._fits)
        return [sum(math.prod(x.shape) * x.dtype.itemsize for x in sent)]

    # errors and reports

    def described(self, fingerprint: int) -> Sent | None:
        """Return the message with a fingerprint; None if this rank has traced none with it."""
        return self._sent.get(fingerprint)

    def branches(self, fingerprints: Sequence[int]) -> dict[int, Branch]:
        """Return the branches among the calls that were recorded, by fingerprint."""
        return {x: self._branches[x] for x in fingerprints if x in self._branches}

    def members_of(self, transport: int) -> Sequence[int]:
        """Return the ranks of this rank's group in a transport; () for all ranks."""
        return self._opened.members[transport]

    def communicator_of(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator of a group of ranks, or None."""
        for groups, number in self._transports.items():
            if ranks and self._opened.members[number] == ranks:
                return self._communicators[groups]
        return None

    def monitored(self, is_in_program: Callable[[], bool]) -> None:
        """Do nothing: only the monitor ends the job for a long wait."""

    def wait_for_all(self) -> None:
        """Wait until all messages have ended, those that were sent ahead, too."""
        self.native.wait_for_all()

    def close(self) -> None:
        """Free the communicators, and the shared memory."""
        # first what communicates: a thread may be in a message that was sent ahead
        self._opened.close()
        for comm in (self._programs, *self._communicators.values()):
            comm.Free()


class InlineComparison(Comparison):
    """Comparison in the messages: each carries a fingerprint, and those of calls before it."""

    def __init__(self, transport: Native, ranks: Processes, objects: Communicator) -> None:
        self._transport, self._native = transport, transport.native
        self._ranks, self._objects = ranks, objects

    def explain_mismatches(self, explain: Explain) -> None:
        """Have `explain` write the error where the fingerprints of a message differ."""

        def handler(fingerprint: int, transport: int, calls: int) -> str:
            members = self._transport.members_of(transport)
            difference = None if members else self._first_difference(calls)
            if difference and difference.taken:
                return explain(0, difference.taken, members)
            call = difference.call if difference else 0
            earlier = Sent(fingerprint, Message("a program of an earlier init"), 0)
            sent = self._transport.described(call or fingerprint) or earlier
            text = str(sent.message)
            if sent.message_index:
                text += f", message {sent.message_index} of the program"
            return explain(sent.program, text, members)

        self._explain = explain
        self._native.on_mismatch(handler)

    def _first_difference(self, calls: int) -> Difference | None:
        """Find the first call in which the ranks differ, before a message in which they do.

        All ranks forget these calls.

        Args:
          calls: how many calls this rank made before its message that are not compared yet.

        Returns:
          The call, the same one on all ranks; None where they differ in the message alone.
        """
        first, made = self._native.calls_before(calls)
        everyone = self._ranks.gather_details((first, made, self._transport.branches(made)))
        self._native.forget_calls()
        begin = max(first for first, _, _ in everyone)
        columns = zip_longest(
            *(theirs[begin - first :] for first, theirs, _ in everyone), fillvalue=0
        )
        found = next((pair for pair in enumerate(columns, begin) if len(set(pair[1])) > 1), None)
        if found is None:
            return None
        number, column = found
        known: dict[int, Branch] = {}
        for _, _, of_rank in everyone:
            known.update(of_rank)
        taken = None
        if all(call in known for call in column):
            taken = Taken(tuple(known[call] for call in column))
        return Difference(made[number - first] if number < calls else 0, taken)

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """Return that of a group of ranks, if they have one; else that of all."""
        return self._transport.communicator_of(ranks) or self._objects

    def executor(self, *, inline: E, before: E) -> E:
        """Return `inline`."""
        return inline

    def drain(self) -> None:
        """Wait for all programs: their messages and those outside have one order."""
        self._ranks.finish()

    def extremes(self, fingerprint: int, title: str, program: int) -> tuple[int, int]:
        """Return the smallest and largest fingerprint, compared in the order of the messages."""
        try:
            with self._ranks.entered():
                smallest, largest, calls = self._native.compare(fingerprint)
        except RuntimeError as error:  # a message that was sent ahead has failed
            if found := self._ranks.registry.pop(str(error)):
                raise found from None
            raise
        if smallest != largest:
            difference = self._first_difference(calls)
            if difference:
                earlier = Sent(program or fingerprint, Message(title), 0)
                sent = self._transport.described(difference.call) or earlier
                text = self._explain(sent.program, difference.taken or sent.message, ())
                if found := self._ranks.registry.pop(text):
                    raise found
        return smallest, largest

    def counts(self) -> tuple[int, int]:
        """Return how many messages have started, and how many have ended."""
        return self._native.messages()

    def last_fingerprint(self) -> int:
        """Return the fingerprint of the last message."""
        return self._native.last_fingerprint()

    def events(self) -> Sequence[Event]:
        """Return the last messages."""
        # the record has 0 for a time that has not come, or is unknown
        return [
            Event(number, fingerprint, sent_bytes, entered, all_entered or None, done or None)
            for number, fingerprint, sent_bytes, entered, all_entered, done in self._native.events()
        ]

    def waits(self) -> Sequence[tuple[int, int]]:
        """Return when the last waits for messages began and ended, in monotonic nanoseconds."""
        return self._native.waits()

    def exposed_ns(self) -> int | None:
        """Return the nanoseconds for which programs have waited for messages."""
        return self._native.exposed_ns()

    def described(self, fingerprint: int) -> tuple[int, Message] | None:
        """Return (program fingerprint, message) for a message of a program; None for any other."""
        sent = self._transport.described(fingerprint)
        return (sent.program, sent.message) if sent else None


def _message(call: Collective, xs: Sequence[jax.Array]) -> Message:
    return Message(call.title, tuple((x.shape, str(x.dtype)) for x in xs))
