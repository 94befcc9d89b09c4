"""JAX in this process: backends, tracing, compiling, dispatch, `jax.pmap` and effects."""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType

import jax
from jax._src import config, core, dispatch, xla_bridge

from jaxmpi._job.process import stacks

try:
    from jax._src import distributed
    from jax._src.lib import _jax

    _ = (
        xla_bridge.make_cpu_client,
        xla_bridge.register_backend_factory,
        _jax.make_gloo_tcp_collectives,
    )
except (ImportError, AttributeError):
    distributed = _jax = None  # type: ignore[assignment]

try:
    from jax._src import pmap as pmap_module

    _ = pmap_module._mapped_axis_size
except (ImportError, AttributeError):  # a pmap is not noticed
    pmap_module = None


# Returns the part of JAX's configuration on which a trace depends, such as x64 and the default
# precision of a matrix product, as `jax.jit` has it in its keys. A JAX without it tells x64 alone.
trace_context: Callable[[], object] = getattr(
    config, "trace_context", lambda: jax.config.jax_enable_x64
)

# returns whether the caller is outside of traced functions
at_top_level: Callable[[], bool] = core.trace_state_clean


def tracing() -> bool:
    """Return whether the caller is inside a traced function (`jit`, `grad`, `vmap`, ...)."""
    return not at_top_level()


def binding_axes(axes: Mapping[str, int]) -> AbstractContextManager[None] | None:
    """Return a context in which `jax.jit` traces with named axes of these sizes.

    It is None if this JAX has changed.
    """
    bind = getattr(core, "extend_axis_env_nd", None)
    return bind and bind([*axes.items()])


def dispatch_in_c(jitted: Callable[..., object]) -> None:
    """Make JAX dispatch a `jax.jit` from C++ again.

    After a first trace that raises, JAX dispatches calls with such arguments from Python.
    """
    getattr(jitted, "_clear_cache", lambda: None)()


def backends_started() -> bool:
    """Return whether JAX has started a backend, as the first array or device query does."""
    return xla_bridge.backends_are_initialized()


def started_without(index: str, option: str) -> bool:
    """Return whether JAX has started, and with other GPUs than the one that it is to use.

    Args:
      index: the index of the GPU that it is to use.
      option: the name of JAX's option for the GPU; it keeps the value from before the start.
    """
    return xla_bridge.backends_are_initialized() and jax.config.values.get(option) != index


def gloo_listens_at(host: str) -> None:
    """Make JAX's collectives on CPUs listen at an address of this host, not at its host name.

    Call it before JAX's backend starts. A JAX without these functions uses the host name.
    """

    def make_client() -> object:
        client = distributed.global_state.client
        if client is None or jax.config.jax_cpu_collectives_implementation != "gloo":
            return xla_bridge.make_cpu_client()
        return xla_bridge.make_cpu_client(
            _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        )

    if _jax is not None:
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def watch_communication() -> Callable[[], bool]:
    """Return a function that tells whether this process waits for a program with ordered effects.

    Any thread may call it. Such a program is either being dispatched by some thread (small ones run
    during dispatch), or it runs and its token is not ready. The tokens are in the runtime token set
    of the thread that called `watch_communication`.
    """
    # a `threading.local`: its `__dict__` is the dictionary of this thread
    token_set = dispatch.runtime_tokens.__dict__

    def waits() -> bool:
        if any(map(_dispatches, stacks.frames_of_others().values())):
            return True
        return any(
            not token._buf.is_ready()
            for token in list(token_set.get("current_tokens", {}).values())
        )

    return waits


def watch_pmap(report: Callable[[], None]) -> None:
    """Call `report` at each call of a function that `jax.pmap` has returned, now or earlier.

    These functions are plain closures that look up a function of JAX's module by its name when they
    are called, so that function is replaced. A second call of `watch_pmap` changes nothing.
    """
    if pmap_module is None or hasattr(pmap_module._mapped_axis_size, "reports"):
        return
    mapped_axis_size = pmap_module._mapped_axis_size

    @functools.wraps(mapped_axis_size)
    def reporting(*args: object, **kwargs: object) -> object:
        report()
        return mapped_axis_size(*args, **kwargs)

    reporting.reports = report  # type: ignore[attr-defined]
    pmap_module._mapped_axis_size = reporting


def _dispatches(frames: Sequence[FrameType]) -> bool:
    for frame in frames:
        executable = (
            frame.f_locals.get("self") if frame.f_code.co_filename.endswith("pxla.py") else None
        )
        if getattr(executable, "ordered_effects", None):
            return True
    return False


def compiling(thread: int | None) -> bool:
    """Return whether a thread is inside XLA's compiler."""
    names = {frame.f_code.co_name for frame in stacks.frames(thread or 0)}
    return not names.isdisjoint(("backend_compile_and_load", "backend_compile"))


def callbacks() -> dict[int, FrameType]:
    """Return the other threads that run a callback of a program, each with the call's frame.

    These are `pure_callback`, `io_callback`, `debug.callback` and `debug.print`. As long as the
    frame is kept, no other call has the same one.
    """
    folder, found = os.path.dirname(jax.__file__) + os.sep, {}
    for thread, frames in stacks.frames_of_others().items():
        for frame in frames:
            code = frame.f_code
            if code.co_name == "_wrapped_callback" and code.co_filename.startswith(folder):
                found[thread] = frame  # the outermost one
    return found


def leave_as_it_is() -> None:
    """Keep JAX's objects alive when this process, a forked child, ends.

    Their destructors would wait for threads that exist in the parent only.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            for value in list(vars(module).values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def wait_for_effects() -> None:
    """Wait for effects as `jax.effects_barrier` does, and forget the errors of failed programs.

    The readers of their outputs get these errors.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        # otherwise every later program with effects of this thread would fail, too
        dispatch.runtime_tokens.clear()
