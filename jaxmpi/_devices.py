"""GPU of a rank: chosen by its node-local rank, before JAX's backend starts."""

import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax

from jaxmpi._jaxcompat import started_without

__all__ = [
    "RankGpu",
    "choose",
    "describe",
    "each_has_own_gpu",
    "has_plugin",
    "listed_in",
    "memory_of_one",
    "pick",
    "share_memory",
    "sharing",
    "unique",
    "uses_nccl",
    "visible",
]

_GPU = re.compile(r"\d+|(GPU|MIG)-\S+")  # an entry of CUDA_VISIBLE_DEVICES and its relatives


class _Vendor(NamedTuple):
    plugins: tuple[str, ...]  # JAX's part for these GPUs
    platforms: str  # as JAX_PLATFORMS names them
    variables: tuple[str, ...]  # that hide GPUs from a process; the first one that is set counts
    option: str  # of JAX


_NVIDIA = _Vendor(
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "cuda|gpu",
    ("CUDA_VISIBLE_DEVICES",),
    "jax_cuda_visible_devices",
)
_AMD = _Vendor(
    ("jax_rocm60_plugin", "jax_rocm7_plugin"),
    "rocm|gpu",
    ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "jax_rocm_visible_devices",
)
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
PREALLOCATED = 0.75  # of the memory of a GPU: what JAX takes when it starts
_MEMORY = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


class RankGpu(NamedTuple):
    """The GPU of one rank, for the line that `init` prints."""

    host: str
    gpu: str | None  # its name, the same for all ranks that have it; None if there is none
    listed: int  # how many GPUs the rank could choose from
    variable: str  # that lists these; "" for all of the node


def choose(local_rank: int, size: int, devices: Sequence[int] | None) -> str | None:
    """Choose this rank's GPU, or MIG slice, and hide the others from JAX; return its name here.

    It is None if there is no GPU to choose. A job of one rank keeps all GPUs, unless `devices`
    names some.

    Raises:
      RuntimeError: there are several, and JAX has started with all of them.
      ValueError: as `visible`.
    """
    names = visible(devices)
    if not names or (size == 1 and devices is None):
        return None
    mine = pick(local_rank, len(names))
    index = mine if devices is None else devices[mine]
    option = _vendor().option
    # CUDA shows a process one MIG slice, the first of the list, whatever index it asks for.
    is_slice = _is_slice(names[mine])
    if is_slice:
        index = 0
    if len(visible()) > 1 and started_without(str(index), option):
        raise RuntimeError(
            "init: JAX has started already, with all GPUs of this node, and this rank is to have "
            f"GPU {names[mine]} alone. Call jaxmpi.init() before anything that starts JAX's "
            "backend, such as jnp.zeros or jax.devices."
        )
    if is_slice:
        os.environ[_NVIDIA.variables[0]] = names[mine]
    jax.config.update(option, str(index))
    return names[mine]


def each_has_own_gpu(shown: Sequence[tuple[str, Sequence[str]]]) -> bool:
    """Return whether each rank has a GPU of its own, between which NCCL works.

    It does not between MIG slices: two of a GPU are one GPU for it.

    Args:
      shown: for each rank, its host and the GPUs that it may use there.
    """
    taken = []
    for rank, (host, names) in enumerate(shown):
        here = [other for other, _ in shown[:rank]].count(host)
        taken += [(host, names[pick(here, len(names))])] if names else []
    if any(_is_slice(name) for _, name in taken):
        return False
    return len(set(taken)) == len(shown)


def unique(name: str) -> str:
    """Return the UUID of a GPU instead of its number, if this process sees the listed GPUs only.

    Slurm counts each rank's GPUs from 0 if it hides the others, so numbers do not tell them apart.
    """
    if _vendor() is not _NVIDIA:
        return name
    listed = visible()
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return name
    if name.isdigit() and name in listed and len(found) == len(listed):
        return found[listed.index(name)]
    return name


def sharing(gpus: Sequence[RankGpu], rank: int) -> list[int]:
    """Return the ranks that have the GPU of `rank`; none if it has no GPU.

    Args:
      gpus: the GPU of each rank, with names that are equal for one GPU only.
      rank: one of the ranks.
    """
    mine = gpus[rank]
    if mine.gpu is None:
        return []
    same = []
    for other, theirs in enumerate(gpus):
        if (theirs.host, theirs.gpu) == (mine.host, mine.gpu):
            same.append(other)
    return same


def share_memory(ranks: int) -> str:
    """Make JAX use an equal share of the GPU's memory for each of its ranks; return a description.

    Call it before JAX starts.
    """
    if given := _given_for_memory():
        return f"its memory is shared out as {given} says"
    fraction = int(1000 * PREALLOCATED / ranks) / 1000
    os.environ[_MEMORY[0]] = f"{fraction:.3f}"
    return f"each takes {fraction:.1%} of its memory ({_MEMORY[0]})"


