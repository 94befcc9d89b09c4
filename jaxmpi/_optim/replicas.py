"""Detect parameters that should be equal on all ranks and are not."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxmpi._backends.wire import bits_of, is_sub_byte
from jaxmpi._collectives.trees import Caller
from jaxmpi._errors import RankMismatchError
from jaxmpi._leaves import PyTree, leaf_name
from jaxmpi._marks import equal_on_all_ranks
from jaxmpi._optim.transform_arguments import check_transform, checked_count, cond_or_call
from jaxmpi._per_rank_state import flatten_with_path, is_per_rank_leaf

__all__ = ["ReplicaState", "check_replicas", "watch_replicas"]


class ReplicaState(NamedTuple):
    """The state of `watch_replicas`; equal on all ranks.

    Attributes:
      inner: the state of the inner transform.
      step: calls of `update`.
      found: the step at which parameters were first found to differ; -1 if they were equal at the
        last comparison.
      leaf: the index of the first leaf that differs, in the order of `jax.tree.leaves`.
      rank: the rank on which it differs.
    """

    inner: PyTree
    step: jax.Array
    found: jax.Array
    leaf: jax.Array
    rank: jax.Array


def watch_replicas(
    inner: optax.GradientTransformation, every: int = 100
) -> optax.GradientTransformationExtraArgs:
    """Compare the ranks' parameters by checksums of their bits, at every `every`-th `update`.

    The first difference goes into the state: the leaf, and the rank whose bits the fewest ranks
    have. `check_replicas` raises an error for it. Leaves in a `PerRankState` may differ, and are
    not compared.

    **Collective:** every rank calls `update` equally often, with the parameters.
    **Communication:** 4 bytes for each array of the parameters, every `every` calls, and what
    `inner` sends.

    Args:
      inner: any optax transform whose parameters should be equal on all ranks.
      every: calls of `update` for one comparison.

    Raises:
      ValueError: `every` is below 1; `update` gets no parameters.
      TypeError: `inner` is no optax transform; `every` is no integer.
    """
    check_transform("watch_replicas", "inner", inner)
    every = checked_count(
        "watch_replicas", "every", every, "the number of steps for one comparison"
    )
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> ReplicaState:
        return ReplicaState(
            inner.init(params),
            jnp.zeros((), jnp.int32),
            *_none_found(),
            jnp.full((), -1, jnp.int32),
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
        leaf, rank = cond_or_call(step % every == 0, lambda: _compare(params), _none_found)
        # keep the step of the first difference, until a comparison finds none
        compared, differs = step % every == 0, leaf >= 0
        found = jnp.where(differs, jnp.where(state.found < 0, step, state.found), -1)
        return out, ReplicaState(
            after,
            step + 1,
            jnp.where(compared, found, state.found),
            jnp.where(compared, leaf, state.leaf),
            jnp.where(compared, rank, state.rank),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def check_replicas(state: PyTree, params: PyTree) -> None:
    """Raise an error if `watch_replicas` has found a difference.

    Call it outside of the step, for example once in an epoch.

    **Collective:** no; but every rank has the same state, and raises.

    Args:
      state: of `watch_replicas`, or of a transform around it, such as `optax.chain`; an
        `nnx.Optimizer`, or the `nnx.state` of one.
      params: the parameters, for the name of the array.

    Raises:
      RankMismatchError: a difference was found; with the leaf, the rank and the step.
      TypeError: there is no state of `watch_replicas` in `state`.
      ValueError: `params` are not the parameters of `update`.
      RuntimeError: called in traced code.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise RuntimeError(
            "check_replicas was called inside a traced function, where nothing runs yet. Call it "
            "outside."
        )
    nodes = jax.tree.leaves(state, is_leaf=_is_watched)
    found = [_as_state(x) for x in filter(_is_watched, nodes)]
    if not found:
        raise TypeError(
            f"check_replicas: state is a {type(state).__name__} without a state of "
            "jaxmpi.watch_replicas. Wrap the optimizer, tx = jaxmpi.watch_replicas(tx), and pass "
            "its state."
        )
    for watched in found:
        _check(watched, params)


def _is_watched(x: object) -> bool:
    """Return whether x is a `ReplicaState`, or the dict of its fields that nnx makes of one.

    nnx leaves out an `inner` that has no arrays.
    """
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
            f"check_replicas: params has {len(paths)} leaves, and leaf {leaf} differs between the "
            "ranks. Pass the parameters that update gets."
        )
    name = leaf_name(paths[leaf][0])
    raise RankMismatchError(
        f"check_replicas: leaf {name} of the parameters on rank {rank} was found to differ from "
        f"the other ranks at step {step}.",
        advice="Make the parameters equal with params = jaxmpi.synchronize(params), and look for "
        "an update that is not reduced over the ranks, or for failing memory.",
        function="check_replicas",
        leaf=name,
        ranks=[rank],
    )


def _none_found() -> tuple[jax.Array, jax.Array]:
    return jnp.full((), -1, jnp.int32), jnp.full((), -1, jnp.int32)


def _compare(params: PyTree) -> tuple[jax.Array, jax.Array]:
    """Return the first leaf that differs between ranks, and a rank that differs from most.

    Both are -1 if no leaf differs.
    """
    leaves: dict[int, ArrayLike] = {}
    for i, (path, x) in enumerate(flatten_with_path(params)[0]):
        if not is_per_rank_leaf(path):
            leaves[i] = x
    if not leaves:
        return _none_found()
    checksums = jnp.stack([_checksum(x) for x in leaves.values()])
    gathered = Caller("watch_replicas").allgather(checksums)  # [size, leaves]
    # the number of ranks that have the same bits as this one, [size, leaves]
    alike = jnp.sum(gathered[:, None] == gathered[None], axis=1)
    size = len(gathered)
    first = jnp.argmax(jnp.any(alike < size, axis=0))
    # of the ranks whose bits the fewest have, the last one: with two ranks, rank 1
    rank = size - 1 - jnp.argmin(alike[::-1, first])
    differs = jnp.any(alike < size)
    leaf = jnp.where(differs, jnp.array([*leaves])[first], -1)
    return leaf.astype(jnp.int32), jnp.where(differs, rank, -1).astype(jnp.int32)


def _checksum(x: ArrayLike) -> jax.Array:
    """Return a uint32 that differs if the bits differ, except in one case in 2³²."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:  # it holds no numbers
        return jnp.uint32(0)
    # any dtype as a vector of uint32
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or is_sub_byte(x.dtype):
        x = bits_of(x).astype(jnp.uint8)
    uints = jax.lax.bitcast_convert_type(
        x, jnp.uint32 if x.dtype.itemsize >= 4 else f"uint{8 * x.dtype.itemsize}"
    )
    flat = uints.reshape(-1).astype(jnp.uint32)
    # A sum alone would not notice two numbers that change places, so each is mixed with its index.
    mixed = flat ^ (jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the finalizer of MurmurHash3
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
