"""The collectives that `jaxmpi.jit` refuses, on every backend, in a sentence with the line."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._lowering.classify import MESHES, REDUCE, equations, line

__all__ = ["explained", "refuse", "refuse_meshes", "refuse_references"]

PUBLIC = {"reduce_scatter": "psum_scatter"}  # the function of a primitive
AXES = ("scatter_dimension", "split_axis", "concat_axis")
ONE_AXIS = "Over the ranks and an axis of vmap, psum, pmean, pmax, pmin and tiled all_to_all are; use one axis at a time."
ADVICE = {
    "pmax": "Use jaxmpi.tree_allreduce(x, 'max'), which has a derivative, or lax.stop_gradient.",
    "pmin": "Use jaxmpi.tree_allreduce(x, 'min'), which has a derivative, or lax.stop_gradient.",
    "pcast": "Leave it out: jaxmpi.jit has no replication types.",
    "pbroadcast": "Use jaxmpi.tree_bcast(x, root).",
}


def refuse(eqn: JaxprEqn, size: int) -> None:
    """Raise an error if an equation of kind "collective" cannot be carried out on `size` ranks.

    Raises:
      NotImplementedError: it is over a part of the ranks, or has an axis that is counted from the end.
      TypeError: it would reduce keys or booleans.
      ValueError: the pairs of a ppermute are no permutation of some ranks.
    """
    name, params = eqn.primitive.name, eqn.params
    where = f"jaxmpi.jit: {PUBLIC.get(name, name)} at {line(eqn)}"
    axes = params.get("axes", params.get("axis_name"))
    named = [axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(axis, int)]
    if params.get("axis_index_groups") is not None or named != [AXIS]:
        raise NotImplementedError(
            f"{where} is over a part of the ranks, or another axis, too. Only collectives over all ranks are supported."
        )
    _refuse_axes(where, params)
    _refuse_dtype(where, name, eqn.invars[0].aval.dtype)
    if name == "ppermute":
        _refuse_pairs(where, params["perm"], size)


def _refuse_axes(where: str, params: Mapping[str, Any]) -> None:
    """JAX 0.10 to 0.12 takes these for other axes, under `vmap` without a word; later ones count them from 0 themselves."""
    for parameter in AXES:
        axis = params.get(parameter)
        if isinstance(axis, int) and axis < 0:
            raise NotImplementedError(f"{where} has {parameter}={axis}, which this JAX misreads. Count the axis from 0.")


def _refuse_dtype(where: str, name: str, dtype: Any) -> None:
    if name in (*REDUCE, "reduce_scatter") and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{where} is of PRNG keys, which cannot be reduced. Use all_gather or ppermute, which move them.")
    if name == "reduce_scatter" and dtype == jnp.bool_:
        raise TypeError(f"{where} is of booleans, which cannot be summed. Convert them to integers first.")


def _refuse_pairs(where: str, pairs: Any, size: int) -> None:
    for side in zip(*pairs, strict=True):
        if len(set(side)) < len(side) or not all(0 <= rank < size for rank in side):
            raise ValueError(
                f"{where} has pairs {[(int(p), int(q)) for p, q in pairs]} on {size} ranks. "
                "Each rank may appear at most once as a source and at most once as a destination."
            )


def refuse_references(jaxpr: Any, backend: str) -> None:
    """Raise a NotImplementedError if a program of simulated ranks, or XLA's, uses a reference in a way that these cannot."""
    outside = {v for v in _jaxcompat.parts(jaxpr)[0].invars if _jaxcompat.is_reference(v.aval)}
    for eqn in equations(jaxpr):
        if not any(_jaxcompat.is_reference(v.aval) for v in eqn.invars):
            continue
        if outside.intersection(v for v in eqn.invars if not isinstance(v, Literal)):
            what = "a reference from outside is used"
        elif backend == "simulate" and eqn.primitive.name == "cond":
            what = "a branch uses a reference"
        else:
            continue
        raise NotImplementedError(
            f"jaxmpi.jit: {what} at {line(eqn)}, which the {backend} backend does not support. Pass its value instead, and "
            "return the new one."
        )


def refuse_meshes(jaxpr: Any) -> None:
    """Raise a NotImplementedError if a program maps over devices of its own."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name in MESHES:
            raise NotImplementedError(
                f"jaxmpi.jit: a pmap or shard_map at {line(eqn)} stands inside of it, where each rank has one device. "
                "Use jax.vmap in its place, or call its function directly."
            )


def explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the errors that JAX's collectives raise when it is traced in words that say what to do."""

    @wraps(function)
    def traced(*args: Any) -> Any:
        try:
            return function(*args)
        except (NameError, AssertionError, NotImplementedError, ValueError, TypeError, IndexError) as error:
            name, params, at = _jaxcompat.failed_collective(error)
            if name:
                _explain(error, f"jaxmpi.jit: {name} at {at or 'a line of a library'}", name, params)
            raise

    return traced


def _explain(error: Exception, where: str, name: str, params: Mapping[str, Any]) -> None:
    """Raise what an error of one of JAX's collectives means, if JAX does not say it."""
    if isinstance(error, NameError) and name != "pbroadcast":  # which reads the letters of the name as names
        axis = str(error).partition("axis name: ")[2].partition(". ")[0]
        raise NameError(
            f"{where} is over the axis {axis!r}, which nothing binds. The ranks are the axis jaxmpi.AXIS, {AXIS!r}: name that "
            "one, as in nnx.BatchNorm(axis_name=jaxmpi.AXIS)."
        ) from error
    try:
        _refuse_axes(where, params)
    except NotImplementedError as refusal:
        raise refusal from error
    if not isinstance(error, ValueError | TypeError | IndexError):
        reason = f": {str(error)[:100]}" if str(error) and not isinstance(error, AssertionError) else ""  # not JAX's types
        raise NotImplementedError(f"{where} is not supported{reason}. {ADVICE.get(name, ONE_AXIS)}") from error
