"""The garbage collector while a program is traced."""

import gc
import os
import threading
import warnings

import jax.numpy as jnp
import pytest

import jaxmpi
from jaxmpi._job.process.garbage import collection_paused


@pytest.fixture(params=[True, False])
def was_on(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collection_is_as_before_after_a_pause(was_on):
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == was_on
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled() == was_on


def test_pauses_of_two_threads_overlap(was_on):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collection_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collection_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled() == was_on


def test_no_collection_while_a_step_is_traced():
    seen = []

    @jaxmpi.jit
    def step(x):
        seen.append(gc.isenabled())
        return jaxmpi.tree_allreduce(x)

    with jaxmpi.simulate(2):
        step.trace(jaxmpi.PerRank(jnp.ones((2, 3))))
    assert seen and not any(seen)
    assert gc.isenabled()


def test_a_child_that_is_forked_in_a_pause_collects_again(was_on):
    """The thread that has paused the collector is not there to end its pause."""
    right = []
    with collection_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of threads
        child = os.fork()
        right.append(gc.isenabled() == (was_on and not child))
    if not child:  # its pause has ended already
        right.append(gc.isenabled() == was_on)
        with collection_paused():
            right.append(not gc.isenabled())
        right.append(gc.isenabled() == was_on)
        os._exit(0 if all(right) else 1)
    assert all(right) and gc.isenabled() == was_on
    assert os.waitpid(child, 0)[1] == 0
