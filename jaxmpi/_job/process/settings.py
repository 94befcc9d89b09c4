"""The environment variables that jaxmpi reads. `jaxmpi run` reads them, too, without JAX.

`get` reads one. `check` reads all: `init` calls it on every rank, and `jaxmpi run` before it starts
any. An empty value counts as unset. docs/api.md has the table that `table` prints.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["BACKENDS", "SETTINGS", "Setting", "check", "difference", "get", "limits", "table"]

BACKENDS = ("auto", "single", "mpi", "xla")
MOST_SECONDS, MOST = 1e9, 10**9  # 30 years; far below what timers and C integers hold
MOST_BYTES = 10**15


class Setting(NamedTuple):
    """One environment variable."""

    read: Callable[[str], object]  # raises a ValueError for what is not allowed
    allowed: str
    default: str  # as it would be set; "" for none
    meaning: str
    same: bool = False  # whether it must be the same on all ranks


def _number(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:  # false for NaN
            raise ValueError
        return value

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _switch(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


# the fields of `_backends.tuning.Tuning`
_TUNABLE = ("chunk_bytes", "chunks", "small_bytes", "direct_nodes", "bucket_bytes", "threads")
_POSITIVE = ("chunk_bytes", "chunks", "bucket_bytes")
# A small message and the fingerprints of its ranks are one piece, `kPieceBytes` of
# native/internode.h (61 440 bytes): the receiver does not know how many there are.
_MOST_SMALL_BYTES = 60_000


def _tuning(text: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for pair in text.split(",") if text != "0" else ():
        name, _, value = pair.partition("=")
        most = _MOST_SMALL_BYTES if name == "small_bytes" else MOST
        least = 1 if name in _POSITIVE else 0
        values[_one_of(*_TUNABLE)(name)] = int(_number(int, least, most)(value))
    return values


_SECONDS = "a number of seconds, from 0 to 1e9"
_COUNT = "a whole number, from {} to 1e9"
_ON = "0 or 1"


def _seconds(default: str, meaning: str) -> Setting:
    return Setting(_number(float, 0, MOST_SECONDS), _SECONDS, default, meaning)


SETTINGS: Mapping[str, Setting] = {
    "JAXMPI_BACKEND": Setting(
        _one_of(*BACKENDS),
        f"one of {', '.join(BACKENDS)}",
        "auto",
        "the backend, where `jaxmpi.init` is given none",
    ),
    "JAXMPI_TRANSPORT": Setting(
        _one_of("auto", "native", "mpi4jax"),
        "one of auto, native, mpi4jax",
        "auto",
        "what carries the messages of backend mpi",
        same=True,
    ),
    "JAXMPI_XLA": Setting(
        _one_of("auto", "gloo", "mpi"),
        "one of auto, gloo, mpi",
        "auto",
        "what carries XLA's own collectives on CPUs, in a program that calls `jaxmpi.init`; mpi: "
        "the native transport; auto: mpi under `jaxmpi run`, gloo elsewhere",
        same=True,
    ),
    "JAXMPI_HOST": Setting(
        str,
        "a name or an address",
        "",
        "on rank 0, for backend xla or `jax_processes` on several hosts: where it listens",
    ),
    "JAXMPI_NODE_RANKS": Setting(
        _number(int, 1, MOST),
        _COUNT.format(1),
        "",
        "treat every so many ranks as a node of their own, to test several nodes on one",
        same=True,
    ),
    "JAXMPI_TUNE": Setting(
        _tuning,
        f"0, or NAME=NUMBER, with commas between several, of the names {', '.join(_TUNABLE)}; "
        f"small_bytes up to {_MOST_SMALL_BYTES}",
        "",
        "sizes, algorithms and threads of the native transport; 0: the defaults. Unset, `init` "
        "probes the network",
        same=True,
    ),
    "JAXMPI_OVERLAP": Setting(
        _one_of("auto", "0", "1"),
        "one of auto, 0, 1",
        "auto",
        "whether a step's messages are on their way while it computes; auto: between nodes, on the "
        "native transport",
        same=True,
    ),
    "JAXMPI_STALL_SECONDS": _seconds(
        "60", "how long a rank waits in a collective before it reports who is missing; 0: never"
    ),
    "JAXMPI_STALL_END_SECONDS": _seconds(
        "",
        "how long until the job ends; ten times the above by default, but never in plain JAX "
        "programs; 0: never",
    ),
    "JAXMPI_PREEMPTION_SECONDS": _seconds(
        "60", "how long `jaxmpi run` waits for ranks that stop in order at a SIGTERM"
    ),
    "JAXMPI_FLIGHT_DIR": Setting(
        str,
        "a folder",
        "",
        "where the flight records go; by default a private folder in the temporary one, only at a "
        "stall or SIGUSR1",
    ),
    "JAXMPI_COMPILE": Setting(
        _one_of("auto", "once", "each"),
        "one of auto, once, each",
        "auto",
        "whether ranks that run the same program compile it once between them, or each for itself; "
        "auto: once where a host has more ranks than cores",
        same=True,
    ),
    "JAXMPI_CACHE_BYTES": Setting(
        _number(int, 0, MOST_BYTES),
        "a whole number, from 0 to 1e15",
        "2000000000",
        "how much `jaxmpi run` keeps of what was compiled, in the user's cache folder; 0: nothing",
    ),
    "JAXMPI_CACHE_DIR": Setting(
        str,
        "a folder",
        "",
        "set by `jaxmpi run`: where its ranks keep what was compiled, unless "
        "JAX_COMPILATION_CACHE_DIR is",
    ),
    "JAXMPI_CHECK": Setting(
        _one_of("0", "1"),
        _ON,
        "",
        "0: check no assumption about the ranks, such as equal parameters before the first step; "
        "1: compare all values that must be equal on all ranks, at every step, as well",
        same=True,
    ),
    "JAXMPI_EXPLAIN": Setting(_switch, _ON, "0", "print what each new program sends, on rank 0"),
    "JAXMPI_MPIEXEC": Setting(str, "a program", "", "the MPI launcher that `jaxmpi run` uses"),
    "JAXMPI_RUN_DIR": Setting(str, "a folder", "", "set by `jaxmpi run`: where its ranks register"),
    "JAXMPI_LIBMPI": Setting(
        str,
        "a path",
        "",
        "set by `jaxmpi run`: the MPI library that plain JAX programs load",
    ),
    "JAXMPI_RESTART": Setting(
        _number(int, 0, MOST),
        _COUNT.format(0),
        "0",
        "set by `jaxmpi run`: how often the job has failed",
    ),
    "JAXMPI_TTY": Setting(
        _switch, _ON, "0", "set by `jaxmpi run`: its standard error is a terminal"
    ),
    "JAXMPI_TESTING_ADDRESS": Setting(
        str, "a socket", "", "set by `jaxmpi.launch` and `run_ranks`: where they listen"
    ),
}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the value of a setting in an environment, or its default, or None.

    Raises:
      ValueError: the value is not allowed. The text names the variable.
    """
    setting = SETTINGS[name]
    text = environ.get(name, "") or setting.default
    try:
        return setting.read(text) if text else None
    except ValueError:
        raise ValueError(f"{name} is {text!r}. It is {setting.allowed}.") from None


