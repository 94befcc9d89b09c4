"""Averaging gradients, as optax transforms.

tx = jaxmpi.distributed(optax.adam(1e-3))
tx = optax.chain(jaxmpi.average_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import optax

from jaxmpi._axis import AXIS, Axis
from jaxmpi._collectives.arrays import axis_size, check_axis
from jaxmpi._collectives.trees import OPS, tree_allreduce
from jaxmpi._jit.api import compiled
from jaxmpi._leaves import PerRankState, PyTree
from jaxmpi._optim.adasum import adasum
from jaxmpi._optim.compression import Codec, check_codec
from jaxmpi._optim.deterministic import canonical_mean, invariant_update
from jaxmpi._optim.float_leaves import check_in_step, check_shapes, check_transform, map_floats
from jaxmpi._optim.objective import Given, over_ranks
from jaxmpi._optim.sharded_array import refuse_shards
from jaxmpi._optim.weights import Weight, as_weight, check_total, divided, scaled, weighted_mean
from jaxmpi._world import session

__all__ = ["DistributedState", "average_gradients", "average_loss", "distributed", "mean", "mean_of_all"]

P = ParamSpec("P")


class DistributedState(NamedTuple):
    """The state of `distributed` with a codec.

    Attributes:
      inner: the state of the inner transform, equal on all ranks.
      codec: that of the codec, a `PerRankState`.
    """

    inner: PyTree
    codec: PerRankState


def average_gradients(*, axis: Axis = AXIS) -> optax.GradientTransformationExtraArgs:
    """An optax transform that averages its updates over all ranks.

    g ← (1/p) · Σ_r g_r; with the extra argument `weight` of `update`, g ← Σ_r w_r·g_r / Σ_r w_r as in `distributed`. What comes
    before it in a chain acts on this rank's gradients, what comes after on the average. `value`, `grad` and functions would
    reach the others in the chain as this rank's own, so `update` takes none of them: `distributed` does.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`.

    Args:
      axis: as in `tree_allreduce`: the ranks of each group average theirs. The gradients may be shards of `fully_shard` over
        another axis.

    Raises:
      ValueError: `update` gets `value`, `grad` or a function; gradients of other shapes than the parameters', such as those of
        single samples; weights as in `distributed`.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(average_gradients(), optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, weight: Weight | None = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        given = Given(extra_args, None)
        if local := [*given.local, *given.functions]:
            raise ValueError(
                f"average_gradients: update got {' and '.join(local)}, and the transforms that follow would take this rank's "
                "as that of all ranks. Use jaxmpi.distributed(inner) in the place of average_gradients, with them as inner."
            )
        if params is not None:
            check_shapes("average_gradients", updates, params)
        return mean("average_gradients", updates, weight, axis), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def average_loss(fun: Callable[P, PyTree], *, weight: Weight | None = None, axis: Axis = AXIS) -> Callable[P, PyTree]:
    """A function with the mean of `fun` over all ranks as its value, and the mean of the gradients as its gradient.

    f(θ, ...) = (1/p) · Σ_r f_r(θ, ...), and ∇f(θ) = (1/p) · Σ_r ∇f_r(θ) on every rank, where f_r is `fun` with the samples of
    rank r. (The gradient of `tree_allreduce(fun(θ))` is this rank's own, ∇f_r.) With weights both are weighted means, as in
    `distributed`.

        value_and_grad = optax.value_and_grad_from_state(jaxmpi.average_loss(loss))

    `distributed` and `sharded` do this to the functions that their `update` gets, such as `value_fn`. It is for programs that
    evaluate the loss themselves: a line search, a Hessian-vector product, an implicit layer.

    **Collective:** every rank calls the function equally often, with equal θ.
    **Communication:** a mean of the value, and for each derivative one of the gradient.

    Args:
      fun: (θ, ...) -> a number, or a pytree of real or complex numbers; θ is a pytree that is equal on all ranks.
      weight: this rank's number of samples, or tokens, if the ranks have different ones.
      axis: as in `tree_allreduce`: the means are those of each group, on whose ranks θ is equal.

    Returns:
      A function of the same arguments, for forward and reverse differentiation.

    Raises:
      ValueError: when called, a weight that is negative or no scalar; an unknown axis.
      TypeError: when called, a result that cannot be averaged, with its path.

    >>> f = average_loss(lambda w: (w - 1.0) ** 2)
    >>> float(f(3.0)), float(jax.grad(f)(3.0))
    (4.0, 4.0)
    """
    return mean_of_all("average_loss", fun, weight, axis)


def distributed(
    inner: optax.GradientTransformation,
    *,
    op: str = "mean",
    codec: Codec | None = None,
    micro_batches: int | None = None,
    axis: Axis = AXIS,
) -> optax.GradientTransformationExtraArgs:
    """Feed `inner` the gradients of all ranks in place of this rank's own.

    g ← (1/p) · Σ_r g_r for "mean"; then inner. The state is that of `inner`, unchanged, and stays equal on all ranks as long as
    it and the parameters start equal: see `synchronize`. With a codec the state is a `DistributedState`.

    `update(grads, state, params, weight=w)` gives g ← Σ_r w_r·g_r / Σ_r w_r, where w_r is the number of samples, or tokens,
    that rank r has averaged its gradient over: the exact mean over all samples, however unevenly they are spread. It is one
    finite number, 0 or more; all ranks pass one, or none does. A rank with weight 0 does not count, whatever its gradients are;
    where all weights are 0, so are the gradients. Short floats travel as float32 then.

    `update` takes what optax's transforms take beside the gradients, as this rank has it: `value`, the loss, and `grad` become
    means over the ranks, too; functions of the parameters, such as `value_fn` of a line search, become `average_loss` of
    themselves. `inner` gets any other argument as it is: equal on all ranks, or for `value_fn` only.

    **Collective:** every rank calls `update`, with the same structure, shapes and dtypes.
    **Communication:** that of `tree_allreduce`, in `update` alone; weights and `value` travel in the same message. Or the
    codec's. A function communicates wherever `inner` calls it.

    Args:
      inner: any optax transform.
      op: "mean" for losses that average over the rank's batch, "sum" for losses that sum; also "max", "min", "prod", and
        "adasum" (Maleki et al. 2020, "Scaling distributed training with adaptive summation"), leaf by leaf.
      codec: one of `jaxmpi.codecs`, which says what is sent for a mean; on one rank nothing is, and it changes nothing.
      micro_batches: M, for the same bits on any number of ranks: the gradients have another first axis, of this rank's M/p
        micro-batches, as `jaxmpi.micro_batch_grads` returns them. Their mean, and the sums of `inner`, are formed in one
        order; an `inner` that multiplies matrices, such as Muon, is refused.
      axis: as in `tree_allreduce`: the ranks of each group take the gradients of their group, and stay equal within it. A
        codec has the same axis, and M is the number of a group. There is no function for `update` then.

    Raises:
      ValueError: an unknown op; a codec, a weight or micro-batches with another op than "mean", or with each other; an axis
        with a function, or a codec for another one; a function with micro-batches or another op than "mean" and "sum"; an
        `inner` that takes the gradients of single samples; when called, an unknown axis; when called with micro-batches, an
        `inner` that multiplies matrices; when called eagerly, on all ranks, a weight of any rank that is not one finite number
        of 0 or more. In a traced step it makes NaN of everything, on all ranks.
      TypeError: `inner` is no optax transform, or `codec` no codec; a leaf that cannot be averaged, with its path.

    >>> import jax.numpy as jnp
    >>> tx = distributed(optax.sgd(0.5))
    >>> updates, state = tx.update(jnp.array([2.0]), tx.init(jnp.array([0.0])))
    >>> updates
    Array([-1.], dtype=float32)
    """
    if op not in (*OPS, "adasum"):
        raise ValueError(f"distributed: op {op!r} is unknown. Use one of {', '.join(OPS)} and adasum.")
    check_transform("distributed", "inner", inner)
    if codec is not None:
        check_codec("distributed", codec, axis)
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(f"distributed: micro_batches is {micro_batches}. It is how many all ranks have together: 1 or more.")
    special = [name for name, given in (("a codec", codec), ("micro_batches", micro_batches)) if given is not None]
    if len(special) > 1 or (special and op != "mean"):
        raise ValueError(
            f"distributed: {' and '.join([*special, f'op {op!r}'])} do not go together. Use op 'mean', and one of them."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        refuse_shards("distributed", params, AXIS if op == "adasum" else axis)
        return DistributedState(inner.init(params), PerRankState(codec.init(params))) if codec else inner.init(params)

    def reduced(updates: PyTree, local: dict[str, PyTree], weight: Weight | None) -> tuple[PyTree, PyTree]:
        """The gradients of all ranks, and the `value` and `grad`."""
        if op not in ("mean", "sum"):
            grads = adasum(updates, axis) if op == "adasum" else tree_allreduce(updates, op=op, axis=axis)
            return grads, tree_allreduce(local, op="mean", axis=axis)
        tree = (updates, local) if local else updates  # errors name the leaf by its path
        if micro_batches:
            tree = canonical_mean(tree, micro_batches, axis)
        else:
            tree = mean("distributed", tree, weight, axis) if op == "mean" else tree_allreduce(tree, op="sum", axis=axis)
        return tree if local else (tree, {})

    def check(weight: Weight | None, functions: Iterable[str]) -> None:
        other = "micro_batches" if micro_batches else f"op {op!r}"
        if weight is not None and (micro_batches or op != "mean"):
            raise ValueError(f"distributed: weight does not go together with {other}. Leave one of them out.")
        if functions and (micro_batches or op not in ("mean", "sum")):
            raise ValueError(f"distributed: {' and '.join(functions)} does not go together with {other}. Use op 'mean'.")

    def step(
        updates: PyTree, state: PyTree, params: PyTree, weight: Weight | None, extra_args: dict[str, object]
    ) -> tuple[PyTree, PyTree]:
        check_axis("distributed", axis, session.current("distributed"))
        given = Given(extra_args, updates)
        check(weight, given.functions)
        given.check_axis("distributed", axis)
        before, sent = (state.inner, state.codec.per_rank) if codec else (state, None)
        if codec:
            grads, sent = _coded(codec, updates, sent, weight)
            local = mean("distributed", given.local, weight, axis) if given.local else {}
        else:
            grads, local = reduced(updates, given.local, weight)
        total = partial(tree_allreduce, op="sum")
        over = (lambda f: over_ranks(f, total)) if op == "sum" else lambda f: mean_of_all("distributed", f, weight)
        apply = invariant_update(inner) if micro_batches else inner.update
        out, after = apply(grads, *given.marked((before, params)), **given.reduced(grads, local, over))
        check_shapes("distributed", grads, out)
        return out, DistributedState(after, PerRankState(sent)) if codec else after

    whole_step = compiled(step, "distributed") if micro_batches else step

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, weight: Weight | None = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        return whole_step(updates, state, params, weight, extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def mean_of_all(function: str, fun: Callable[..., PyTree], weight: Weight | None, axis: Axis = AXIS) -> Callable[..., PyTree]:
    """`average_loss`, for a function that says its name in errors."""
    counts = None if weight is None else as_weight(function, weight, ())[0] != 0
    return over_ranks(fun, lambda out: mean(function, out, weight, axis), counts, axis=axis)


def mean(function: str, updates: PyTree, weight: Weight | None, axis: Axis = AXIS) -> PyTree:
    """The mean over the ranks along an axis, weighted where there is a weight, in the dtypes of `updates`."""
    means = weighted_mean(function, updates, weight, axis=axis)
    return means if weight is None else _rounded(function, means, updates)


def _rounded(function: str, means: PyTree, like: PyTree) -> PyTree:
    return map_floats(function, lambda mean, x: mean.astype(x.dtype), means, like)


def _coded(codec: Codec, updates: PyTree, state: PyTree, weight: Weight | None) -> tuple[PyTree, PyTree]:
    """The mean that a codec finds; its state stays as it was where there is nothing to average."""
    if axis_size(codec.axis, session.current("distributed")) == 1:
        return mean("distributed", updates, weight, codec.axis), state
    check_in_step("distributed")
    if weight is None:
        return codec.mean(updates, state)
    w, problem = as_weight("distributed", weight, updates)
    total = tree_allreduce(w, op="mean", axis=codec.axis)
    means, sent = codec.mean(scaled("distributed", updates, w), state)
    check_total("distributed", total, problem, codec.axis)
    kept = jax.tree.map(lambda new, old: jnp.where(total != 0, new, old), sent, state)
    return _rounded("distributed", divided("distributed", means, total), updates), kept
