"""ZeRO-1: each rank keeps the optimizer's state for its shards of the parameters."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxmpi._axis import AXIS, Axis, equal_on_all_ranks, may_differ, with_parameters
from jaxmpi._collectives.trees import Caller
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PyTree, widest
from jaxmpi._lowering.exact_updates import update_to
from jaxmpi._optim.average import mean, mean_of_all
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, map_floats
from jaxmpi._optim.objective import Given
from jaxmpi._optim.partition import on_shards
from jaxmpi._optim.sharded_array import (
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
from jaxmpi._optim.weights import MeanOverRanks, Weight, weighted_mean
from jaxmpi._world import session

__all__ = ["sharded"]


def sharded(
    inner: optax.GradientTransformation, *, master_dtype: DTypeLike | None = None, axis: Axis = AXIS
) -> optax.GradientTransformationExtraArgs:
    """`distributed(inner)` with 1/p of the optimizer's state on each rank.

    Each rank gets the mean of its shard of the gradients (reduce_scatter), updates that shard with
    `inner`, and gives the updates to all (allgather): ZeRO stage 1 (Rajbhandari et al. 2020). An
    array of n numbers is padded to p equal shards of ⌈n/p⌉. Arrays of the state that have the shape
    of a parameter are sharded; the others are equal on all ranks.

    The result is that of `distributed(inner)`, but for rounding, whatever `inner` is: it is traced
    on whole arrays, and its equations are evaluated on shards. Elementwise ones (SGD, Adam, AdamW,
    Lion; masks by name, `ndim` or `size`) send nothing more. Each norm or other reduction of an
    array to one number (`optax.clip_by_global_norm`, LAMB, LARS) is an allreduce of one number.
    What else looks at whole arrays (Adafactor, Muon, L-BFGS) gathers them, and every rank does the
    same with them.

    `update` takes `weight`, `value`, `grad` and functions as that of `distributed` does.

    **Collective:** every rank calls `init`, with equal parameters: called eagerly, it compares
    checksums of them. Every rank calls `update`, with the same structure, shapes and dtypes, and
    with parameters. **Communication:** the bytes of a mean, in a reduce_scatter of the gradients
    and an allgather of the updates; and what `inner` needs, as above: `jaxmpi.explain` lists it.
    `init` sends 16 bytes.

    Args:
      inner: an optax transform.
      master_dtype: a dtype such as float32, in which each rank keeps its shard of the parameters
        and updates it: for parameters in bfloat16, which then are the rounded masters. None updates
        the parameters as they are.
      axis: as in `tree_allreduce`: the ranks of each group take the gradients of their group, share
        its state, and stay equal within it, as with `distributed(inner, axis=axis)`. There is no
        function for `update` then. After `average_gradients` over the other axes all ranks do the
        same, and the state is sharded within each group.

    Raises:
      ValueError: a state that was made for another number of ranks, or another axis; `update` gets
        no parameters; gradients of other shapes than the parameters', such as those of single
        samples; weights as in `distributed`; an axis that is unknown, or with a function.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
      RuntimeError: `update` is called outside of a step under `simulate`.
      RankMismatchError: on every rank, the parameters of `init` are not equal on the ranks along
        the axis.
    """
    check_transform("sharded", "inner", inner)
    inner = optax.with_extra_args_support(inner)
    cut, own_of, own_part = (
        partial(make_shard, axis=axis),
        partial(local_shard, axis=axis),
        partial(shard_value, axis=axis),
    )

    def masters(params: PyTree) -> PyTree:
        return (
            params
            if master_dtype is None
            else map_floats("sharded", lambda x: jnp.array(x, dtype=master_dtype), params)
        )

    def start(params: PyTree) -> ShardedState:
        wholes = masters(params)
        shards = jax.tree.map(lambda x: cut(own_of(x), jnp.shape(x), x), wholes)
        state = on_shards(inner.init, shards, axis=axis)
        master = () if master_dtype is None else with_shards(shards, wholes, axis)
        return ShardedState(
            (with_shards(state, wholes, axis), master), StateLayout(size_along(axis), axis)
        )

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
        given = Given(extra_args, updates)
        given.check_axis("sharded", axis)
        if master_dtype is None:
            theirs = map_floats("sharded", lambda x: cut(own_of(x), x.shape, x), params)
        else:
            kept = shards_of(state.parts[1])
            theirs = map_floats(
                "sharded",
                lambda x, m: cut(m, x.shape) if x.shape else _equal(m, axis),
                params,
                kept,
            )
        means, local = _means(updates, given.local, weight, axis)
        grads = map_floats(
            "sharded", lambda g, x: cut(x.astype(master_dtype or g.dtype), g.shape), updates, means
        )
        local = map_floats("sharded", lambda x, mean: cut(mean, x.shape), given.local, local)
        before = jax.tree.map(partial(_as_shard, axis), state.parts[0], is_leaf=is_sharded_array)
        args = given.reduced(grads, local, lambda f: mean_of_all("sharded", f, weight))
        work = lambda grads, state, params, args: inner.update(grads, state, params, **args)
        steps, after = on_shards(work, grads, *given.marked((before, theirs)), args, axis=axis)
        after = with_shards(after, params, axis)
        if master_dtype is None:
            return _meant(_gathered(steps), axis), ShardedState((after, ()), state.layout)
        master = jax.tree.map(
            lambda x: shard_value(x) if is_shard(x) else x, theirs, is_leaf=is_shard
        )
        master = optax.apply_updates(master, jax.tree.map(own_part, steps, is_leaf=is_shard))
        rounded = map_floats(
            "sharded", lambda m, p: cut(m.astype(p.dtype), p.shape), master, params
        )
        there = _gathered(rounded)
        master = with_shards(
            map_floats("sharded", lambda m, p: cut(m, p.shape), master, params), params, axis
        )

        def to_master(x: jax.Array, to: jax.Array) -> jax.Array:
            # in the dtype of the masters, so that the sum is exact for short floats wherever it is
            # computed
            dtype = widest(x.dtype, master_dtype)
            return update_to(x.astype(dtype), to.astype(dtype))

        out = map_floats("sharded", to_master, params, _meant(there, axis))
        return out, ShardedState((after, master), state.layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _means(
    updates: PyTree, local: dict[str, PyTree], weight: Weight | None, axis: Axis
) -> tuple[PyTree, PyTree]:
    """This rank's shards of the means of the gradients, and those of `value` and `grad`."""
    map_floats("sharded", lambda x: x, updates)  # an error names the leaf by its path
    if size_along(axis) == 1:
        return mean("sharded", updates, weight, axis), local
    means = weighted_mean(
        "sharded", (updates, local) if local else updates, weight, _mean_shards(axis), axis=axis
    )
    return means if local else (means, {})


