"""The frames of another thread: which they are, and that a look at them is safe."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from jaxmpi._job.process import communicating_thread, stacks

LOOKS = """
import sys, threading, time
sys.setswitchinterval(1e-5)
import jax, jax.numpy as jnp, numpy as np
from jaxmpi._job.process import stacks

main, looks, over = threading.main_thread().ident, 0, time.monotonic() + float(sys.argv[1])

def look():
    global looks
    while time.monotonic() < over:
        for frame in stacks.frames(main):
            frame.f_code.co_filename.startswith("/"), frame.f_lineno
        looks += 1
        time.sleep(1e-4)

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)

thread = threading.Thread(target=look)
thread.start()
ws, x = [np.ones((4, 4), np.float32)] * 20, np.ones((2, 4), np.float32)
while time.monotonic() < over:
    jax.jit(lambda ws, x: jax.grad(loss)(ws, x)).lower(ws, x)
thread.join()
print("looks:", looks)
"""


def inner(ready, go):
    ready.set()
    go.wait(60)


def outer(ready, go):
    inner(ready, go)


@pytest.fixture
def thread():
    """Return a thread that stands in `inner`, called by `outer`."""
    ready, go = threading.Event(), threading.Event()
    started = threading.Thread(target=outer, args=(ready, go))
    started.start()
    ready.wait(60)
    yield started
    go.set()
    started.join()


def names(frames):
    return [frame.f_code.co_name for frame in frames]


def test_frames_are_those_of_the_thread_the_innermost_first(thread):
    found = names(stacks.frames(thread.ident))
    assert found[-5:] == ["inner", "outer", "run", "_bootstrap_inner", "_bootstrap"]
    assert names(stacks.frames_of_others()[thread.ident])[-5:] == found[-5:]
    own = names(stacks.frames(threading.get_ident()))
    assert own[:2] == ["frames", "test_frames_are_those_of_the_thread_the_innermost_first"]


def test_a_thread_that_runs_no_python_has_no_frames(thread):
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert stacks.frames(ended.ident) == [] == stacks.frames(0)
    assert not {ended.ident, threading.get_ident()} & set(stacks.frames_of_others())


class Array:
    """Something large that a thread holds."""


def test_a_look_keeps_nothing_alive():
    """Not until the next garbage collection either, which may never come."""

    def hold_and(look):
        array = Array()
        look()
        return weakref.ref(array)

    def look_from_a_thread():
        thread = threading.Thread(target=stacks.frames_of_others)
        thread.start()
        thread.join()

    own = threading.get_ident()
    gc.disable()
    try:
        for look in (look_from_a_thread, stacks.frames_of_others, lambda: stacks.frames(own)):
            assert hold_and(look)() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_looks_at_a_thread_that_traces_are_safe(seconds):
    """With a walk by `frame.f_back` in Python, CPython 3.11.7 crashes within seconds."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(seconds)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 100, done.stdout + done.stderr


def test_files_of_collectives_are_there():
    for folder in communicating_thread._COMMUNICATING:
        assert os.path.isdir(folder), folder
