"""The command line of `jaxmpi run`: its own options, MPI's options, and the program."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxmpi._job.launch.mpiexec import LaunchError
from jaxmpi._job.process import settings

__all__ = ["Request", "parse"]

_FLAGS = ("-h", "--help", "--no-huge-pages", "--mps")
# each takes a value
_OWN = (
    *("-n", "-np", "--np", "--mpiexec", "--bind-to", "--threads"),
    *("--restarts", "--min-ranks", "--scaling"),
)


@dataclass(frozen=True)
class Request:
    """The job that the command line asks for."""

    ranks: int
    mpiexec: str | None
    bind_to: str | None
    threads: int | None
    huge_pages: bool
    mps: bool  # whether CUDA's Multi-Process Service is started
    restarts: int
    min_ranks: int | None
    mpi_options: tuple[str, ...]
    scaling: tuple[int, ...]  # numbers of ranks to compare; empty for one job
    program: tuple[str, ...]  # what follows `python` in the command of a rank


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. See `jaxmpi run --help`.")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(sorted({int(number) for number in text.split(",")}))
    if not numbers or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers of ranks, such as 1,2,4")
    return numbers


def parse(arguments: Sequence[str]) -> Request:
    """Split the arguments into our options, MPI's options and the program.

    The program starts at the first argument that ends in .py, at -m, or after --. Before it, an
    option that is not ours is MPI's.

    Raises:
      LaunchError: an option is wrong, or there is no program.
    """
    own, mpi_options, program = _split(arguments)
    options = _parser().parse_args(own)
    if (options.ranks is None) == (not options.scaling):
        raise LaunchError(
            "give either -n, the number of ranks, or --scaling, the numbers to compare. See "
            "`jaxmpi run --help`."
        )
    options.ranks = max(options.scaling) if options.ranks is None else options.ranks
    _check_numbers(options)
    try:
        settings.check()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    _check_program(program)
    if mpi_options and re.fullmatch(r"python[0-9.]*", os.path.basename(mpi_options[-1])):
        raise LaunchError(
            f"{mpi_options[-1]!r} stands before the program. Leave it out: `jaxmpi run` starts the "
            f"ranks with its own Python, {sys.executable}."
        )
    return Request(
        options.ranks,
        options.mpiexec,
        options.bind_to,
        options.threads,
        not options.no_huge_pages,
        options.mps,
        options.restarts,
        options.min_ranks,
        tuple(mpi_options),
        options.scaling,
        tuple(program),
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return our options, MPI's options, and the program with its arguments."""
    own: list[str] = []
    mpi_options: list[str] = []
    rest = list(arguments)
    while rest and rest[0] not in ("--", "-m") and not rest[0].endswith(".py"):
        name = rest[0].partition("=")[0]
        if rest[0] in _OWN:
            own, rest = own + rest[:2], rest[2:]
        elif name in (*_OWN, *_FLAGS) or re.fullmatch(r"-n\d+", name):
            own.append(rest.pop(0))
        else:
            mpi_options.append(rest.pop(0))
    if rest and rest[0].startswith("-") and rest[0].endswith(".py"):
        rest[0] = f"./{rest[0]}"  # a script, which Python would take for an option
    return own, mpi_options, rest[1:] if rest[:1] == ["--"] else rest


def _parser() -> argparse.ArgumentParser:
    """Return the parser of our own options."""
    parser = _Parser(
        prog="jaxmpi run",
        usage="jaxmpi run -n N [options] [MPI's options] "
        "{script.py | -m module | -- program} [arguments]",
        description="Run a Python program on N ranks. Options not listed here go to MPI's launcher "
        "as they are.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "-np", "--np", dest="ranks", type=int, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--mpiexec",
        metavar="PATH",
        help="MPI's launcher; default: $JAXMPI_MPIEXEC, or beside this Python",
    )
    parser.add_argument(
        "--bind-to",
        metavar="WHAT",
        help="core, none, or another of the launcher's words; default: core",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="K",
        help="threads of a rank; default: its share of the cores",
    )
    parser.add_argument(
        "--no-huge-pages",
        action="store_true",
        help="leave malloc as it is, slower but with smaller pages",
    )
    parser.add_argument(
        "--mps",
        action="store_true",
        help="start CUDA's Multi-Process Service for ranks that share a GPU, on this host",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start a job that has failed again, up to K times",
    )
    parser.add_argument(
        "--min-ranks",
        type=int,
        metavar="M",
        help="with --restarts: each time on one rank less, but on M at least",
    )
    parser.add_argument(
        "--scaling",
        type=_numbers,
        default=(),
        metavar="N,N,...",
        help="run on each of these numbers of ranks, and compare",
    )
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    if options.ranks < 1:
        raise LaunchError(f"-n is {options.ranks}, and a job needs a rank. Give -n 1 or more.")
    if options.threads is not None and options.threads < 1:
        raise LaunchError(
            f"--threads is {options.threads}, and a rank needs a thread. Give --threads 1 or more."
        )
    if options.restarts < 0:
        raise LaunchError(
            f"--restarts is {options.restarts}. Give the maximum number of restarts, 0 or more."
        )
    if options.min_ranks is not None and not 1 <= options.min_ranks <= options.ranks:
        raise LaunchError(
            f"--min-ranks is {options.min_ranks}. Give a number from 1 to the {options.ranks} "
            "ranks of -n."
        )
    if options.min_ranks is not None and not options.restarts:
        raise LaunchError(
            "--min-ranks is the smallest number of ranks that a restart may use. Give --restarts "
            "K, too."
        )


def _check_program(program: Sequence[str]) -> None:
    if not program or program == ["-m"]:
        raise LaunchError("no program to run. It must end in .py, or come after -m or --.")
    if not program[0].startswith("-") and not os.path.exists(program[0]):
        raise LaunchError(
            f"there is no file {program[0]} in {os.getcwd()}. Check the path of the script."
        )
