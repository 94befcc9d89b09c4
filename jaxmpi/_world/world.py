"""What `init` has found out: this process's place among the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from jaxmpi._backends.groups import coordinates

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """What `init` found out: this process's place among the ranks.

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
        """This rank's number along each of `axes`: the last axis is the fastest."""
        return coordinates(self.axes, self.rank)

    @property
    def device(self) -> jax.Device:
        """The device that this rank computes on."""
        return jax.local_devices()[0]
