"""The kind of this processor, and how much of its time this process may use."""

import hashlib
import platform
import re
from functools import cache
from pathlib import Path

__all__ = ["processor", "quota"]

_NAMES = (
    "model name",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)


@cache
def processor() -> str:
    """Return the name of the processor and a digest of its instruction sets.

    Machine code of one kind may not run on another. Processors with equal texts are of one kind.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    first = dict(re.findall(r"^(.*?)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    features = [
        platform.machine(),
        *(f"{name} {' '.join(sorted(first[name].split()))}" for name in _NAMES if name in first),
    ]
    digest = hashlib.sha256("\n".join(features).encode()).hexdigest()[:16]
    return f"{first.get('model name') or platform.machine()} ({digest})"


def quota() -> float | None:
    """Return how many processors' time this process may use; None for no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
