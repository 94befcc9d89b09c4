"""The World that `init` returns, and the named axes of its ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import jax

from jaxmpi._axis import AXIS
from jaxmpi._backends.groups import coordinates
from jaxmpi._errors import RankCountError

__all__ = ["World", "checked_axes", "sized_axes"]


@dataclass(frozen=True)
class World:
    """Result of `init`: this process's place among the ranks.

    Attributes:
      rank: 0 to size - 1, over all nodes.
      size: the number of ranks.
      local_rank: 0 to local_size - 1, within the node; the device is chosen by it.
      local_size: the number of ranks on this node.
      node: the number of this node; nodes are numbered by their lowest rank.
      backend: "single", "mpi", "xla" or "simulate".
      axes: the names that `init(axes=...)` was given, and their sizes, whose product is `size`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    backend: str
    axes: Mapping[str, int] = field(default_factory=dict, repr=False, hash=False)

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's number along each of `axes`: the last axis is the fastest."""
        return coordinates(self.axes, self.rank)

    @property
    def device(self) -> jax.Device:
        """Return the device that this rank computes on."""
        return jax.local_devices()[0]


def checked_axes(function: str, axes: object) -> dict[str, int]:
    """Return the axes that `init` or `simulate` was given, or raise an error.

    Raises:
      TypeError: no mapping from names to ints.
      ValueError: a name that is taken, or no identifier; a size below 1; more than one -1.
    """
    if axes is None:
        return {}
    if not isinstance(axes, Mapping):
        kind = type(axes).__name__
        raise TypeError(
            f"{function}: axes is a {kind}. Give names and sizes, such as {{'island': 2, 'member': "
            f"-1}}."
        )
    for name, size in axes.items():
        if not isinstance(name, str):
            raise TypeError(
                f"{function}: axes has the name {name!r}, of type {type(name).__name__}. Names are "
                "strings."
            )
        if name == AXIS or not name.isidentifier():
            why = "is the name of all ranks" if name == AXIS else "is no identifier"
            raise ValueError(
                f"{function}: axes has the name {name!r}, which {why}. Choose another one, such as "
                "'island'."
            )
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"{function}: the size of axis {name!r} is {size!r}. Sizes are Python ints."
            )
        if size < 1 and size != -1:
            raise ValueError(
                f"{function}: the size of axis {name!r} is {size}. Sizes are 1 or more, or -1 for "
                "what is left."
            )
    if (unknown := [name for name, size in axes.items() if size == -1])[1:]:
        names = ", ".join(map(repr, unknown))
        raise ValueError(
            f"{function}: the sizes of axes {names} are -1, and only one may be. Give the others."
        )
    return dict(axes)


def sized_axes(function: str, axes: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the axes for `size` ranks, with a number in the place of -1.

    Raises:
      RankCountError: the product of the sizes is not the number of ranks.
    """
    known = prod(length for length in axes.values() if length != -1)
    if axes and (size % known or (-1 not in axes.values() and known != size)):
        there = "there is 1 rank" if size == 1 else f"there are {size} ranks"
        kind = "a multiple of " if -1 in axes.values() else ""
        advice = f"{'Simulate' if function == 'simulate' else 'Start'} {kind}{known} ranks"
        fitting = [name for name, length in axes.items() if size % (known // length) == 0]
        if fitting and not kind:
            advice += f", or let the size of axis {fitting[0]!r} be -1"
        if size == 1 and function == "init":
            advice += (
                ". On one rank, give every axis the size 1, or run the program on simulated ranks, "
                f"under `with jaxmpi.simulate({known}, axes={dict(axes)}):`"
            )
        raise RankCountError(
            f"{function}: axes are {dict(axes)}, which are {kind}{known} ranks together, and "
            f"{there}. {advice}."
        )
    return {name: size // known if length == -1 else length for name, length in axes.items()}
