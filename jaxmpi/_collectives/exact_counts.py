"""Exact sums and means of Python and NumPy integers, outside of traced code.

JAX adds integers in their own dtype, and silently wraps a sum that does not fit. Counters are such
integers: samples, tokens, bytes. Each is sent as two halves,

  x = high · 2ᵏ + low, 0 ≤ low < 2ᵏ,

whose sums over the ranks fit, and are put together in Python. Every rank gets the whole sum, so all
raise if it does not fit.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi._backends.one_process import PerRank
from jaxmpi._leaves import PyTree, as_array, leaf_name

__all__ = ["halves", "is_count", "simulated", "total"]


def is_count(leaf: object) -> bool:
    """Return whether a leaf is an integer, or integers, of Python or NumPy; booleans are none."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "iu"
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and the low half of integers, in 32 bits, or in 64 if they have as many."""
    host = np.asarray(x)
    wide = np.dtype(np.int64 if host.dtype.itemsize == 8 else np.int32)
    if host.dtype.itemsize < wide.itemsize:
        host = host.astype(wide)
    k = 4 * wide.itemsize
    low = host & host.dtype.type((1 << k) - 1)
    return jnp.asarray((host >> k).astype(wide)), jnp.asarray(low.astype(wide))


def total(
    function: str,
    path: KeyPath,
    leaf: ArrayLike,
    dtype: np.dtype,
    sums: Sequence[jax.Array],
    op: str,
    size: int | np.ndarray,
) -> jax.Array:
    """Return the sum, or the mean rounded down, from the sums of the halves.

    Args:
      function: for the error.
      path: of the leaf.
      leaf: this rank's; the result has a weak type where this is a Python int.
      dtype: of the result.
      sums: of `halves`, over the ranks.
      op: "sum" or "mean".
      size: the number of ranks in the sum; an array of the shape of the sums where it differs.

    Raises:
      OverflowError: the result does not fit the dtype.
    """
    k = 4 * sums[0].dtype.itemsize
    exact = np.asarray(sums[0]).astype(object) * (1 << k) + np.asarray(sums[1]).astype(object)
    exact = np.asarray(exact // size if op == "mean" else exact, object)
    limits = np.iinfo(dtype)
    for number in exact.reshape(-1):
        if not limits.min <= number <= limits.max:
            raise OverflowError(_too_large(function, path, number, dtype))
    return (
        jnp.asarray(int(exact))
        if isinstance(leaf, int) and not exact.shape
        else jnp.asarray(exact.astype(dtype))
    )


def simulated(
    function: str,
    leaves: Sequence[tuple[KeyPath, ArrayLike | PerRank]],
    op: str,
    sum_of: Callable[[PyTree], PyTree],
) -> list[jax.Array | PerRank]:
    """Reduce integers of Python and NumPy under `simulate`, where each may be a `PerRank` of them.

    Args:
      function: the caller, for the error.
      leaves: the integers, with their paths.
      op: "sum" or "mean".
      sum_of: the collective that was called, on pytrees and with op "sum".

    Raises:
      OverflowError: a result does not fit its dtype.
    """
    arrays = [as_array(function, path, _stack(leaf), op) for path, leaf in leaves]
    sent = []
    for (_, leaf), x in zip(leaves, arrays, strict=True):
        # The sum of ones is the number of ranks in the sum: 1 if a reduce leaves a rank its value.
        terms = (*halves(x), jnp.ones(x.shape, jnp.int32))
        sent.append([PerRank(term) if isinstance(leaf, PerRank) else term for term in terms])
    outs: list[jax.Array | PerRank] = []
    for (path, leaf), x, sums in zip(leaves, arrays, sum_of(sent), strict=True):
        high, low, ranks = map(_stack, sums)
        out = total(
            function, path, _stack(leaf), x.dtype, (high, low), op, np.asarray(ranks).astype(object)
        )
        outs.append(PerRank(out) if isinstance(sums[0], PerRank) else out)
    return outs


def _stack(leaf: ArrayLike | PerRank) -> ArrayLike:
    return leaf.stack if isinstance(leaf, PerRank) else leaf


def _too_large(function: str, path: KeyPath, number: int, dtype: np.dtype) -> str:
    return (
        f"{function}: the sum of leaf {leaf_name(path)} over the ranks is {number}, which "
        f"{np.dtype(dtype)} cannot hold. Pass floats, or set the option jax_enable_x64 "
        "(JAX_ENABLE_X64=1) on every rank."
    )
