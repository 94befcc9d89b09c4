"""Two ranks send two messages ahead that nobody takes, and end; rank 1 comes late to them."""

import sys
import time

import jax
import jax.numpy as jnp

import jaxmpi
from jaxmpi._backends import native_calls
from jaxmpi._backends.base import Collective
from jaxmpi._backends.groups import Groups
from jaxmpi._world import session

LATE_SECONDS = 1.5  # more than a rank waits at its end before it tells the others
LENGTH = 3_000_000  # between nodes, such a message is in progress for a while

case = sys.argv[1]
rank = jaxmpi.init().rank
ranks, call = session.current("script"), Collective("allreduce", "sum")
backend, everyone_leaves = ranks.transport, ranks.everyone_leaves
if case == "finalize":
    # Not the transport of all ranks, on which `finalize` compares the ranks behind the messages.
    second = Groups.of([range(2)], "second")
    backend._communicators[second] = backend._mpi.COMM_WORLD.Dup()
    backend._transports[second] = backend._opened.open(backend._communicators[second], second[0])
    call = call._replace(groups=second)

x = jnp.ones(LENGTH)
send = jax.jit(lambda x: native_calls.send_ahead([x], call, backend, 1))
jax.block_until_ready(send(x))  # it is compiled, so that nothing is late below but rank 1
jaxmpi.barrier()
if rank == 1:
    time.sleep(LATE_SECONDS)
all_messages = backend.native.messages()[0] + 2
for _ in range(1 if case == "missing" and rank == 1 else 2):
    jax.block_until_ready(send(x))


def leave():
    begun_and_ended = backend.native.messages()
    print("leaves behind", all_messages - min(begun_and_ended), "messages", flush=True)
    return everyone_leaves()


if case == "script":  # `finalize` compares the ranks by one message more
    ranks.everyone_leaves = leave
if case == "finalize":
    jaxmpi.finalize()
print("ended on", rank, flush=True)
