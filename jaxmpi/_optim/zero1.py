"""ZeRO-1: `sharded`, an optimizer whose state is in shards, one on each rank.

One `update`, for the parameters θ and gradients g_r of rank r:

    g       shard of (1/p) · Σ_r g_r      reduce_scatter
    u       shard of inner's updates      `on_shards`: `inner`, evaluated on shards
    u       whole updates                 allgather

and with `master_dtype`, for the shard m of the master copy:

    m       m + u                         on this rank
    q       whole m, rounded              allgather, in the dtype of θ
    u       the update from θ to q        `update_to`
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree, widest
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._marks import equal_along, may_differ, with_parameters
from jaxmpi._optim.float_leaves import map_floats
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
from jaxmpi._optim.transform_arguments import check_in_step, check_shapes, check_transform
from jaxmpi._world import session

__all__ = ["sharded"]


def sharded(
    inner: optax.GradientTransformation, *, master_dtype: DTypeLike | None = None, axis: Axis = AXIS
) -> optax.GradientTransformationExtraArgs:
    """Do what `distributed(inner)` does, with 1/p of the optimizer's state on each rank.

    ZeRO stage 1 (Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion
    parameter models"): each rank gets its shard of the mean of the gradients (reduce_scatter),
    computes the updates of that shard with `inner`, and sends them to all (allgather). An array of
    n numbers is padded to p equal shards of ⌈n/p⌉. Arrays of the state with the shape of a
    parameter are sharded; the others are equal on all ranks.

    Except for rounding, the result is that of `distributed(inner)`, whatever `inner` is: it is
    traced on whole arrays, and its equations are evaluated on shards. Elementwise equations (SGD,
    Adam, AdamW, Lion; masks by name, `ndim` or `size`) send nothing. Each reduction of an array to
    one number (`optax.clip_by_global_norm`, LAMB, LARS) is an allreduce of one number. Other uses
    of whole arrays (Adafactor, Muon, L-BFGS) gather them, and every rank computes the same.

    `update` takes `weight`, `value`, `grad` and functions as in `distributed`.

    **Collective:** every rank calls `init`, with equal parameters: called eagerly, it compares
    checksums of them. Every rank calls `update`, with the same structure, shapes and dtypes, and
    with parameters.
    **Communication:** `update` sends the bytes of a mean, in a reduce_scatter of the gradients and
    an allgather of the updates, 2 (p-1)/p of their bytes per rank; scalars and the weight in an
    allreduce; and the messages of `inner`, as above: `jaxmpi.explain` lists them. `init`, called
    eagerly, sends 16 bytes.

    Args:
      inner: an optax transform.
      master_dtype: a dtype such as float32 for a master copy of the parameters, of which each rank
        keeps and updates its shard. Parameters in bfloat16 are then the rounded master copy. None
        updates the parameters as they are.
      axis: as in `tree_allreduce`: the ranks of each group use the gradients of their group, share
        its state, and stay equal within it, as with `distributed(inner, axis=axis)`. `update` then
        takes no callables such as `value_fn`. After `average_gradients` over the other axes all
        ranks train one model, and the state is sharded within each group.

    Returns:
      An optax transform. Its state is a `ShardedState`, its updates are whole arrays, equal on the
      ranks along the axis.

    Raises:
      ValueError: an unknown axis; parameters that are in shards of `fully_shard` already; a state
        was made for another number of ranks, or another axis; `update` gets no parameters, or a
        callable with an axis; gradients of single samples, which have one axis more than the
        parameters; weights as in `distributed`.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
      RuntimeError: `update` is called outside of a step under `simulate`.
      RankMismatchError: on every rank, the parameters of `init` are not equal on the ranks along
        the axis, with the path of a leaf and the ranks.
    """
    check_transform("sharded", "inner", inner)
    inner = optax.with_extra_args_support(inner)
    shard_along = partial(make_shard, axis=axis)  # (value, shape of the whole array, whole array)
    mean = ReduceScatter("sharded", axis)

    def shard_of_whole(x: jax.Array) -> Shard | jax.Array:
        return shard_along(local_shard(x, axis=axis), jnp.shape(x), x)

    def make_state(params: PyTree) -> ShardedState:
        if master_dtype is not None:
            params = map_floats("sharded", lambda x: jnp.array(x, dtype=master_dtype), params)
        shards = jax.tree.map(shard_of_whole, params)
        state = with_shards(on_shards(inner.init, shards, axis=axis), params, axis)
        master = () if master_dtype is None else with_shards(shards, params, axis)
        return ShardedState((state, master), StateLayout(size_along(axis), axis))

    make_state_anywhere = anywhere(make_state, "sharded")

    def init(params: PyTree) -> ShardedState:
        check_shard_axis("sharded", axis)
        refuse_shards("sharded", params)
        map_floats("sharded", lambda x: x, params)  # refuses a leaf of integers
        check_equal("sharded.init", params, axis)
        state: ShardedState = make_state_anywhere(params)
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
        extra = ExtraArgs(extra_args, updates)  # before the mark, or `grad` is not these arrays
        # The ranks compare this text: all must have the same arguments of `sharded`.
        along = "" if axis == AXIS else f" axis={axis}"
        updates = with_parameters(
            updates, f"sharded master_dtype={master_dtype and jnp.dtype(master_dtype)}{along}"
        )
        mean.check(weight, [*extra.functions])
        # 1. The parameters, as `inner` gets them: shards of the parameters, or of the master copy.
        if master_dtype is None:
            param_shards = map_floats("sharded", shard_of_whole, params)
        else:
            param_shards = map_floats(
                "sharded",
                lambda x, m: shard_along(m, x.shape) if x.shape else _mark_equal(m, axis),
                params,
                shards_of(state.parts[1]),
            )
        # 2. Shards of the means (reduce_scatter): of the gradients, of `value` and of `grad`.
        means, local_means = _shards_of_means(mean, updates, extra.local, weight)
        grads = map_floats(
            "sharded",
            lambda g, x: shard_along(x.astype(master_dtype or g.dtype), g.shape),
            updates,
            means,
        )
        averaged = map_floats(
            "sharded", lambda x, y: shard_along(y, x.shape), extra.local, local_means
        )
        # 3. One step of `inner`, evaluated on shards.
        inner_state = jax.tree.map(
            partial(_as_shard, axis), state.parts[0], is_leaf=is_sharded_array
        )
        args = extra.reduced(grads, averaged, mean, weight)
        inner_state, inner_params = extra.mark_equal((inner_state, param_shards))
        step = lambda grads, state, params, args: inner.update(grads, state, params, **args)
        steps, inner_state = on_shards(step, grads, inner_state, inner_params, args, axis=axis)
        inner_state = with_shards(inner_state, params, axis)
        # 4. Without a master copy: the updates of all shards go to all ranks (allgather).
        if master_dtype is None:
            updates = _mark_per_group(_gather_all(steps), axis)
            return updates, ShardedState((inner_state, ()), state.layout)
        # 4. With a master copy: each rank updates its shard of it, rounds the result, and sends it
        #    to all ranks (allgather). The parameters become the rounded master copy.
        master = jax.tree.map(
            lambda x: shard_value(x) if is_shard(x) else x, param_shards, is_leaf=is_shard
        )
        step_shards = jax.tree.map(lambda x: shard_value(x, axis), steps, is_leaf=is_shard)
        master = optax.apply_updates(master, step_shards)
        rounded = map_floats(
            "sharded", lambda m, p: shard_along(m.astype(p.dtype), p.shape), master, params
        )
        new_params = _mark_per_group(_gather_all(rounded), axis)
        master = with_shards(
            map_floats("sharded", lambda m, p: shard_along(m, p.shape), master, params),
            params,
            axis,
        )

        def update_to_master(x: jax.Array, new: jax.Array) -> jax.Array:
            # in the dtype of the master copy, so that the sum is exact for short floats wherever
            # it is computed
            dtype = widest(x.dtype, master_dtype)
            return update_to(x.astype(dtype), new.astype(dtype))

        out = map_floats("sharded", update_to_master, params, new_params)
        return out, ShardedState((inner_state, master), state.layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _shards_of_means(
    mean: ReduceScatter, updates: PyTree, local: dict[str, PyTree], weight: Weight | None
) -> tuple[PyTree, PyTree]:
    """Return this rank's shards of the means of `updates`, and of `local`: of `value` and `grad`.

    Both trees share their messages: all arrays are in the reduce_scatter. A scalar has no shards:
    its mean is an allreduce, so that it has the same bits on all ranks.
    """
    map_floats("sharded", lambda x: x, updates)  # an error names the leaf by its path
    size = size_along(mean.axis)
    if size == 1:
        means, local_means, _ = Allreduce("sharded", axis=mean.axis).weighted_mean(
            updates, local, weight, ()
        )
        return means, local_means
    leaves, treedef = jax.tree.flatten((updates, local))
    stacks, scalars = {}, {}  # by the index of the leaf
    for i, x in enumerate(leaves):
        if getattr(x, "dtype", None) == jax.dtypes.float0:  # it stays as it is
            continue
        if jnp.ndim(x) == 0:
            scalars[i] = x
        else:
            stacks[i] = all_shards(x, size)
    shards, scalars, _ = mean.weighted_by(weight).mean(stacks, scalars, ())
    for i, x in (shards | scalars).items():
        leaves[i] = x
    means, local_means = treedef.unflatten(leaves)
    return means, local_means


def _as_shard(axis: Axis, x: ShardedArray | jax.Array) -> PyTree:
    """Return a node of the state as `inner` gets it: a `Shard`, or an array equal on all ranks."""
    if isinstance(x, ShardedArray):  # its shard may be in an nnx variable
        return jax.tree.map(lambda value: make_shard(value, x.of, axis=axis), x.shard)
    return _mark_equal(x, axis)


def _mark_equal(x: jax.Array, axis: Axis) -> jax.Array:
    """Return an array of the state that is not a shard, marked as equal along the axis.

    Without the mark the analysis assumes that it differs, as any leaf of a `ShardedState` may. On
    one rank there is none, and the jaxpr is that of plain optax.
    """
    return x if session.size() == 1 else equal_along(x, axis)


def _mark_per_group(updates: PyTree, axis: Axis) -> PyTree:
    """Mark updates over an axis as different on purpose: each group may have its updates."""
    return updates if axis == AXIS else may_differ(updates)


def _gather_all(tree: PyTree) -> PyTree:
    """Return the tree with a whole array for each `Shard`, gathered by one allgather."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    sharded = [i for i, x in enumerate(leaves) if is_shard(x)]
    for i, gathered in zip(sharded, gather_shards([leaves[i] for i in sharded]), strict=True):
        leaves[i] = gathered
    return treedef.unflatten(leaves)