def memory_of_one() -> str:
    """Return in words how much of a GPU's memory JAX takes for a rank that has it alone."""
    if given := _given_for_memory():
        return f"JAX takes memory as {given} says"
    return f"JAX takes {PREALLOCATED:.0%} of its memory when it starts ({_MEMORY[0]})"


def _given_for_memory() -> str:
    """Return the user's variables about the memory, such as "XLA_CLIENT_MEM_FRACTION=0.5"."""
    given = []
    for name in (*_MEMORY, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        if os.environ.get(name):
            given.append(f"{name}={os.environ[name]}")
    return ", ".join(given)


def listed_in() -> str:
    """Return the variable that lists the GPUs of this process; "" if none does."""
    return next((name for name in _vendor().variables if name in os.environ), "")


def _is_slice(name: str) -> bool:
    return name.startswith("MIG-")


def describe(taken: Sequence[RankGpu], memory: str) -> str:
    """Return one line about the GPUs of all ranks; "" where none has one.

    Args:
      taken: what each rank has taken.
      memory: what becomes of the memory of a GPU, in words.
    """
    having = [one for one in taken if one.gpu is not None]
    if not having:
        return ""
    gpus = {(one.host, one.gpu) for one in having}
    first = having[0]
    noun = "MIG slice" if all(_is_slice(one.gpu or "") for one in having) else "GPU"
    if len(having) == 1:
        whose = f"1 rank with a {noun} of its own"
    elif len(gpus) == len(having):
        whose = f"{len(having)} ranks, each with a {noun} of its own"
    else:
        nouns = f"{noun}s" if len(gpus) > 1 else noun
        whose = f"{len(having)} ranks share {len(gpus)} {nouns}"
    if len(having) < len(taken):
        whose += f" ({len(taken) - len(having)} more without)"
    if not first.variable:
        how = f"by its number within the node, of {first.listed} there"
    elif max(one.listed for one in having) > 1:
        how = f"by its number within the node, of {first.listed} in {first.variable}"
    else:
        how = f"the only one that {first.variable} shows it"
    return f"{whose}: {how}; {memory}"


def pick(local_rank: int, count: int) -> int:
    """Return the index of a rank's device among `count`; ranks share devices in turn."""
    return local_rank % count


def has_plugin() -> bool:
    """Return whether JAX's plugin for NVIDIA's or AMD's GPUs is installed."""
    return any(map(find_spec, _NVIDIA.plugins + _AMD.plugins))


def uses_nccl() -> bool:
    """Return whether JAX's plugin for NVIDIA's GPUs is installed, which brings NCCL."""
    return any(map(find_spec, _NVIDIA.plugins))


def _vendor() -> _Vendor:
    is_amd = any(map(find_spec, _AMD.plugins)) and not any(map(find_spec, _NVIDIA.plugins))
    return _AMD if is_amd else _NVIDIA


def visible(
    devices: Sequence[int] | None = None, dev: Path = Path("/dev"), kfd: Path = _KFD
) -> list[str]:
    """Return the names of the GPUs that JAX could use here.

    They are the entries of CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, or numbers.

    Args:
      devices: indices among them; all by default.
      dev: where the device files of NVIDIA's GPUs are.
      kfd: where the driver of AMD's GPUs lists them, among the processors.

    Raises:
      ValueError: `devices` is empty or names one that is not there.
    """
    vendor = _vendor()
    platforms = os.environ.get("JAX_PLATFORMS", "") or "gpu"
    if not has_plugin() or not re.search(vendor.platforms, platforms):
        return []
    listed = next((os.environ[name] for name in vendor.variables if name in os.environ), None)
    if listed is not None:  # what comes after an entry that names no GPU, such as -1, is ignored
        names = [*itertools.takewhile(_GPU.fullmatch, (name.strip() for name in listed.split(",")))]
    elif vendor is _NVIDIA:
        names = sorted((p.name.removeprefix("nvidia") for p in dev.glob("nvidia[0-9]*")), key=int)
    else:
        names = []
        for path in kfd.glob("*/properties"):
            units = re.search(r"^simd_count (\d+)", path.read_text(), re.MULTILINE)
            if units and int(units[1]):  # CPUs have no SIMD units in this list
                names.append(str(len(names)))
    if devices is None:
        return names
    if not names:
        tool = "nvidia-smi" if vendor is _NVIDIA else "rocm-smi"
        raise ValueError(
            f"init: devices={list(devices)}, and this node shows no GPU. Leave devices out, or "
            f"start the job where {tool} lists one."
        )
    if not devices or not all(0 <= i < len(names) for i in devices):
        raise ValueError(
            f"init: devices={list(devices)}, and this node shows GPUs 0 to {len(names) - 1}. Name "
            "some of these."
        )
    return [names[i] for i in devices]
