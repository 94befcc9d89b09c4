"""FSDP: each rank keeps its shards of the parameters, and makes them whole where they are needed.

θ = unshard(shards) is an allgather, and its derivative the mean reduce_scatter: ∂/∂shard_q of (1/p)
Σ_r L_r. So the loss is written as ever, its gradients are shards, and the optimizer is plain optax
on them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike, DTypeLike

from jaxmpi._axis import AXIS, Axis, as_shard, as_whole
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, leaf_name
from jaxmpi._optim.sharded_array import (
    ShardedArray,
    all_shards,
    check_shard_axis,
    check_sharded_arrays,
    is_sharded_array,
    join_shards,
    make_sharded_array,
    size_along,
)
from jaxmpi._optim.sharded_state import (
    check_equal,
    check_state_fits,
    from_nnx_dicts,
    is_sharded,
    is_sharded_state,
    to_nnx_dicts,
    whole_state,
)
from jaxmpi._optim.weights import MeanOverRanks, Weight, weighted_mean
from jaxmpi._world import session

__all__ = ["fully_shard", "unshard"]


def fully_shard(params: PyTree, *, stacked: PyTree = False, axis: Axis = AXIS) -> PyTree:
    """Keep 1/p of each array of a pytree on each rank: FSDP, or ZeRO stage 3.

    Each array of floats becomes a `ShardedArray`, of which this rank keeps its shard.
    `jaxmpi.unshard` makes them whole inside of a step. Integers, booleans and PRNG keys stay as
    they are. (Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP".)

        shards = jaxmpi.fully_shard(params)
        state = optax.adam(1e-3).init(shards)  # plain optax: elementwise transforms do with shards what they do with arrays

        @jaxmpi.jit
        def step(shards, state, batch):
            grads = jax.grad(lambda shards: loss(jaxmpi.unshard(shards), batch))(shards)
            updates, state = optax.adam(1e-3).update(grads, state, shards)
            return optax.apply_updates(shards, updates), state

    An optimizer that looks at more than one element, such as LAMB or Adafactor, is an error of
    `jaxmpi.jit`; one that asks for the shape of an array gets that of the shard, of which only the
    number of axes is right. `jaxmpi.clip_by_global_norm` and `skip_nonfinite` know shards, and
    `accumulate` adds them up: its `weight` is then that of all ranks.

    **Collective:** every rank calls it, with the same arrays. Called eagerly, it compares checksums
    of them first. **Communication:** 16 bytes.

    Args:
      params: any pytree of arrays, equal on all ranks: see `synchronize`. A state of an optimizer
        will do, too.
      stacked: whether the first axis of the arrays counts layers, as that of `lax.scan` and Flax's
        `nn.scan`: each layer is cut by itself. A bool, or a pytree of bools for the subtrees of
        `params`, as `in_axes` of `jax.vmap`.
      axis: as in `tree_allreduce`: each group of ranks along it has all shards. `unshard` gathers
        within the group, and the gradients are means over the group: put `average_gradients` over
        the other axes before the optimizer, and all ranks train one model (hybrid sharding).

    Raises:
      TypeError: a leaf that is no array, with its path.
      ValueError: a scalar that is to be a stack, with its path; a leaf that is a `ShardedArray`
        already; an unknown axis.
      RankMismatchError: on every rank, a leaf that is not equal on the ranks along the axis, with
        its path and the ranks.
    """
    check_shard_axis("fully_shard", axis)
    paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_leaf)
    flags = jax.tree.leaves(jax.tree.broadcast(stacked, params, is_leaf=_is_leaf))
    for (path, x), flag in zip(paths, flags, strict=True):
        if is_sharded_array(x):
            raise ValueError(
                f"fully_shard: leaf {leaf_name(path)} is a ShardedArray already. Call "
                "jaxmpi.unshard on it first."
            )
        if isinstance(x, jax.ShapeDtypeStruct) or is_per_rank(x):
            continue
        if as_array("fully_shard", path, x, None).ndim == 0 and flag and _is_float(x):
            raise ValueError(
                f"fully_shard: leaf {leaf_name(path)} is a scalar, no stack of layers. Leave it "
                "out of stacked."
            )
    check_equal("fully_shard", params, axis)
    return _cut(tuple(map(bool, flags)), axis)(params)


def unshard(
    tree: PyTree, *, dtype: DTypeLike | None = None, weight: Weight | None = None
) -> PyTree:
    """Make what is sharded whole, on every rank: parameters inside of a step, and states of optimizers, to look at them.

    Each `ShardedArray` becomes its array; a `ShardedState`, of `sharded`, becomes that of one rank.
    Anything else stays as it is. The tree may be an `nnx.Optimizer`, or the `nnx.state` of one. The
    derivative with respect to a `ShardedArray` is this rank's shard of the mean of the gradients of
    all ranks, or of those along its axis.

    What is whole stays in memory until the backward pass has used it. In a `jax.checkpoint` it is
    gathered again there, so that in a scan over stacked layers one layer at a time is whole:

        @jax.checkpoint
        def layer(x, shards):
            return block(jaxmpi.unshard(shards), x), None

        x, _ = jax.lax.scan(layer, x, shards["layers"])

    **Collective:** every rank calls it, with the same structure, shapes and dtypes. Called eagerly,
    it first compares checksums of what is no shard and must be equal on the ranks that share an
    array. **Communication:** (p-1)/p of the bytes of the arrays, as often in the backward pass, and
    once more in a `jax.checkpoint`; 16 bytes where it is called eagerly.

    Args:
      tree: any pytree.
      dtype: in which floats are sent and computed with, such as bfloat16; the gradients travel in
        it, too, and are summed in 32 bits at least. The shards and their gradients keep their own.
      weight: this rank's number of samples, or tokens, if the ranks have different ones: the
        derivative becomes Σ_r w_r·g_r / Σ_r w_r, as in `distributed`, over the ranks along the axis
        of the array.

    Returns:
      A pytree of whole arrays. Of a `ShardedState`, `reshard` makes one for any number of ranks.

    Raises:
      ValueError: a leaf that was cut for another number of ranks or an axis that they do not have,
        with its path; weights as in `distributed`.
      RankMismatchError: on every rank, a leaf that is no shard and not equal on the ranks, with its
        path and the ranks.
      RuntimeError: under `jax.jit` in the place of `jaxmpi.jit`, on the xla backend and on
        simulated ranks.
    """
    given, treedef = jax.tree.flatten(tree, is_leaf=is_sharded)
    nodes = [from_nnx_dicts(x) for x in given]
    check_sharded_arrays("unshard", treedef.unflatten(nodes))
    for x in nodes:
        if is_sharded_state(x):
            check_state_fits("unshard", x)
    check_equal("unshard", treedef.unflatten(nodes))
    chosen = [i for i, x in enumerate(nodes) if is_sharded_array(x)]
    if chosen:
        # an nnx variable may be around the shard: it is put around the whole array again
        shards, around = zip(*(_bare(nodes[i]) for i in chosen), strict=True)
        wholes = _wholes(None if dtype is None else jnp.dtype(dtype))([*shards], weight)
        for i, whole, variable in zip(chosen, wholes, around, strict=True):
            nodes[i] = variable.unflatten([whole])
    for i, x in enumerate(nodes):
        if is_sharded_state(x):
            nodes[i] = (
                whole_state(x) if is_sharded_state(given[i]) else to_nnx_dicts(whole_state(x))
            )
    return treedef.unflatten(nodes)


def _bare(x: ShardedArray) -> tuple[ShardedArray, PyTreeDef]:
    """A `ShardedArray` of the array alone, and the structure that was around it."""
    (shard,), around = jax.tree.flatten(x.shard, is_leaf=is_per_rank)
    return ShardedArray(shard, x.of, x.ranks, x.axis), around


@cache
def _cut(stacked: tuple[bool, ...], axis: Axis) -> Callable[[PyTree], PyTree]:
    def each(params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, stacked, strict=True)
        return treedef.unflatten(
            [make_sharded_array(x, flag, axis=axis) if _is_float(x) else x for x, flag in pairs]
        )

    return anywhere(each, "fully_shard")


@cache
def _wholes(
    dtype: np.dtype | None,
) -> Callable[[list[ShardedArray], Weight | None], list[jax.Array]]:
    def whole(shards: list[ShardedArray], weight: Weight | None) -> list[jax.Array]:
        layouts = [Layout(len(x.stack), x.of, x.dtype, _cast(x, dtype), x.axis) for x in shards]
        if session.size() == 1 and weight is None:
            return [x.shard.astype(layout.to) for x, layout in zip(shards, layouts, strict=True)]
        wholes: dict[int, jax.Array] = {}
        for axis in dict.fromkeys(x.axis for x in shards):
            along = [i for i, x in enumerate(shards) if x.axis == axis]
            arrays = _gather(
                axis, tuple(layouts[i] for i in along), [shards[i].shard for i in along], weight
            )
            wholes.update(zip(along, arrays, strict=True))
        return [wholes[i] for i in range(len(shards))]

    return anywhere(whole, "unshard", sends=True)


class Layout(NamedTuple):
    """Of a `ShardedArray`."""

    stacked: int  # how many axes there are before those of one array
    of: tuple[int, ...]  # the shape of one array
    dtype: np.dtype  # of the shard
    to: np.dtype  # of the whole array
    axis: Axis

    @property
    def is_cut(self) -> bool:
        """Whether the ranks have different parts."""
        return bool(self.of) and size_along(self.axis) > 1


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(
    axis: Axis, layouts: tuple[Layout, ...], shards: list[jax.Array], weight: Weight | None
) -> list[jax.Array]:
    """The whole arrays, all of one axis."""
    parts = [x.astype(layout.to) for x, layout in zip(shards, layouts, strict=True)]
    cuts = {i: x for i, (x, layout) in enumerate(zip(parts, layouts, strict=True)) if layout.is_cut}
    wholes = [as_whole(x, axis) for x in parts]
    for i, x in Caller("unshard").allgather(cuts, axis=axis).items():
        stacked, of, *_ = layouts[i]
        wholes[i] = join_shards(x, (*parts[i].shape[:stacked], *of), stacked)
    return wholes


def _gather_fwd(
    axis: Axis, layouts: tuple[Layout, ...], shards: list[jax.Array], weight: Weight | None
) -> tuple[list[jax.Array], Weight | None]:
    return _gather(axis, layouts, shards, weight), weight


def _gather_bwd(
    axis: Axis, layouts: tuple[Layout, ...], weight: Weight | None, cts: list[jax.Array]
) -> tuple[list[jax.Array], None]:
    """This rank's shards of the mean of the cotangents."""
    size, pairs = size_along(axis), list(zip(cts, layouts, strict=True))
    stacks = [all_shards(ct, size, layout.stacked) for ct, layout in pairs if layout.is_cut]
    wholes_here = [ct for ct, layout in pairs if not layout.is_cut]
    means = weighted_mean("unshard", (stacks, wholes_here), weight, _mean_shards(axis), axis=axis)
    shards, wholes = map(iter, means)
    found = [next(shards if layout.is_cut else wholes) for layout in layouts]
    return [
        as_shard(x.astype(layout.dtype), axis) for x, layout in zip(found, layouts, strict=True)
    ], None


_gather.defvjp(_gather_fwd, _gather_bwd)


@cache  # as what a mean has compiled is kept with this
def _mean_shards(axis: Axis) -> MeanOverRanks:
    """The means of what is cut into rows, in the row of this rank, and of the rest; before them that of weights, if any."""

    def means_of(function: str, tree: PyTree) -> PyTree:
        weight, (stacks, wholes) = tree if isinstance(tree[1], tuple) else (None, tree)
        shards = Caller("unshard").reduce_scatter(stacks, op="mean", axis=axis)
        weight, wholes = Caller("unshard").allreduce((weight, wholes), op="mean", axis=axis)
        return (shards, wholes) if weight is None else (weight, (shards, wholes))

    return means_of


def _cast(x: ShardedArray, dtype: np.dtype | None) -> np.dtype:
    """The dtype of the whole array."""
    return dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def _is_float(x: ArrayLike) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact)


def _is_leaf(x: object) -> bool:
    return is_sharded_array(x) or is_per_rank(x)
