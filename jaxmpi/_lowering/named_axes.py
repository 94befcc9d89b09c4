"""Rewrite collectives over named axes as collectives over AXIS within groups: later passes know only these.

An axis of `init(axes=...)` is a partition of the ranks into groups. Once a function is traced, and
so differentiated, a collective over "island" is the same collective over "ranks" with
`axis_index_groups`.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends.groups import Groups, groups_along
from jaxmpi._backends.lax_collectives import from_root
from jaxmpi._backends.sent_ahead import SEND
from jaxmpi._backends.wire import LOCAL_REDUCE
from jaxmpi._lowering.classify import BROADCASTS, REDUCE, axis_names
from jaxmpi._lowering.refuse import refuse_dtype, refuse_groups, refuse_names, refuse_pairs

__all__ = ["broadcast", "collective", "has_groups", "index"]

Axes = Mapping[str, int]


def has_groups(eqn: JaxprEqn) -> bool:
    """Return whether an equation is over other axes than AXIS, or within groups that are given as numbers."""
    given = eqn.params.get("axis_index_groups")
    return axis_names(eqn) != (AXIS,) or (given is not None and not isinstance(given, Groups))


def index(eqn: JaxprEqn, axes: Axes) -> jax.Array:
    """This rank's coordinate along the axis of an `axis_index`."""
    (name,) = axis_names(eqn)
    rank = lax.axis_index(AXIS)
    if name == AXIS:
        return rank
    _groups(eqn, axes)
    names = [axis for axis in axes if axis != AXIS]
    stride = 1
    for after in names[names.index(name) + 1 :]:
        stride *= axes[after]
    return lax.rem(lax.div(rank, jnp.int32(stride)), jnp.int32(axes[name]))


def broadcast(eqn: JaxprEqn, x: jax.Array, axes: Axes) -> jax.Array:
    """The array of a root, within each group."""
    refuse_dtype(eqn)
    root, groups = eqn.params[BROADCASTS[eqn.primitive.name]], _groups(eqn, axes)
    if len(groups[0]) == 1:
        return x
    roots = [group[root] for group in groups]
    within = _given(_any_order(groups))
    is_root = (
        jnp.isin(lax.axis_index(AXIS), jnp.array(roots, jnp.int32))
        if within
        else lax.axis_index(AXIS) == root
    )
    return from_root(is_root, lambda bits: lax.psum(bits, AXIS, axis_index_groups=within), x)


def collective(eqn: JaxprEqn, xs: Sequence[ArrayLike], axes: Axes) -> list[jax.Array]:
    """A collective over all ranks, within groups where it is one of some."""
    name, groups = eqn.primitive.name, _groups(eqn, axes)
    if name == "ppermute":
        pairs = [(int(p), int(q)) for p, q in eqn.params["perm"]]
        refuse_pairs(eqn, len(groups[0]))
        perm = tuple((group[p], group[q]) for group in groups for p, q in pairs)
        return _jaxcompat.bind(eqn, xs, axis_name=(AXIS,), perm=perm)
    if name == SEND:  # of which there is none within groups of one rank
        given = _given(_any_order(groups) if eqn.params["op"] else groups)
        return _jaxcompat.bind(eqn, xs, axis_name=(AXIS,), axis_index_groups=given)
    if len(groups[0]) == 1:
        with _jaxcompat.at_source(eqn):
            return [_alone(eqn, xs[0])]
    if name not in REDUCE:
        bound = _jaxcompat.bind(eqn, xs, axis_name=(AXIS,), axis_index_groups=_given(groups))
    else:
        with _jaxcompat.at_source(eqn):
            x = _reduced(eqn, xs[0])
        bound = _jaxcompat.bind(
            eqn, [x], axes=(AXIS,), axis_index_groups=_given(_any_order(groups))
        )
    return bound


def _any_order(groups: Groups) -> Groups:
    """Return the groups with sorted ranks, for a sum."""
    return Groups.of([sorted(group) for group in groups], groups.name)


def _given(groups: Groups) -> Groups | None:
    """Return the groups for JAX: None for all ranks in their order."""
    return None if len(groups) == 1 and list(groups[0]) == sorted(groups[0]) else groups


def _groups(eqn: JaxprEqn, axes: Axes) -> Groups:
    names = axis_names(eqn)
    refuse_names(eqn, names, axes)
    groups, inner = groups_along(axes, names), eqn.params.get("axis_index_groups")
    if inner is None or isinstance(inner, Groups):
        return inner or groups
    refuse_groups(eqn, inner, len(groups[0]))
    return Groups.of([[group[i] for i in part] for group in groups for part in inner])


def _reduced(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """Over the axes of a `vmap` inside, by their numbers."""
    dims = tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))
    return LOCAL_REDUCE[REDUCE[eqn.primitive.name]](x, dims).astype(x.dtype) if dims else x


def _alone(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """A collective of groups of one rank."""
    name, params = eqn.primitive.name, eqn.params
    if name in REDUCE:
        return _reduced(eqn, x)
    if name == "all_gather" and not params["tiled"]:
        return lax.expand_dims(x, (params["all_gather_dimension"],))
    if name == "reduce_scatter" and not params["tiled"]:
        return lax.squeeze(x, (params["scatter_dimension"],))
    return x
