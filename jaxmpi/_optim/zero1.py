"""ZeRO-1: each rank keeps the optimizer's state for its shards of the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import equal_on_all_ranks, with_parameters
from jaxmpi._collectives.trees import tree_allgather, tree_allreduce, tree_reduce_scatter
from jaxmpi._jit.api import anywhere
from jaxmpi._leaves import PerRankState, PyTree, is_key
from jaxmpi._optim.average import mean, mean_of_all
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, map_floats, wide
from jaxmpi._optim.objective import Given
from jaxmpi._optim.partition import on_shards
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._optim.shards import gathered, is_shard, joined, own, part, rows, shard, shard_shape
from jaxmpi._optim.weights import weighted_mean
from jaxmpi._world import session

__all__ = ["ShardedState", "reshard", "shard_shape", "sharded", "whole_state"]


class Layout(NamedTuple):
    """Which leaves of a state are shards, in the order of `jax.tree.leaves`: the shape of the whole array, or None."""

    ranks: int
    shapes: tuple[tuple[int, ...] | None, ...]


@partial(jax.tree_util.register_dataclass, data_fields=("own",), meta_fields=("layout",))
class ShardedState:
    """The state of `sharded`.

    Attributes:
      own: `inner` and `master`: a `PerRankState`, unless it is the state of one rank.
      layout: for how many ranks, and what the shards are parts of.
    """

    def __init__(self, own: Any, layout: Layout) -> None:
        self.own, self.layout = own, layout

    @classmethod
    def of(cls, parts: tuple[Any, Any], layout: Layout) -> "ShardedState":
        return cls(parts if layout.ranks == 1 else PerRankState(parts), layout)

    @property
    def parts(self) -> tuple[PyTree, PyTree]:
        return self.own.per_rank if isinstance(self.own, PerRankState) else self.own

    @property
    def inner(self) -> Any:
        """The state of the inner transform, for this rank's shards."""
        return self.parts[0]

    @property
    def master(self) -> Any:
        """This rank's shards of the parameters in `master_dtype`; () without."""
        return self.parts[1]

    def __repr__(self) -> str:
        return f"ShardedState(inner={self.inner!r}, master={self.master!r}, ranks={self.layout.ranks})"


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
        return _stored(state, _layout(state, wholes)), master

    started = anywhere(start, "sharded")

    def init(params: PyTree) -> ShardedState:
        refuse_shards("sharded", params)
        map_floats("sharded", lambda x: x, params)
        wholes = jax.eval_shape(masters, params)
        return ShardedState.of(started(params), _layout(jax.eval_shape(inner.init, wholes), wholes))

    def update(
        updates: PyTree, state: ShardedState, params: PyTree = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[Any, ShardedState]:
        if params is None:
            raise ValueError("sharded: update needs the parameters. Call update(grads, state, params).")
        _check_ranks("sharded", state)
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
        layout = _layout(after, params)  # a state may get other leaves in a step
        after = _stored(after, layout)
        if master_dtype is None:
            return _gathered(steps), ShardedState.of((after, ()), layout)
        master = jax.tree.map(lambda x: part(x) if is_shard(x) else x, theirs, is_leaf=is_shard)
        master = optax.apply_updates(master, jax.tree.map(part, steps, is_leaf=is_shard))
        rounded = map_floats("sharded", lambda m, p: shard(m.astype(p.dtype), p.shape), master, params)
        there = _gathered(rounded)
        out = map_floats("sharded", lambda x, to: to.astype(wide(x.dtype)) - x.astype(wide(x.dtype)), params, there)
        return out, ShardedState.of((after, master), layout)

    return optax.GradientTransformationExtraArgs(init, update)


def whole_state(state: ShardedState) -> ShardedState:
    """The state that one rank would have, on every rank; `unshard` does this."""
    _check_ranks("unshard", state)
    parts = _whole_parts(state) if state.layout.ranks > 1 else state.parts
    return ShardedState.of(parts, state.layout._replace(ranks=1))


def reshard(state: ShardedState) -> ShardedState:
    """A state of one rank, from `unshard`, cut for the ranks that there are now.

    **Collective:** every rank calls it, with the same state.
    **Communication:** none.

    Raises:
      ValueError: the state is that of several ranks.
    """
    if state.layout.ranks != 1:
        raise ValueError(f"reshard: the state is one of {state.layout.ranks} ranks. Call jaxmpi.unshard on them, then reshard.")

    return ShardedState.of(_own_parts(state), state.layout._replace(ranks=session.size()))


@partial(anywhere, name="unshard")
def _whole_parts(state: ShardedState) -> Any:
    leaves, treedef = jax.tree.flatten(state.parts)
    wholes = {i: shape for i, shape in enumerate(state.layout.shapes[: len(leaves)]) if shape is not None}
    for i, x in tree_allgather({i: leaves[i] for i in wholes}).items():
        leaves[i] = joined(x, wholes[i])
    return treedef.unflatten(leaves)


@partial(anywhere, name="reshard")
def _own_parts(state: ShardedState) -> Any:
    leaves, treedef = jax.tree.flatten(state.parts)
    pairs = zip(leaves, state.layout.shapes, strict=False)
    return treedef.unflatten([x if shape is None else own(x) for x, shape in pairs])


# shards


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


def _layout(state: PyTree, params: PyTree) -> Layout:
    """Which leaves of a state are sharded: arrays with the shape of a parameter, and the masters."""

    def shape_of(x: Any) -> tuple[int, ...]:
        return tuple(getattr(x, "shape", ()))

    shapes = [shape_of(x) or None for x in jax.tree.leaves(params)]
    leaves = jax.tree.leaves(state, is_leaf=is_shard)
    of_inner = [shape_of(x) if shape_of(x) in shapes and not is_key(x) else None for x in leaves]
    return Layout(session.size(), (*of_inner, *shapes))


def _stored(state: PyTree, layout: Layout) -> Any:
    """This rank's shards of the leaves that are sharded, and the others whole."""
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_shard)
    pairs = list(zip(leaves, layout.shapes, strict=False))
    wholes = iter(gathered([x for x, shape in pairs if is_shard(x) and shape is None]))
    return treedef.unflatten([part(x) if shape else next(wholes) if is_shard(x) else x for x, shape in pairs])


def _no_floats(collective: Callable[..., Any], tree: PyTree, **options: Any) -> Any:
    """A collective that lets float0 pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sent = {i: x for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0}
    got = dict(enumerate(leaves)) | collective(sent, **options)
    return treedef.unflatten([got[i] for i in range(len(leaves))])


def _check_ranks(function: str, state: ShardedState) -> None:
    if state.layout.ranks != session.size():
        raise ValueError(
            f"{function}: the state was made for {state.layout.ranks} ranks, and there are {session.size()}. On "
            f"{state.layout.ranks} ranks call jaxmpi.unshard(state) and save that; then call jaxmpi.reshard on it here."
        )
