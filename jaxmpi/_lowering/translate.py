"""JAX's collectives as jaxmpi's: a call, and what is done to its operand before and to its result afterwards."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire import LOCAL_REDUCE
from jaxmpi._lowering.classify import REDUCE
from jaxmpi._lowering.refuse import refuse

__all__ = ["Group", "Translation", "translate"]

Array = jax.Array


class Translation(NamedTuple):
    """A collective of JAX: y = after(call(before(x))), or after(call(before(x, rank)))."""

    call: Collective
    before: Callable[..., Array]
    after: Callable[[Array], Array]
    needs_rank: bool = False

    def operand(self, aval: ShapedArray) -> ShapedArray | jax.ShapeDtypeStruct:
        """Shape and dtype of `before(x)`, for x like `aval`."""
        if self.before is _same:
            return aval
        return jax.eval_shape(
            lambda x: self.carried(x, lambda: 0), jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        )

    def carried(self, x: Array, rank: Callable[[], ArrayLike]) -> Array:
        """Return the operand of the collective for x on this rank."""
        return self.before(x, rank()) if self.needs_rank else self.before(x)


class Group(NamedTuple):
    """Collectives that are one call: the same `call` on the operand of each equation."""

    call: Collective
    eqns: list[JaxprEqn]
    translations: list[Translation]


def translate(eqn: JaxprEqn, size: int) -> Translation:
    """The collective that an equation of kind "collective" stands for, on `size` ranks; raises as `refuse` does."""
    call, before, after, _ = plain = _translate(eqn, size)
    key = eqn.invars[0].aval
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return plain
    impl: list[Hashable] = []
    jax.eval_shape(
        lambda x: impl.append(jax.random.key_impl(x)), jax.ShapeDtypeStruct(key.shape, key.dtype)
    )
    # keys travel as their data, whose axes come last
    return Translation(
        call,
        lambda x: before(jax.random.key_data(x)),
        lambda y: jax.random.wrap_key_data(after(y), impl=impl[0]),
    )


def _translate(eqn: JaxprEqn, size: int) -> Translation:
    params = eqn.params
    refuse(eqn, size)
    name, groups = eqn.primitive.name, params.get("axis_index_groups") or ()
    size = len(groups[0]) if groups else size
    if name in REDUCE:
        # axes of a vmap inside, over the same name
        dims = tuple(axis for axis in params["axes"] if isinstance(axis, int))
        before = partial(_reduce, name, dims) if dims else _same
        # which no transport orders
        if name != "psum" and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.complexfloating):
            return Translation(
                Collective("allgather", groups=groups), before, lambda y: _reduce(name, (0,), y)
            )
        return Translation(
            Collective("allreduce", op=params.get("op", REDUCE[name]), groups=groups), before, _same
        )
    if name == "ppermute":
        pairs = tuple((int(p), int(q)) for p, q in params["perm"])
        return Translation(Collective("permute", pairs=pairs), _same, _same)
    tiled = params["tiled"] if name != "all_to_all" else True  # the primitive itself always is
    if name == "all_gather":
        call = Collective("allgather", groups=groups)
        return Translation(call, _same, lambda y: _merge(y, params["all_gather_dimension"], tiled))
    if name == "reduce_scatter":
        call = Collective("reduce_scatter", op=params.get("op", "sum"), groups=groups)
        return Translation(
            call, lambda x: _split(x, params["scatter_dimension"], tiled, size), _same
        )
    return Translation(
        Collective("alltoall", groups=groups),
        lambda x: _split(x, params["split_axis"], tiled, size),
        lambda y: _merge(y, params["concat_axis"], tiled),
    )


def _same(x: Array) -> Array:
    return x


def _reduce(name: str, dims: tuple[int, ...], x: Array) -> Array:
    return LOCAL_REDUCE[REDUCE[name]](x, dims).astype(x.dtype)


def _split(x: Array, axis: int, tiled: bool, size: int) -> Array:
    """`[.., n·k, ..]` to `[n, .., k, ..]`; untiled, `[.., n, ..]` to `[n, ..]`."""
    if tiled:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _merge(y: Array, axis: int, tiled: bool) -> Array:
    """`[n, .., k, ..]` to `[.., n·k, ..]`; untiled, `[n, ..]` to `[.., n, ..]`."""
    y = jnp.moveaxis(y, 0, axis)
    return (
        y.reshape(*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :])
        if tiled
        else y
    )
