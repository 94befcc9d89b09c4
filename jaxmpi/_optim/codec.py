"""The interface of a codec, as transforms use it. The codecs themselves are in `jaxmpi.codecs`."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxmpi._axis import AXIS, Axis, names
from jaxmpi._leaves import PyTree

__all__ = ["Codec", "OneMessage", "check_codec"]


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
