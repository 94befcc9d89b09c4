"""Means by a codec: `Codec`, as a user writes one, and the means that transforms form with it.

The codecs themselves are in `jaxmpi.codecs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import jax

from jaxmpi._axis import AXIS, Axis, bound, names
from jaxmpi._backends import sent_ahead
from jaxmpi._backends.base import Collective
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import check_in_step
from jaxmpi._optim.mean import Allreduce, Mean, Traits
from jaxmpi._world import session

__all__ = ["UNCODED", "Codec", "CodecMean", "OneMessage", "OneMessageMean", "check_codec"]


class OneMessage(NamedTuple):
    """A mean in one message: the data that a rank sends depends only on its updates.

    Attributes:
      init: params -> state, of arrays like them.
      encode: (updates, state) -> (arrays to send, state).
      decode: (arrays, like) -> the mean over ranks, in the structure and dtypes of `like`. If
        `averages`, the arrays are the means over ranks of the encoded arrays; if not, they are the
        encoded arrays of all ranks, `[size, ...]` each.
      averages: whether the encoded arrays are averaged on the way.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]
    decode: Callable[[list[jax.Array], PyTree], PyTree]
    averages: bool


# the message without a codec: the arrays as they are
UNCODED = OneMessage(
    lambda params: (), lambda xs, state: (xs, state), lambda means, like: means, averages=True
)


class Codec(NamedTuple):
    """A mean over ranks in fewer bytes.

    Attributes:
      init: params -> state, of arrays like them.
      mean: (updates, state) -> (mean over ranks in the dtypes of updates, state). Called in traced
        code, on all ranks.
      one_message: the same mean in one message, for `local_sgd` with a delay; None if the codec
        needs several rounds.
      axis: the axis of the ranks that the mean is over.
    """

    init: Callable[[PyTree], PyTree]
    mean: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    one_message: OneMessage | None = None
    axis: Axis = AXIS


def check_codec(function: str, codec: object, axis: Axis = AXIS) -> None:
    """Raise an error unless `codec` is a codec for means along an axis.

    Raises:
      TypeError: `codec` is not a `Codec`.
      ValueError: `codec` is for another axis.
    """
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{function}: codec is a {type(codec).__name__}. Use one of jaxmpi.codecs, such as "
            "codecs.bf16()."
        )
    if names(codec.axis) != names(axis):
        raise ValueError(
            f"{function}: the mean is along axis {axis!r}, and the codec's along {codec.axis!r}. "
            f"Give the codec the same axis, as in codecs.bf16(axis={axis!r})."
        )


@final
@dataclass(frozen=True)
class CodecMean(Mean):
    """The mean by a codec, in as many rounds as the codec takes.

    `extra` is averaged without the codec. On one rank nothing is sent, and all stays as it is.

    **Communication:** that of the codec, and an allreduce of `extra`.
    """

    function: str
    codec: Codec
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits("a codec", has_state=True, one_program=False)

    def init(self, params: PyTree) -> PyTree:
        return self.codec.init(params)

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        extra, _, _ = Allreduce(self.function, axis=self.axis).mean(extra, (), ())
        if axis_size(self.axis, session.current(self.function)) == 1:
            return updates, extra, state
        check_in_step(self.function)
        means, state = self.codec.mean(updates, state)
        return means, extra, state


@final
@dataclass(frozen=True)
class OneMessageMean(Mean):
    """The mean in one message, which may be sent in one call and received in a later one.

    On one rank, too, the updates are encoded and decoded.

    **Communication:** an allreduce of the encoded arrays if the message averages them, else an
    allgather; and an allreduce of `extra`.
    """

    function: str
    message: OneMessage
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits("fragments or a delay", has_state=True, one_program=False)

    def init(self, params: PyTree) -> PyTree:
        return self.message.init(params)

    def mean(self, updates: PyTree, extra: PyTree, state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        extra, _, _ = Allreduce(self.function, axis=self.axis).mean(extra, (), ())
        coded, state = self.encode(updates, state)
        return self.receive(coded, updates), extra, state

    def encode(self, updates: PyTree, state: PyTree) -> tuple[list[jax.Array], PyTree]:
        """Return the arrays to send, and the new state."""
        return self.message.encode(updates, state)

    def send(self, coded: list[jax.Array]) -> jax.Array:
        """Start the message of encoded arrays, and return its number.

        A later call receives it: `receive(sent_ahead(coded, number), like)`.
        """
        if not bound(self.axis) or axis_size(self.axis, session.current(self.function)) == 1:
            return sent_ahead.none()
        call = Collective("allgather")
        if self.message.averages:
            call = Collective("allreduce", op="mean")
        return sent_ahead.send_ahead(call, coded, self.axis)

    def receive(self, coded: list[jax.Array], like: PyTree) -> PyTree:
        """Return the mean over the ranks of arrays that were encoded, which are like `like`."""
        caller = Caller(self.function)
        exchange = caller.allreduce if self.message.averages else caller.allgather
        return self.message.decode(exchange(coded, axis=self.axis), like)
