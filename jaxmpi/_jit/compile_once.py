"""Ranks that share their cores compile a new program once between them.

One rank compiles it, and the others get the executable.

Which ranks can use the same executable, they find out by a digest of what each would give to XLA,
and by the kind of their processor. The first of them compiles, or finds the program in its
persistent cache, and the others wait asleep.

Only ranks that have just agreed on a program wait for each other so. Of programs that send what an
earlier one has sent, as for the last batch of an epoch, a rank may come to a new one alone. It
compiles without a word to the others; those of its host that come to the same one later take what
it has left in the folder of the run.
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

# The executable of a program, or the error of its compilation, as one rank tells it the others.
Outcome: TypeAlias = tuple[Literal["compiled"], bytes] | tuple[Literal["failed"], Exception]

ALONE: Outcome = "compiled", b""  # what a rank says that has no executable for the others


def shares(ranks: Ranks) -> bool:
    """Return whether the ranks of this job share what they compile.

    By default they do where a host has more ranks than cores. A rank with a core of its own has
    compiled sooner than it could take over the executable of another one: GPT of 24 layers on 2
    ranks 2.7 s against 3.6 to 4.4 s. With 4 ranks on 2 cores it is 6.4 s against 5.1 s.

    On GPUs they do not: the compilers of all ranks talk to each other.
    """
    if jax.default_backend() != "cpu":
        return False
    wanted = settings.get("JAXMPI_COMPILE")
    return ranks.cores_per_rank < 1 if wanted == "auto" else wanted == "once"


def compile_once(backend: Processes, title: str, lower: Callable[[], Lowered]) -> None:
    """Compile a program that the ranks have agreed on, so that JAX compiles nothing at its call.

    **Collective:** every rank calls it.

    Args:
      backend: the ranks.
      title: of the program.
      lower: makes the `jax.stages.Lowered` whose function is called afterwards.

    Raises:
      Exception: what `lower` raises, on this rank; what the compiler raises, on all ranks that have
        this program.
    """
    lowered, failure = None, None
    try:
        lowered = lower()
        digest = "" if jax.config.jax_disable_jit else _jaxcompat.module_digest(lowered)
    except Exception as error:
        digest, failure = "", error
    rank, everyone = backend.place.rank, backend.allgather_asleep((digest, kind()))
    ranks = [r for r, theirs in enumerate(everyone) if digest and theirs == everyone[rank]] or [
        rank
    ]
    _report_kinds(backend, [of_rank for _, of_rank in everyone])
    if rank != ranks[0]:
        what = f"the compilation of {title} on rank {ranks[0]}"
        _take_over(lowered, backend.broadcast_asleep(None, ranks, what))
        return
    result = ALONE
    try:
        if len(ranks) > 1:
            with long_operation(backend, f"compiling {title}, for {in_words(ranks[1:])}, too"):
                result = _compiled(lowered)
    finally:
        backend.broadcast_asleep(result, ranks, title)  # or the others would wait for ever
    if failure is None and result[0] == "failed":
        failure = result[1]
    if failure is not None:
        raise failure


def compile_alone(backend: Processes, title: str, lowered: Lowered) -> None:
    """Compile a program that other ranks may not call.

    If a rank of this host has compiled it before, its executable is taken.
    """
    digest = _jaxcompat.module_digest(lowered)
    if not digest or jax.config.jax_disable_jit:
        return
    name = hashlib.sha256(f"{digest} {kind()}".encode()).hexdigest()[:40]
    with long_operation(backend, f"compiling {title}, or waiting for a rank of its host that does"):
        entry = made_once(
            settings.get("JAXMPI_RUN_DIR"), name, partial(_jaxcompat.compile_entry, lowered)
        )
        if entry is not None:
            _jaxcompat.load_entry(lowered, entry)


def kind() -> dict[str, str]:
    """Describe the machine: the text must be equal on ranks that share an executable."""
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


def _take_over(lowered: Lowered, result: Outcome) -> None:
    """Load what another rank has compiled, or raise what it has raised."""
    if result[0] == "failed":
        raise result[1]
    if result[0] == "compiled":
        _jaxcompat.load_entry(lowered, result[1])


def _picklable(error: Exception) -> Exception:
    """Return an error that the other ranks can raise: of its class where that can be sent."""
    try:
        again = pickle.loads(pickle.dumps(error))  # what this process has just written
        return (
            error
            if type(again) is type(error) and str(again) == str(error)
            else jax.errors.JaxRuntimeError(str(error))
        )
    except Exception:  # whatever a class of somebody else's raises
        return jax.errors.JaxRuntimeError(str(error))


def _report_kinds(backend: Processes, kinds: Sequence[Mapping[str, str]]) -> None:
    """Report once, on the first rank that differs from rank 0, why it compiles for itself."""
    other = next((rank for rank, theirs in enumerate(kinds) if theirs != kinds[0]), None)
    if other is None or backend.registry.kinds_reported:
        return
    backend.registry.kinds_reported = True
    if backend.place.rank == other:
        name = next(name for name in kinds[0] if kinds[0][name] != kinds[other][name])
        here, there = (kinds[r][name] or "unset" for r in (other, 0))
        _say(
            f"{name} is {here} on rank {other} and {there} on rank 0: ranks of different kinds "
            "compile for themselves."
        )


def _say(text: str) -> None:
    if watch := session.monitor():
        watch.say(text)
