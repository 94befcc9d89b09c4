"""Collectives outside of traced code: on Python objects, a barrier, and a common end."""

from typing import Any, TypeVar

import jax
import numpy as np

from jaxmpi import _jaxcompat
from jaxmpi._backends.interface import Ranks
from jaxmpi._collectives.trees import Caller
from jaxmpi._consistency import compare
from jaxmpi._consistency.mismatch import Call
from jaxmpi._job.process import stderr
from jaxmpi._world import session

__all__ = ["agreed", "allgather_object", "barrier", "broadcast_object", "preempted", "untraced"]

T = TypeVar("T")


def broadcast_object(obj: object, root: int = 0) -> Any:
    """Give every rank the object of rank `root`, whatever can be pickled.

    The objects come from the ranks of the same job; nothing is unpickled that was read from a file.

    **Collective:** every rank calls it, with the same root; what the others pass is ignored.
    **Communication:** the pickled bytes once, from root. 16 bytes are compared before, and 8 bytes
    tell whether all could read the result.

    Raises:
      ValueError: root is not a rank.
      TypeError: a root that is no Python int; on every rank, an object that cannot be pickled, or
        not read back on a rank.
      RankMismatchError: on every rank, if one of them calls something else or raises one of the
        errors above alone.
      RuntimeError: called in traced code.

    >>> broadcast_object({"lr": 0.1})
    {'lr': 0.1}
    """
    backend = untraced("broadcast_object")
    with compare.raising_on_all(backend, "broadcast_object"):
        session.check_root("broadcast_object", root)
    return agreed(f"broadcast_object root={root}").broadcast_object(obj, root)


def allgather_object(obj: T) -> list[T]:
    """Return all ranks' objects, whatever can be pickled, in the order of the ranks.

    **Collective:** every rank calls it.
    **Communication:** every rank's pickled bytes to every other. 16 bytes are compared before, and
    8 bytes tell whether all could read the result.

    Raises:
      TypeError: on every rank, an object that cannot be pickled, or not read back on a rank.
      RankMismatchError: on every rank, if one of them calls something else.
      RuntimeError: called in traced code.

    >>> allgather_object("a")
    ['a']
    """
    return agreed("allgather_object").allgather_object(obj)


def barrier() -> None:
    """Return once every rank has called it, and all collectives before it are done.

    **Collective:** every rank calls it.
    **Communication:** 16 bytes are compared; one number is reduced after all programs; MPI's
    barrier.

    Raises:
      RuntimeError: called in traced code.
    """
    backend = agreed("barrier")
    # Programs run in the order of their calls, so this one ends after all others.
    jax.block_until_ready(Caller("barrier").allreduce(np.float32(0)))
    backend.barrier()


def preempted() -> bool:
    """Return whether a rank was told to end (SIGTERM): true on all ranks from the same call on.

    Call it once a step, in training and in evaluation alike; save and leave where it is true:

        if jaxmpi.preempted():
            jaxmpi.save(directory, step, state)
            sys.exit(0)

    The first call takes SIGTERM over, unless the script has a handler of its own. `jaxmpi run`
    passes on the SIGTERM that it gets and waits for the ranks; schedulers send it some time before
    they kill (Slurm: `--signal=TERM@60`).

    **Collective:** every rank calls it equally often.
    **Communication:** none until there was a signal, and three short messages between threads then.
    Where MPI allows no threads, an allgather of a flag at each call.

    Raises:
      RuntimeError: called in traced code.

    >>> preempted()
    False
    """
    backend = untraced("preempted")
    preemption = session.preemption()
    preemption.listen()
    requested = preemption.requested()
    if session.monitor():  # the monitors have agreed
        return requested
    stops = any(agreed("preempted").allgather_object(requested))
    if stops and backend.place.rank == 0:
        stderr.say("jaxmpi: told to end (SIGTERM): the job stops here.\n")
    return stops


def agreed(function: str) -> Ranks:
    """Return the backend once all ranks have called `function`, a text with its parameters.

    Raises:
      RankMismatchError: on every rank, if one of them has called another function, or with other
        options.
      RuntimeError: called in traced code.
    """
    backend = untraced(function)
    compare.check_consistent(backend, Call.of(function))
    return backend


def untraced(function: str) -> Ranks:
    """Return the backend, or raise a RuntimeError in traced code.

    A function that communicates at once would do so while tracing, and never again.
    """
    if _jaxcompat.tracing():
        raise RuntimeError(
            f"{function} was called inside a traced function (jit, grad, vmap, ...), where nothing "
            "runs yet. Call it outside; inside, use jaxmpi.tree_bcast and the other tree functions."
        )
    return session.current(function)
