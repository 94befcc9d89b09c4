"""Records that the backends and the layers above share: a collective, its messages, a place."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import jax
from jax.typing import ArrayLike

from jaxmpi._backends.groups import described
from jaxmpi._errors import RankMismatchError

__all__ = [
    "ArrayType",
    "Branch",
    "Collective",
    "Event",
    "Explain",
    "Message",
    "Overlap",
    "Place",
    "Progress",
    "Registry",
    "Started",
    "Taken",
    "Target",
    "fingerprint_of",
]

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
    """Return a number of 62 bits that differs where texts do: its negative is an int64, too."""
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

    Attributes:
      kind: one of the above.
      op: "sum", "max", "min" or "prod", for allreduce and reduce_scatter; "mean" of floats where
        the backend divides.
      root: the rank whose array a bcast sends; with `groups`, the rank within each group.
      pairs: (from, to) for each message of a permute; a rank is at most once on either side.
      fingerprint: that of the program that it is part of; 0 if it is part of none. Transports that
        compare programs by their messages need it.
      groups: the ranks of each group, if it is carried out within groups, whose ranks count from 0;
        () for all ranks as one group.
      message_index: which message of its program it is, from 1; 0 if it is of none. Transports that
        compare programs by their messages need it.
    """

    kind: str
    op: str = ""
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    fingerprint: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    message_index: int = 0

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
        """Return the shape of the result for an operand of a shape, in a job of `size` ranks."""
        if self.kind == "allgather":
            return (self.count(size), *shape)
        return shape[1:] if self.kind == "reduce_scatter" else shape


# Functions in traced code:
# send_ahead(collective, arrays) -> number of the message
SendAhead = Callable[[Collective, Sequence[jax.Array]], jax.Array]
# take(collective, arrays, number) -> results
Take = Callable[[Collective, Sequence[jax.Array], jax.Array], list[jax.Array]]
# wait(before) -> (results, before): computes the arrays `before`, then waits for the message
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
    can_start: Callable[[Collective], bool]  # whether such a collective can be started
    # in traced code; whether it is one of several buckets, and the first message that is started
    # before any is waited for
    start: Callable[[Collective, Sequence[jax.Array], bool, bool], Started]
    # waits until the started messages have ended, in a program that is about to fail
    end_started: Callable[[], None] = lambda: None
    # where messages may be on their way from one call of a program to the next
    send_ahead: SendAhead | None = None
    take: Take | None = None


class Branch(NamedTuple):
    """One branch of a `lax.cond` whose branches send different messages.

    Attributes:
      function: the function of jaxmpi that sends them, such as "distributed".
      line: the user's line, as "file:line"; "" if it is not known.
      number: of the first branch that sends these messages, from 0.
      messages: what it sends, in words; () for nothing.
    """

    function: str
    line: str
    number: int
    messages: tuple[str, ...]

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{', '.join(self.messages) or 'nothing'} in a branch{at}"


class Taken(NamedTuple):
    """Branches of one `lax.cond` that the ranks take, and that differ.

    Attributes:
      branches: one of each rank, in the order of the ranks.
    """

    branches: tuple[Branch, ...]


# Returns the text of the error where the ranks differ in a program. Takes its fingerprint; what
# this rank was about to send, or what all ranks take; the ranks of the group, or () for all.
Explain: TypeAlias = Callable[[int, str | Message | Taken, Sequence[int]], str]


class Event(NamedTuple):
    """One collective of this rank, with times by `time.monotonic_ns`.

    A time that has not come, or is unknown, is None.
    """

    number: int
    fingerprint: int
    bytes: int
    entered_ns: int
    all_entered_ns: int | None
    done_ns: int | None


class Progress(NamedTuple):
    """Collectives that a rank has entered, for the monitor."""

    # Collectives and programs. Each rank enters the same ones, so that the numbers of two ranks can
    # be compared; votes aside, which only some of the ranks have to wait for.
    entered: int
    votes: int  # that it has given
    inside: bool  # whether it waits in one of these
    in_vote: bool  # whether that is a vote


class Place(NamedTuple):
    """Rank of this process, and its place on the nodes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0


@dataclass
class Registry:
    """Facts that a rank remembers between calls.

    They are programs that the ranks have agreed on, errors that are not raised yet, and reports
    that are made once.
    """

    # programs that were traced, by fingerprint; `_consistency.compare` knows their type
    programs: dict[int, object] = field(default_factory=dict)
    agreed: set[int] = field(default_factory=set)  # fingerprints on which all ranks have agreed
    # fingerprints of programs before which the values of arguments were compared, since the last
    # restore; and the number of restores
    values_compared: set[int] = field(default_factory=set)
    restores: int = 0
    # the numbers that programs return, by their tags; `_jit.numbers` knows their type
    numbers: dict[int, object] = field(default_factory=dict)
    # the last error that a thread of a program has found, with its mark, until it is raised
    kept_error: tuple[str, Exception] | None = None
    # the user's line of the last `shard` that gave the ranks parts of different lengths
    uneven_shard: str = ""
    # the user's lines of `shard` whose data the ranks have compared
    shards: set[str] = field(default_factory=set)
    machines_reported: bool = False  # that ranks compile for themselves, on different machines
    errors_kept: int = 0  # so far
    mismatches: int = 0  # that all ranks have reported to each other so far
    # what this rank is about to raise on all ranks, for `_consistency.compare`
    raising: RankMismatchError | None = None

    def keep(self, error: Exception) -> str:
        """Keep an error that XLA will carry as text; return the mark to put into the text."""
        self.errors_kept += 1
        mark = f"[jaxmpi error {self.errors_kept}]"
        self.kept_error = mark, error  # an earlier one that nobody has raised is out of date
        return mark

    def pop(self, text: str) -> Exception | None:
        """Return the kept error whose mark a text has, once; None if it has no such mark."""
        if self.kept_error is None:
            return None
        mark, error = self.kept_error
        if mark not in text:
            return None
        self.kept_error = None
        return error


class Target(NamedTuple):
    """Operations with which a traced program is rewritten for a transport."""

    size: int  # the number of ranks
    # carries out a collective, in traced code
    run: Callable[[Collective, Sequence[jax.Array]], list[jax.Array]]
    rank: Callable[[], ArrayLike]  # this rank's number, in traced code
    combine: bool = True  # whether collectives that can travel together do
    overlap: Overlap | None = None  # how messages are on their way while the program computes
    # whether what carries the program out keeps collectives, and loops that have some, in order
    keeps_order: bool = True
    # whether `run` takes the mean of any floats; else only that of short ones, which it widens
    divides: bool = False
    # whether `run` rounds a sum of 16-bit floats once, at the end, and no sum of some of the ranks
    rounds_once: bool = True
