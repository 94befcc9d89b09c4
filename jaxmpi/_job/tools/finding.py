"""What `jaxmpi doctor` says about one thing, and how it asks without coming to harm."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

__all__ = ["START_SECONDS", "Finding", "ask", "environment", "two"]

START_SECONDS = 120.0


class Finding(NamedTuple):
    """One line of the answer: "ok", "slow" or "broken", what it is about, what was found, and what to do."""

    verdict: str
    topic: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [_wrapped(f"  {self.verdict:6}  ", f"{self.topic}: {self.text}")]
        return "\n".join(lines + ([_wrapped("          -> ", self.advice)] if self.advice else []))


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(text, 118, initial_indent=mark, subsequent_indent=" " * 10)


def environment() -> dict[str, str]:
    """Of a Python that finds the jaxmpi of this process, and nothing else that the working directory holds."""
    home, environ = Path(__file__).parents[2], {**os.environ, "PYTHONSAFEPATH": "1"}
    if home == Path.cwd():  # it may be found there only
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(home), os.environ.get("PYTHONPATH")])
        )
    return environ


def ask(code: str) -> tuple[bool, str]:
    """Run Python code; returns whether it worked, and what it printed, or its error."""
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=START_SECONDS, env=environment()
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {START_SECONDS:.0f} s"
    if not done.returncode:
        return True, done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    errors = [
        i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)", line)
    ]
    return False, " ".join(
        lines[errors[-1] if errors else -1 :]
    ) if lines else f"exit code {done.returncode}"


def two(error: str) -> tuple[str, str]:
    """What happened, and what to do: the last sentence of our errors."""
    first, dot, last = error.rpartition(". ")
    return (first + dot.strip(), last) if dot else (error, "")
