"""Steps that change Flax nnx objects in place (`jaxmpi.nn.jit`).

An argument with nnx objects enters the step as a graph, which is static, and a state of arrays. In
the step the objects are built again, the function runs, and the new state is an output. After the
call it is written into the objects of the caller.
"""

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
class _SplitArgument:
    """An argument with nnx objects, as arrays and a graph.

    Attributes:
      state: its arrays. Those of objects that several arguments share are in the first of these.
      graph: the graph of all such arguments of the call together; None in an output.
    """

    state: PyTree
    graph: "nnx.GraphDef | None"

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[KeyEntry, PyTree]], "nnx.GraphDef | None"]:
        return ((_Key("state"), self.state),), self.graph

    def tree_flatten(self) -> tuple[tuple[PyTree], "nnx.GraphDef | None"]:
        return (self.state,), self.graph

    @classmethod
    def tree_unflatten(
        cls, graph: "nnx.GraphDef | None", children: Sequence[PyTree]
    ) -> "_SplitArgument":
        (state,) = children
        return cls(state, graph)


class InPlace(Step):
    """A Step whose nnx arguments hold, after a call, what the function has left in them."""

    def __init__(self, function: Function, options: dict[str, object]) -> None:
        super().__init__(replace(function, fun=_pure(function.fun)), options)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function, and write the changes of its nnx objects into the caller's."""
        from flax import nnx

        # `nnx.cached_partial` works only within an update context.
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
    """Return a function of split arguments, without side effects.

    It returns `(*positional, named, out)`: for each positional argument its new `_SplitArgument`,
    None if it has no nnx objects; a dict of these for keyword arguments; and the result of `fun`.
    """
    from flax import nnx

    def pure(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # Build the objects from the graph and the arrays, and call the function.
        arguments = _by_key(args, kwargs)
        split = {key: arg for key, arg in arguments.items() if isinstance(arg, _SplitArgument)}
        graph = next((arg.graph for arg in split.values()), None)
        before = {key: _structures(arg.state) for key, arg in split.items()}
        objects = nnx.merge(graph, _state(split)) if graph is not None else {}
        arguments |= objects
        out = fun(
            *(arguments[str(i)] for i in range(len(args))),
            **{name: arguments[name] for name in kwargs},
        )
        # Return the arrays that are in the objects now.
        new_graph, new_split = _split_objects(objects)
        if split and new_graph != graph:
            raise ValueError(
                f"jaxmpi.nn.jit: {pure.__name__} changes the structure of its nnx arguments: it "
                "adds, removes or newly shares variables, or changes a static attribute, as "
                "model.eval() does. Do that outside of the step."
            )
        for key, arg in new_split.items():
            arg.state = jax.tree.map(_with_structure, arg.state, before[key], is_leaf=is_variable)
        positional = [new_split.get(str(i)) for i in range(len(args))]
        return *positional, {name: new_split[name] for name in kwargs if name in new_split}, out

    update_wrapper(pure, fun)
    pure.__name__ = title_of(fun)
    return pure


def _structures(state: PyTree) -> PyTree:
    """Return the structure of each variable."""
    return jax.tree.map(jax.tree.structure, state, is_leaf=is_variable)


def _with_structure(variable: PyTree, before: PyTreeDef) -> PyTree:
    """Return a variable with the structure that it had before the function.

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
    """Split the arguments that have nnx objects.

    Returns:
      The arguments, some of which are `_SplitArgument`; and by their keys the arguments with
      objects, as they were.
    """
    arguments = _by_key(args, kwargs)
    objects = {key: arg for key, arg in arguments.items() if _has_object(arg)}
    if objects:
        graph, split = _split_objects(objects)
        arguments |= {key: replace(arg, graph=graph) for key, arg in split.items()}
    return (
        tuple(arguments[str(i)] for i in range(len(args))),
        {name: arguments[name] for name in kwargs},
        objects,
    )


def _by_key(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return all arguments by their names; positional ones by their positions, as text."""
    return {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}


def _has_object(arg: PyTree) -> bool:
    return any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))


def _write_back(objects: dict[str, PyTree], outs: PyTree) -> PyTree:
    """Write the new arrays of a step into the objects of the caller; return the function's result.

    Args:
      objects: the arguments with nnx objects, by their keys.
      outs: the outputs of the step, as `_pure` returns them.
    """
    from flax import nnx

    *positional, named, out = outs
    split = {str(i): arg for i, arg in enumerate(positional) if arg is not None} | named
    if objects:
        nnx.update(objects, _state(split))
    return out


def _split_objects(
    objects: dict[str, PyTree],
) -> tuple["nnx.GraphDef", dict[str, _SplitArgument]]:
    """Return the graph of nnx objects, and the arrays of each."""
    from flax import nnx

    graph, state = nnx.split(objects)
    empty: nnx.State = nnx.State({})
    return graph, {key: _SplitArgument(state.get(key, empty), None) for key in objects}


def _state(split: Mapping[str, _SplitArgument]) -> "nnx.State":
    """Return the arrays of split arguments as one state, for nnx."""
    from flax import nnx

    return nnx.State({key: arg.state for key, arg in split.items()})
