"""Two ranks close their job while a message of rank 0 waits behind one that is in progress."""

import importlib
import sys
import threading
import time

import jax
import jax.numpy as jnp

import jaxmpi
from jaxmpi._backends import native_calls
from jaxmpi._backends.base import Collective
from jaxmpi._world import session

LATE_SECONDS = 2.0  # for which rank 0 is in its first message alone

waits = sys.argv[1]
native = importlib.import_module("jaxmpi._native")
rank = jaxmpi.init().rank
ranks, call = session.current("script"), Collective("allreduce", "sum")
backend = ranks.transport


@jax.jit
def send(x):
    return native_calls.send_ahead([x], call, backend, 1)


@jax.jit
def send_another(x):
    return native_calls.send_ahead([x], call, backend, 2)


@jax.jit
def take(x, number):
    return native_calls.take([x], number, call, backend, 3)


@jax.jit
def at_once(x):
    return native_calls.run([x], call, backend, 4)


@jax.jit
def start(x):
    _, wait = native_calls.start([x], call, backend, 5, bucket=False, first=True)
    return wait([])


x, caught = jnp.float32(1), []
waiting_calls = {
    "take": lambda: take(x, send_another(x)),
    "at once": lambda: at_once(x),
    "start": lambda: start(x),
}


def wait_behind():
    try:
        jax.block_until_ready(waiting_calls[waits]())
    except jax.errors.JaxRuntimeError as error:
        caught.append(str(error))


# all are compiled, so that they wait at once below
jax.block_until_ready(take(x, send(x)))
wait_behind()
assert not caught, caught
jaxmpi.barrier()
if rank == 0:
    jax.block_until_ready(send(x))
    waiting = threading.Thread(target=wait_behind)
    waiting.start()
    time.sleep(LATE_SECONDS / 2)
    assert waiting.is_alive()
    began = time.monotonic()
    closing = threading.Thread(target=native.close)
    closing.start()
    # what has not begun ends now, and what is in progress when rank 1 has come
    waiting.join(LATE_SECONDS / 4)
    assert not waiting.is_alive() and "of a job that has ended" in caught[0], caught
    closing.join()
    assert time.monotonic() - began > LATE_SECONDS / 4
else:
    time.sleep(LATE_SECONDS)
    jax.block_until_ready(take(x, send(x)))
    native.close()
print("ended on", rank, flush=True)
# as `finalize` does, which would compare the ranks by a transport that is closed
running = session._session
assert running is not None and running.monitor is not None
ranks._objects.Barrier()  # or the monitor of one rank would see the other one leave too early
running.monitor.leave()
running.backend.close()
session._session = None
