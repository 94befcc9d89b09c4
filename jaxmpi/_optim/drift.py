"""Replicas that drift apart are found, before they are a mystery in a loss curve."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxmpi._axis import equal_on_all_ranks
from jaxmpi._backends.wire_dtypes import bits_of, is_sub_byte
from jaxmpi._collectives.trees import Caller
from jaxmpi._errors import RankMismatchError
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._optim.float_leaves import check_transform, either
from jaxmpi._per_rank_state import flatten_with_path, is_per_rank_leaf

__all__ = ["ReplicaState", "check_replicas", "watch_replicas"]


class ReplicaState(NamedTuple):
    """The state of `watch_replicas`; equal on all ranks.

    Attributes:
      inner: the state of the inner transform.
      step: calls of `update`.
      found: since which step parameters were found to differ; -1 if they were equal when they were
        last compared.
      leaf: which one, in the order of `jax.tree.leaves`.
      rank: on which rank.
    """

    inner: PyTree
    step: jax.Array
    found: jax.Array
    leaf: jax.Array
    rank: jax.Array


def watch_replicas(
    inner: optax.GradientTransformation, every: int = 100
) -> optax.GradientTransformationExtraArgs:
    """Compare the ranks' parameters at every `every`-th call of `update`, bit by bit, by checksums.

    The first difference goes into the state: which array, and which rank, that of the fewest with
    its bits. `check_replicas` makes an error of it. What is in a `PerRankState` may differ, and is
    not compared.

    **Collective:** every rank calls `update` equally often, with the parameters.
    **Communication:** 4 bytes for each array of the parameters, every `every` calls, and what
    `inner` sends.

    Args:
      inner: any optax transform; the parameters must be meant to be equal on all ranks.
      every: calls of `update` for one comparison.

    Raises:
      ValueError: `every` is below 1; `update` gets no parameters.
      TypeError: `inner` is no optax transform.
    """
    check_transform("watch_replicas", "inner", inner)
    if every < 1:
        raise ValueError(
            f"watch_replicas: every is {every}. It is the number of steps for one comparison: 1 or "
            "more."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> ReplicaState:
        return ReplicaState(
            inner.init(params), jnp.zeros((), jnp.int32), *_nothing(), jnp.full((), -1, jnp.int32)
        )

    def update(
        updates: PyTree, state: ReplicaState, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, ReplicaState]:
        if params is None:
            raise ValueError(
                "watch_replicas: update needs the parameters. Call update(grads, state, params)."
            )
        out, after = inner.update(updates, state.inner, params, **extra_args)
        step = equal_on_all_ranks(state.step)
        leaf, rank = either(step % every == 0, lambda: _compare(params), _nothing)
        compared, differs = step % every == 0, leaf >= 0
        since = jnp.where(differs, jnp.where(state.found < 0, step, state.found), -1)
        last = ((since, state.found), (leaf, state.leaf), (rank, state.rank))
        return out, ReplicaState(
            after, step + 1, *(jnp.where(compared, new, old) for new, old in last)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def check_replicas(state: PyTree, params: PyTree) -> None:
    """Raise an error if `watch_replicas` has found a difference; call it now and then, outside of the step.

    **Collective:** no; but every rank has the same state, and raises.

    Args:
      state: of `watch_replicas`, or of a transform around it, such as `optax.chain`; an
        `nnx.Optimizer`, or the `nnx.state` of one.
      params: the parameters, for the name of the array.

    Raises:
      RankMismatchError: with the array, the rank and the step.
      TypeError: no state of `watch_replicas` in `state`.
      ValueError: `params` are others than those of `update`.
      RuntimeError: called in traced code.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise RuntimeError(
            "check_replicas was called inside a traced function, where nothing runs yet. Call it "
            "outside."
        )
    found = [_as_state(x) for x in jax.tree.leaves(state, is_leaf=_is_watched) if _is_watched(x)]
    if not found:
        raise TypeError(
            f"check_replicas: state is a {type(state).__name__} without a state of "
            "jaxmpi.watch_replicas. Wrap the optimizer, "
            "tx = jaxmpi.watch_replicas(tx), and pass its state."
        )
    for watched in found:
        _check(watched, params)


def _is_watched(x: object) -> bool:
    """Whether x is a `ReplicaState`, or what nnx makes of one: a dict of its fields, without an `inner` that has no arrays."""
    if isinstance(x, Mapping):
        return {*x, "inner"} == {*ReplicaState._fields}
    return isinstance(x, ReplicaState)


def _as_state(x: ReplicaState | Mapping[str, PyTree]) -> ReplicaState:
    return x if isinstance(x, ReplicaState) else ReplicaState(**{"inner": (), **x})


def _check(state: ReplicaState, params: PyTree) -> None:
    step, leaf, rank = (
        int(np.asarray(x)) for x in jax.tree.leaves((state.found, state.leaf, state.rank))
    )
    if step < 0:
        return
    paths = jax.tree_util.tree_leaves_with_path(params)
    if leaf >= len(paths):
        raise ValueError(
            f"check_replicas: params has {len(paths)} leaves, and leaf number {leaf} differs "
            "between the ranks. Pass the "
            "parameters that update gets."
        )
    raise RankMismatchError(
        f"check_replicas: leaf {leaf_name(paths[leaf][0])} of the parameters on rank {rank} was "
        "found to differ from that of "
        f"the others at step {step}. Make them equal with params = jaxmpi.synchronize(params), and "
        "look for what is not "
        "reduced over the ranks, or for memory that fails."
    )


def _nothing() -> tuple[jax.Array, jax.Array]:
    return jnp.full((), -1, jnp.int32), jnp.full((), -1, jnp.int32)


def _compare(params: PyTree) -> tuple[jax.Array, jax.Array]:
    """The first array that is not equal on all ranks, and a rank that differs from most; -1 and -1 if there is none."""
    leaves = {
        i: x
        for i, (path, x) in enumerate(flatten_with_path(params)[0])
        if not is_per_rank_leaf(path)
    }
    if not leaves:
        return _nothing()
    # [ranks, arrays]
    sums = Caller("watch_replicas").allgather(jnp.stack([_checksum(x) for x in leaves.values()]))
    alike = jnp.sum(sums[:, None] == sums[None], axis=1)  # how many ranks have these bits
    size = len(sums)
    which = jnp.argmax(jnp.any(alike < size, axis=0))
    rank = size - 1 - jnp.argmin(alike[::-1, which])  # the last of the fewest
    differs = jnp.any(alike < size)
    leaf = jnp.array([*leaves])[which]
    return jnp.where(differs, leaf, -1).astype(jnp.int32), jnp.where(differs, rank, -1).astype(
        jnp.int32
    )


def _checksum(x: ArrayLike) -> jax.Array:
    """A uint32 that differs where the bits do, but for one case in 2³²."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:  # it holds no numbers
        return jnp.uint32(0)
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or is_sub_byte(x.dtype):
        x = bits_of(x).astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(
        x, jnp.uint32 if x.dtype.itemsize >= 4 else f"uint{8 * x.dtype.itemsize}"
    )
    flat = words.reshape(-1).astype(jnp.uint32)
    mixed = flat ^ (jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
