"""The order of messages at once, started and sent ahead, on one transport and on two.

Programs of random messages call the handlers themselves, with other delays on each rank. The record
of the messages shows when each was in progress: it must follow the rule of native/message_queue.h.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi._backends import native_calls, sent_ahead
from jaxmpi._backends.base import Collective, Message
from jaxmpi._backends.groups import Groups
from jaxmpi._job.launch.pool import Pool, Task
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("JAXMPI_TRANSPORT") == "mpi4jax", reason="these are of the native transport"
)
CALLS = 200
DELAY_SECONDS = 5e-4
LENGTHS = (1, 7, 30_000)  # of the arrays: the last has several chunks
MISMATCH = (jaxmpi.RankMismatchError, jax.errors.JaxRuntimeError)


def collectives(transports):
    """Return the backend, and an allreduce on each transport, of which all have all ranks."""
    backend = session.current("test").transport
    everyone = Collective("allreduce", "sum")
    if transports == 1:
        return backend, [everyone]
    second = Groups.of([range(jaxmpi.size())], "second")
    if not backend.connects(everyone._replace(groups=second)):
        backend._communicators[second] = backend._mpi.COMM_WORLD.Dup()
        backend._transports[second] = backend._opened.open(
            backend._communicators[second], second[0]
        )
    return backend, [everyone, everyone._replace(groups=second)]


class Op(NamedTuple):
    """An operation of a random program."""

    kind: str  # "at once" | "start" | "wait" | "send" | "take"
    transport: int = 0
    length: int = 1
    fingerprint: int = 0
    delayed: bool = False  # whether each rank computes for another time before


def random_ops(seed, transports):
    """Return the operations of a program, which takes most messages of the call before once."""
    rng, ops, started = np.random.default_rng(seed), [], 0
    kinds = ["at once", "start", "start", "wait", "send", "send"]
    for number in range(rng.integers(6, 14)):
        kind = str(rng.choice(kinds))
        if kind == "wait" and not started:
            continue
        started += (kind == "start") - (kind == "wait")
        ops.append(
            Op(
                kind,
                int(rng.integers(transports)),
                int(rng.choice(LENGTHS)),
                1000 * (seed + 1) + number,
                bool(rng.integers(2)),
            )
        )
    ops += [Op("wait")] * started
    for sent in [op for op in ops if op.kind == "send"]:
        if rng.integers(8):
            take = sent._replace(kind="take", fingerprint=sent.fingerprint + 100)
            ops.insert(int(rng.integers(len(ops) + 1)), take)
    return ops


def operand(op, x):
    """The array of an operation: of the argument of the call, of the rank, and of the message."""
    return jnp.full(op.length, 1.0) * x + op.fingerprint % 100


def build(ops, backend, calls, rng):
    """Return a jitted call, which maps x, and x and the numbers before, to sums and numbers."""

    def sleep(x):
        time.sleep(rng.uniform(0, DELAY_SECONDS) * (1 + jaxmpi.rank()))
        return x

    def call(x, before, numbers):
        sums, waits, sent = [], [], []
        for op in ops:
            of = before if op.kind == "take" else x
            if op.delayed:
                of = jax.pure_callback(sleep, of, of)
            xs, on = [operand(op, of)], (calls[op.transport], backend, op.fingerprint)
            match op.kind:
                case "at once":
                    sums += native_calls.run(xs, *on)
                case "start":
                    first = not waits
                    _, wait = native_calls.start(xs, *on, bucket=False, first=first)
                    waits.append(wait)
                case "wait":
                    sums += waits.pop(0)([])
                case "send":
                    sent.append(native_calls.send_ahead(xs, *on))
                case "take":
                    sends = [op.fingerprint for op in ops if op.kind == "send"]
                    number = numbers[sends.index(op.fingerprint - 100)]
                    sums += native_calls.take(xs, number, *on)
        return sums, sent

    return jax.jit(call)


def expected(ops, x, before):
    """Return Σ_r of each result of a call; the ranks have (r + 1) x."""
    size, sums, started = jaxmpi.size(), [], []
    for op in ops:
        total = (before if op.kind == "take" else x) * size * (size + 1) / 2
        value = np.full(op.length, total + size * (op.fingerprint % 100), np.float32)
        if op.kind == "start":
            started.append(value)
        elif op.kind != "send":
            sums.append(started.pop(0) if op.kind == "wait" else value)
    return sums


def messages_of(ops, first):
    """Return the operations of a call that send a message; only in the first, takes find none."""
    return [op for op in ops if op.kind in ("at once", "start", "send", *["take"] * first)]


def holds_up(earlier, later):
    """Return whether a message must have ended before a later one begins."""
    return earlier.kind != "send" or later.kind == "send" or earlier.transport == later.transport


def check_order(sent, events):
    """Check the record of messages, which were asked for in the order of `sent`.

    Returns:
      How many began while one that was sent ahead before them was in progress.
    """
    assert len(events) == len(sent)
    events = {k: [e for e in events if e[1] == k] for k in {op.fingerprint for op in sent}}
    spans = [events[op.fingerprint].pop(0) for op in sent]  # those of one fingerprint: in order
    beside = 0
    for i, later in enumerate(sent):
        for k in range(max(0, i - 60), i):
            in_progress = spans[k][5] > spans[i][3]
            assert not (holds_up(sent[k], later) and in_progress), (k, sent[k], i, later)
            beside += in_progress
    return beside


def check_programs(transports, seeds=range(4)):
    """Run random programs by turns: right sums, and an order that follows the rule."""
    backend, calls = collectives(transports)
    rng = np.random.default_rng(jaxmpi.rank())
    for seed in seeds:
        ops = random_ops(seed, transports)
        call = build(ops, backend, calls, rng)
        sends = sum(op.kind == "send" for op in ops)
        numbers, before, sent = [sent_ahead.none()] * sends, 0.0, []
        first = backend.native.messages()[0]
        for turn in range(CALLS // len(seeds)):
            x = float(turn % 5 + 1)
            of_rank = jaxmpi.rank() + 1
            sums, numbers = call(x * of_rank, before * of_rank, numbers)
            for got, want in zip(sums, expected(ops, x, before), strict=True):
                np.testing.assert_array_equal(got, want)
            sent += messages_of(ops, first=turn == 0)
            before = x
        jaxmpi.barrier()
        everyone = jaxmpi.allgather_object([tuple(map(int, number)) for number in numbers])
        assert everyone == [everyone[0]] * jaxmpi.size()
        # what was sent ahead in the last call may still be in progress
        while backend.native.messages()[1] < backend.native.messages()[0]:
            time.sleep(1e-3)
        ours = {op.fingerprint for op in sent}
        events = [e for e in backend.native.events() if e[0] >= first and e[1] in ours]
        beside = check_order(sent, events)
        assert transports > 1 or not beside
        yield beside


@pytest.mark.parametrize("transports", [1, 2])
@run_ranks(2, 3)
def test_messages_of_all_kinds_are_carried_out_in_their_order(transports):
    beside = sum(check_programs(transports))
    # a message sent ahead does not hold up another transport
    assert (beside > 0) == (transports > 1), beside


def between_nodes():
    for transports in (1, 2):
        sum(check_programs(transports))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_between_nodes_are_carried_out_in_their_order(ranks, monkeypatch):
    monkeypatch.setenv("JAXMPI_NODE_RANKS", "1")
    job = Pool(ranks, "mpi")
    try:
        job.run(Task(__file__, "between_nodes", {}, 300.0))
    finally:
        job.end()


# failures

X = 2.0
DIFFER = partial(pytest.raises, MISMATCH, match="Every rank must make the same calls")


def message(call, name):
    """Return the arguments of a call of the handlers that describe a message of this name."""
    backend = session.current("test").transport
    return call, backend, backend._fingerprint(call, Message(name))


def send(call, name, items=1):
    """Send a message ahead, and return its number."""
    ahead = jax.jit(lambda x: native_calls.send_ahead([x], *message(call, name)))
    return ahead(jnp.full(items, X, jnp.float32))


def take(call, number, items=1):
    """Take the result of a message."""
    taken = jax.jit(lambda x, number: native_calls.take([x], number, *message(call, "taken")))
    return float(taken(jnp.full(items, X, jnp.float32), number)[0][-1])


def at_once(call):
    """Return the sum of X over the ranks."""
    run = jax.jit(lambda x: native_calls.run([x], *message(call, "at once")))
    return float(run(jnp.float32(X))[0])


def start_and_wait(call):
    """Return the sum of X over the ranks, by a start and a wait."""

    def started(x):
        what = message(call, "started")
        _, wait = native_calls.start([x], *what, bucket=False, first=True)
        return wait([])

    return float(jax.jit(started)(jnp.float32(X))[0])


SUM = X * 2  # on two ranks


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("waits", ["take it", "take", "at once", "start", "compare"])
@run_ranks(2)
def test_a_failure_reaches_the_next_wait_behind_it(waits, late):
    """The ranks differ in a message sent ahead; the next one waits behind it, or comes later."""
    _, (everyone, second) = collectives(2)
    for call in (everyone, second):
        jaxmpi.barrier()
        time.sleep(0.1 * (jaxmpi.rank() == late))
        failing = send(call, f"of rank {jaxmpi.rank()}")
        behind = send(second, "behind")
        with DIFFER():
            match waits:
                case "take it":
                    take(call, failing)
                case "take":
                    take(second, behind)
                case "at once":
                    at_once(call)
                case "start":
                    start_and_wait(call)
                case "compare":
                    take(call, failing) if call is second else jaxmpi.barrier()
        # the failure is given once, and what was behind it is carried out by those who take it
        assert [take(call, failing), take(second, behind)] == [SUM, SUM]
        assert [at_once(everyone), at_once(second), start_and_wait(second)] == [SUM] * 3


@run_ranks(2)
def test_a_failure_of_another_transport_waits_for_its_take():
    _, (everyone, second) = collectives(2)
    failing = send(second, f"of rank {jaxmpi.rank()}")
    time.sleep(0.2 * jaxmpi.rank())
    for _ in range(3):
        assert [at_once(everyone), start_and_wait(everyone)] == [SUM] * 2
        time.sleep(0.1 * (1 - jaxmpi.rank()))
    with DIFFER():
        take(second, failing)
    assert take(second, failing) == SUM


@run_ranks(2)
@pytest.mark.parametrize(("items", "kept"), [(1, 10), (1 << 22, 8)])
def test_of_large_messages_that_nobody_takes_eight_of_a_place_are_kept(items, kept):
    """Those that are kept are taken; the others are carried out anew, on all ranks."""
    backend, (everyone,) = collectives(1)
    sent = 10
    numbers = [send(everyone, "alike", items) for _ in range(sent)]
    others = [send(everyone, f"other {i}") for i in range(3)]
    assert at_once(everyone) == SUM  # behind all of them
    begun, _ = backend.native.messages()
    got = [take(everyone, number, items) for number in numbers]
    got += [take(everyone, number) for number in others]
    assert got == [SUM] * (sent + 3)
    assert backend.native.messages()[0] == begun + sent - kept


@run_ranks(2)
def test_times_of_a_message_are_none_until_they_have_come():
    ranks, (_, (everyone,)) = session.current("test"), collectives(1)
    jaxmpi.barrier()
    begun = ranks.transport.native.messages()[0]
    time.sleep(0.5 * jaxmpi.rank())
    number = send(everyone, "of rank 1 later")
    while ranks.transport.native.messages()[0] == begun:
        time.sleep(1e-3)
    event = ranks.events()[-1]
    assert jaxmpi.rank() or (event.all_entered_ns, event.done_ns) == (None, None)
    assert take(everyone, number) == SUM
    event = ranks.events()[-1]
    assert event.entered_ns <= event.all_entered_ns <= event.done_ns


@run_ranks(2)
def test_a_started_message_holds_up_other_transports():
    """Rank 0 has a message of a group behind one that all ranks start, and rank 1 has not.

    If rank 0 began it before they have compared the started one, it would wait there for rank 1,
    which waits for rank 0, to describe the difference.
    """
    _, (everyone, second) = collectives(2)

    def call(x):
        what = message(everyone, f"of rank {jaxmpi.rank()}")
        _, wait = native_calls.start([x], *what, bucket=False, first=True)
        if jaxmpi.rank() == 0:
            (x,) = native_calls.run([x], *message(second, "between"))
        return wait([])[0] + x

    began = time.monotonic()
    with DIFFER():
        jax.block_until_ready(jax.jit(call)(jnp.float32(1)))
    assert time.monotonic() - began < 20
    assert [at_once(everyone), at_once(second)] == [SUM, SUM]


# the end of a job

SCRIPT = Path(__file__).with_name("closed_queue_script.py")


@pytest.mark.parametrize("waits", ["take", "at once", "start"])
def test_a_closed_job_ends_what_waits_in_its_queue(waits):
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(SCRIPT), waits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stdout.count("ended on") == 2, done.stdout + done.stderr


LEFT_AHEAD = Path(__file__).with_name("left_ahead_script.py")


def end_with_messages_ahead(case, **environ):
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(LEFT_AHEAD), case]
    environ = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environ)


@pytest.mark.parametrize(
    ("case", "environ"),
    [
        ("script", {}),
        pytest.param("script", {"JAXMPI_NODE_RANKS": "1"}, marks=pytest.mark.slow),
        pytest.param("finalize", {"JAXMPI_NODE_RANKS": "1"}, marks=pytest.mark.slow),
    ],
)
def test_a_job_ends_well_with_messages_that_nobody_takes(case, environ):
    done = end_with_messages_ahead(case, **environ)
    assert done.returncode == 0 and done.stdout.count("ended on") == 2, done.stdout + done.stderr
    if case == "script":
        assert done.stdout.count("leaves behind 0 messages") == 2, done.stdout


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_message_ahead_ends_the_job():
    done = end_with_messages_ahead("missing")
    assert done.returncode, done.stdout + done.stderr
    assert "rank 1 has exited while this rank waits for it in" in done.stderr, done.stderr
