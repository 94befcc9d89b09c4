"""Ranks with the same program compile it once for all; others compile for themselves."""

import itertools
import os
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxmpi
from jaxmpi import _jaxcompat
from jaxmpi._jit import compile_once
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

EVENTS = Counter()
NUMBERS = itertools.count(1000)  # more than the other programs of this file send


@cache
def listen():
    jax.monitoring.register_event_listener(lambda name, **_: EVENTS.update([name]))


def compiled():
    """Count the programs that this process has compiled and not found in a cache."""
    at = "/jax/compilation_cache/"
    return EVENTS[f"{at}compile_requests_use_cache"] - EVENTS[f"{at}cache_hits"]


def new_number():
    """One that no program of these ranks has had, the same on all of them.

    Ranks serve several tests, and a program that sends as many numbers is one they have agreed on.
    """
    return jaxmpi.broadcast_object(next(NUMBERS))


def step_of(number):
    """A step that sends what no other has sent: so many numbers."""
    return jaxmpi.jit(
        lambda x: (
            jaxmpi.tree_allreduce(jnp.full(number, x.sum()), op="sum")[0] * number + jaxmpi.rank()
        )
    )


def new_step():
    number = new_number()
    return number, step_of(number)


def compiled_by(call):
    """Return how many programs each rank compiles in a call, and the call's result.

    No rank finds another's program in a folder.
    """
    listen()
    usual = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.config.update("jax_compilation_cache_dir", folder)
            compilation_cache.reset_cache()
            before = compiled()
            out = jaxmpi.local(call())
        finally:
            jax.config.update("jax_compilation_cache_dir", usual)
            compilation_cache.reset_cache()
    return jaxmpi.allgather_object(compiled() - before), out


def shares():
    """Return whether the ranks' modules are equal; mpi4jax's hold a communicator's address."""
    return session.current("test").transport.name != "mpi4jax"


def expected(number, sums):
    return number * sum(sums) + jaxmpi.rank()


@contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


def crowded(function):
    """Run a test as ranks that share their cores."""

    @wraps(function)
    def run():
        with replaced(session.current("test"), "cores_per_rank", 0.5):
            function()

    del run.__wrapped__  # which `run_ranks` would run instead
    return run


def check_once():
    number, step = new_step()
    for length in (3, 5):  # the second program of a step is new, too
        xs = [jnp.arange(float(length)) + rank for rank in range(jaxmpi.size())]
        counts, out = compiled_by(lambda xs=xs: step(xs[jaxmpi.rank()]))
        np.testing.assert_allclose(out, expected(number, [x.sum() for x in xs]))
        assert sum(counts) == (1 if shares() else jaxmpi.size())
        counts, out = compiled_by(lambda xs=xs: step(xs[jaxmpi.rank()]))
        np.testing.assert_allclose(out, expected(number, [x.sum() for x in xs]))
        assert not any(counts)


@run_ranks(2, 3, 4)
@crowded
def test_a_program_is_compiled_once_in_the_job():
    check_once()


@pytest.mark.slow
@run_ranks(2, 3, backend="xla")
@crowded
def test_a_program_is_compiled_once_in_the_job_xla():
    check_once()


@pytest.mark.slow
@run_ranks(2)
def test_each_rank_compiles_where_that_is_asked_for():
    before = os.environ.pop("JAXMPI_COMPILE", None)
    os.environ["JAXMPI_COMPILE"] = "each"
    try:
        number, step = new_step()
        counts, out = compiled_by(lambda: step(np.ones(3, np.float32)))
    finally:
        os.environ.pop("JAXMPI_COMPILE")
        os.environ.update({"JAXMPI_COMPILE": before} if before else {})
    assert counts == [1, 1]
    np.testing.assert_allclose(out, expected(number, [3, 3]))


@run_ranks(2)
def test_a_rank_with_a_core_of_its_own_compiles_for_itself():
    with replaced(session.current("test"), "cores_per_rank", 1.0):
        number, step = new_step()
        counts, out = compiled_by(lambda: step(np.ones(3, np.float32)))
    assert counts == [1, 1]
    np.testing.assert_allclose(out, expected(number, [3, 3]))


