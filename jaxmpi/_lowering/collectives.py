"""Collectives of a traced program: over all ranks, and as calls of a transport.

An axis of `init(axes=...)` is a partition of the ranks into groups. Once a function is traced, and
so differentiated, a collective over "island" is the same collective over "ranks" with
`axis_index_groups`. Later steps know only these (`over_all_ranks`). `translate` returns the call of
a transport for such a collective, and the functions to apply to its operand before the call and to
its result after it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.classify import axis_names
from jaxmpi._analysis.primitives import Op, op_of, properties, reduction_of
from jaxmpi._axis import AXIS
from jaxmpi._backends.base import Collective
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._backends.lax_collectives import from_root
from jaxmpi._backends.wire import LOCAL_REDUCE
from jaxmpi._lowering.refuse import refuse, refuse_dtype, refuse_groups, refuse_names, refuse_pairs

__all__ = [
    "Translation",
    "broadcast",
    "coordinate",
    "has_groups",
    "is_among_several",
    "is_short",
    "over_all_ranks",
    "translate",
    "vmap_axes",
]


# Collectives over named axes, as collectives over AXIS within groups


Axes = Mapping[str, int]


def has_groups(eqn: JaxprEqn) -> bool:
    """Return whether an equation is over other axes than AXIS, or within groups that users gave.

    Groups of the type `Groups` come from `over_all_ranks`, and need no further step.
    """
    groups = eqn.params.get("axis_index_groups")
    return axis_names(eqn) != (AXIS,) or (groups is not None and not isinstance(groups, Groups))


def coordinate(eqn: JaxprEqn, axes: Axes) -> jax.Array:
    """Return this rank's coordinate along the axis of an `axis_index`."""
    (name,) = axis_names(eqn)
    rank = lax.axis_index(AXIS)
    if name == AXIS:
        return rank
    refuse_names(eqn, (name,), axes)
    names = [axis for axis in axes if axis != AXIS]
    # Ranks are numbered in row-major order over the axes.
    stride = 1
    for after in names[names.index(name) + 1 :]:
        stride *= axes[after]
    return lax.rem(lax.div(rank, jnp.int32(stride)), jnp.int32(axes[name]))


def broadcast(eqn: JaxprEqn, x: jax.Array, axes: Axes) -> jax.Array:
    """Return the array of a root, within each group."""
    refuse_dtype(eqn)
    root, groups = eqn.params[properties(eqn.primitive.name).root], _groups(eqn, axes)
    if len(groups[0]) == 1:
        return x
    jax_groups = _groups_for_jax(_sorted_groups(groups))
    if jax_groups is None:
        is_root = lax.axis_index(AXIS) == root
    else:
        roots = [group[root] for group in groups]
        is_root = jnp.isin(lax.axis_index(AXIS), jnp.array(roots, jnp.int32))
    return from_root(is_root, lambda bits: lax.psum(bits, AXIS, axis_index_groups=jax_groups), x)


def over_all_ranks(eqn: JaxprEqn, xs: Sequence[ArrayLike], axes: Axes) -> list[jax.Array]:
    """Carry out a collective over named axes as one over all ranks, within groups if need be."""
    op, groups = op_of(eqn), _groups(eqn, axes)
    if op is Op.PERMUTE:
        pairs = [(int(p), int(q)) for p, q in eqn.params["perm"]]
        refuse_pairs(eqn, len(groups[0]))
        perm: list[tuple[int, int]] = []
        for group in groups:
            perm += [(group[p], group[q]) for p, q in pairs]
        return _jaxcompat.bind(eqn, xs, axis_name=(AXIS,), perm=tuple(perm))
    if op is Op.SEND_AHEAD:  # never within groups of one rank
        jax_groups = _groups_for_jax(_sorted_groups(groups) if eqn.params["op"] else groups)
        return _jaxcompat.bind(eqn, xs, axis_name=(AXIS,), axis_index_groups=jax_groups)
    if len(groups[0]) == 1:
        with _jaxcompat.at_source(eqn):
            return [_within_one_rank(eqn, xs[0])]
    if op is not Op.ALLREDUCE:
        bound = _jaxcompat.bind(
            eqn, xs, axis_name=(AXIS,), axis_index_groups=_groups_for_jax(groups)
        )
    else:
        with _jaxcompat.at_source(eqn):
            x = _reduce_vmap_axes(eqn, xs[0])
        bound = _jaxcompat.bind(
            eqn, [x], axes=(AXIS,), axis_index_groups=_groups_for_jax(_sorted_groups(groups))
        )
        bound = [y if y.dtype == xs[0].dtype else y.astype(xs[0].dtype) for y in bound]
    return bound


