"""ZeRO-1: each rank keeps the optimizer's state for its shards of the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import equal_on_all_ranks, with_parameters
from jaxmpi._collectives.trees import tree_allreduce, tree_reduce_scatter
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree
from jaxmpi._optim.average import mean, mean_of_all
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, map_floats, wide
from jaxmpi._optim.objective import Given
from jaxmpi._optim.partition import on_shards
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._optim.sharded_state import ShardedState, check_ranks, layout_of, stored
from jaxmpi._optim.shards import gathered, is_shard, own, part, rows, shard
from jaxmpi._optim.weights import weighted_mean
from jaxmpi._world import session

__all__ = ["sharded"]


def sharded(inner: optax.GradientTransformation, *, master_dtype: Any = None) -> optax.GradientTransformationExtraArgs:
    """`distributed(inner)` with 1/p of the optimizer's state on each rank.

    Each rank gets the mean of its shard of the gradients (reduce_scatter), updates that shard with `inner`, and gives the
    updates to all (allgather): ZeRO stage 1 (Rajbhandari et al. 2020). An array of n numbers is padded to p equal shards of
    ⌈n/p⌉. Arrays of the state that have the shape of a parameter are sharded; the others are equal on all ranks.

    The result is that of `distributed(inner)`, but for rounding, whatever `inner` is: it is traced on whole arrays, and its
    equations are evaluated on shards. Elementwise ones (SGD, Adam, AdamW, Lion; masks by name, `ndim` or `size`) send nothing
    more. Each norm or other reduction of an array to one number (`optax.clip_by_global_norm`, LAMB, LARS) is an allreduce of
    one number. What else looks at whole arrays (Adafactor, Muon, L-BFGS) gathers them, and every rank does the same with them.

    `update` takes `weight`, `value`, `grad` and functions as that of `distributed` does.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes, and with parameters.
    **Communication:** the bytes of a mean, in a reduce_scatter of the gradients and an allgather of the updates; and what
    `inner` needs, as above: `jaxmpi.explain` lists it.

    Args:
      inner: an optax transform.
      master_dtype: a dtype such as float32, in which each rank keeps its shard of the parameters and updates it: for
        parameters in bfloat16, which then are the rounded masters. None updates the parameters as they are.

    Raises:
      ValueError: a state that was made for another number of ranks; `update` gets no parameters; gradients of other shapes
        than the parameters', such as those of single samples; weights as in `distributed`.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
      RuntimeError: `update` is called outside of a step under `simulate`.
    """
    check_transform("sharded", "inner", inner)
    inner = optax.with_extra_args_support(inner)

    def masters(params: PyTree) -> Any:
        return params if master_dtype is None else map_floats("sharded", lambda x: jnp.array(x, dtype=master_dtype), params)

    def start(params: PyTree) -> tuple[PyTree, PyTree]:
        wholes = masters(params)
        shards = jax.tree.map(lambda x: shard(own(x), jnp.shape(x), x), wholes)
        state = on_shards(inner.init, shards)
        master = () if master_dtype is None else jax.tree.map(part, shards, is_leaf=is_shard)
        return stored(state, layout_of(state, wholes)), master

    started = anywhere(start, "sharded")

    def init(params: PyTree) -> ShardedState:
        refuse_shards("sharded", params)
        map_floats("sharded", lambda x: x, params)
        wholes = jax.eval_shape(masters, params)
        return ShardedState.of(started(params), layout_of(jax.eval_shape(inner.init, wholes), wholes))

    def update(
        updates: PyTree, state: ShardedState, params: PyTree = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[Any, ShardedState]:
        if params is None:
            raise ValueError("sharded: update needs the parameters. Call update(grads, state, params).")
        check_ranks("sharded", state)
        check_in_step("sharded")
        check_shapes("sharded", updates, params)
        updates = with_parameters(updates, f"sharded master_dtype={master_dtype and jnp.dtype(master_dtype)}")
        given = Given(extra_args, updates)
        if master_dtype is None:
            theirs = map_floats("sharded", lambda x: shard(own(x), x.shape, x), params)
        else:
            theirs = map_floats("sharded", lambda x, m: shard(m, x.shape) if x.shape else _equal(m), params, state.master)
        means, local = _means(updates, given.local, weight)
        grads = map_floats("sharded", lambda g, x: shard(x.astype(master_dtype or g.dtype), g.shape), updates, means)
        local = map_floats("sharded", lambda x, mean: shard(mean, x.shape), given.local, local)
        leaves, treedef = jax.tree.flatten(state.inner)
        pairs = zip(leaves, state.layout.shapes, strict=False)
        before = treedef.unflatten([_equal(x) if shape is None else shard(x, shape) for x, shape in pairs])
        args = given.reduced(grads, local, lambda f: mean_of_all("sharded", f, weight))
        work = lambda grads, state, params, args: inner.update(grads, state, params, **args)
        steps, after = on_shards(work, grads, *given.marked((before, theirs)), args)
        layout = layout_of(after, params)  # a state may get other leaves in a step
        after = stored(after, layout)
        if master_dtype is None:
            return _gathered(steps), ShardedState.of((after, ()), layout)
        master = jax.tree.map(lambda x: part(x) if is_shard(x) else x, theirs, is_leaf=is_shard)
        master = optax.apply_updates(master, jax.tree.map(part, steps, is_leaf=is_shard))
        rounded = map_floats("sharded", lambda m, p: shard(m.astype(p.dtype), p.shape), master, params)
        there = _gathered(rounded)
        out = map_floats("sharded", lambda x, to: to.astype(wide(x.dtype)) - x.astype(wide(x.dtype)), params, there)
        return out, ShardedState.of((after, master), layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _means(updates: PyTree, local: Any, weight: Any) -> tuple[PyTree, PyTree]:
    """This rank's shards of the means of the gradients, and those of `value` and `grad`."""
    map_floats("sharded", lambda x: x, updates)  # an error names the leaf by its path
    if session.size() == 1:
        return mean("sharded", updates, weight), local
    means = weighted_mean("sharded", (updates, local) if local else updates, weight, _mean_shards)
    return means if local else (means, {})


def _mean_shards(function: str, tree: PyTree) -> Any:
    """This rank's shards of the mean over the ranks, and the whole mean of a scalar, which has the same bits on all."""
    size = session.size()
    if size == 1:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    scalars = {i: x for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
    stacks = map_floats(function, lambda x: rows(x, size), {i: x for i, x in enumerate(leaves) if i not in scalars})
    means = _no_floats(tree_reduce_scatter, stacks, op="mean") | tree_allreduce(scalars, op="mean")
    return treedef.unflatten([means[i] for i in range(len(leaves))])


def _equal(x: Any) -> Any:
    """A part of the state that is no shard: it is equal on all ranks, although it stands in a `PerRankState`."""
    return x if session.size() == 1 else equal_on_all_ranks(x)


def _gathered(tree: PyTree) -> Any:
    """A tree of whole arrays, of one with shards."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    wholes = iter(gathered([x for x in leaves if is_shard(x)]))
    return treedef.unflatten([next(wholes) if is_shard(x) else x for x in leaves])


def _no_floats(collective: Callable[..., Any], tree: PyTree, **options: Any) -> Any:
    """A collective that lets float0 pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sent = {i: x for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0}
    got = dict(enumerate(leaves)) | collective(sent, **options)
    return treedef.unflatten([got[i] for i in range(len(leaves))])
