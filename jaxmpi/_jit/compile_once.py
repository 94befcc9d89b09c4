"""Compile a program once for ranks that share their cores and have agreed on it.

Ranks can use the same executable if the digests of what they would give to XLA are equal, and if
their machines are equal, too (`machine_description`). They exchange both. The first rank of each
such set compiles, or finds the executable in its persistent cache, and broadcasts it to the others,
which wait asleep.

Only ranks that have just compared a new fingerprint wait for each other (`compile_once`). A rank
may also come alone to a new program whose fingerprint the ranks have compared before, because its
messages are those of an earlier program: the last batch of an epoch has fewer rows, for example.
Then it compiles without the others (`compile_alone`), and leaves the executable in the folder of
the run, where ranks of its host find it.
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import jax
from jax.stages import Lowered

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Processes, Ranks, long_operation
from jaxmpi._consistency.mismatch import in_words
from jaxmpi._job.process import settings
from jaxmpi._job.process.compiled_files import made_once
from jaxmpi._job.process.processor import processor
from jaxmpi._world import session

__all__ = ["compile_alone", "compile_once", "shares"]

# The executable of a program, or the error of its compilation, as one rank sends it to the others.
Outcome: TypeAlias = tuple[Literal["compiled"], bytes] | tuple[Literal["failed"], Exception]

NOTHING: Outcome = "compiled", b""  # from a rank that has no executable for the others


def shares(ranks: Ranks) -> bool:
    """Return whether the ranks of this job share what they compile.

    They do not on GPUs, where the compilers of all ranks talk to each other.
    """
    if jax.default_backend() != "cpu":
        return False
    wanted = settings.get("JAXMPI_COMPILE")
    return ranks.cores_per_rank < 1 if wanted == "auto" else wanted == "once"


def compile_once(backend: Processes, title: str, lower: Callable[[], Lowered]) -> None:
    """Compile a program that the ranks have agreed on, so that JAX compiles nothing at its call.

    **Collective:** every rank calls it.
    **Communication:** an allgather of a digest and a description of the machine, and a broadcast of
    the executable within each set of ranks where these are equal.

    Args:
      backend: the ranks.
      title: of the program.
      lower: returns the `jax.stages.Lowered` of the function that is called afterwards.

    Raises:
      Exception: what `lower` raises, on this rank; what the compiler raises, on all ranks that have
        this program.
    """
    # Lower. A rank that fails still takes part in the exchange, or the others would wait for ever.
    lowered, failure = None, None
    try:
        lowered = lower()
        digest = "" if jax.config.jax_disable_jit else _jaxcompat.module_digest(lowered)
    except Exception as error:
        digest, failure = "", error
    # Find the ranks that can use the same executable; a program without a digest cannot be shared.
    rank = backend.place.rank
    everyone = backend.allgather_asleep((digest, machine_description()))
    ranks = [rank]
    if digest:
        ranks = [r for r, theirs in enumerate(everyone) if theirs == everyone[rank]]
    _report_machines(backend, [machine for _, machine in everyone])
    # Receive the executable, or compile it.
    if rank != ranks[0]:
        what = f"the compilation of {title} on rank {ranks[0]}"
        _load(lowered, backend.broadcast_asleep(NOTHING, ranks, what))
        return
    result = NOTHING
    try:
        if len(ranks) > 1:
            with long_operation(backend, f"compiling {title}, for {in_words(ranks[1:])}, too"):
                result = _compiled(lowered)
    finally:
        # even if `result` is NOTHING, or the others would wait for ever
        backend.broadcast_asleep(result, ranks, title)
    if failure is None and result[0] == "failed":
        failure = result[1]
    if failure is not None:
        raise failure


def compile_alone(backend: Processes, title: str, lowered: Lowered) -> None:
    """Compile a program that other ranks may not call; nothing is sent.

    If a rank of this host has compiled it before, its executable is loaded; if one is compiling it,
    this waits for it.
    """
    digest = _jaxcompat.module_digest(lowered)
    if not digest or jax.config.jax_disable_jit:
        return
    name = hashlib.sha256(f"{digest} {machine_description()}".encode()).hexdigest()[:40]
    with long_operation(backend, f"compiling {title}, or waiting for a rank of its host that does"):
        entry = made_once(
            settings.get("JAXMPI_RUN_DIR"), name, partial(_jaxcompat.compile_entry, lowered)
        )
        if entry is not None:
            _jaxcompat.load_entry(lowered, entry)


def machine_description() -> dict[str, str]:
    """Describe the machine by facts that must be equal on ranks that share an executable."""
    from jaxlib import version

    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    return {
        "processor": processor(),
        "jax": jax.__version__,
        "jaxlib": version.__version__,
        "XLA_FLAGS": flags,
    }


def _compiled(lowered: Lowered) -> Outcome:
    """Return the executable of a program, or the error of its compilation."""
    try:
        return "compiled", _jaxcompat.compile_entry(lowered)
    except Exception as error:
        return "failed", _picklable(error)


def _load(lowered: Lowered, result: Outcome) -> None:
    """Load what another rank has compiled, or raise what it has raised."""
    if result[0] == "failed":
        raise result[1]
    if result[0] == "compiled":
        _jaxcompat.load_entry(lowered, result[1])


def _picklable(error: Exception) -> Exception:
    """Return an error that can be pickled: the same one if it can, else a JaxRuntimeError."""
    try:
        again = pickle.loads(pickle.dumps(error))  # the bytes are from this process
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:  # pickling a class of another library may raise anything
        pass
    return jax.errors.JaxRuntimeError(str(error))


def _report_machines(backend: Processes, machines: Sequence[Mapping[str, str]]) -> None:
    """Report once, on the first rank whose machine differs from that of rank 0, what differs."""
    other = next((rank for rank, theirs in enumerate(machines) if theirs != machines[0]), None)
    if other is None or backend.registry.machines_reported:
        return
    backend.registry.machines_reported = True
    if backend.place.rank == other:
        name = next(name for name in machines[0] if machines[0][name] != machines[other][name])
        here, there = (machines[r][name] or "unset" for r in (other, 0))
        _report(
            f"{name} is {here} on rank {other} and {there} on rank 0: ranks of different kinds "
            "compile for themselves."
        )


def _report(text: str) -> None:
    """Have the monitor report a line, if there is one."""
    if monitor := session.monitor():
        monitor.say(text)
