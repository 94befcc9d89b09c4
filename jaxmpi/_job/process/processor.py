"""Which kind of processor this is, as machine code of one kind may not run on another, and how much of it there is."""

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
    """Its name, and a digest of what it can do; the same text for processors that are alike."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    first = dict(re.findall(r"^(.*?)\s*: (.*)$", text.split("\n\n")[0], re.MULTILINE))
    said = [
        platform.machine(),
        *(f"{name} {' '.join(sorted(first[name].split()))}" for name in _NAMES if name in first),
    ]
    digest = hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
    return f"{first.get('model name') or platform.machine()} ({digest})"


def quota() -> float | None:
    """The processor time that this process may use, in processors; None for no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
