"""Errors for collectives that no backend supports, each with the source line."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmpi import _jaxcompat
from jaxmpi._analysis.inner_jaxprs import equations, line, subjaxprs
from jaxmpi._analysis.primitives import (
    Op,
    Properties,
    function_of,
    op_of,
    properties_of_function,
)
from jaxmpi._axis import AXIS
from jaxmpi._backends.interface import Limits
from jaxmpi._errors import RankCountError
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._leaves import PyTree

__all__ = [
    "Refusals",
    "refuse",
    "refuse_dtype",
    "refuse_groups",
    "refuse_meshes",
    "refuse_names",
    "refuse_pairs",
    "with_clear_errors",
]

T = TypeVar("T")

AXES = ("scatter_dimension", "split_axis", "concat_axis")
ONE_AXIS = (
    "Use one axis at a time: only psum, pmean, pmax, pmin and tiled all_to_all go over the ranks "
    "and an axis of vmap together."
)
IN_GROUPS = "Use an axis of jaxmpi.init(axes=...) instead of axis_index_groups."
REPLICATION_TYPES = "Leave it out: jaxmpi.jit has no replication types."
DIFFERENTIABLE = (
    "Use jaxmpi.tree_allreduce(x, {op!r}), which has a derivative, or lax.stop_gradient."
)
BROADCAST = "Use jaxmpi.tree_bcast(x, root)."


def refuse(eqn: JaxprEqn, size: int) -> None:
    """Raise an error if an equation whose role is COLLECTIVE cannot be carried out on `size` ranks.

    Raises:
      NotImplementedError: it has a negative axis.
      TypeError: it is of a dtype that it cannot carry, as in `refuse_dtype`; or a ppermute would
        give zero to some ranks, and its dtype has no zero.
      ValueError: the pairs of a ppermute are no permutation of some ranks.
    """
    params, where = eqn.params, partial(_where, eqn)
    _refuse_axes(where, params)
    refuse_dtype(eqn)
    if op_of(eqn) is Op.PERMUTE:
        refuse_pairs(eqn, size)
        dtype = eqn.invars[0].aval.dtype
        if dtype == jnp.float8_e8m0fnu and len(params["perm"]) < size:
            raise TypeError(
                f"{where()} has pairs for {len(params['perm'])} of {size} ranks, and the others "
                f"would get zero, which {dtype} cannot represent. Name a source for every rank, or "
                "use another dtype."
            )


def refuse_dtype(eqn: JaxprEqn) -> None:
    """Raise a TypeError if a collective or a broadcast is of a dtype that it cannot carry.

    No collective carries float0; no reduction carries PRNG keys; no reduce_scatter carries
    booleans.
    """
    _refuse_dtype(partial(_where, eqn), eqn.primitive.name, eqn.invars[0].aval.dtype)


def _where(eqn: JaxprEqn) -> str:
    """Return the function that the user called and its line: "psum at train.py:12"."""
    return f"{function_of(eqn.primitive.name)} at {line(eqn)}"


def refuse_names(eqn: JaxprEqn, names: Sequence[str], axes: Mapping[str, int]) -> None:
    """Raise an error if an equation is over unknown axes, or over some of the ranks twice.

    Raises:
      NameError: an axis that `init` was not given.
      ValueError: the same axis twice, or AXIS together with another axis, which is within it.
    """
    if unknown := [name for name in names if name not in axes]:
        raise NameError(
            f"{_where(eqn)} is over the axis {unknown[0]!r}, and {_known(axes)}. Name one of them, "
            "or pass the axis to jaxmpi.init(axes=...)."
        )
    if len(set(names)) < len(names) or (AXIS in names and len(names) > 1):
        raise ValueError(
            f"{_where(eqn)} is over {', '.join(map(repr, names))}, and names some of the ranks "
            f"twice. Name {AXIS!r} alone, which is all ranks, or each of the other axes once."
        )


def _known(axes: Mapping[str, int]) -> str:
    """Return the names of the axes as a sentence."""
    return (
        f"the axes of the ranks are {', '.join(map(repr, axes))}"
        if len(axes) > 1
        else f"the ranks are the axis {AXIS!r}"
    )


def _others(axes: Mapping[str, int]) -> str:
    """Return the axes apart from AXIS as an end of a sentence; "" if there are none."""
    names = [repr(name) for name in axes if name != AXIS]
    return f", or one of {', '.join(names)} of jaxmpi.init" if names else ""


def refuse_groups(eqn: JaxprEqn, groups: Sequence[Sequence[int]], size: int) -> None:
    """Raise a ValueError unless `axis_index_groups` are equally large, with each rank in one."""
    found = sorted(int(rank) for group in groups for rank in group)
    if found != [*range(size)] or len({len(group) for group in groups}) > 1:
        raise (RankCountError if found != [*range(size)] else ValueError)(
            f"{_where(eqn)} has axis_index_groups {[list(map(int, group)) for group in groups]} on "
            f"{size} ranks. Put each of the ranks 0 to {size - 1} in one group, and make all "
            "groups equally large."
        )


def _refuse_axes(where: Callable[[], str], params: Mapping[str, object]) -> None:
    """Raise a NotImplementedError for a negative axis.

    JAX 0.10 to 0.12 confuses it with another axis, under `vmap` without an error; later versions
    convert it to a positive axis themselves.
    """
    for parameter in AXES:
        axis = params.get(parameter)
        if isinstance(axis, int) and axis < 0:
            raise NotImplementedError(
                f"{where()} has {parameter}={axis}, which this JAX misreads. Count the axis from 0."
            )


def _refuse_dtype(where: Callable[[], str], name: str, dtype: np.dtype) -> None:
    """Raise a TypeError if a collective function cannot carry a dtype.

    `where` returns the function and its line, which takes long to find.
    """
    if dtype == jax.dtypes.float0:
        raise TypeError(
            f"{where()} has an array of float0, the gradient of integers, which holds no numbers. "
            "Take it out of the tree, or use jaxmpi.tree_*, which return float0 as it is."
        )
    known = properties_of_function(name)
    if known.reduction and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{where()} is of PRNG keys, which cannot be reduced. Use all_gather or ppermute, "
            "which move them."
        )
    if known.op is Op.REDUCE_SCATTER and dtype == jnp.bool_:
        raise TypeError(
            f"{where()} is of booleans, which cannot be summed. Convert them to integers first."
        )


def refuse_pairs(eqn: JaxprEqn, size: int) -> None:
    """Raise a ValueError unless the pairs of a ppermute permute some of `size` ranks."""
    pairs = eqn.params["perm"]
    for side in zip(*pairs, strict=True):
        if len(set(side)) < len(side) or not all(0 <= rank < size for rank in side):
            raise ValueError(
                f"{_where(eqn)} has pairs {[(int(p), int(q)) for p, q in pairs]} on {size} ranks. "
                "Name each rank at most once as a source and at most once as a destination."
            )


class Refusals(Limits):
    """Checks of a traced program: each raises a NotImplementedError with a source line."""

    def __init__(self, jaxpr: AnyJaxpr, backend: str) -> None:
        self._jaxpr, self._backend = jaxpr, backend

    def no_references_from_outside(self) -> None:
        """Refuse a use of a reference that the function has from outside."""
        jaxpr = self._jaxpr
        outside = {v for v in _jaxcompat.parts(jaxpr)[0].invars if _jaxcompat.is_reference(v.aval)}
        if not outside:
            return
        for eqn in equations(jaxpr):
            if outside.intersection(v for v in eqn.invars if not isinstance(v, Literal)):
                self._refuse_reference("A reference from outside is used", eqn)

    def no_references_in_branches(self) -> None:
        """Refuse a branch that uses a reference."""
        for eqn in equations(self._jaxpr):
            has_reference = any(_jaxcompat.is_reference(v.aval) for v in eqn.invars)
            if has_reference and op_of(eqn) is Op.COND:
                self._refuse_reference("A branch uses a reference", eqn)

    def _refuse_reference(self, what: str, eqn: JaxprEqn) -> None:
        raise NotImplementedError(
            f"{what} at {line(eqn)}, which the {self._backend} backend does not support. Pass its "
            "value instead, and return the new value."
        )

    def no_ordered_effects(self) -> None:
        """Refuse an ordered print or callback, which JAX has for one device only."""
        # a jaxpr has the effects of all that it contains
        if not _jaxcompat.parts(self._jaxpr)[0].effects:
            return
        for eqn in equations(self._jaxpr):
            if not [*subjaxprs(eqn)] and any(map(_jaxcompat.needs_one_device, eqn.effects)):
                raise NotImplementedError(
                    "This program has a jax.debug.print or jax.debug.callback with ordered=True at "
                    f"{line(eqn)}, which the {self._backend} backend does not support. Pass "
                    "ordered=False, or use io_callback(..., ordered=True)."
                )


def refuse_meshes(jaxpr: AnyJaxpr) -> None:
    """Raise a NotImplementedError if a program contains a pmap or shard_map."""
    for eqn in equations(jaxpr):
        if op_of(eqn) is Op.MESH:
            raise NotImplementedError(
                f"This program contains a pmap or shard_map at {line(eqn)}, and each rank has one "
                "device. Use jax.vmap instead, or call its function directly."
            )


def with_clear_errors(function: Callable[..., T], axes: Mapping[str, int]) -> Callable[..., T]:
    """Return the function with better texts for the errors of JAX's collectives at tracing."""

    @wraps(function)
    def traced(*args: PyTree, **kwargs: PyTree) -> T:
        try:
            return function(*args, **kwargs)
        except (
            NameError,
            AssertionError,
            NotImplementedError,
            ValueError,
            TypeError,
            IndexError,
        ) as error:
            name, params, at = _jaxcompat.failed_collective(error)
            if name:
                where = f"{name} at {at or _jaxcompat.LIBRARY_LINE}"
                _raise_clearer(error, where, name, params, axes)
            raise

    return traced


