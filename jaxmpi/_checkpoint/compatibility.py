"""Whether a checkpoint fits the tree that it is to be restored into."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxmpi._checkpoint.manifest import Leaf, LeafValue, dtype_of
from jaxmpi._errors import CheckpointError

__all__ = ["difference", "fitted", "only_common"]

SHOWN = 8  # names in a message


def difference(there: Sequence[Leaf], here: Sequence[Leaf], out: Sequence[str]) -> str:
    """The first leaf that is not the same in a checkpoint and in a tree, in words; "" if there is none.

    Parts of the checkpoint that are each rank's own are not missed where `out` has their names.
    """
    saved, wanted = {leaf.name: leaf for leaf in there}, {leaf.name: leaf for leaf in here}
    for name in [*saved, *wanted]:
        if name not in wanted:
            if saved[name].part == "own" and any(_inside(name, outer) for outer in out):
                continue
            return f"leaf {name} ({saved[name]}) is in it, and not in `like`"
        if name not in saved:
            return f"leaf {name} ({wanted[name]}) of `like` is not in it"
        if not _fit(saved[name], wanted[name]):
            return f"leaf {name} is {saved[name]} in it, and {wanted[name]} in `like`"
    return ""


def only_common(there: Sequence[Leaf], here: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf], str]:
    """The leaves of a checkpoint and of a tree that both have, and the names that only one of them has, in words."""
    saved, wanted = {leaf.name for leaf in there}, {leaf.name for leaf in here}
    words = []
    for what, names in (
        ("left out of the checkpoint", [leaf.name for leaf in there if leaf.name not in wanted]),
        ("kept from `like`", [leaf.name for leaf in here if leaf.name not in saved]),
    ):
        if names:
            more = f" and {len(names) - SHOWN} more leaves" if len(names) > SHOWN else ""
            words.append(f"{what}: {', '.join(names[:SHOWN])}{more}")
    both = saved & wanted
    return [leaf for leaf in there if leaf.name in both], [leaf for leaf in here if leaf.name in both], "; ".join(words)


def _inside(name: str, outer: str) -> bool:
    return name == outer or (name.startswith(outer) and name[len(outer)] in ".[")


def _fit(saved: Leaf, wanted: Leaf) -> bool:
    """Whether one can be restored as the other: a number of Python's own also as an array of its kind, and back."""
    if (saved.plain, saved.dtype, saved.shape) == (wanted.plain, wanted.dtype, wanted.shape):
        return True
    return (
        saved.plain != wanted.plain and saved.shape == wanted.shape == () and _kind_of_number(saved) == _kind_of_number(wanted)
    )


def _kind_of_number(leaf: Leaf) -> str:
    if leaf.plain or leaf.dtype.startswith("key"):
        return leaf.dtype
    dtype = dtype_of(leaf.dtype)
    kinds = {"bool": np.bool_, "int": jnp.integer, "float": jnp.floating}
    return next((kind for kind, of in kinds.items() if jnp.issubdtype(dtype, of)), leaf.dtype)


def fitted(saved: Leaf, wanted: Leaf, value: LeafValue) -> LeafValue:
    """A value as it was saved, as an array where one is wanted for a number of Python's own."""
    if isinstance(value, np.ndarray) or wanted.plain:
        return value
    error = ""
    try:
        with np.errstate(over="ignore"):
            x = np.asarray(value, dtype_of(wanted.dtype))
        if not isinstance(value, float) or np.isfinite(float(x)) == np.isfinite(value):
            return x
    except (OverflowError, ValueError) as caught:
        error = f": {caught}"
    raise CheckpointError(f"leaf {saved.name} was saved as {value}, which {wanted} cannot hold{error}. Take a wider dtype.")
