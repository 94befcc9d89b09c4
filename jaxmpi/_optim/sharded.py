"""ZeRO-1: each rank keeps the optimizer's state for its share of the parameters."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmpi import _world
from jaxmpi._axis import with_parameters
from jaxmpi._collectives import tree_allgather, tree_reduce_scatter
from jaxmpi._jit import anywhere
from jaxmpi._leaves import PerRankState
from jaxmpi._optim.average import checked_weight, scaled
from jaxmpi._optim.clip import on_shards
from jaxmpi._optim.elementwise import check_elementwise, like_parameters
from jaxmpi._optim.trees import check_transform, map_floats, wide

__all__ = ["ShardedState", "reshard", "shard_shape", "sharded", "unshard"]


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
    def parts(self) -> tuple[Any, Any]:
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

    Each rank gets the mean of its share of the gradients (reduce_scatter), updates that share with `inner`, and gives the
    updates to all (allgather): ZeRO stage 1 (Rajbhandari et al. 2020). An array of n numbers is padded to p equal shards of
    ⌈n/p⌉. A shard has as many axes as its array, so masks that look at `ndim` still work; names and structure stay, too.

    `inner` must treat every number by itself, as SGD, Adam, AdamW, Lion and RMSProp do. `init` tries it on two halves of small
    arrays and refuses it otherwise: clipping is right with `jaxmpi.clip_by_global_norm`; LAMB, LARS, Adafactor and Muon look at
    whole arrays and need `distributed`.

    `update` takes `weight` as that of `distributed` does.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes, and with parameters.
    **Communication:** the bytes of a mean, in a reduce_scatter of the gradients and an allgather of the updates.

    Args:
      inner: an optax transform that treats every number by itself.
      master_dtype: a dtype such as float32, in which each rank keeps its shard of the parameters and updates it: for
        parameters in bfloat16, which then are the rounded masters. None updates the parameters as they are.

    Raises:
      ValueError: `inner` does not treat every number by itself; a state that was made for another number of ranks; `update`
        gets no parameters; weights as in `distributed`.
      TypeError: `inner` is no optax transform; a leaf of integers, with its path.
    """
    check_transform("sharded", "inner", inner)
    inner = optax.with_extra_args_support(inner)

    def split(params: Any) -> Any:
        """The shards that `inner` sees: the masters, if there are any."""
        shards = map_floats("sharded", _own, params)
        return shards if master_dtype is None else map_floats("sharded", lambda x: jnp.array(x, dtype=master_dtype), shards)

    def init(params: Any) -> ShardedState:
        size = _world.size()
        map_floats("sharded", lambda x: x, params)
        wholes = jax.eval_shape(lambda p: p if master_dtype is None else optax.tree_utils.tree_cast(p, master_dtype), params)
        shapes = tuple(map(_shape, jax.tree.leaves(wholes)))
        check_elementwise(inner, wholes)

        def start(params: Any) -> tuple[Any, Any]:
            shards = split(params)
            return inner.init(shards), shards if master_dtype is not None else ()

        own, master = anywhere(start, "sharded")(params)
        of_inner = (None if i is None else shapes[i] for i in like_parameters(inner, wholes))
        return ShardedState.of((own, master), Layout(size, (*of_inner, *(shape or None for shape in shapes))))

    def update(
        updates: Any, state: ShardedState, params: Any = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[Any, ShardedState]:
        if params is None:
            raise ValueError("sharded: update needs the parameters. Call update(grads, state, params).")
        _check_ranks("sharded", state)
        updates = with_parameters(updates, f"sharded master_dtype={master_dtype and jnp.dtype(master_dtype)}")
        own = map_floats("sharded", _own, params) if master_dtype is None else state.master
        grads = map_floats("sharded", lambda x, p: x.astype(p.dtype), _mean_shards(updates, weight), own)
        with on_shards():
            steps, after = inner.update(grads, state.inner, own, **extra_args)
        if master_dtype is None:
            return map_floats("sharded", _whole, params, _gathered(steps)), ShardedState.of((after, ()), state.layout)
        master = optax.apply_updates(own, steps)
        rounded = map_floats("sharded", lambda m, p: m.astype(p.dtype), master, params)
        there = map_floats("sharded", _whole, params, _gathered(rounded))
        out = map_floats("sharded", lambda to, x: to.astype(wide(x.dtype)) - x.astype(wide(x.dtype)), there, params)
        return out, ShardedState.of((after, master), state.layout)

    return optax.GradientTransformationExtraArgs(init, update)


def unshard(state: ShardedState) -> ShardedState:
    """The whole state on every rank, as one rank would have it: to save it, or to go on with another number of ranks.

    **Collective:** every rank calls it.
    **Communication:** an allgather of the state.

    Returns:
      A `ShardedState` for one rank; `reshard` cuts it for any number.

    Raises:
      ValueError: the state was made for another number of ranks.
    """
    _check_ranks("unshard", state)
    layout = state.layout

    def join(x: Any, shape: tuple[int, ...] | None) -> Any:
        return x if shape is None else x.reshape(-1)[: prod(shape)].reshape(shape)

    def whole(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        shards = {i: x for i, x in enumerate(leaves) if layout.shapes[i] is not None}
        for i, x in tree_allgather(shards).items():
            leaves[i] = join(x, layout.shapes[i])
        return treedef.unflatten(leaves)

    parts = anywhere(whole, "unshard")(state.parts) if layout.ranks > 1 else state.parts
    return ShardedState.of(parts, layout._replace(ranks=1))


def reshard(state: ShardedState) -> ShardedState:
    """A state of one rank, from `unshard`, cut for the ranks that there are now.

    **Collective:** every rank calls it, with the same state.
    **Communication:** none.

    Raises:
      ValueError: the state is that of several ranks.
    """
    if state.layout.ranks != 1:
        raise ValueError(f"reshard: the state is one of {state.layout.ranks} ranks. Call jaxmpi.unshard on them, then reshard.")

    def cut(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, state.layout.shapes, strict=False)
        return treedef.unflatten([x if shape is None else _own(x) for x, shape in pairs])

    return ShardedState.of(anywhere(cut, "reshard")(state.parts), state.layout._replace(ranks=_world.size()))


def shard_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of one of `size` equal shards of an array: as many axes as it has."""
    return shape if size == 1 else (_columns(shape, size), *[1] * (len(shape) - 1)) if shape else ()


# shards


def _columns(shape: tuple[int, ...], size: int) -> int:
    return -(-prod(shape) // size)


def _rows(x: Any, size: int) -> jax.Array:
    """`[...]` as `[size, *shard]`, with zeros at the end; `[]` as `[size]`."""
    if jnp.ndim(x) == 0:
        return jnp.full(size, x)
    flat = jnp.pad(jnp.reshape(x, -1), (0, size * _columns(jnp.shape(x), size) - x.size))
    return flat.reshape(size, *shard_shape(jnp.shape(x), size))


def _own(x: Any) -> jax.Array:
    """This rank's shard of an array that is whole here."""
    size = _world.size()
    return x if size == 1 else lax.dynamic_index_in_dim(_rows(x, size), _world.rank(), keepdims=False)


def _whole(x: Any, rows: Any) -> Any:
    """All ranks' shards `[size, *shard]` as an array like x."""
    return rows if _world.size() == 1 else rows.reshape(-1)[: x.size].reshape(x.shape)


def _mean_shards(updates: Any, weight: Any) -> Any:
    size = _world.size()
    if weight is None:
        rows = map_floats("sharded", lambda x: _rows(x, size), updates)
        return updates if size == 1 else _no_floats(tree_reduce_scatter, rows, op="mean")
    w = checked_weight("sharded", weight)
    sums = scaled("sharded", updates, w)
    if size == 1:
        total = w
    else:
        rows = map_floats("sharded", lambda x: _rows(x, size), sums)
        total, sums = _no_floats(tree_reduce_scatter, (jnp.full(size, w), rows), op="sum")
    safe = jnp.where(total != 0, total, 1)
    return map_floats("sharded", lambda s: jnp.where(total != 0, s / safe.astype(s.dtype), 0), sums)


def _gathered(shards: Any) -> Any:
    return shards if _world.size() == 1 else _no_floats(tree_allgather, shards)


def _no_floats(collective: Callable[..., Any], tree: Any, **options: Any) -> Any:
    """A collective that lets float0 pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sent = {i: x for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0}
    got = dict(enumerate(leaves)) | collective(sent, **options)
    return treedef.unflatten([got[i] for i in range(len(leaves))])


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_ranks(function: str, state: ShardedState) -> None:
    if state.layout.ranks != _world.size():
        raise ValueError(
            f"{function}: the state was made for {state.layout.ranks} ranks, and there are {_world.size()}. On "
            f"{state.layout.ranks} ranks call jaxmpi.unshard(state) and save that; then call jaxmpi.reshard on it here."
        )
