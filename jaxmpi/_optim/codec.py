"""Means by a codec: `Codec`, as a user may write one, and the means that transforms form with it.

A codec communicates by itself, in as many messages as it needs: `CodecMean` calls it. For fragments
or a delay of `local_sgd` the mean must be one message, which is encoded and sent in one call, and
received and decoded in a later one: a codec that can do so has a `OneMessage`, which
`OneMessageMean` uses. The codecs themselves are in `jaxmpi.codecs`.
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
from jaxmpi._optim.mean import Allreduce, Mean, Traits
from jaxmpi._optim.transform_arguments import check_in_step
from jaxmpi._world import session

__all__ = ["UNCODED", "Codec", "CodecMean", "OneMessage", "OneMessageMean", "check_codec"]


class OneMessage(NamedTuple):
    """A mean over ranks in one message; its functions do not communicate.

    Attributes:
      init: params -> the state of this rank before the first call, for updates like `params`.
      encode: (updates, state) -> (arrays to send, new state). The arrays have the same shapes and
        dtypes on all ranks.
      decode: (received arrays, like) -> the mean over ranks, in the structure, shapes and dtypes of
        `like`. The received arrays are the means over ranks of the encoded ones, or, without
        `averages`, the encoded ones of all ranks, `[size, ...]` each.
      averages: whether the encoded arrays are averaged by the message (an allreduce) or gathered
        (an allgather).
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]
    decode: Callable[[list[jax.Array], PyTree], PyTree]
    averages: bool


# The message of `local_sgd` without a codec: the arrays of a fragment as they are.
UNCODED = OneMessage(
    init=lambda params: (),
    encode=lambda xs, state: (xs, state),
    decode=lambda means, like: means,
    averages=True,
)


class Codec(NamedTuple):
    """A mean over ranks in fewer bytes; one of `jaxmpi.codecs`, or one that you write.

    Attributes:
      init: params -> the state of this rank before the first call, for updates like `params`; ()
        if the codec keeps none. The state may differ between the ranks.
      mean: (updates, state) -> (mean over ranks, new state). The mean has the structure, shapes and
        dtypes of `updates`, and must be equal on the ranks along the axis. It communicates, with
        the collectives of jaxmpi, and every rank calls it, in a function under `jaxmpi.jit` or, not
        under `simulate`, eagerly. It is not called on one rank.
      one_message: the same mean in one message, for `local_sgd` with fragments or a delay; None if
        the codec needs several rounds of messages.
      axis: the axis of the ranks that the mean is over: that of the transform that gets the codec.
      is_narrow: whether a gradient times a weight may be too large for the codes, though the
        gradient is not. With a weight, the mean of the weights is then formed first, in a message
        of its own, and the codec gets the gradients times the ratios of the weights to it.
    """

    init: Callable[[PyTree], PyTree]
    mean: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    one_message: OneMessage | None = None
    axis: Axis = AXIS
    is_narrow: bool = False


def check_codec(function: str, codec: object, axis: Axis = AXIS) -> None:
    """Check that `codec` is a codec for means along an axis.

    Args:
      function: the name in the error.
      codec: the argument of the user.
      axis: the axis of the transform that got it.

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
    """The mean by a codec, in as many messages as the codec needs.

    `extra` is averaged without the codec. On one rank nothing is sent, and updates, extra and state
    stay as they are.

    **Communication:** an allreduce of `extra`, then that of the codec.
    """

    function: str
    codec: Codec
    axis: Axis = AXIS

    @property
    def traits(self) -> Traits:
        return Traits(
            "a codec", has_state=True, one_program=False, weights_first=self.codec.is_narrow
        )

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

    `mean` does all of it. With a delay, the steps are separate: `encode` and `send` in one call of
    a program, `receive` in a later one. On one rank, too, the updates are encoded and decoded.

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
        # not sent ahead: `receive` sends the message itself
        return self.receive(coded, updates), extra, state

    def encode(self, updates: PyTree, state: PyTree) -> tuple[list[jax.Array], PyTree]:
        """Return (arrays to send, new state) for this rank's updates."""
        return self.message.encode(updates, state)

    def send(self, coded: list[jax.Array]) -> jax.Array:
        """Start to send encoded arrays; a later call receives the message.

        That call is `receive(sent_ahead(coded, number), like)`, in the same order on all ranks.

        Returns:
          The number of the message, a uint32 `[2]`; `sent_ahead.none()` if nothing is sent, on one
          rank and where the axis is not bound. `receive` then sends the message itself.
        """
        if not bound(self.axis) or axis_size(self.axis, session.current(self.function)) == 1:
            return sent_ahead.none()
        call = Collective("allgather")
        if self.message.averages:
            call = Collective("allreduce", op="mean")
        return sent_ahead.send_ahead(call, coded, self.axis)

    def receive(self, coded: list[jax.Array], like: PyTree) -> PyTree:
        """Exchange encoded arrays, and return the decoded mean over the ranks.

        Args:
          coded: this rank's encoded arrays; marked by `sent_ahead` if `send` has sent them.
          like: a tree with the structure, shapes and dtypes of the updates.
        """
        caller = Caller(self.function)
        exchange = caller.allreduce if self.message.averages else caller.allgather
        return self.message.decode(exchange(coded, axis=self.axis), like)
