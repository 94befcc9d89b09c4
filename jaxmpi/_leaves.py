"""Leaves of a pytree: their names, and errors that name a leaf that cannot be sent or reduced."""

from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi._errors import RankCountError
from jaxmpi._per_rank_state import PathMarkKey, path_mark_of

__all__ = [
    "PyTree",
    "as_array",
    "check_fits",
    "check_rows",
    "is_inexact",
    "is_key",
    "leaf_name",
    "output_name",
    "widest",
]


# arrays and numbers in the containers that `jax.tree` knows; mypy has no type for it
PyTree: TypeAlias = Any

ONE_BIT = frozenset(np.dtype(getattr(jnp, name)) for name in ("int1", "uint1"))


class HasDtype(Protocol):
    """An array, or a description of one, such as a `jax.ShapeDtypeStruct`."""

    @property
    def dtype(self) -> np.dtype: ...


def leaf_name(path: KeyPath) -> str:
    """Return the name of the leaf at a path for errors, such as "['dense']['kernel']"."""
    keys = tuple(key if (mark := path_mark_of(key)) is None else PathMarkKey(mark) for key in path)
    return jax.tree_util.keystr(keys) or "the argument"


def output_name(path: KeyPath) -> str:
    """Return the name of the leaf at a path of an output, for errors, such as "output ['x']"."""
    return f"output {leaf_name(path)}" if path else "the output"


def is_key(x: HasDtype) -> bool:
    """Return whether an array holds PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_inexact(x: ArrayLike | HasDtype) -> bool:
    """Return whether x has real or complex floats."""
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact)


def as_array(function: str, path: KeyPath, leaf: object, op: str | None) -> jax.Array:
    """Return a leaf as a JAX array, or raise an error that names the leaf.

    Args:
      function: the caller, for the error.
      path: the path of the leaf, from `tree_flatten_with_path`.
      leaf: anything.
      op: the reduction that the leaf goes into; None if it is only moved.

    Raises:
      TypeError: the leaf is no array of numbers, or cannot be reduced by `op`.
      OverflowError: as `check_fits`.
    """
    # This runs for every leaf of every eager call, so names are made in the errors only.
    check_fits(function, path, leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} is a {type(leaf).__name__}, not an array. Take it "
            "out of the tree."
        )
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if dtype == jax.dtypes.float0:  # the gradients of integers hold no numbers
        return leaf  # type: ignore[return-value]
    if (
        not isinstance(leaf, jax.Array)
        and dtype != np.bool_
        and not jnp.issubdtype(dtype, jnp.number)
    ):
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} has dtype {dtype}, which JAX does not know. "
            "Convert it to numbers."
        )
    if dtype in ONE_BIT:
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} has dtype {dtype}, which XLA takes for booleans. "
            "Cast it to int2 or to bool."
        )
    try:
        # `jnp.asarray` would return a concrete array unchanged, after checks that take a third of
        # an eager call. A tracer goes through it: a Python float under `jax.grad` is a tracer whose
        # value is no array yet.
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            x = leaf
        elif getattr(dtype, "isnative", True):
            x = jnp.asarray(leaf)
        else:
            x = jnp.asarray(np.asarray(leaf, dtype.newbyteorder("=")))
    except (TypeError, ValueError, OverflowError, jax.errors.JaxRuntimeError) as error:
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} is {dtype}, which JAX cannot hold: {error}"
        ) from error
    if op is None:
        return x
    if is_key(x):
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} is a PRNG key, which cannot be reduced. Use "
            "tree_bcast or tree_allgather."
        )
    if op not in ("max", "min") and dtype == jnp.bool_:
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} is bool, which has no {op}. Cast it to a number, "
            "or use op 'max' or 'min'."
        )
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{function}: leaf {leaf_name(path)} is {dtype}, which has no order. Reduce its real "
            "and imaginary parts."
        )
    return x


def check_fits(function: str, path: KeyPath, leaf: object) -> None:
    """Raise an OverflowError if a Python or NumPy number does not fit the dtype that JAX gives it.

    Without `jax_enable_x64`, JAX truncates 64 bits to 32, which silently changes an integer of 2³¹
    or more.
    """
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return
    host = np.asarray(leaf)
    if isinstance(leaf, int) and host.dtype == object:  # beyond 64 bits
        kind, wrong = jax.dtypes.canonicalize_dtype(int), leaf
    elif host.dtype.kind in "iufc" and host.size:
        kind = jax.dtypes.canonicalize_dtype(
            int if isinstance(leaf, int) and host.dtype.kind in "iu" else host.dtype
        )
        if kind == host.dtype:
            return
        if host.dtype.kind in "iu":
            limits = np.iinfo(kind)
            outside = (host < limits.min) | (host > limits.max)
        else:
            with np.errstate(over="ignore"):
                outside = np.isfinite(host) & ~np.isfinite(host.astype(kind))
        if not outside.any():
            return
        wrong = host[outside].reshape(-1)[0].item()
    else:
        return
    remedy = "pass a float, or " if np.issubdtype(kind, np.integer) else ""
    raise OverflowError(
        f"{function}: leaf {leaf_name(path)} is {wrong}, which {kind} cannot hold. To keep it, "
        f"{remedy}set the option jax_enable_x64 (JAX_ENABLE_X64=1) on every rank."
    )


def widest(*values: Any) -> np.dtype:
    """Return the dtype for sums of arrays, numbers or dtypes: the widest one, 32 bits at least.

    It does not depend on `jax_numpy_dtype_promotion`, which is for the user's own arithmetic.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(jnp.float32, *values))


def check_rows(function: str, path: KeyPath, x: jax.Array, size: int) -> None:
    """Raise a ValueError that names the leaf unless its first axis has the length `size`."""
    if x.ndim == 0 or x.shape[0] != size:
        raise (RankCountError if x.ndim else ValueError)(
            f"{function}: leaf {leaf_name(path)} has shape {list(x.shape)}, and its first axis "
            f"must be the {size} ranks. Reshape it to [{size}, ...]."
        )
