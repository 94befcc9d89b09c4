"""Steps that change Flax nnx objects in place: they travel as graphs and arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import TYPE_CHECKING

import jax
from jax.tree_util import KeyEntry, PyTreeDef

from jaxmpi._jit.function import Function, title_of
from jaxmpi._jit.lost_nnx_changes import is_object
from jaxmpi._jit.program import Program
from jaxmpi._jit.step import Step, Traced
from jaxmpi._leaves import PyTree
from jaxmpi._per_rank_state import is_variable

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["InPlace"]


class _Key(jax.tree_util.GetAttrKey):  # type: ignore[misc]
    """A key that does not show in the names of leaves."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class _Part:
    """Argument with nnx objects in it; objects that several arguments share are in the first."""

    state: PyTree  # its arrays
    graph: "nnx.GraphDef | None"  # of all such arguments together

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[KeyEntry, PyTree]], "nnx.GraphDef | None"]:
        return ((_Key("state"), self.state),), self.graph

    def tree_flatten(self) -> tuple[tuple[PyTree], "nnx.GraphDef | None"]:
        return (self.state,), self.graph

    @classmethod
    def tree_unflatten(cls, graph: "nnx.GraphDef | None", children: Sequence[PyTree]) -> "_Part":
        (state,) = children
        return cls(state, graph)


class InPlace(Step):
    """A Step whose nnx arguments hold, after a call, what the function has left in them."""

    def __init__(self, function: Function, options: dict[str, object]) -> None:
        super().__init__(replace(function, fun=_pure(function.fun)), options)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function, and leave in its objects what it has made of them."""
        from flax import nnx

        # where `nnx.cached_partial` expects a transformation of nnx
        with nnx.update_context("jaxmpi.nn.jit"):
            args, kwargs, objects = _split(args, kwargs)
        return _write_back(objects, super().__call__(*args, **kwargs))

    def trace(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Trace the function, as `jax.jit(fun).trace`."""
        args, kwargs, _ = _split(args, kwargs)
        return super().trace(*args, **kwargs)

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return shapes and dtypes of the outputs, as `jax.jit(fun).eval_shape`."""
        args, kwargs, _ = _split(args, kwargs)
        return super().eval_shape(*args, **kwargs)[-1]

    def program(self, *args: PyTree, **kwargs: PyTree) -> Program:
        """Return the program of a call with these arguments; nothing is sent."""
        args, kwargs, _ = _split(args, kwargs)
        return super().program(*args, **kwargs)

    def _run_compiled(
        self,
        program: Program | None,
        compiled: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        args, kwargs, objects = _split(args, kwargs)
        return _write_back(objects, super()._run_compiled(program, compiled, args, kwargs))


def _pure(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the function of graphs and arrays.

    It returns what becomes of positional arguments, of those by name, and its result.
    """
    from flax import nnx

    def pure(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given = _named(args, kwargs)
        parts = {key: arg for key, arg in given.items() if isinstance(arg, _Part)}
        graph = next((part.graph for part in parts.values()), None)
        before = {key: _structures(part.state) for key, part in parts.items()}
        objects = nnx.merge(graph, _state(parts)) if graph is not None else {}
        given |= objects
        out = fun(
            *(given[str(i)] for i in range(len(args))), **{name: given[name] for name in kwargs}
        )
        left, found = _taken_apart(objects)
        if parts and left != graph:
            raise ValueError(
                f"jaxmpi.nn.jit: {pure.__name__} changes the structure of its nnx arguments: it "
                "adds, removes or newly shares variables, or changes a static attribute, as "
                "model.eval() does. Do that outside of the step."
            )
        for key, part in found.items():
            part.state = jax.tree.map(_put_together, part.state, before[key], is_leaf=is_variable)
        here = [found.get(str(i)) for i in range(len(args))]
        return *here, {name: found[name] for name in kwargs if name in found}, out

    update_wrapper(pure, fun)
    pure.__name__ = title_of(fun)
    return pure


def _structures(state: PyTree) -> PyTree:
    """The structure of each variable."""
    return jax.tree.map(jax.tree.structure, state, is_leaf=is_variable)


def _put_together(variable: PyTree, before: PyTreeDef) -> PyTree:
    """A variable with the structure that it had before the function.

    Where the value of a variable is a pytree, such as a `ShardedArray`, `nnx.Optimizer.update`
    leaves an `nnx.State` of its fields in the variable, and fails at the next call.
    """
    leaves, after = jax.tree.flatten(variable)
    if after == before or len(leaves) != 1 or before.num_leaves != 1:
        return variable
    return before.unflatten(leaves)


def _split(
    args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], dict[str, PyTree]]:
    """Return the arguments with objects split into parts, and the objects by argument."""
    given = _named(args, kwargs)
    objects = {key: arg for key, arg in given.items() if _has_object(arg)}
    if objects:
        graph, parts = _taken_apart(objects)
        given |= {key: replace(part, graph=graph) for key, part in parts.items()}
    return (
        tuple(given[str(i)] for i in range(len(args))),
        {name: given[name] for name in kwargs},
        objects,
    )


def _named(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> dict[str, PyTree]:
    """All arguments, positional ones by their number."""
    return {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}


def _has_object(arg: PyTree) -> bool:
    return any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))


def _write_back(objects: dict[str, PyTree], outs: PyTree) -> PyTree:
    from flax import nnx

    *here, named, out = outs
    parts = {str(i): part for i, part in enumerate(here) if part is not None} | named
    if objects:
        nnx.update(objects, _state(parts))
    return out


def _taken_apart(objects: dict[str, PyTree]) -> tuple["nnx.GraphDef", dict[str, _Part]]:
    """The graph of nnx objects, and the arrays of each."""
    from flax import nnx

    graph, state = nnx.split(objects)
    empty: nnx.State = nnx.State({})
    return graph, {key: _Part(state.get(key, empty), None) for key in objects}


def _state(parts: Mapping[str, _Part]) -> "nnx.State":
    """The arrays of all parts, as nnx has them."""
    from flax import nnx

    return nnx.State({key: part.state for key, part in parts.items()})
