"""The value of a leaf: an array, on the host or on its device, or a number of Python's own."""

from collections.abc import Hashable

import jax
import numpy as np

from jaxmpi._backends.simulate import PerRank
from jaxmpi._checkpoint.manifest import LeafValue, is_plain
from jaxmpi._leaves import is_key

__all__ = ["like", "stored", "to_host"]

KEYS = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}  # the names that JAX abbreviates in a dtype


def like(leaf: LeafValue, value: LeafValue) -> LeafValue:
    """`value` as the kind of leaf that `leaf` is: an array on its device, or a number of Python's own."""
    if not isinstance(value, np.ndarray):
        return value
    if isinstance(leaf, PerRank):
        return PerRank(like(leaf.stack, np.broadcast_to(value, stored(leaf.stack).shape)))
    stacked = value.ndim > len(stored(leaf).shape)  # of simulated ranks that differ
    if is_plain(leaf) and not stacked:
        return type(leaf)(value.item())
    if isinstance(leaf, np.generic) and not stacked:
        return value[()]
    x = value if is_plain(leaf) or isinstance(leaf, np.ndarray | np.generic) else _on_device(leaf, value, stacked)
    return PerRank(x) if stacked else x


def _on_device(leaf: jax.Array | jax.ShapeDtypeStruct, value: np.ndarray, stacked: bool) -> jax.Array | np.ndarray:
    if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return value  # JAX would shorten it
    committed = isinstance(leaf, jax.Array) and leaf.committed and not stacked
    x = jax.device_put(value, leaf.sharding if committed else None)
    return jax.random.wrap_key_data(x, impl=_kind(leaf)) if is_key(leaf) else x


def to_host(x: jax.Array | np.ndarray | np.generic, *, copy: bool) -> np.ndarray:
    """An array's numbers; a copy stays as it is whatever becomes of the array."""
    data = jax.random.key_data(x) if is_key(x) else x
    return np.array(data) if copy else np.asarray(data)


def stored(x: LeafValue) -> jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct:
    """What has the shape of the numbers that are stored of a leaf."""
    return np.asarray(x) if is_plain(x) else jax.eval_shape(jax.random.key_data, x) if is_key(x) else x


def _kind(key: jax.Array | jax.ShapeDtypeStruct) -> Hashable:
    """The implementation of PRNG keys; of a `ShapeDtypeStruct`, the dtype tells it."""
    tag = str(key.dtype).removeprefix("key<").removesuffix(">")
    return jax.random.key_impl(key) if isinstance(key, jax.Array) else KEYS.get(tag, tag)
