"""`jaxmpi.pmap`: `jax.pmap` over the ranks, of which each has one device.

A function `f(x)` of one device's arrays becomes one of arrays with a leading axis of one, as
multi-process JAX has it where each process has one device: `x[1, ...] -> f(x[0])[None]`. It is a
`jaxmpi.jit` of that function, in which `axis_name` is another name for the ranks.

A call squeezes the mapped axis of each argument (`_row`), traces `f` with `axis_name` bound and
renames that axis to AXIS (`_on_ranks`), and adds the mapped axis to each result (`_with_axis`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jaxmpi import _axis, _jaxcompat
from jaxmpi._axis import AXIS
from jaxmpi._backends.interface import Ranks
from jaxmpi._consistency.findings import allowed_names
from jaxmpi._jit.api import describe, local
from jaxmpi._jit.function import argument_name, title_of
from jaxmpi._jit.lost_nnx_changes import watch_changes
from jaxmpi._jit.step import Step
from jaxmpi._leaves import PyTree, output_name
from jaxmpi._per_rank_state import flatten_with_path
from jaxmpi._world import session

__all__ = ["pmap"]

# The name of an axis of length one. It is bound while the function is traced, so that `_mapped`
# knows a pmap within a pmap.
INSIDE = "jaxmpi: inside of a pmap"


def pmap(
    fun: Callable[..., PyTree],
    axis_name: str | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    replicated_argnums: int | Sequence[int] = (),
    allow: str | Sequence[str] = (),
) -> Callable[..., PyTree]:
    """Map a function over the ranks, as `jax.pmap` does over devices.

    Every rank passes the rows of its device, `[1, ...]`, and gets its results as `[1, ...]`. In the
    function, collectives over `axis_name` and over `jaxmpi.AXIS` are over all ranks, and all of
    `jaxmpi` works as in `jaxmpi.jit`. A program for `jax.pmap` needs two changes: this name, and
    the rows of this rank (`jaxmpi.shard`, `jaxmpi.batches`, `jaxmpi.rank`) instead of the rows by
    `jax.process_index()`, which is 0 on every rank of the mpi backend.

    Inside of `jaxmpi.jit` it maps over the ranks, too; inside of another `jaxmpi.pmap` it maps over
    this rank's one device, because nested pmaps divide the devices.

    **Collective:** as `jaxmpi.jit`.
    **Communication:** as in `jaxmpi.jit`.

    Args:
      fun: the function, of one device's arrays.
      axis_name: any str that is no axis of `jaxmpi.init(axes=...)`.
      in_axes: for each positional argument, or for subtrees of it, the axis of length one that is
        removed; None, on any level, for arrays without that axis, which must be equal on all
        ranks.
      out_axes: the axis of length one that the results get; None, on any level, for results without
        it, which must be equal on all ranks.
      static_broadcasted_argnums: positions of arguments that are no arrays, and compared by value.
      devices: `jax.devices()` or `jax.local_devices()`, which change nothing: a rank has one
        device.
      backend: the platform of this rank's device; it changes nothing.
      axis_size: the number of ranks, or `jax.device_count()`; it changes nothing.
      donate_argnums: positions of arguments whose memory the results may take.
      replicated_argnums: positions of arguments that are equal on all ranks, as in `jaxmpi.jit`, on
        which branches with collectives may depend.
      allow: names of checks to turn off, as in `jaxmpi.jit`.

    Returns:
      The mapped function, with `lower`. On the xla backend its results are this rank's arrays.

    Raises:
      TypeError: `axis_name` is no str.
      ValueError: when called, for an axis that is not of length one, with the argument; for devices
        or an axis size that are not those of the ranks; for a result without an axis that may
        differ between ranks; and as in `jaxmpi.jit`.
      RankMismatchError: when called, on every rank, as in `jaxmpi.jit`.

    >>> import jax, jaxmpi
    >>> step = jaxmpi.pmap(lambda x: jax.lax.pmean(x, "batch"), axis_name="batch")
    >>> step(jnp.array([3.0]))
    Array([3.], dtype=float32)
    """
    if not callable(fun):
        raise TypeError(
            f"pmap: fun is a {type(fun).__name__}. Pass a function of one device's arrays."
        )
    if not isinstance(axis_name, str | None):
        raise TypeError(
            f"pmap: axis_name is {axis_name!r}, of type {type(axis_name).__name__}. Pass a "
            "string, such as 'batch'."
        )
    static, donated = _as_tuple(static_broadcasted_argnums), _as_tuple(donate_argnums)
    axes = Axes(axis_name, in_axes, out_axes, frozenset(static))
    options: dict[str, Any] = {}
    if static:
        options["static_argnums"] = static
    if donated:
        options["donate_argnums"] = donated

    @wraps(fun)
    def on_this_device(*args: PyTree, **kwargs: PyTree) -> PyTree:
        _check(axis_name, devices, backend, axis_size, session.current("pmap"))
        return _mapped(fun, axes, args, kwargs)

    # a functools.partial and a callable object have no name for `wraps` to copy
    on_this_device.__name__ = title_of(fun)
    function = replace(
        describe(on_this_device, _as_tuple(replicated_argnums), (), options),
        equal_leaf=axes.argument_has_none,
        equal_output=axes.output_has_none,
        feeds_rows=True,
        api="jaxmpi.pmap",
        allowed=allowed_names("jaxmpi.pmap", allow),
    )
    step = Step(function, options)

    @wraps(on_this_device)
    def pmapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out = step(*args, **kwargs)
        return local(out) if _jaxcompat.at_top_level() else out

    pmapped.lower = step.lower  # type: ignore[attr-defined]
    return pmapped


@dataclass(frozen=True)
class Axes:
    """The axes of a pmap, and its static arguments.

    Attributes:
      name: the axis that collectives name, or None.
      ins: `in_axes` of `pmap`.
      outs: `out_axes` of `pmap`.
      static: the positions of arguments that are no arrays.
    """

    name: str | None
    ins: Any
    outs: Any
    static: frozenset[int]

    def argument_has_none(self, path: KeyPath) -> bool:
        """Return whether the leaf of (args, kwargs) at this path has no mapped axis."""
        by_name = path[0]
        if by_name.idx:
            return False
        # A tuple has one tree of axes for each argument; anything else is that of every argument.
        within = path[1:] if isinstance(self.ins, tuple | list) else path[2:]
        return _starts_with_one(within, self._none_of_ins)

    def output_has_none(self, path: KeyPath) -> bool:
        """Return whether the leaf of the results at this path gets no axis."""
        return _starts_with_one(path, self._none_of_outs)

    @cached_property
    def _none_of_ins(self) -> frozenset[KeyPath]:
        return _paths_of_none(self.ins)

    @cached_property
    def _none_of_outs(self) -> frozenset[KeyPath]:
        return _paths_of_none(self.outs)


def _as_tuple(argnums: int | Iterable[int]) -> tuple[int, ...]:
    """Return positions as a tuple."""
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _paths_of_none(axes: Any) -> frozenset[KeyPath]:
    """Return the paths at which a tree of axes has None."""
    paths, _ = flatten_with_path(axes, is_leaf=lambda x: x is None)
    return frozenset(path for path, axis in paths if axis is None)


def _starts_with_one(path: KeyPath, beginnings: frozenset[KeyPath]) -> bool:
    """Return whether a path is one of these, or below one of them."""
    return any(path[:length] in beginnings for length in range(len(path) + 1))


def _check(
    axis_name: str | None,
    devices: Sequence[jax.Device] | None,
    platform: str | None,
    axis_size: int | None,
    ranks: Ranks,
) -> None:
    """Raise a ValueError if a pmap is given an axis or devices that are not those of the ranks."""
    size, here = ranks.place.size, jax.local_devices()[0]
    if axis_name is not None and axis_name in ranks.axes and axis_name != AXIS:
        raise ValueError(
            f"pmap: axis_name {axis_name!r} is an axis of jaxmpi.init(axes=...), of "
            f"{ranks.axes[axis_name]} of {size} ranks. A pmap is over all ranks: choose another "
            "name."
        )
    if axis_size not in (None, size, jax.device_count()):
        raise ValueError(
            f"pmap: axis_size is {axis_size}, and the number of ranks is {size}. Leave axis_size "
            "out, or pass jaxmpi.size()."
        )
    if devices is not None and {*devices} not in ({*jax.devices()}, {*jax.local_devices()}):
        raise ValueError(
            f"pmap: devices are {[*devices]}, but a pmap is over all ranks, and this rank has "
            f"{here}. Leave devices out."
        )
    if platform is not None and jax.local_devices(backend=platform)[0] != here:
        raise ValueError(
            f"pmap: backend is {platform!r}, but this rank computes on {here}. Leave backend out."
        )


def _mapped(
    fun: Callable[..., PyTree], axes: Axes, args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> PyTree:
    """Call a function on arrays without the mapped axis, and add that axis to its results."""
    title = title_of(fun)
    # Squeeze the mapped axis of each argument. Keyword arguments are mapped over axis 0.
    dynamic = [None if i in axes.static else arg for i, arg in enumerate(args)]
    paths, treedef = jax.tree_util.tree_flatten_with_path((tuple(dynamic), kwargs))
    numbers = [*_axes_of_arguments(title, axes, dynamic), *[0] * len(jax.tree.leaves(kwargs))]
    rows = [_row(title, path, x, axis) for (path, x), axis in zip(paths, numbers, strict=True)]

    def call(*rows: ArrayLike) -> PyTree:
        dynamic, named = treedef.unflatten(rows)
        arguments = [
            arg if i in axes.static else new
            for i, (arg, new) in enumerate(zip(args, dynamic, strict=True))
        ]
        # Changes of nnx objects would be lost.
        check = watch_changes("jaxmpi.pmap", title, (arguments, named))
        out = fun(*arguments, **named)
        check(jax.tree.leaves(out))
        return out

    out = (
        _on_one_device(call, axes.name, rows)
        if _axis.bound(INSIDE)
        else _on_ranks(title, call, axes.name, rows)
    )
    return _with_axis(title, axes.outs, out)


def _axes_of_arguments(title: str, axes: Axes, args: Sequence[PyTree]) -> list[int | None]:
    """Return the mapped axis of each array of the positional arguments."""
    ins = axes.ins
    if isinstance(ins, tuple | list) and len(ins) != len(args):
        raise ValueError(
            f"pmap: in_axes {ins} are {len(ins)} axes, and {title} got {len(args)} positional "
            "arguments. Pass one axis for each, or one number for all."
        )
    each = tuple(ins) if isinstance(ins, tuple | list) else (ins,) * len(args)
    out: list[int | None] = []
    for i, (axis, arg) in enumerate(zip(each, args, strict=True)):
        if i not in axes.static:
            out += _axes_of_leaves(f"in_axes of argument {i} of {title}", axis, arg)
    return out


def _axes_of_leaves(what: str, axes: Any, tree: PyTree) -> list[int | None]:
    """Return the axis of each leaf of `tree`.

    Args:
      what: the argument of `pmap` with the axes, for an error.
      axes: a prefix of `tree`, in which an int or None is the axis of all leaves below.
      tree: the arrays.

    Raises:
      TypeError: an axis is no int and not None.
      ValueError: `axes` is no prefix of `tree`.
    """
    out: list[int | None] = []

    def append(axis: object, subtree: PyTree) -> None:
        if not (axis is None or (isinstance(axis, int) and not isinstance(axis, bool))):
            raise TypeError(f"pmap: {what} has {axis!r}. An axis is an int, or None.")
        out.extend([axis] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(append, axes, tree, is_leaf=lambda x: x is None)
    except ValueError:
        raise ValueError(
            f"pmap: {what}, {axes}, do not have the structure {jax.tree.structure(tree)}. Pass one "
            "axis for all of it, or a tree of axes that is a prefix of this structure."
        ) from None
    return out


def _row(title: str, path: KeyPath, x: jax.Array, axis: int | None) -> jax.Array:
    """Return an array without its mapped axis.

    Raises:
      ValueError: that axis is not of length one, with the name of the argument.
    """
    if axis is None:
        return x
    shape = jnp.shape(x)
    if -len(shape) <= axis < len(shape) and shape[axis] == 1:
        return lax.squeeze(x, [axis])
    size, devices = session.size(), jax.local_device_count()
    if not shape:
        advice = "Pass it as [1] (flax.jax_utils.replicate), or give it in_axes None."
    elif devices > 1 and devices in shape[:1]:
        advice = (
            f"JAX has {devices} devices here: start without --xla_force_host_platform_device_count."
        )
    elif size in shape[:1]:
        advice = "Pass this rank's row, x[jaxmpi.rank()][None]."
    else:
        advice = "Pass this rank's rows, jaxmpi.shard(x)[:][None], or x[None] if x has them only."
    raise ValueError(
        f"pmap: {argument_name(path)} of {title} has shape {list(shape)}, and axis {axis} must be "
        f"1: a rank has one device. {advice}"
    )


def _on_ranks(
    title: str, call: Callable[..., PyTree], name: str | None, rows: Sequence[jax.Array]
) -> PyTree:
    """Trace a function with a name bound to the ranks, and evaluate it here over AXIS instead."""
    structure = None  # of the results

    def flat(*rows: jax.Array) -> list[ArrayLike]:
        nonlocal structure
        try:
            leaves, structure = jax.tree.flatten(call(*rows))
        except NameError as error:
            _raise_clearer(error, title, name)
            raise
        return leaves

    bound: list[tuple[Hashable, int]] = [(INSIDE, 1)]
    if name not in (None, AXIS):
        bound.append((name, session.size()))
    jaxpr = jax.make_jaxpr(flat, axis_env=bound)(*rows)
    if name not in (None, AXIS):
        jaxpr = _jaxcompat.with_axis_renamed(jaxpr, name, AXIS)
    return jax.tree.unflatten(structure, _jaxcompat.as_function(jaxpr)(*rows))


def _on_one_device(
    call: Callable[..., PyTree], name: str | None, rows: Sequence[jax.Array]
) -> PyTree:
    """Call a function in which a name is bound to an axis of one."""
    out = jax.vmap(lambda _: call(*rows), axis_name=name or INSIDE, axis_size=1)(jnp.zeros(1))
    return jax.tree.map(lambda x: lax.squeeze(x, [0]), out)


def _raise_clearer(error: NameError, title: str, name: str | None) -> None:
    """Raise a NameError with the axis of a collective, which the pmap does not bind."""
    collective, params, at = _jaxcompat.failed_collective(error)
    if not collective:
        return
    has = "has no axis_name" if name is None else f"has axis_name {name!r}"
    axis = params.get("axis_name", "another axis")
    raise NameError(
        f"pmap: {collective} at {at or _jaxcompat.LIBRARY_LINE} is over the axis {axis!r}, and the "
        f"pmap of {title} {has}. Name the same axis in both, or jaxmpi.AXIS in the collective."
    ) from error


def _with_axis(title: str, out_axes: Any, out: PyTree) -> PyTree:
    """Return the results with an axis of length one where `out_axes` has a number."""
    leaves, treedef = jax.tree.flatten(out)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
    numbers = _axes_of_leaves(f"out_axes of {title}", out_axes, out)
    for i, (axis, path) in enumerate(zip(numbers, paths, strict=True)):
        if axis is None:
            continue
        x = jnp.asarray(leaves[i])
        if not -x.ndim - 1 <= axis <= x.ndim:
            raise ValueError(
                f"pmap: out_axes of {title} is {axis} for {output_name(path)}, of shape "
                f"{list(x.shape)}. Pass a number from 0 to {x.ndim}."
            )
        leaves[i] = lax.expand_dims(x, [axis])
    return treedef.unflatten(leaves)