def limits(environ: Mapping[str, str] = os.environ) -> tuple[float, float]:
    """Return the seconds after which a wait is reported, and those after which the job ends.

    0 stands for never.

    Raises:
      ValueError: as `get`; or the job would end before the wait is reported.
    """
    stall = get("JAXMPI_STALL_SECONDS", environ)
    end = get("JAXMPI_STALL_END_SECONDS", environ)
    if end and end < stall:
        raise ValueError(
            f"JAXMPI_STALL_END_SECONDS is {end:g}, below JAXMPI_STALL_SECONDS ({stall:g}): the job "
            "would end before it reports the wait. Give it at least as many seconds, or 0."
        )
    return stall, 10 * stall if end is None else end


def check() -> dict[str, object]:
    """Read all settings, and return those that must be the same on all ranks.

    Raises a ValueError as `get` and `limits`.
    """
    limits()
    values = {name: get(name) for name in SETTINGS}
    return {name: values[name] for name, setting in SETTINGS.items() if setting.same}


def difference(everyone: Sequence[Mapping[str, object]]) -> tuple[str, int] | None:
    """Return the first setting that differs between ranks, and the first rank that differs.

    Args:
      everyone: the settings of each rank.

    Returns:
      (name, rank), where the rank has another value than rank 0; None if there is no difference.
    """
    for name, value in everyone[0].items():
        for rank, of_rank in enumerate(everyone):
            if of_rank[name] != value:
                return name, rank
    return None


def table() -> str:
    """Return all settings as a table in Markdown."""
    rows = [
        f"| `{name}` | {s.allowed} | {s.default or '–'} | {s.meaning} |"
        for name, s in SETTINGS.items()
    ]
    return "\n".join(["| variable | value | default | |", "|---|---|---|---|", *rows]) + "\n"