def _sorted_groups(groups: Groups) -> Groups:
    """Return the groups with sorted ranks, for a reduction, whose result is equal in any order."""
    return Groups.of([sorted(group) for group in groups], groups.name)


def _groups_for_jax(groups: Groups) -> Groups | None:
    """Return the groups as JAX takes them: None for all ranks in their order."""
    return None if len(groups) == 1 and list(groups[0]) == sorted(groups[0]) else groups


def _groups(eqn: JaxprEqn, axes: Axes) -> Groups:
    """Return the groups of ranks that an equation communicates within.

    `axis_index_groups` of an equation over an axis count along that axis.

    Raises:
      NameError, ValueError: as `refuse_names` and `refuse_groups` do.
    """
    names = axis_names(eqn)
    refuse_names(eqn, names, axes)
    groups, inner = groups_along(axes, names), eqn.params.get("axis_index_groups")
    if inner is None or isinstance(inner, Groups):
        return inner or groups
    refuse_groups(eqn, inner, len(groups[0]))
    divided: list[list[int]] = []
    for group in groups:
        for subset in inner:
            divided.append([group[i] for i in subset])
    return Groups.of(divided)


def is_among_several(eqn: JaxprEqn, axes: Axes) -> bool:
    """Return whether an equation communicates within groups of more than one rank."""
    return len(_groups(eqn, axes)[0]) > 1


