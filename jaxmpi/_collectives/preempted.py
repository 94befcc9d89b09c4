"""A signal to any rank, and all stop together."""

from jaxmpi._collectives.objects import agreed, untraced
from jaxmpi._job.process import stderr
from jaxmpi._world import session

__all__ = ["preempted"]


def preempted() -> bool:
    """Whether a rank was told to end (SIGTERM): true on all ranks at the same call, and from then on.

    Call it once a step, in training and in evaluation alike; save and leave where it is true:

        if jaxmpi.preempted():
            jaxmpi.save(directory, step, state)
            sys.exit(0)

    The first call takes SIGTERM over, unless the script has a handler of its own. `jaxmpi run`
    passes on the SIGTERM that it gets and waits for the ranks; schedulers send it some time before
    they kill (Slurm: `--signal=TERM@60`).

    **Collective:** every rank calls it equally often.
    **Communication:** none until there was a signal, and three short messages between threads then.
    Where MPI allows no
      threads, an allgather of a flag at each call.

    Raises:
      RuntimeError: called in traced code.

    >>> preempted()
    False
    """
    backend = untraced("preempted")
    preemption = session.preemption()
    preemption.listen()
    if session.monitor():
        return preemption.requested()
    stops = any(agreed("preempted").allgather_object(preemption.signalled))
    if stops and backend.place.rank == 0:
        stderr.say("jaxmpi: told to end (SIGTERM): the job stops here.\n")
    return stops
