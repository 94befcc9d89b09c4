"""Steps that change Flax nnx objects in place: they travel as their graphs and their arrays, and the arrays come back."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import jax

from jaxmpi._program.function import Function
from jaxmpi._program.objects import is_object
from jaxmpi._program.program import Program
from jaxmpi._stages import Traced
from jaxmpi._step import Step

__all__ = ["InPlace"]


@jax.tree_util.register_dataclass
@dataclass
class _Part:
    """An argument with nnx objects in it. What several arguments share is in the first that has it."""

    state: Any  # its arrays
    graph: Any = field(metadata={"static": True})  # of all such arguments together


class InPlace(Step):
    """A Step whose nnx arguments hold, after a call, what the function has left in them."""

    def __init__(self, function: Function, options: dict[str, Any]) -> None:
        super().__init__(replace(function, fun=_pure(function.fun)), options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, objects = _split(args, kwargs)
        return _write_back(objects, super().__call__(*args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        args, kwargs, _ = _split(args, kwargs)
        return super().trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, _ = _split(args, kwargs)
        return super().eval_shape(*args, **kwargs)[-1]

    def program(self, *args: Any, **kwargs: Any) -> Program:
        args, kwargs, _ = _split(args, kwargs)
        return super().program(*args, **kwargs)

    def _run_compiled(self, program: Program, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs, objects = _split(args, kwargs)
        return _write_back(objects, super()._run_compiled(program, compiled, args, kwargs))


def _pure(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of parts. It returns what becomes of each positional argument, then of those by name, then its result."""
    from flax import nnx

    @wraps(fun)
    def pure(*args: Any, **kwargs: Any) -> Any:
        given = _named(args, kwargs)
        parts = {key: arg for key, arg in given.items() if isinstance(arg, _Part)}
        graph: Any = next((part.graph for part in parts.values()), None)
        objects = nnx.merge(graph, nnx.State({key: part.state for key, part in parts.items()})) if parts else {}
        given |= objects
        out = fun(*(given[str(i)] for i in range(len(args))), **{name: given[name] for name in kwargs})
        left, states = nnx.split(objects)
        if parts and left != graph:
            raise ValueError(
                f"jaxmpi.nn.jit: {fun.__name__} adds variables to its nnx arguments, removes some or shares them anew. Do "
                "that before, outside of the step."
            )
        here = [states.get(str(i)) for i in range(len(args))]
        return *here, {name: states[name] for name in kwargs if name in states}, out

    return pure


def _split(args: Any, kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The arguments with parts in the place of objects, and the objects by the names of their arguments."""
    from flax import nnx

    given = _named(args, kwargs)
    objects = {key: arg for key, arg in given.items() if _has_object(arg)}
    if objects:
        graph, states = nnx.split(objects)
        given |= {key: _Part(states.get(key, nnx.State({})), graph) for key in objects}
    return tuple(given[str(i)] for i in range(len(args))), {name: given[name] for name in kwargs}, objects


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments, positional ones by their number."""
    return {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}


def _has_object(arg: Any) -> bool:
    return any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))


def _write_back(objects: dict[str, Any], outs: Any) -> Any:
    from flax import nnx

    *here, named, out = outs
    states = {str(i): state for i, state in enumerate(here) if state is not None} | named
    if objects:
        nnx.update(objects, nnx.State(states))
    return out
