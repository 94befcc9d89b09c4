"""Flax nnx objects among a function's arguments: what the function changes in them, under a plain `jit`, is lost."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

__all__ = ["is_object", "watch_changes"]


def is_object(x: Any) -> bool:
    """Whether this is an nnx Module, Optimizer, Rngs, Metric or Variable."""
    nnx = sys.modules.get("flax.nnx")  # who has one has imported it
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def watch_changes(title: str, arguments: Any) -> Callable[[Sequence[Any]], None]:
    """A function of the outputs' arrays that raises a ValueError if one of the objects was changed, and is not among them."""
    if "flax.nnx" not in sys.modules:
        return lambda outs: None
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_object)
    found = [(path, x, jax.tree_util.tree_flatten_with_path(x)[0]) for path, x in paths if is_object(x)]

    def check(outs: Sequence[Any]) -> None:
        returned = set(map(id, outs))
        for path, x, before in found:
            for (inner, old), new in zip(before, jax.tree.leaves(x), strict=False):
                if new is not old and id(new) not in returned:
                    (_, first, *rest) = path
                    name = f"argument {first.idx if hasattr(first, 'idx') else first.key}"
                    raise ValueError(
                        f"jaxmpi.jit: {title} changes {name}{jax.tree_util.keystr((*rest, *inner))} in place, in a "
                        f"{type(x).__name__} that it does not return: the change would be lost. Use jaxmpi.nn.jit, "
                        "which keeps it, or return the object."
                    )

    return check
