"""Command line of jaxmpi: `jaxmpi run`, `doctor`, `top` and `timeline`.

`python -m jaxmpi run` is the same as `jaxmpi run`.
"""

import sys
from collections.abc import Sequence

from jaxmpi._job.launch import run
from jaxmpi._job.tools import timeline

__all__ = ["main"]

USAGE = """usage: jaxmpi COMMAND ...

commands:
  run       run a Python program on several ranks; see `jaxmpi run --help`
  doctor    is everything here, does it fit together, and how fast is it?
  top       the ranks of running jobs, live; see `jaxmpi top --help`
  timeline  put the flight records of a job together; see `jaxmpi timeline --help`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["run"]:
        return run.run(arguments[1:])
    if arguments[:1] == ["doctor"]:
        from jaxmpi._job.tools import doctor

        return doctor.run(arguments[1:])
    if arguments[:1] == ["top"]:
        from jaxmpi._job.tools import top

        return top.run(arguments[1:])
    if arguments[:1] == ["timeline"]:
        return timeline.run(arguments[1:])
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())
