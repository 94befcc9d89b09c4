"""ZeRO-1: `sharded`, an optimizer whose state is in shards, one on each rank."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree, widest
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._marks import equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, map_floats
from jaxmpi._optim.loss import ExtraArgs
from jaxmpi._optim.mean import Allreduce, ReduceScatter, Weight
from jaxmpi._optim.partition import on_shards
from jaxmpi._optim.sharded_array import (
    Shard,
    ShardedArray,
    all_shards,
    check_shard_axis,
    gather_shards,
    is_shard,
    is_sharded_array,
    local_shard,
    make_shard,
    refuse_shards,
    shard_value,
    size_along,
)
from jaxmpi._optim.sharded_state import (
    ShardedState,
    StateLayout,
    check_equal,
    check_state_ranks,
    shards_of,
    with_shards,
)
from jaxmpi._world import session

__all__ = ["sharded"]


def sharded(
    inner: optax.GradientTransformation, *, master_dtype: DTypeLike | None = None, axis: Axis = AXIS
) -> optax.GradientTransformationExtraArgs:
    """Do what `distributed(inner)` does, with 1/p of the optimizer's state on each rank.

    ZeRO stage 1 (Rajbhandari et al. 2020): each rank gets its shard of the mean of the gradients
    (reduce_scatter), computes the updates of that shard with `inner`, and sends them to all
    (allgather). An array of n numbers is padded to p equal shards of ⌈n/p⌉. Arrays of the state
    with the shape of a parameter are sharded; the others are equal on all ranks.

    Except for rounding, the result is that of `distributed(inner)`, whatever `inner` is: it is
    traced on whole arrays, and its equations are evaluated on shards. Elementwise equations (SGD,
    Adam, AdamW, Lion; masks by name, `ndim` or `size`) send nothing. Each reduction of an array to
    one number (`optax.clip_by_global_norm`, LAMB, LARS) is an allreduce of one number. Other uses
    of whole arrays (Adafactor, Muon, L-BFGS) gather them, and every rank computes the same.

    `update` takes `weight`, `value`, `grad` and functions as in `distributed`.

    **Collective:** every rank calls `init`, with equal parameters: called eagerly, it compares
    checksums of them. Every rank calls `update`, with the same structure, shapes and dtypes, and
    with parameters. **Communication:** the bytes of a mean, in a reduce_scatter of the gradients
    and an allgather of the updates; and the messages of `inner`, as above: `jaxmpi.explain` lists
    them. `init` sends 16 bytes.

    Args:
      inner: an optax transform.
      master_dtype: a dtype such as float32 for a master copy of the parameters, of which each rank
        keeps and updates its shard. Parameters in bfloat16 are then the rounded master copy. None
        updates the parameters as they are.
      axis: as in `tree_allreduce`: the ranks of each group use the gradients of their group, share
        its state, and stay equal within it, as with `distributed(inner, axis=axis)`. `update` then
        takes no callables such as `value_fn`. After `average_gradients` over the other axes all
        ranks train one model, and the state is sharded within each group.

    Raises:
      ValueError: a state was made for another number of ranks, or another axis; `update` gets no
        parameters; gradients have other shapes than the parameters, such as those of single
        samples; weights as in `distributed`; an axis is unknown, or given with a callable.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
      RuntimeError: `update` is called outside of a step under `simulate`.
      RankMismatchError: on every rank, the parameters of `init` are not equal on the ranks along
        the axis.
    """
    check_transform("sharded", "inner", inner)
    inner = optax.with_extra_args_support(inner)
    make = partial(make_shard, axis=axis)
    mean = ReduceScatter("sharded", axis)

    def shard_of_whole(x: jax.Array) -> Shard | jax.Array:
        return make(local_shard(x, axis=axis), jnp.shape(x), x)

    def start(params: PyTree) -> ShardedState:
        if master_dtype is not None:
            params = map_floats("sharded", lambda x: jnp.array(x, dtype=master_dtype), params)
        shards = jax.tree.map(shard_of_whole, params)
        state = with_shards(on_shards(inner.init, shards, axis=axis), params, axis)
        master = () if master_dtype is None else with_shards(shards, params, axis)
        return ShardedState((state, master), StateLayout(size_along(axis), axis))

    started = anywhere(start, "sharded")

    def init(params: PyTree) -> ShardedState:
        check_shard_axis("sharded", axis)
        refuse_shards("sharded", params)
        map_floats("sharded", lambda x: x, params)
        check_equal("sharded.init", params, axis)
        state: ShardedState = started(params)
        return state

    def update(
        updates: PyTree,
        state: ShardedState,
        params: PyTree = None,
        *,
        weight: Weight | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, ShardedState]:
        if params is None:
            raise ValueError(
                "sharded: update needs the parameters. Call update(grads, state, params)."
            )
        check_shard_axis("sharded", axis)
        check_state_ranks("sharded", state, axis)
        check_in_step("sharded")
        check_shapes("sharded", updates, params)
        over = "" if axis == AXIS else f" axis={axis}"
        updates = with_parameters(
            updates, f"sharded master_dtype={master_dtype and jnp.dtype(master_dtype)}{over}"
        )
        extra = ExtraArgs(extra_args, updates)
        mean.check(weight, [*extra.functions])
        # the parameters as `inner` gets them: this rank's shards of them, or of the master copy
        if master_dtype is None:
            params_here = map_floats("sharded", shard_of_whole, params)
        else:
            params_here = map_floats(
                "sharded",
                lambda x, m: make(m, x.shape) if x.shape else _mark_equal(m, axis),
                params,
                shards_of(state.parts[1]),
            )
        # the gradients: this rank's shards of their mean (reduce_scatter)
        means, local = _shards_of_means(mean, updates, extra.local, weight)
        grads = map_floats(
            "sharded", lambda g, x: make(x.astype(master_dtype or g.dtype), g.shape), updates, means
        )
        local = map_floats("sharded", lambda x, shard: make(shard, x.shape), extra.local, local)
        # one step of `inner` on shards
        before = jax.tree.map(partial(_as_shard, axis), state.parts[0], is_leaf=is_sharded_array)
        args = extra.reduced(grads, local, mean, weight)
        step = lambda grads, state, params, args: inner.update(grads, state, params, **args)
        steps, after = on_shards(step, grads, *extra.marked((before, params_here)), args, axis=axis)
        after = with_shards(after, params, axis)
        if master_dtype is None:
            # the updates go to all ranks (allgather)
            updates = _mark_per_group(_gather_all(steps), axis)
            return updates, ShardedState((after, ()), state.layout)
        # This rank's shard of the master copy is updated, rounded, and sent to all ranks.
        master = jax.tree.map(
            lambda x: shard_value(x) if is_shard(x) else x, params_here, is_leaf=is_shard
        )
        steps_here = jax.tree.map(lambda x: shard_value(x, axis), steps, is_leaf=is_shard)
        master = optax.apply_updates(master, steps_here)
        rounded = map_floats(
            "sharded", lambda m, p: make(m.astype(p.dtype), p.shape), master, params
        )
        targets = _gather_all(rounded)
        master = with_shards(
            map_floats("sharded", lambda m, p: make(m, p.shape), master, params), params, axis
        )

        def update_to_master(x: jax.Array, to: jax.Array) -> jax.Array:
            # in the dtype of the master copy, so that the sum is exact for short floats wherever
            # it is computed
            dtype = widest(x.dtype, master_dtype)
            return update_to(x.astype(dtype), to.astype(dtype))

        out = map_floats("sharded", update_to_master, params, _mark_per_group(targets, axis))
        return out, ShardedState((after, master), state.layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _shards_of_means(
    mean: ReduceScatter, updates: PyTree, local: dict[str, PyTree], weight: Weight | None
) -> tuple[PyTree, PyTree]:
    """Return this rank's shards of the means of the gradients, and of `value` and `grad`.

    A scalar has no shards: its mean is an allreduce, so that it has the same bits on all ranks.
    """
    map_floats("sharded", lambda x: x, updates)  # an error names the leaf by its path
    size = size_along(mean.axis)
    if size == 1:
        means, _, _ = Allreduce("sharded", axis=mean.axis).average(updates, (), weight, ())
        return means, local
    leaves, treedef = jax.tree.flatten((updates, local))
    stacks, scalars = {}, {}
    for i, x in enumerate(leaves):
        if getattr(x, "dtype", None) == jax.dtypes.float0:  # it stays as it is
            continue
        if jnp.ndim(x) == 0:
            scalars[i] = x
        else:
            stacks[i] = all_shards(x, size)
    shards, scalars, _ = mean.by(weight).mean(stacks, scalars, ())
    for i, x in (shards | scalars).items():
        leaves[i] = x
    means, local = treedef.unflatten(leaves)
    return means, local


def _as_shard(axis: Axis, x: ShardedArray | jax.Array) -> PyTree:
    """Return a node of the state as `inner` gets it: a `Shard`, or a whole array."""
    if isinstance(x, ShardedArray):  # an nnx variable may be around the array
        return jax.tree.map(lambda value: make_shard(value, x.of, axis=axis), x.shard)
    return _mark_equal(x, axis)


def _mark_equal(x: jax.Array, axis: Axis) -> jax.Array:
    """Mark an array of the state that is not a shard as equal on all ranks of the axis.

    Without the mark the analysis takes it as different, as all of a `ShardedState`.
    """
    return x if session.size() == 1 or axis != AXIS else equal_on_all_ranks(x)


def _mark_per_group(updates: PyTree, axis: Axis) -> PyTree:
    """Mark updates over an axis as different on purpose: the groups along it may differ."""
    return updates if axis == AXIS else may_differ(updates)


def _gather_all(tree: PyTree) -> PyTree:
    """Return the tree with whole arrays for its shards."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    sharded = [i for i, x in enumerate(leaves) if is_shard(x)]
    for i, gathered in zip(sharded, gather_shards([leaves[i] for i in sharded]), strict=True):
        leaves[i] = gathered
    return treedef.unflatten(leaves)
