"""Whether a transform treats every number by itself: found by trying."""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from jaxmpi._axis import AXIS
from jaxmpi._leaves import is_key, leaf_name
from jaxmpi._optim.clip import on_shards

__all__ = ["check_elementwise", "like_parameters"]

STEPS = 3
LONGEST = 4  # of an axis of the arrays that it is tried on


def like_parameters(inner: Any, params: Any) -> list[int | None]:
    """For each leaf of the state, the number of the parameter that it is an array like; None for one number.

    Args:
      inner: an optax transform.
      params: shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(params)
    # every parameter in a shape that no other has
    marked = [jax.ShapeDtypeStruct((1_000_003 + i, *[1] * (len(x.shape) - 1)), x.dtype) for i, x in enumerate(leaves)]
    marks = {x.shape: i for i, (x, leaf) in enumerate(zip(marked, leaves, strict=True)) if leaf.shape}
    marked = [x if leaf.shape else leaf for x, leaf in zip(marked, leaves, strict=True)]
    return [marks.get(x.shape) for x in jax.tree.leaves(jax.eval_shape(inner.init, treedef.unflatten(marked)))]


def check_elementwise(inner: Any, params: Any) -> None:
    """Raise a ValueError unless `inner` does the same to two halves of arrays as to the whole.

    Args:
      inner: an optax transform.
      params: shapes and dtypes. It is tried on arrays with the same structure and numbers of axes, but small; and the shapes of
        its state for the real ones are looked at.
    """
    _check_state(inner, params)
    rng = np.random.default_rng(0)

    def draw(x: Any) -> np.ndarray:
        return np.asarray(rng.random([min(n, LONGEST) for n in x.shape])).astype(x.dtype)

    def spoilt(x: np.ndarray) -> np.ndarray:
        return np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x).astype(x.dtype) if x.size > 1 else x

    small = jax.tree.map(lambda x: draw(x) + np.ones((), x.dtype), params)
    grads = [jax.tree.map(lambda x: draw(x) - np.full((), 0.5, x.dtype), params) for _ in range(STEPS)]
    with jax.ensure_compile_time_eval():  # init may be traced
        run = jax.jit(jax.vmap(partial(_steps, inner), axis_name=AXIS))
        for tried in (grads, [*grads[:-1], jax.tree.map(spoilt, grads[-1])]):  # a NaN must stay where it is
            try:
                wholes, halves = (run(*jax.tree.map(cut, (small, tried))) for cut in (lambda x: x[None], _halves))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"sharded: inner could not be tried on small arrays: {error}. What needs extra arguments, or other than "
                    "the parameters' numbers of axes, works with jaxmpi.distributed."
                ) from error
            for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(wholes), jax.tree.leaves(halves), strict=True):
                _compare(leaf_name(path[1:]), np.asarray(one[0]), np.asarray(two))


def _compare(name: str, whole: np.ndarray, halves: np.ndarray) -> None:
    """Refuse unless they hold the same updates, but for rounding."""
    want = whole.astype(np.complex128)
    got = halves.astype(np.complex128).reshape(-1)[: want.size].reshape(want.shape)
    tolerance = 1e-4 if whole.dtype.itemsize > 2 else 3e-2
    scale = np.nanmax(np.abs(want), initial=0.0) if not np.isnan(want).all() else 0.0
    if not np.allclose(got, want, 0, tolerance * scale, equal_nan=True):
        _refuse(f"what it does to parts of {name} is not what it does to the whole")


def _steps(inner: Any, params: Any, grads: list[Any]) -> list[Any]:
    state, outs = inner.init(params), []
    with on_shards():
        for g in grads:
            updates, state = inner.update(g, state, params)
            params = optax.apply_updates(params, updates)
            outs.append(updates)
    return outs


def _halves(x: np.ndarray) -> np.ndarray:
    """`[...]` as `[2, *shard]`; both have a scalar."""
    if x.ndim == 0:
        return np.stack([x, x])
    return np.pad(x.reshape(-1), (0, x.size % 2)).reshape(2, -(-x.size // 2), *[1] * (x.ndim - 1))


def _check_state(inner: Any, params: Any) -> None:
    """The state of what treats numbers by themselves consists of arrays like the parameters, and of numbers."""
    shapes = [x.shape for x in jax.tree.leaves(params)]
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(inner.init, params))
    for (path, x), i in zip(state, like_parameters(inner, params), strict=True):
        if x.shape != (() if i is None else shapes[i]) and not is_key(x):
            _refuse(f"its state has an array of shape {list(x.shape)} at {leaf_name(path)}, which is like no parameter")


def _refuse(why: str) -> None:
    raise ValueError(
        f"sharded: inner does not treat every number by itself: {why}. Use jaxmpi.clip_by_global_norm in the place of optax's, "
        "and jaxmpi.distributed in the place of sharded for LAMB, LARS, Adafactor, Muon and the like."
    )
