"""A plain JAX program whose rank 1 fails, comes late, or seems to fail, as its argument says."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

how = sys.argv[1]
if how.endswith("beside mpi4py"):
    importlib.import_module("mpi4py.MPI")  # starts MPI
jax.distributed.initialize()
if how == "start" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(3)
if how == "before devices" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    raise ValueError("of rank 1")
n, rank = jax.process_count(), jax.process_index()
mesh = jax.make_mesh((n,), ("d",))
permutes = how.endswith("permute")
pairs = [(i, (i + 1) % n) for i in range(n)]
program = jax.jit(
    jax.shard_map(
        lambda x: jax.lax.ppermute(x, "d", pairs) if permutes else jax.lax.psum(x, "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
    )
)


def print(*texts):
    """Print without waiting; what runs beside the program must not call it."""
    sys.stdout.write(" ".join(map(str, texts)) + "\n")
    sys.stdout.flush()


def caught():
    """Call sys.exit, and go on."""
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def show_error():
    """Show an error as Python does at the end of a program."""
    sys.excepthook(ValueError, ValueError("of a child"), None)
    sys.exit(1)


def run_forked(act):
    """Call a function in a forked child, which fails."""
    child = multiprocessing.get_context("fork").Process(target=act)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of threads
        child.start()
    child.join()
    assert child.exitcode


for i in range(10):
    items = 4
    if i == 5 and rank == 1:
        if how.startswith("raise"):
            raise ValueError("of rank 1")
        if how == "exit":
            sys.exit(3)
        if how == "exit in try":
            try:
                sys.exit(3)
            finally:
                print("cleans up")
        if how == "exit()":
            exit(3)
        if how == "text":
            sys.exit("rank 1 gives up")
        if how.startswith("leave"):
            sys.exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "late":
            time.sleep(4)
        if how == "other":
            items = 5
        if how == "caught":
            caught()
        if how == "thread exits":
            thread = threading.Thread(target=sys.exit, args=(3,))
            thread.start()
            thread.join()
        if how == "child raises":
            run_forked(show_error)
        if how == "child exits":
            run_forked(lambda: sys.exit(3))
    local = np.full((1, items), rank + 1, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), local)
    y = np.asarray(program(x).addressable_data(0))
    assert (y == ((rank - 1) % n + 1 if permutes else n * (n + 1) / 2)).all()
print("done")
if how == "caught at the end":
    caught()
if how == "caught, and exit 0":
    caught()
    raise SystemExit(0)