@run_ranks(3)
@crowded
def test_a_rank_with_another_program_compiles_it_for_itself():
    """A rank with a larger batch compiles for itself, and sends the same messages."""
    number, step = new_step()
    rank = jaxmpi.rank()
    counts, out = compiled_by(lambda: step(np.ones(7 if rank == 0 else 4, np.float32)))
    assert counts == ([1, 1, 0] if shares() else [1, 1, 1])
    np.testing.assert_allclose(out, expected(number, [7, 4, 4]))


@run_ranks(2)
@crowded
def test_a_compiled_program_is_not_that_of_other_arguments():
    number = new_number()
    step = jaxmpi.jit(lambda x: jaxmpi.tree_allreduce(x * number, op="sum"))
    for length in (3, 4):
        step(jnp.ones(length))
        assert step.eval_shape(jnp.ones(length + 4)).shape == (length + 4,)
    step(jnp.ones(5))
    assert "float32[6]" in str(jaxmpi.explain(step, jnp.ones(6)))
    step(jnp.ones(9))
    assert step.lower(jnp.ones(10)).compile()(jnp.ones(10)).shape == (10,)


@run_ranks(2, 3)
@crowded
def test_a_rank_that_compiles_anew_alone_waits_for_nobody():
    number, step = new_step()
    step(np.ones(3, np.float32))
    x = np.ones(3, np.float32)
    if jaxmpi.rank() == 0:
        x = jax.device_put(np.ones(5, np.float32), jax.devices()[0])
    counts, out = compiled_by(lambda: step(x))
    assert counts == [1] + [0] * (jaxmpi.size() - 1)
    np.testing.assert_allclose(out, expected(number, [5] + [3] * (jaxmpi.size() - 1)))


@run_ranks(3)
@crowded
def test_an_error_of_the_compiler_is_raised_on_all_ranks():
    if not shares():
        return

    def fail(lowered):
        raise ZeroDivisionError(f"as rank {jaxmpi.rank()} says")

    number, step = new_step()
    with (
        replaced(_jaxcompat, "compile_entry", fail),
        pytest.raises(ZeroDivisionError, match=r"^as rank 0 says$"),
    ):
        step(np.ones(3, np.float32))
    # the ranks go on together
    np.testing.assert_allclose(step(np.ones(3, np.float32)), expected(number, [3] * 3))


@run_ranks(2)
@crowded
def test_an_error_that_cannot_be_pickled_keeps_its_text():
    if not shares():
        return

    class LocalError(Exception):
        pass

    def fail(lowered):
        raise LocalError("no such option")

    _, step = new_step()
    with (
        replaced(_jaxcompat, "compile_entry", fail),
        pytest.raises(Exception, match="no such option") as raised,
    ):
        step(np.ones(3, np.float32))
    assert raised.type is jax.errors.JaxRuntimeError  # on all ranks


@run_ranks(2)
@crowded
def test_an_unknown_option_is_refused_on_all_ranks():
    step = jaxmpi.jit(
        lambda x: jaxmpi.tree_allreduce(x), compiler_options={"xla_no_such_option": 1}
    )
    with pytest.raises(Exception, match="xla_no_such_option") as raised:
        step(np.ones(3, np.float32))
    assert len(set(jaxmpi.allgather_object(f"{raised.type} {raised.value}"))) == 1


@run_ranks(3)
@crowded
def test_a_rank_that_cannot_lower_raises_alone_and_nobody_waits_for_it():
    """Such a rank goes on, since the others have its message by its next call."""
    if not shares():
        return
    number, step = new_step()

    def fail(lowered):
        raise OverflowError("cannot be lowered")

    if jaxmpi.rank() == 1:
        with (
            replaced(_jaxcompat, "module_digest", fail),
            pytest.raises(OverflowError, match="cannot be lowered"),
        ):
            step(np.ones(3, np.float32))
    np.testing.assert_allclose(step(np.ones(3, np.float32)), expected(number, [3] * 3))


