"""FSDP: each rank keeps its shards of the parameters, and gathers them where they are needed.

    θ = unshard(shard_0, ..., shard_{p-1})           allgather
    ∂L/∂shard_q for L = (1/p) · Σ_r L_r(θ)           reduce_scatter with a mean, on rank q

The second line is the derivative of the first: rank q gets the gradient of the mean loss with
respect to its shard. So the loss is written as without shards, its gradients are shards, and the
optimizer is plain optax on shards.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import anywhere
from jaxmpi._jit.function import is_per_rank
from jaxmpi._leaves import PyTree, as_array, is_inexact, leaf_name
from jaxmpi._marks import as_shard, as_whole
from jaxmpi._optim.mean import ReduceScatter, Weight
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
from jaxmpi._world import session

__all__ = ["fully_shard", "unshard"]


def fully_shard(params: PyTree, *, stacked: PyTree = False, axis: Axis = AXIS) -> PyTree:
    """Keep 1/p of each array of a pytree on each rank: FSDP, or ZeRO stage 3.

    Each array of n real or complex floats becomes a `ShardedArray`, with this rank's ⌈n/p⌉ numbers.
    `jaxmpi.unshard` makes it whole inside of a step. Integers, booleans and PRNG keys stay as they
    are. (Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP".)

        shards = jaxmpi.fully_shard(params)
        state = optax.adam(1e-3).init(shards)  # plain optax, elementwise on shards

        @jaxmpi.jit
        def step(shards, state, batch):
            grads = jax.grad(lambda shards: loss(jaxmpi.unshard(shards), batch))(shards)
            updates, state = optax.adam(1e-3).update(grads, state, shards)
            return optax.apply_updates(shards, updates), state

    An optimizer that combines several elements of an array, such as LAMB or Adafactor, would
    combine those of the shard only: `jaxmpi.jit` raises an error. One that reads the shape of an
    array gets the shape of the shard, in which only the number of axes is right.
    `jaxmpi.clip_by_global_norm` and `skip_nonfinite` work on shards. `accumulate` adds gradients
    that are means over the ranks already, so its `weight` is the number of samples of all ranks.

    **Collective:** every rank calls it, with the same arrays. Called eagerly, it compares checksums
    of them first.
    **Communication:** 16 bytes if it is called eagerly; none in traced code.

    Args:
      params: any pytree of arrays, equal on all ranks: see `synchronize`. It may also be the state
        of an optimizer.
      stacked: whether the first axis of the arrays counts layers, as in `lax.scan` and Flax's
        `nn.scan`: each layer is cut by itself. A bool, or a pytree of bools for the subtrees of
        `params`, as `in_axes` of `jax.vmap`.
      axis: as in `tree_allreduce`: each group of ranks along it has all shards. `unshard` gathers
        within the group, and the gradients are means over the group. With `average_gradients` over
        the other axes before the optimizer, all ranks train one model (hybrid sharding).

    Returns:
      The pytree with a `ShardedArray` for each array of floats. A shard has the dtype of its array
      and as many axes, `[⌈n/p⌉, 1, ...]`; in a stack, `[layers, ⌈n/p⌉, 1, ...]` with n numbers in a
      layer. A scalar is whole on every rank.

    Raises:
      TypeError: a leaf is no array, with its path.
      ValueError: a scalar where `stacked` is True, with its path; a leaf is a `ShardedArray`
        already; an unknown axis.
      RankMismatchError: on every rank, called eagerly, a leaf is not equal on the ranks along the
        axis, with its path and the ranks.
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
        if as_array("fully_shard", path, x, None).ndim == 0 and flag and is_inexact(x):
            raise ValueError(
                f"fully_shard: leaf {leaf_name(path)} is a scalar, no stack of layers. Pass False "
                "for it in stacked."
            )
    check_equal("fully_shard", params, axis)
    return _shard_tree(tuple(map(bool, flags)), axis)(params)


def unshard(
    tree: PyTree, *, dtype: DTypeLike | None = None, weight: Weight | None = None
) -> PyTree:
    """Gather shards: make each `ShardedArray` and `ShardedState` of a tree whole, on every rank.

    Call it on parameters inside of a step, and on states of optimizers to look at them. Each
    `ShardedArray` becomes its array; a `ShardedState` becomes the state of one rank. Anything else
    stays as it is. The tree may be an `nnx.Optimizer`, or the `nnx.state` of one. The derivative
    with respect to a `ShardedArray` is this rank's shard of the mean of the gradients of all ranks,
    or of the ranks along its axis. It is a reverse derivative: on several ranks, `jax.jvp` and
    `jax.linearize` of `unshard` are JAX's TypeError. For a Hessian-vector product, unshard the
    parameters and the vector, and differentiate `jaxmpi.average_loss(loss)` with respect to the
    whole arrays.

    Whole arrays stay in memory until the backward pass has used them. In a `jax.checkpoint` they
    are gathered again there, so that in a scan over stacked layers one layer at a time is whole:

        @jax.checkpoint
        def layer(x, shards):
            return block(jaxmpi.unshard(shards), x), None

        x, _ = jax.lax.scan(layer, x, shards["layers"])

    **Collective:** every rank calls it, with the same structure, shapes and dtypes. Called eagerly,
    it first compares checksums of the leaves that are not shards and must be equal on the ranks
    that share an array.
    **Communication:** an allgather for each axis of shards, (p-1)/p of the bytes of the arrays per
    rank; as much again in the backward pass (reduce_scatter), and where a `jax.checkpoint` gathers
    again; 16 bytes more if it is called eagerly. Weights and the gradients of scalars travel in an
    allreduce.

    Args:
      tree: any pytree.
      dtype: the dtype in which floats are sent and computed with, such as bfloat16; the gradients
        travel in it, too, and are summed in 32 bits at least. The shards and their gradients keep
        their dtype.
      weight: this rank's number of samples, or tokens, if the ranks have different numbers: the
        derivative becomes Σ_r w_r·g_r / Σ_r w_r, as in `distributed`, over the ranks along the axis
        of the array.

    Returns:
      A pytree of whole arrays, equal on the ranks along their axis. `reshard` shards a whole
      `ShardedState` for any number of ranks.

    Raises:
      ValueError: a leaf was sharded for another number of ranks, or over an axis that they do not
        have, with its path; where it is differentiated, weights as in `distributed`.
      RankMismatchError: on every rank, called eagerly, a leaf is no shard and not equal on the
        ranks, with its path and the ranks.
      RuntimeError: called under `jax.jit` instead of `jaxmpi.jit`, on the xla backend and on
        simulated ranks.
    """
    # `nnx.state` makes dicts of the nodes that we look for: from here on they are nodes again.
    inputs, treedef = jax.tree.flatten(tree, is_leaf=is_sharded)
    nodes = [from_nnx_dicts(x) for x in inputs]
    check_sharded_arrays("unshard", treedef.unflatten(nodes))
    for x in nodes:
        if is_sharded_state(x):
            check_state_fits("unshard", x)
    check_equal("unshard", treedef.unflatten(nodes))
    # The sharded arrays, all together. An nnx variable may be around a shard: it is taken off, and
    # put around the whole array.
    indices, shards, variables = [], [], []
    for i, x in enumerate(nodes):
        if is_sharded_array(x):
            shard, variable = _without_variable(x)
            indices.append(i)
            shards.append(shard)
            variables.append(variable)
    if shards:
        gather = _unshard_arrays(None if dtype is None else jnp.dtype(dtype))
        for i, array, variable in zip(indices, gather(shards, weight), variables, strict=True):
            nodes[i] = variable.unflatten([array])
    # The states, one after the other.
    for i, x in enumerate(nodes):
        if is_sharded_state(x):
            whole = whole_state(x)
            nodes[i] = whole if is_sharded_state(inputs[i]) else to_nnx_dicts(whole)
    return treedef.unflatten(nodes)


def _without_variable(x: ShardedArray) -> tuple[ShardedArray, PyTreeDef]:
    """Return a `ShardedArray` of the shard alone, and the structure that was around the shard."""
    (shard,), around = jax.tree.flatten(x.shard, is_leaf=is_per_rank)
    return ShardedArray(shard, x.of, x.ranks, x.axis), around


@cache
def _shard_tree(stacked: tuple[bool, ...], axis: Axis) -> Callable[[PyTree], PyTree]:
    """Return a function that shards the leaves of floats of a tree.

    Args:
      stacked: for each leaf, whether its first axis counts layers.
      axis: the axis over whose ranks the arrays are sharded.
    """

    def shard_leaves(params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        for i, flag in enumerate(stacked):
            if is_inexact(leaves[i]):
                stack_axes = 1 if flag else 0
                leaves[i] = make_sharded_array(leaves[i], stack_axes, axis=axis)
        return treedef.unflatten(leaves)

    return anywhere(shard_leaves, "fully_shard")


@cache
def _unshard_arrays(
    dtype: np.dtype | None,
) -> Callable[[list[ShardedArray], Weight | None], list[jax.Array]]:
    """Return a function that makes sharded arrays whole, by one allgather for each axis.

    Args:
      dtype: the dtype of the whole arrays of real floats; None keeps theirs.
    """

    def gather(shards: list[ShardedArray], weight: Weight | None) -> list[jax.Array]:
        layouts = [
            ShardLayout(len(x.stack), x.of, x.dtype, _whole_dtype(x, dtype), x.axis) for x in shards
        ]
        if session.size() == 1 and weight is None:
            return [
                x.shard.astype(layout.whole_dtype)
                for x, layout in zip(shards, layouts, strict=True)
            ]
        gathered: dict[int, jax.Array] = {}  # by the index in `shards`
        for axis in dict.fromkeys(x.axis for x in shards):
            along = [i for i, x in enumerate(shards) if x.axis == axis]
            layouts_along = tuple(layouts[i] for i in along)
            arrays = _gather(axis, layouts_along, [shards[i].shard for i in along], weight)
            gathered.update(zip(along, arrays, strict=True))
        return [gathered[i] for i in range(len(shards))]

    return anywhere(gather, "unshard", sends=True)


class ShardLayout(NamedTuple):
    """Shapes and dtypes of a `ShardedArray` and of its whole array."""

    stack_axes: int  # 1 in a stack of layers, else 0
    shape: tuple[int, ...]  # of one whole array, without the axis of a stack
    shard_dtype: np.dtype
    whole_dtype: np.dtype
    axis: Axis

    @property
    def is_cut(self) -> bool:
        """Whether the ranks have different shards: not on one rank, and not of a scalar."""
        return bool(self.shape) and size_along(self.axis) > 1


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(
    axis: Axis, layouts: tuple[ShardLayout, ...], shards: list[jax.Array], weight: Weight | None
) -> list[jax.Array]:
    """Return the whole arrays of shards over one axis, by one allgather.

    Args:
      axis: the axis of the ranks.
      layouts: of each shard.
      shards: this rank's shards.
      weight: the weight of this rank in the derivative, or None; not used here.
    """
    values = [x.astype(layout.whole_dtype) for x, layout in zip(shards, layouts, strict=True)]
    # Scalars, and on one rank all arrays, are whole already. The mark says so: the analysis then
    # lets a program combine their elements.
    gathered = [as_whole(x, axis) for x in values]
    cuts = {i: values[i] for i, layout in enumerate(layouts) if layout.is_cut}
    for i, stack in Caller("unshard").allgather(cuts, axis=axis).items():
        stack_axes, shape = layouts[i].stack_axes, layouts[i].shape
        gathered[i] = join_shards(stack, (*values[i].shape[:stack_axes], *shape), stack_axes)
    return gathered


def _gather_fwd(
    axis: Axis, layouts: tuple[ShardLayout, ...], shards: list[jax.Array], weight: Weight | None
) -> tuple[list[jax.Array], Weight | None]:
    return _gather(axis, layouts, shards, weight), weight


def _gather_bwd(
    axis: Axis, layouts: tuple[ShardLayout, ...], weight: Weight | None, cts: list[jax.Array]
) -> tuple[list[jax.Array], None]:
    """Return this rank's shards of the mean of the cotangents; a weight has no cotangent."""
    size = size_along(axis)
    stacks, uncut = [], []  # `[size, *shard]` of the arrays that are cut; the others as they are
    for ct, layout in zip(cts, layouts, strict=True):
        if layout.is_cut:
            stacks.append(all_shards(ct, size, layout.stack_axes))
        else:
            uncut.append(ct)
    # a reduce_scatter of the stacks, and an allreduce of the others
    mean = ReduceScatter("unshard", axis).weighted_by(weight)
    means_of_stacks, means_of_uncut, _ = mean.mean(stacks, uncut, ())
    # Put both lists together in the order of the layouts.
    cut_means, uncut_means = iter(means_of_stacks), iter(means_of_uncut)
    shards = []
    for layout in layouts:
        x = next(cut_means if layout.is_cut else uncut_means)
        shards.append(as_shard(x.astype(layout.shard_dtype), axis))
    return shards, None


_gather.defvjp(_gather_fwd, _gather_bwd)


def _whole_dtype(x: ShardedArray, dtype: np.dtype | None) -> np.dtype:
    """Return the dtype of the whole array: `dtype`, if there is one and x has real floats."""
    return dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def _is_leaf(x: object) -> bool:
    """Return whether x is one array for `fully_shard`; for `is_leaf`."""
    return is_sharded_array(x) or is_per_rank(x)
