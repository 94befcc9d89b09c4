"""What may stand at the leaves of a tree, and the errors that name the leaf that may not."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

__all__ = [
    "PerRankKey",
    "PerRankState",
    "PyTree",
    "ShardKey",
    "as_array",
    "check_fits",
    "check_rows",
    "in_shard",
    "is_key",
    "is_own",
    "leaf_name",
    "shard_axis",
]


PyTree: TypeAlias = Any  # of arrays and numbers, as `jax.tree` takes them apart; mypy has no type for it


class HasDtype(Protocol):
    """An array, or what stands for one, such as a `jax.ShapeDtypeStruct`."""

    @property
    def dtype(self) -> np.dtype: ...


class PerRankKey(jax.tree_util.GetAttrKey):  # type: ignore[misc]
    """The key of `PerRankState.per_rank` in a path: a type of its own, as any class may have a field of this name."""


class ShardKey(PerRankKey):
    """The key of `ShardedArray.shard` in a path: shards are each rank's own, too.

    Attributes:
      axis: that the array is cut over.
    """

    def __init__(self, axis: str | tuple[str, ...]) -> None:
        super().__init__("shard")
        self.axis = axis


@jax.tree_util.register_pytree_with_keys_class
class PerRankState:
    """Mark a part of a pytree as each rank's own: per-rank keys, environments, BatchNorm statistics of local batches.

    All other leaves of a train state are equal on all ranks. In a `PerRankState`,

    - `save` writes every rank's values, and `restore` gives each rank its own back. On another number of ranks it raises
      unless all ranks had the same; `PerRankState(None)` in `like` leaves the part out;
    - `synchronize` keeps each rank's values; `watch_replicas` and JAXMPI_CHECK do not compare them;
    - `jaxmpi.jit` lets them differ in the arguments and outputs that are named as replicated.

    It is a pytree node with one child, and goes through `jax.jit`, `jax.grad` and optimizers as a tuple would. Structure,
    shapes and dtypes are the same on all ranks. (`PerRank` is something else: the stacked arrays of simulated ranks.)

    Attributes:
      per_rank: any pytree.

    >>> import jax, jaxmpi
    >>> run = {"step": 0, "key": PerRankState(jaxmpi.rank_key(jax.random.key(0)))}
    >>> key, noise_key = jax.random.split(run["key"].per_rank)
    >>> run["key"] = PerRankState(key)
    """

    def __init__(self, per_rank: PyTree) -> None:
        self.per_rank = per_rank

    def __repr__(self) -> str:
        return f"PerRankState({self.per_rank!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[PerRankKey, PyTree]], None]:
        return ((PerRankKey("per_rank"), self.per_rank),), None

    def tree_flatten(self) -> tuple[tuple[PyTree], None]:
        return (self.per_rank,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[PyTree]) -> "PerRankState":
        return cls(*children)


def is_own(path: KeyPath) -> bool:
    """Whether the leaf at this path of `jax.tree_util` is in a `PerRankState`."""
    return any(isinstance(key, PerRankKey) for key in path)


def in_shard(path: KeyPath) -> bool:
    """Whether the leaf at this path of `jax.tree_util` is the shard of a `ShardedArray`."""
    return shard_axis(path) is not None


def shard_axis(path: KeyPath) -> str | tuple[str, ...] | None:
    """The axis over which the `ShardedArray` at this path of `jax.tree_util` is cut; None where there is none."""
    return next((key.axis for key in path if isinstance(key, ShardKey)), None)


def leaf_name(path: KeyPath) -> str:
    """How errors call the leaf at this path of `jax.tree_util`."""
    return jax.tree_util.keystr(path) or "the argument"


def is_key(x: HasDtype) -> bool:
    """Whether an array holds PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_array(function: str, path: KeyPath, leaf: object, op: str | None) -> jax.Array:
    """The leaf as a JAX array, or a TypeError that names it.

    Args:
      function: the caller, for the error.
      path: of the leaf, from `tree_flatten_with_path`.
      leaf: anything.
      op: the reduction that it is for; None where it only moves.

    Raises:
      TypeError: it is no array of numbers, or has no such reduction.
      OverflowError: as `check_fits`.
    """
    name = leaf_name(path)
    check_fits(function, path, leaf)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"{function}: leaf {name} is a {type(leaf).__name__}, not an array. Take it out of the tree.")
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    if dtype == jax.dtypes.float0:  # the gradients of integers: they hold nothing
        return leaf  # type: ignore[return-value]
    if not isinstance(leaf, jax.Array) and dtype != np.bool_ and not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(f"{function}: leaf {name} has dtype {dtype}, which JAX does not know. Convert it to numbers.")
    if str(dtype) in ("int1", "uint1"):
        raise TypeError(f"{function}: leaf {name} has dtype {dtype}, which XLA takes for booleans. Cast it to int2 or to bool.")
    try:
        x = jnp.asarray(leaf if getattr(dtype, "isnative", True) else np.asarray(leaf, dtype.newbyteorder("=")))
    except (TypeError, ValueError, OverflowError, jax.errors.JaxRuntimeError) as error:
        raise TypeError(f"{function}: leaf {name} is {dtype}, which JAX cannot hold: {error}") from error
    if op is not None and is_key(x):
        raise TypeError(f"{function}: leaf {name} is a PRNG key, which cannot be reduced. Use tree_bcast or tree_allgather.")
    if op not in (None, "max", "min") and dtype == jnp.bool_:
        raise TypeError(f"{function}: leaf {name} is bool, which has no {op}. Cast it to a number, or use op 'max' or 'min'.")
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{function}: leaf {name} is {dtype}, which has no order. Reduce its real and imaginary parts.")
    return x


def check_fits(function: str, path: KeyPath, leaf: object) -> None:
    """Raise an OverflowError if a number of Python or NumPy is too large for the dtype that JAX gives it.

    Without `jax_enable_x64`, JAX makes 32 bits of 64, and an integer beyond 2³¹ another number without a word.
    """
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return
    host = np.asarray(leaf)
    if isinstance(leaf, int) and host.dtype == object:  # beyond 64 bits
        kind, wrong = jax.dtypes.canonicalize_dtype(int), leaf
    elif host.dtype.kind in "iufc" and host.size:
        kind = jax.dtypes.canonicalize_dtype(int if isinstance(leaf, int) and host.dtype.kind in "iu" else host.dtype)
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
        f"{function}: leaf {leaf_name(path)} is {wrong}, which {kind} cannot hold. To keep it, {remedy}set the option "
        "jax_enable_x64 (JAX_ENABLE_X64=1) on every rank."
    )


def check_rows(function: str, path: KeyPath, x: jax.Array, size: int) -> None:
    """Raise a ValueError that names the leaf unless its first axis is the ranks."""
    if x.ndim == 0 or x.shape[0] != size:
        raise ValueError(
            f"{function}: leaf {leaf_name(path)} has shape {list(x.shape)}, and its first axis must be the {size} ranks. "
            f"Reshape it to [{size}, ...]."
        )
