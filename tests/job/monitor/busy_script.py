"""A job whose rank 0 works longer than the others wait: busy_script.py HOW; see test_busy.py."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import jaxmpi
from jaxmpi._job.process.joining import peers

how, init = sys.argv[1], jaxmpi.init  # is imported here
launched = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
SECONDS = 12.0


def hold_the_gil():
    """Call C code that never lets another thread run Python, for SECONDS."""
    start = time.monotonic()
    sum(range(10**7))
    sum(range(int(1e7 * SECONDS / (time.monotonic() - start))))


@jaxmpi.busy("evaluating")
def evaluate():
    time.sleep(SECONDS)


if how.startswith("init") and launched == 0:
    with jaxmpi.busy("tokenizing"):
        if how == "init, stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while not (1 in peers() and peers()[1].called):
            time.sleep(0.05)
        time.sleep(1.5 * SECONDS)
    if how == "init, then nothing":
        time.sleep(1000)

rank = init().rank
step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x, "sum"))
step(np.float32(rank))

if rank == 0:
    if how == "decorator":
        evaluate()
    elif how == "thread":
        with jaxmpi.busy("the epoch's end"):
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
    elif how == "gil":
        with jaxmpi.busy("tokenizing"):
            hold_the_gil()
    elif how == "fork":
        with jaxmpi.busy("tokenizing"):
            child = os.fork()
            if not child:
                time.sleep(SECONDS)
                os._exit(0)
            os.waitpid(child, 0)
    elif how == "limit":
        with jaxmpi.busy("tokenizing", limit_seconds=2):
            time.sleep(1000)
    elif not how.startswith("init"):
        with jaxmpi.busy("tokenizing\nthe text"):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "raises":
                raise ValueError("no such file")
            subprocess.run(["sleep", str(SECONDS)], check=True)
        if how == "then work":
            time.sleep(3)  # less than what the others wait
        if how == "then nothing":
            time.sleep(1000)

if how == "object":
    assert jaxmpi.broadcast_object({"vocabulary": 100} if rank == 0 else None) == {
        "vocabulary": 100
    }
elif how == "step":
    total = step(np.float32(rank + 1))
    assert total == jaxmpi.size() * (jaxmpi.size() + 1) / 2
else:
    jaxmpi.barrier()
print("went on", flush=True)
