"""Means over ranks in fewer bytes: what a codec is, and the codecs that cast, `bf16` and `f16`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis, names, with_parameters
from jaxmpi._collectives.arrays import axis_size
from jaxmpi._collectives.trees import Caller
from jaxmpi._leaves import PyTree
from jaxmpi._optim.float_leaves import floats
from jaxmpi._world import session

__all__ = ["Codec", "OneMessage", "bf16", "check_at_least_one", "check_codec", "f16", "ranks_along"]


class OneMessage(NamedTuple):
    """A mean that takes one message: what a rank sends follows from its own updates alone.

    Attributes:
      init: params -> state, of arrays like them.
      encode: (updates, state) -> (arrays to send, state).
      decode: (arrays, like) -> the mean over ranks, in the structure and dtypes of `like`. The
        arrays are the means of what was sent, or, if not `averages`, those of all ranks,
        `[size, ...]` each.
      averages: whether the arrays are averaged on the way.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]
    decode: Callable[[list[jax.Array], PyTree], PyTree]
    averages: bool


class Codec(NamedTuple):
    """What is sent for a mean.

    Attributes:
      init: params -> state, of arrays like them.
      mean: (updates, state) -> (mean over ranks in the dtypes of updates, state). Called in traced
        code, on all ranks.
      one_message: the same in one message, for `local_sgd` with a delay; None where there is no
        such way.
      axis: of the ranks that the mean is over.
    """

    init: Callable[[PyTree], PyTree]
    mean: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    one_message: OneMessage | None = None
    axis: Axis = AXIS


def check_codec(function: str, codec: object, axis: Axis = AXIS) -> None:
    """Raise unless it is a codec for means along an axis.

    Raises:
      TypeError: it is none.
      ValueError: it is one for another axis.
    """
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{function}: codec is a {type(codec).__name__}. Use one of jaxmpi.codecs, such as "
            "codecs.bf16()."
        )
    if names(codec.axis) != names(axis):
        raise ValueError(
            f"{function}: the mean is along axis {axis!r}, and the codec's along {codec.axis!r}. "
            "Give the codec the axis, too, "
            f"as in codecs.bf16(axis={axis!r})."
        )


def ranks_along(axis: Axis) -> int:
    """The number of ranks that a codec's mean is over."""
    return axis_size(axis, session.current("codecs"))


def check_at_least_one(codec: str, name: str, value: int) -> None:
    """Raise a ValueError unless the argument `name` of a codec is 1 or more."""
    if value < 1:
        raise ValueError(f"codecs.{codec}: {name} is {value}, and must be 1 or more.")


def bf16(*, axis: Axis = AXIS) -> Codec:
    """Send bfloat16: half of float32's bytes, 8 bits of precision, its whole range.

    The sum is formed in float32 and rounded once more. On the native transport half of the bytes
    travel; the others carry short floats as float32. No state.

    Args:
      axis: of the ranks that the mean is over, as in `tree_allreduce`: that of the transform that
        gets the codec.
    """
    return _cast("codecs.bf16", jnp.bfloat16, axis)


def f16(*, axis: Axis = AXIS) -> Codec:
    """Send float16: 11 bits of precision; what is beyond ±65504 is sent as that, and what is below 3e-8 as zero.

    As `bf16` otherwise.
    """
    return _cast("codecs.f16", jnp.float16, axis)


def _cast(name: str, dtype: DTypeLike, axis: Axis) -> Codec:
    largest = float(jnp.finfo(dtype).max)

    def encode(updates: PyTree, state: PyTree) -> tuple[list[jax.Array], PyTree]:
        leaves, _ = floats(name, with_parameters(updates, name))
        return [jnp.clip(x, -largest, largest).astype(dtype) for x in leaves], state

    def decode(means: list[jax.Array], like: PyTree) -> PyTree:
        leaves, put = floats(name, like)
        return put([y.astype(x.dtype) for x, y in zip(leaves, means, strict=True)])

    def mean(updates: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        coded, state = encode(updates, state)
        return decode(Caller(name).allreduce(coded, op="mean", axis=axis), updates), state

    return Codec(
        lambda params: (), mean, OneMessage(lambda params: (), encode, decode, averages=True), axis
    )