@cache  # as what a mean has compiled is kept with this
def _mean_shards(axis: Axis) -> MeanOverRanks:
    """This rank's shards of the mean along an axis, and the whole mean of a scalar, which has the same bits on all."""

    def means_of(function: str, tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        scalars = {i: x for i, x in enumerate(leaves) if jnp.ndim(x) == 0}
        arrays = {i: x for i, x in enumerate(leaves) if i not in scalars}
        stacks = map_floats(function, lambda x: all_shards(x, size_along(axis)), arrays)
        shards = _no_floats(Caller("sharded").reduce_scatter, stacks, op="mean", axis=axis)
        means = shards | Caller("sharded").allreduce(scalars, op="mean", axis=axis)
        return treedef.unflatten([means[i] for i in range(len(leaves))])

    return means_of


def _as_shard(axis: Axis, x: ShardedArray | jax.Array) -> PyTree:
    """A node of the state as the inner transform gets it: a `Shard`, or what is whole."""
    if isinstance(x, ShardedArray):  # an nnx variable may be around the array
        return jax.tree.map(lambda value: make_shard(value, x.of, axis=axis), x.shard)
    return _equal(x, axis)


def _equal(x: jax.Array, axis: Axis) -> jax.Array:
    """A part of the state that is no shard: equal on all ranks of the axis, although a `ShardedState` counts as per rank."""
    return x if session.size() == 1 or axis != AXIS else equal_on_all_ranks(x)


def _meant(updates: PyTree, axis: Axis) -> PyTree:
    """Updates, which may differ between the groups along an axis."""
    return updates if axis == AXIS else may_differ(updates)


def _gathered(tree: PyTree) -> PyTree:
    """A tree of whole arrays, of one with shards."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    wholes = iter(gather_shards([x for x in leaves if is_shard(x)]))
    return treedef.unflatten([next(wholes) if is_shard(x) else x for x in leaves])


def _no_floats(collective: Callable[..., PyTree], tree: PyTree, **options: object) -> PyTree:
    """A collective that lets float0 pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sent = {i: x for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0}
    got = dict(enumerate(leaves)) | collective(sent, **options)
    return treedef.unflatten([got[i] for i in range(len(leaves))])