@run_ranks(3)
@crowded
def test_ranks_of_different_kinds_compile_for_themselves_and_say_so_once():
    if not shares():
        return
    backend, said = session.current("test"), []
    machine = compile_once.machine_description() | (
        {"processor": "a slower one"} if jaxmpi.rank() == 2 else {}
    )
    reported, backend.registry.machines_reported = backend.registry.machines_reported, False
    try:
        with (
            replaced(compile_once, "machine_description", lambda: machine),
            replaced(compile_once, "_report", said.append),
        ):
            for _ in range(2):
                number, step = new_step()
                counts, out = compiled_by(lambda step=step: step(np.ones(3, np.float32)))
                assert counts == [1, 0, 1]
                np.testing.assert_allclose(out, expected(number, [3] * 3))
    finally:
        backend.registry.machines_reported = reported
    if jaxmpi.rank() == 2:
        (line,) = said
        assert line.startswith("processor is a slower one on rank 2 and ")
        assert line.endswith("compile for themselves.")
    else:
        assert not said


@run_ranks(2)
@crowded
def test_an_entry_that_cannot_be_loaded_is_compiled():
    if not shares():
        return
    number, step = new_step()
    with (
        replaced(_jaxcompat, "compile_entry", lambda lowered: b"damaged"),
        np.testing.suppress_warnings() as warned,
    ):
        warned.filter(UserWarning)
        counts, out = compiled_by(lambda: step(np.ones(3, np.float32)))
    assert counts == [1, 1]
    np.testing.assert_allclose(out, expected(number, [3] * 2))


@run_ranks(2)
@crowded
def test_a_program_with_a_callback_is_compiled_by_each_rank():
    """Each rank compiles a callback's program, which calls the Python of its own process."""
    number, seen = new_number(), []

    def fun(x):
        jax.debug.callback(lambda y: seen.append(float(y)), x.sum() + jaxmpi.rank())
        return jaxmpi.tree_allreduce(x.sum() * number, op="sum")

    counts, out = compiled_by(lambda: jaxmpi.jit(fun)(np.ones(3, np.float32)))
    jax.effects_barrier()
    assert counts == [1, 1] and seen == [3.0 + jaxmpi.rank()]
    np.testing.assert_allclose(out, number * 6)


@run_ranks(3)
@crowded
def test_ranks_that_wait_use_no_core():
    if not shares():
        return
    seconds = 2.0
    entry = _jaxcompat.compile_entry

    def slow(lowered):
        time.sleep(seconds)
        return entry(lowered)

    _, step = new_step()
    jaxmpi.barrier()
    with replaced(_jaxcompat, "compile_entry", slow):
        began, used = time.monotonic(), time.thread_time()
        step(np.ones(3, np.float32)).block_until_ready()
        assert time.monotonic() - began > seconds
        assert jaxmpi.rank() == 0 or time.thread_time() - used < 0.75 * seconds


@run_ranks(2)
def test_what_is_larger_than_a_piece_arrives():
    from jaxmpi._backends import asleep

    backend = session.current("test")
    data = os.urandom(1000)
    with replaced(asleep, "PIECE_BYTES", 64):
        got = backend.broadcast_asleep(data if jaxmpi.rank() == 0 else None, [0, 1], "data")
    assert got == jaxmpi.broadcast_object(data)


@run_ranks(1, 2, 3, 4)
def test_all_ranks_of_a_group_get_the_first_ones_object():
    if jaxmpi.size() == 1:
        return
    backend, rank = session.current("test"), jaxmpi.rank()
    for root in range(jaxmpi.size()):
        ranks = sorted(range(jaxmpi.size()), key=lambda r: (r != root, r))
        assert backend.broadcast_asleep(("from", rank), ranks, "an object") == ("from", root)


@run_ranks(2)
@crowded
def test_the_user_s_own_cache_is_used_beside_it():
    before = jax.config.jax_compilation_cache_dir
    assert before and os.path.samefile(before, os.environ["JAX_COMPILATION_CACHE_DIR"])
    if shares():
        number, step = new_step()
        step(np.ones(3, np.float32))
        listen()
        compiled_before = compiled()
        # the same module, of another function
        out = jaxmpi.local(step_of(number)(np.ones(3, np.float32)))
        assert compiled() == compiled_before
        np.testing.assert_allclose(out, expected(number, [3] * 2))