def _raise_clearer(
    error: Exception, where: str, name: str, params: Mapping[str, object], axes: Mapping[str, int]
) -> None:
    """Raise an error with what to do about a collective, where JAX's error does not say it.

    Args:
      error: JAX's.
      where: the collective and its line.
      name: of the collective.
      params: its arguments.
      axes: the axes that are bound.
    """
    known = properties_of_function(name)
    # A NameError of pbroadcast is none of the user's: JAX reads each letter of the axis as a name.
    if isinstance(error, NameError) and known.op is not Op.BROADCAST:
        axis = str(error).partition("axis name: ")[2].partition(". ")[0]
        raise NameError(
            f"{where} is over the axis {axis!r}, which nothing binds. Name jaxmpi.AXIS, {AXIS!r}, "
            f"as in nnx.BatchNorm(axis_name=jaxmpi.AXIS){_others(axes)}."
        ) from error
    try:
        _refuse_axes(lambda: where, params)
        # pmean divides its operand at tracing, where keys and float0 raise an error of JAX.
        for x in jax.tree.leaves(params.get("x")):
            if hasattr(x, "dtype"):
                _refuse_dtype(lambda: where, name, x.dtype)
    except (NotImplementedError, TypeError) as refusal:
        raise refusal from error
    if not isinstance(error, ValueError | TypeError | IndexError):
        # The text of an AssertionError of JAX shows its internal types, which tell users nothing.
        reason = (
            f": {str(error)[:100]}" if str(error) and not isinstance(error, AssertionError) else ""
        )
        advice = IN_GROUPS if params.get("axis_index_groups") else _advice(known)
        raise NotImplementedError(f"{where} is not supported{reason}. {advice}") from error


def _advice(known: Properties) -> str:
    """Return what to do about a collective that JAX does not support."""
    if known.op is Op.REPLICATION_TYPE:
        return REPLICATION_TYPES
    if known.op is Op.BROADCAST:
        return BROADCAST
    if known.op is Op.ALLREDUCE and known.reduction != "sum":
        return DIFFERENTIABLE.format(op=known.reduction)
    return ONE_AXIS
