"""Find changes of Flax nnx objects that a plain `jit` would lose."""

import sys
from collections.abc import Callable, Sequence

import jax

from jaxmpi._leaves import PyTree

__all__ = ["is_object", "watch_changes"]


def is_object(x: object) -> bool:
    """Return whether this is an nnx Module, Optimizer, Rngs, Metric or Variable."""
    nnx = sys.modules.get("flax.nnx")  # who has one has imported it
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def watch_changes(api: str, title: str, arguments: PyTree) -> Callable[[Sequence[object]], None]:
    """Return a function that checks the outputs for lost changes.

    Args:
      api: the function of jaxmpi, for the error.
      title: of the user's function, for the error.
      arguments: `(args, kwargs)` before the function runs.

    Returns:
      A function of the leaves of the outputs. It raises a ValueError if the function has changed an
      nnx object of its arguments in place, and the new values are not among the outputs.
    """
    if "flax.nnx" not in sys.modules:
        return lambda outs: None
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_object)
    found = [(path, x, _arrays(x)) for path, x in paths if is_object(x)]

    def check(outs: Sequence[object]) -> None:
        returned = set(map(id, outs))
        for (_, first, *rest), x, before in found:
            # Variables that are new, such as intermediates, may be lost without an error.
            after = _arrays(x)
            changed = [
                name
                for name, old in before.items()
                if after.get(name, old) is not old and id(after[name]) not in returned
            ]
            if changed:
                position = first.idx if hasattr(first, "idx") else first.key
                argument = f"argument {position}{jax.tree_util.keystr(tuple(rest))}"
                raise ValueError(
                    f"{api}: {title} changes {argument}{changed[0]} in place, in a "
                    f"{type(x).__name__} that it does not return: the change would be lost. Use "
                    "jaxmpi.nn.jit, which keeps it, or return the object."
                )

    return check


def _arrays(x: PyTree) -> dict[str, object]:
    """Return the leaves of an nnx object by their paths."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]
    }
