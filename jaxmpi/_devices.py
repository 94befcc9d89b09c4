"""Which GPU a rank takes: decided by its node-local rank, before JAX's backend starts."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import jax

__all__ = ["choose", "enough", "pick", "visible"]

LOCAL_SIZES = (  # what each launcher tells its ranks about their number on the node
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_TASKS_PER_NODE",
)


def choose(local_rank: int, local_size: int, devices: Sequence[int] | None) -> str | None:
    """Take this rank's GPU and hide the others from JAX; returns its name on this node, None where there is none to choose."""
    names = visible(devices)
    if not names or (local_size == 1 and devices is None):
        return None
    index = pick(local_rank, len(names)) if devices is None else devices[pick(local_rank, len(names))]
    jax.config.update("jax_cuda_visible_devices", str(index))
    return names[pick(local_rank, len(names))]


def enough(devices: Sequence[int] | None) -> bool:
    """Whether the ranks of this node have a GPU each, as far as the launcher's environment tells how many they are."""
    told = [re.match(r"\d+", os.environ.get(name, "")) for name in LOCAL_SIZES]  # Slurm's is such as "4(x2)"
    return any(told) and len(visible(devices)) >= max(int(number[0]) for number in told if number)


def pick(local_rank: int, count: int) -> int:
    """The index of this rank's device among `count`: ranks in turn, and from the start again when they outnumber them."""
    return local_rank % count


def visible(devices: Sequence[int] | None = None, dev: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that JAX could use here: CUDA_VISIBLE_DEVICES' entries, or the numbers of the NVIDIA devices.

    Args:
      devices: indices among them; all by default.
      dev: where the device files are.

    Raises:
      ValueError: `devices` is empty or names one that is not there.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "") or "cuda"
    has_plugin = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if not has_plugin or not re.search("cuda|gpu", platforms):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",") if name.strip()]
    else:
        names = sorted((p.name.removeprefix("nvidia") for p in dev.glob("nvidia[0-9]*")), key=int)
    if devices is None:
        return names
    if not devices or not all(0 <= i < len(names) for i in devices):
        raise ValueError(f"init: devices={list(devices)}, and this node shows GPUs 0 to {len(names) - 1}. Name some of these.")
    return [names[i] for i in devices]
