"""The command line: `jaxmpi run ...`, which is `python -m jaxmpi run ...`."""

import sys
from collections.abc import Sequence

from jaxmpi import _launch

__all__ = ["main"]

USAGE = """usage: jaxmpi COMMAND ...

commands:
  run    run a Python program on several ranks; see `jaxmpi run --help`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["run"]:
        return _launch.run(arguments[1:])
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())
