"""What an equation of a traced function has to do with the ranks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends import Collective

__all__ = [
    "CALLS",
    "LOOPS",
    "Translation",
    "has_collective",
    "kind",
    "map_subjaxprs",
    "other_effects",
    "subjaxprs",
    "translate",
]

# Primitives that contain jaxprs, by the parameter that holds the one to open.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
LOOPS = ("scan", "while", "cond")
REDUCE = {"psum": "sum", "pmax": "max", "pmin": "min"}
MOVE = ("all_gather", "reduce_scatter", "all_to_all", "ppermute")

_LOCAL: dict[str, Callable[..., jax.Array]] = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}

Array = jax.Array


class Translation(NamedTuple):
    """A collective of JAX: y = after(call(before(x)))."""

    call: Collective
    before: Callable[[Array], Array]
    after: Callable[[Array], Array]

    def operand(self, aval: Any) -> Any:
        """Shape and dtype of `before(x)`, for x like `aval`."""
        if self.before is _same:
            return aval
        return jax.eval_shape(self.before, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        yield from (item for item in (value if isinstance(value, tuple) else (value,)) if hasattr(item, "eqns"))


def map_subjaxprs(eqn: Any, function: Callable[[Any], Any]) -> dict[str, Any]:
    """Those parameters that hold jaxprs, with `function` applied to each jaxpr."""
    changed = {}
    for name, value in eqn.params.items():
        if hasattr(value, "eqns"):
            changed[name] = function(value)
        elif isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            changed[name] = tuple(function(item) for item in value)
    return changed


def kind(eqn: Any) -> str:
    """How an equation has to be treated: "" (it is local), "index", "collective", "call" or "loop" (that contain one).

    Raises:
      NotImplementedError: it communicates in a way that is not known here, with the primitive and the source line.
    """
    name, inside = eqn.primitive.name, list(subjaxprs(eqn))
    if not inside:
        if not _over_ranks(eqn):
            return ""
        if name == "axis_index":
            return "index"
        if name in REDUCE or name in MOVE:
            return "collective"
    elif not any(_over_ranks(e) for jaxpr in inside for e in _equations(jaxpr)):
        return ""
    elif name in CALLS:
        return "call"
    elif name in LOOPS:
        return "loop"
    raise NotImplementedError(
        f"jaxmpi.jit: {name} at {_jaxcompat.source_line(eqn)} communicates over {AXIS!r}, which is not supported. "
        f"Move the collective out of it, or use {', '.join((*REDUCE, *MOVE))}."
    )


def has_collective(jaxpr: Any) -> bool:
    """Whether anything in it has to do with the ranks."""
    return any(kind(eqn) for eqn in _jaxcompat.parts(jaxpr)[0].eqns)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, inner ones included."""
    for eqn in _jaxcompat.parts(jaxpr)[0].eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _equations(inner)


def _over_ranks(eqn: Any) -> bool:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if AXIS in (axes if isinstance(axes, tuple | list | frozenset) else (axes,)):
        return True
    return not any(True for _ in subjaxprs(eqn)) and any(_jaxcompat.is_axis_effect(e, AXIS) for e in eqn.effects)


def other_effects(eqn: Any) -> bool:
    """Whether it has effects beyond the axis: callbacks, prints, references."""
    return any(not _jaxcompat.is_axis_effect(effect, AXIS) for effect in eqn.effects)


def translate(eqn: Any, size: int) -> Translation:
    """The collective that an equation of kind "collective" stands for, on `size` ranks."""
    params = eqn.params
    _refuse_groups(eqn)
    name = eqn.primitive.name
    if name in REDUCE:
        dims = tuple(axis for axis in params["axes"] if isinstance(axis, int))  # axes of a vmap inside, over the same name
        return Translation(Collective("allreduce", op=REDUCE[name]), partial(_reduce, name, dims) if dims else _same, _same)
    if name == "ppermute":
        return Translation(Collective("permute", pairs=tuple(map(tuple, params["perm"]))), _same, _same)
    tiled = params["tiled"] if name != "all_to_all" else True  # the primitive itself always is
    if name == "all_gather":
        return Translation(Collective("allgather"), _same, lambda y: _merge(y, params["all_gather_dimension"], tiled))
    if name == "reduce_scatter":
        call = Collective("reduce_scatter", op="sum")
        return Translation(call, lambda x: _split(x, params["scatter_dimension"], tiled, size), _same)
    return Translation(
        Collective("alltoall"),
        lambda x: _split(x, params["split_axis"], tiled, size),
        lambda y: _merge(y, params["concat_axis"], tiled),
    )


def _same(x: Array) -> Array:
    return x


def _reduce(name: str, dims: tuple[int, ...], x: Array) -> Array:
    return _LOCAL[name](x, dims).astype(x.dtype)


def _split(x: Array, axis: int, tiled: bool, size: int) -> Array:
    """`[.., n·k, ..]` to `[n, .., k, ..]`; untiled, `[.., n, ..]` to `[n, ..]`."""
    if tiled:
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _merge(y: Array, axis: int, tiled: bool) -> Array:
    """`[n, .., k, ..]` to `[.., n·k, ..]`; untiled, `[n, ..]` to `[.., n, ..]`."""
    y = jnp.moveaxis(y, 0, axis)
    return y.reshape(*y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :]) if tiled else y


def _refuse_groups(eqn: Any) -> None:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = [axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(axis, int)]
    if eqn.params.get("axis_index_groups") is None and named == [AXIS]:
        return
    raise NotImplementedError(
        f"jaxmpi.jit: {eqn.primitive.name} at {_jaxcompat.source_line(eqn)} is over a part of the ranks, or another axis, too. "
        "Only collectives over all ranks are supported."
    )