def vmap_axes(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the axes of a `vmap` inside that a reduction is over, too, which are numbers."""
    return tuple(axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int))


def is_short(dtype: np.dtype) -> bool:
    """Return whether a dtype is that of floats of less than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _reduce_vmap_axes(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """Reduce over the axes of a `vmap` inside; the sum of short floats is a float32."""
    dims = vmap_axes(eqn)
    return _reduce(reduction_of(eqn), dims, x) if dims else x


def _within_one_rank(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """Carry out a collective within groups of one rank, which sends nothing."""
    op, params = op_of(eqn), eqn.params
    if op is Op.ALLREDUCE:
        return _reduce_vmap_axes(eqn, x).astype(x.dtype)
    if op is Op.ALL_GATHER and not params["tiled"]:
        return lax.expand_dims(x, (params["all_gather_dimension"],))
    if op is Op.REDUCE_SCATTER and not params["tiled"]:
        return lax.squeeze(x, (params["scatter_dimension"],))
    return x


# Calls of a transport


Array = jax.Array


class Translation(NamedTuple):
    """A collective of JAX as a call of a transport: y = after(call(before(x))).

    Attributes:
      call: the collective of the transport.
      before: makes the operand that is sent.
      after: makes the result of JAX's collective.
      needs_rank: whether `before` also takes this rank's number: y = after(call(before(x, rank))).
    """

    call: Collective
    before: Callable[..., Array]
    after: Callable[[Array], Array]
    needs_rank: bool = False

    def operand_type(self, aval: ShapedArray) -> ShapedArray | jax.ShapeDtypeStruct:
        """Return shape and dtype of the operand that is sent for x like `aval`."""
        if self.before is _identity:
            return aval
        return jax.eval_shape(
            lambda x: self.operand(x, lambda: 0), jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        )

    def operand(self, x: Array, rank: Callable[[], ArrayLike]) -> Array:
        """Return the operand that is sent for x on this rank."""
        return self.before(x, rank()) if self.needs_rank else self.before(x)


def translate(eqn: JaxprEqn, size: int) -> Translation:
    """Return the call of a transport for an equation whose role is COLLECTIVE.

    Args:
      eqn: over AXIS alone, within groups if it has some.
      size: the number of ranks.

    Raises:
      NotImplementedError, TypeError, ValueError: as `refuse` does.
    """
    call, before, after, _ = translation = _translate(eqn, size)
    key = eqn.invars[0].aval
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return translation
    impl: list[Hashable] = []
    jax.eval_shape(
        lambda x: impl.append(jax.random.key_impl(x)), jax.ShapeDtypeStruct(key.shape, key.dtype)
    )
    # Keys travel as their integers, whose axes come last, so the axes of the collective stay.
    return Translation(
        call,
        lambda x: before(jax.random.key_data(x)),
        lambda y: jax.random.wrap_key_data(after(y), impl=impl[0]),
    )


def _translate(eqn: JaxprEqn, size: int) -> Translation:
    params = eqn.params
    refuse(eqn, size)
    op, groups = op_of(eqn), params.get("axis_index_groups") or ()
    reduction = reduction_of(eqn)
    size = len(groups[0]) if groups else size
    if op is Op.ALLREDUCE:
        # JAX reduces over the axes of a vmap, which are numbers, in the same equation.
        dims, x = vmap_axes(eqn), eqn.invars[0].aval
        op_over_ranks, is_wide = params.get("op", reduction), params.get("is_wide", False)
        if dims and op_over_ranks == "mean":  # of short floats: see `means`
            count = prod(x.shape[dim] for dim in dims)
            before = lambda x: _reduce(reduction, dims, x) / count
        elif dims:
            before = partial(_reduce, reduction, dims)
        else:
            before = (lambda x: x.astype(jnp.float32)) if is_wide else _identity
        # A sum on this rank, or one that is sent in float32, is rounded after all of the sums.
        is_wide = is_wide or (bool(dims) and is_short(x.dtype))
        after = (lambda y: y.astype(x.dtype)) if is_wide else _identity
        # No transport orders complex numbers: gather them, and compare here.
        if reduction != "sum" and jnp.issubdtype(x.dtype, jnp.complexfloating):
            return Translation(
                Collective("allgather", groups=groups),
                before,
                lambda y: _reduce(reduction, (0,), y),
            )
        return Translation(
            Collective("allreduce", op=op_over_ranks, groups=groups),
            before,
            after,
        )
    if op is Op.PERMUTE:
        pairs = tuple((int(p), int(q)) for p, q in params["perm"])
        return Translation(Collective("permute", pairs=pairs), _identity, _identity)
    tiled = params["tiled"] if op is not Op.ALL_TO_ALL else True  # its primitive always is
    if op is Op.ALL_GATHER:
        call = Collective("allgather", groups=groups)
        return Translation(
            call, _identity, lambda y: _merge(y, params["all_gather_dimension"], tiled)
        )
    if op is Op.REDUCE_SCATTER:
        call = Collective("reduce_scatter", op=params.get("op", "sum"), groups=groups)
        return Translation(
            call, lambda x: _split(x, params["scatter_dimension"], tiled, size), _identity
        )
    return Translation(
        Collective("alltoall", groups=groups),
        lambda x: _split(x, params["split_axis"], tiled, size),
        lambda y: _merge(y, params["concat_axis"], tiled),
    )


def _identity(x: Array) -> Array:
    return x


def _reduce(reduction: str, dims: tuple[int, ...], x: Array) -> Array:
    """Reduce over some axes of an array; the sum of short floats is a float32."""
    if reduction == "sum" and is_short(x.dtype):
        return jnp.sum(x, dims, dtype=jnp.float32)
    return LOCAL_REDUCE[reduction](x, dims).astype(x.dtype)


def _split(x: Array, axis: int, tiled: bool, size: int) -> Array:
    """Split `[.., n·k, ..]` into `[n, .., k, ..]`; untiled, `[.., n, ..]` into `[n, ..]`."""
    if tiled:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _merge(y: Array, axis: int, tiled: bool) -> Array:
    """Merge `[n, .., k, ..]` into `[.., n·k, ..]`; untiled, `[n, ..]` into `[.., n, ..]`."""
    y = jnp.moveaxis(y, 0, axis)
    return (
        y.reshape(*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :])
        if tiled
        else y
    )
