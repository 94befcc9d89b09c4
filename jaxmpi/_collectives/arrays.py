"""Collectives on lists of arrays, in traced code, over bound axes or the ranks of a backend."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmpi import _axis, _jaxcompat
from jaxmpi._backends import lax_collectives, primitive
from jaxmpi._backends.base import Collective
from jaxmpi._backends.groups import groups_along, position
from jaxmpi._backends.interface import Ranks
from jaxmpi._backends.one_process import Identity

__all__ = [
    "Bound",
    "Plain",
    "RankGroup",
    "allreduce",
    "along",
    "axis_size",
    "check_axis",
    "join",
    "joined_shape",
    "move",
    "reduce",
    "reduce_scatter",
]

# (family of dtypes, its limits, the dtype of 32 bits)
WIDE: list[
    tuple[type[np.generic], Callable[[np.dtype], "jnp.finfo | jnp.iinfo"], type[np.generic]]
] = [
    (jnp.floating, jnp.finfo, np.float32),
    (jnp.signedinteger, jnp.iinfo, np.int32),
    (jnp.unsignedinteger, jnp.iinfo, np.uint32),
]


class RankGroup(Protocol):
    """Ranks of a group, as the functions on lists of arrays see them in traced code."""

    size: int

    def index(self) -> jax.Array | int:
        """Return this rank's number in the group."""

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out a collective on every array."""


class Bound:
    """Ranks along one or several axes that are bound."""

    def __init__(self, axis: _axis.Axis = _axis.AXIS) -> None:
        self.size, self._axis = int(lax.axis_size(axis)), axis

    def index(self) -> jax.Array:
        """Return this rank's number along the axes."""
        return lax.axis_index(self._axis)

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out a collective on every array."""
        return lax_collectives.run(call, xs, self._axis) if xs else []


class Plain:
    """Ranks of a backend along an axis that is not bound, as under plain `jax.jit`."""

    def __init__(self, backend: Ranks, axis: _axis.Axis = _axis.AXIS) -> None:
        groups = groups_along(backend.axes, _axis.names(axis))
        self._place = position(groups, backend.place.rank)[1]
        self.size, self._backend = len(groups[0]), backend
        self._groups = () if groups == (tuple(range(backend.place.size)),) else groups

    def index(self) -> int:
        """Return this rank's number along the axis."""
        return self._place

    def run(self, call: Collective, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Carry out a collective on every array."""
        if self.size == 1:
            return Identity().run(call, xs)
        return primitive.run(call._replace(groups=self._groups), xs, self._backend.transport)


def along(axis: _axis.Axis, backend: Ranks) -> RankGroup:
    """Return the ranks along an axis that has passed `check_axis`."""
    return Bound(axis) if _axis.bound(axis) else Plain(backend, axis)


def axis_size(axis: _axis.Axis, backend: Ranks) -> int:
    """Return the number of ranks along an axis that has passed `check_axis`."""
    if _jaxcompat.tracing() and _axis.bound(axis):
        return int(lax.axis_size(axis))
    return prod(backend.axes[name] for name in _axis.names(axis))


def check_axis(function: str, axis: _axis.Axis, backend: Ranks) -> None:
    """Raise an error that names `function` unless an axis is a name of ranks, or a tuple of names.

    Raises:
      TypeError: no text, and no tuple of texts.
      ValueError: a name that neither `init` was given nor a `vmap` around the caller binds; some of
        the ranks twice.
    """
    names = _axis.names(axis)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function}: axis is {axis!r}. Pass the name of an axis of the ranks, or a tuple of "
            "some."
        )
    if unknown := [name for name in names if name not in backend.axes and not _axis.bound(name)]:
        known = ", ".join(map(repr, backend.axes))
        raise ValueError(
            f"{function}: axis {unknown[0]!r} is unknown, and the ranks have {known}. Name others "
            "in jaxmpi.init(axes=...)."
        )
    if len(set(names)) < len(names) or (_axis.AXIS in names and len(names) > 1):
        raise ValueError(
            f"{function}: axis {axis!r} names some of the ranks twice. {_axis.AXIS!r} is all of "
            "them; name it alone, or each of the other axes once."
        )


def move(xs: Sequence[jax.Array], ranks: RankGroup, *, call: Collective) -> list[jax.Array]:
    """Carry out a collective that only moves arrays."""
    return ranks.run(call, xs)


def join(xs: Sequence[jax.Array], ranks: RankGroup) -> list[jax.Array]:
    """Concatenate the ranks' arrays along their first axis: `lax.all_gather(tiled=True)`."""
    stacks = ranks.run(Collective("allgather"), xs)
    return [
        stack.reshape(joined_shape(x.shape, ranks.size))
        for stack, x in zip(stacks, xs, strict=True)
    ]


def joined_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of the result of `join` for an array of shape `shape` on each rank."""
    return (size * shape[0], *shape[1:])


def allreduce(xs: Sequence[jax.Array], ranks: RankGroup, *, op: str) -> list[jax.Array]:
    """Return y = op_r x_r on every rank."""
    if ranks.size == 1:
        return list(xs)
    if op in ("max", "min", "prod"):
        return _nonlinear(op, ranks, list(xs))
    return _divide(ranks.run(Collective("allreduce", op="sum"), _widen(xs, op)), xs, op, ranks)


def reduce(xs: Sequence[jax.Array], ranks: RankGroup, *, op: str, root: int) -> list[jax.Array]:
    """Return y = op_r x_r on root, and x elsewhere."""
    if ranks.size == 1:
        return list(xs)
    # A choice in the data, not in Python: so the program, and with it the messages of its
    # derivative, is the same on every rank.
    is_root = jnp.asarray(ranks.index() == root)
    return [jnp.where(is_root, y, x) for x, y in zip(xs, allreduce(xs, ranks, op=op), strict=True)]


def reduce_scatter(xs: Sequence[jax.Array], ranks: RankGroup, *, op: str) -> list[jax.Array]:
    """Return y_q = op_r x_r[q], for `[size, ...]` arrays."""
    if op in ("max", "min", "prod"):
        return [x[ranks.index()] for x in allreduce(xs, ranks, op=op)]
    return _divide(ranks.run(Collective("reduce_scatter", op="sum"), _widen(xs, op)), xs, op, ranks)


def _widen(xs: Sequence[jax.Array], op: str) -> list[jax.Array]:
    """Return the arrays in the dtypes in which they are summed.

    Short floats become float32, so that a sum is rounded once. For a mean, short integers get 32
    bits, so that their sum fits.
    """
    wide = [
        _wide(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) or op == "mean" else x.dtype
        for x in xs
    ]
    return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(xs, wide, strict=True)]


def _wide(dtype: np.dtype) -> np.dtype:
    for kind, info, wide in WIDE:
        if jnp.issubdtype(dtype, kind) and info(dtype).bits < 32:
            return np.dtype(wide)
    return dtype


def _divide(
    sums: Sequence[jax.Array], xs: Sequence[jax.Array], op: str, ranks: RankGroup
) -> list[jax.Array]:
    size = ranks.size
    if op == "mean" and size > 1:
        sums = [s // size if jnp.issubdtype(s.dtype, jnp.integer) else s / size for s in sums]
    return [s if s.dtype == x.dtype else s.astype(x.dtype) for s, x in zip(sums, xs, strict=True)]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _nonlinear(op: str, ranks: RankGroup, xs: list[jax.Array]) -> list[jax.Array]:
    """Return the maximum, minimum or product over the ranks."""
    return ranks.run(Collective("allreduce", op=op), xs)


@_nonlinear.defjvp
def _nonlinear_jvp(
    op: str, ranks: RankGroup, primals: tuple[list[jax.Array]], tangents: tuple[list[jax.Array]]
) -> tuple[list[jax.Array], list[jax.Array | np.ndarray]]:
    """Compute dy = Σ_r w_r dx_r.

    For max and min, w = 1/k on the k ranks that hold the extreme; for prod, w_r = Π_{s≠r} x_s.
    """
    (xs,), (dxs,) = primals, tangents
    outs = _nonlinear(op, ranks, xs)
    add = Collective("allreduce", op="sum")
    live = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # w
    if op == "prod":
        stacks = ranks.run(Collective("allgather"), [xs[i] for i in live])
        weights = [_product_of_others(stack, ranks) for stack in stacks]
    else:
        holds = [(xs[i] == outs[i]).astype(xs[i].dtype) for i in live]
        counts = ranks.run(add, holds)
        weights = [h / c for h, c in zip(holds, counts, strict=True)]
    # dy; the tangents of integers hold no numbers
    terms = [w * dxs[i] for w, i in zip(weights, live, strict=True)]
    tangents_out: list[jax.Array | np.ndarray] = []
    for x in xs:
        tangents_out.append(np.zeros(x.shape, jax.dtypes.float0))
    for i, total in zip(live, ranks.run(add, terms), strict=True):
        tangents_out[i] = total
    return outs, tangents_out


def _product_of_others(stack: jax.Array, ranks: RankGroup) -> jax.Array:
    """Return Π_{s≠rank} stack[s] for a `[size, ...]` stack; exact if factors are zero."""
    # int32 as `axis_index`, also under `jax_enable_x64`
    numbers = jnp.arange(ranks.size, dtype=jnp.int32)
    mine = numbers.reshape(-1, *[1] * (stack.ndim - 1)) == ranks.index()
    return jnp.prod(jnp.where(mine, 1, stack), axis=0, dtype=stack.dtype)
