"""Cost of supervision in a step of about 10 ms, with the monitor's thread and without it.

Also measures what the ranks' comparison before a program adds, and what `jaxmpi top` in another
terminal adds; and in a step of 1 ms, the monitor's thread with the log of programs entered and left
(`_backends/program_log.py`, on xla and mpi4jax), beside neither of them. The thread and the log are
also measured by clocks of their own, while the rank trains: these vary less than a step.

    jaxmpi run -n 2 benchmarks/overhead.py
    JAXMPI_BACKEND=xla jaxmpi run -n 2 benchmarks/overhead.py

Exits with 1 where the thread and the comparison, `jaxmpi top`, or the thread and the log, are more
than a hundredth of the step, also by their own clocks.
"""

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from common import Report, parser

import jaxmpi
from jaxmpi._backends.program_log import KEPT_PROGRAMS
from jaxmpi._job.monitor import monitor
from jaxmpi._job.process.joining import MONITOR
from jaxmpi._world import session

STEP_SECONDS, SHORT_STEP_SECONDS = 0.01, 0.001
LIMIT = 0.01  # of the step

args = parser(__doc__).parse_args()
name = jaxmpi.init().backend
report = Report("overhead" if name == "mpi" else f"overhead-{name}", args)
watching, backend = session.monitor(), session.current("benchmark")
poll_seconds = monitor.POLL_SECONDS


def watch(seconds):
    """Set the interval of the monitor's thread, and wake it so that it takes effect now."""
    if seconds != monitor.POLL_SECONDS:
        monitor.POLL_SECONDS = seconds
        watching.signals.wake()


def step_of(times):
    def step(x):
        x = jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)
        return jaxmpi.tree_allreduce(x[:16, :16]), x

    return jaxmpi.jit(step)


x = jnp.ones((256, 256)) / 256
trial = step_of(20)
jax.block_until_ready(trial(x))
start = time.perf_counter()
jax.block_until_ready(trial(x))
took = max(jaxmpi.allgather_object(time.perf_counter() - start))
step = step_of(max(1, round(20 * STEP_SECONDS / took)))
short_step = step_of(max(1, round(20 * SHORT_STEP_SECONDS / took)))


def watched():
    watch(poll_seconds)
    return step(x)


def unwatched():
    watch(3600.0)
    return step(x)


class NoLog:
    """A log of programs that notes nothing."""

    counts = (0, 0)

    def enter(self, fingerprint):
        pass

    def keep(self, end):
        pass

    def end_call(self):
        pass

    def look(self):
        pass

    def inside(self):
        return False

    def current(self):
        return None


class TimedLog:
    """The log of programs, with the time that the calls of the training thread take in it."""

    def __init__(self, log):
        self.log, self.ns = log, 0
        # Outputs that the log drops end here: without the log, something else would drop them last.
        self.dropped = deque(maxlen=2 * KEPT_PROGRAMS)

    def __getattr__(self, name):  # what the monitor asks
        return getattr(self.log, name)

    def timed(self, call, *arguments):
        time.perf_counter_ns()  # the first look at a clock takes a microsecond
        start = time.perf_counter_ns()
        call(*arguments)
        self.ns += time.perf_counter_ns() - start

    def enter(self, fingerprint):
        self.timed(self.log.enter, fingerprint)

    def keep(self, end):
        self.dropped.append(end)
        self.timed(self.log.keep, end)

    def end_call(self):
        self.timed(self.log.end_call)


log, no_log = backend.programs, NoLog()


def short_watched():
    watch(poll_seconds)
    backend.programs = log
    return short_step(x)


def short_unwatched():
    watch(3600.0)
    backend.programs = no_log
    return short_step(x)


def agreement():
    watch(poll_seconds)
    backend.extremes(1, "benchmark")
    return np.zeros(())


def seen():
    watch(poll_seconds)
    return step(x)


@contextlib.contextmanager
def on_screen(contender):
    """Run `jaxmpi top` in its own terminal, started by rank 0, for the turns of `seen`."""
    if contender is not seen or report.world.rank:
        jaxmpi.barrier()
        yield
        return
    ours, theirs = pty.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "jaxmpi", "top"], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    drained = threading.Thread(target=drain, args=(ours,), daemon=True)
    drained.start()
    time.sleep(3.0)  # until it has started
    jaxmpi.barrier()
    yield
    top.kill()
    top.wait()
    drained.join()
    os.close(ours)


def drain(terminal):
    with contextlib.suppress(OSError):  # it was closed on the other side
        while os.read(terminal, 65536):
            pass


contenders = {
    "unwatched": unwatched,
    "watched": watched,
    "the ranks agree": agreement,
    "seen by jaxmpi top": seen,
}
times = report.measure("step of 10 ms", contenders, seconds=10.0, turn=on_screen)
watch(poll_seconds)
report.ratio("step of 10 ms", "watched / unwatched", times["watched"], times["unwatched"])
report.ratio("step of 10 ms", "agreement / unwatched", times["the ranks agree"], times["unwatched"])
added = (
    np.median(times["watched"])
    - np.median(times["unwatched"])
    + np.median(times["the ranks agree"])
)
both = np.full_like(times["unwatched"], np.median(times["unwatched"]) + added)
report.ratio("step of 10 ms", "with both / without", both, times["unwatched"], at_most=1 + LIMIT)
report.ratio(
    "step of 10 ms",
    "seen by jaxmpi top / not",
    times["seen by jaxmpi top"],
    times["watched"],
    at_most=1 + LIMIT,
)

# the thread and the log by their own clocks, while the rank trains


def shares_of_time(call, step_seconds, timed):
    """Return the time of the monitor's thread and of the log per second, in rounds of a second."""
    (thread,) = [t for t in threading.enumerate() if t.name == MONITOR]
    clock = time.pthread_getcpuclockid(thread.ident)
    shares = []
    for _ in range(2 if args.quick else args.rounds):
        start, before = time.perf_counter(), time.clock_gettime(clock) + timed.ns / 1e9
        for _ in range(max(1, round(1.0 / step_seconds))):
            jax.block_until_ready(call())
        took = time.perf_counter() - start
        shares.append((time.clock_gettime(clock) + timed.ns / 1e9 - before) / took)
    everyone = np.array(jaxmpi.allgather_object(shares))
    return everyone.T


def measure_shares(case, call, step_seconds):
    """Report the share of the monitor's thread and of the log in a step."""
    watch(poll_seconds)
    backend.programs = timed = TimedLog(log)
    shares = shares_of_time(call, step_seconds, timed)
    backend.programs = log
    title = "monitor's thread and log, their time / time"
    report.ratio(case, title, shares, np.ones_like(shares), at_most=LIMIT)


measure_shares("step of 10 ms", lambda: step(x), STEP_SECONDS)

contenders = {"unwatched": short_unwatched, "watched": short_watched}
times = report.measure("step of 1 ms", contenders, seconds=10.0)
watch(poll_seconds)
backend.programs = log
report.ratio(
    "step of 1 ms",
    "watched / unwatched",
    times["watched"],
    times["unwatched"],
    at_most=1 + LIMIT,
)
measure_shares("step of 1 ms", lambda: short_step(x), SHORT_STEP_SECONDS)
report.finish()
