"""The host that a job has failed on, from what MPI's launcher and the ranks said."""

import re

__all__ = ["failed_host"]

# White space collapsed; the first that matches counts. A launcher that has lost a host kills the
# ranks of the others.
_LOST = (
    r"Remote daemon: \S+ on node (\S+)",
    r"A daemon failed to report back .{1,900}? Remote host: (\S+)",
)
_VERDICT = (
    r"^(?:rank \d+|a rank) \(pid \d+ on (\S+?)\)",
    r" on (\S+) did not come",
    r"^MPI's daemon on (\S+) ended first",
)
_KILLED = (
    r"process rank \d+ with PID \d+ on node (\S+) (?:exited|exiting)",
    r"RUNNING AT (\S+) = EXIT CODE",  # Intel MPI lists hosts whose ranks it has killed itself
)


def failed_host(text: str, verdict: str) -> str:
    """The name of the host, "" where nothing tells.

    Args:
      text: the last of what the launcher and the ranks wrote.
      verdict: why the job has failed, as `jaxmpi run` says it.
    """
    for said, patterns in ((text, _LOST), (verdict, _VERDICT), (text, _KILLED)):
        for pattern in patterns:
            if found := re.search(pattern, " ".join(said.split())):
                return found[1].strip(".,;:")
    return ""
