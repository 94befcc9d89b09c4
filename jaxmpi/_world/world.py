"""What `init` has found out: this process's place among the ranks."""

from dataclasses import dataclass

import jax

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
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    backend: str

    @property
    def device(self) -> jax.Device:
        """The device that this rank computes on."""
        return jax.local_devices()[0]
