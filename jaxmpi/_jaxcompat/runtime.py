"""What JAX does in this process: how it starts, what it traces, compiles and waits for."""

import ctypes
import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType

import jax
from jax._src import core, dispatch, xla_bridge

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

__all__ = [
    "at_top_level",
    "backends_started",
    "binding_axes",
    "compiling",
    "dispatch_in_c",
    "gloo_listens_at",
    "leave_as_it_is",
    "started_without",
    "tracing",
    "wait_for_effects",
    "watch_communication",
    "watch_pmap",
]


# whether the caller stands outside of traced functions
at_top_level: Callable[[], bool] = core.trace_state_clean


def tracing() -> bool:
    """Whether the caller stands inside a traced function (`jit`, `grad`, `vmap`, ...)."""
    return not at_top_level()


def binding_axes(axes: Mapping[str, int]) -> AbstractContextManager[None] | None:
    """Where `jax.jit` traces with named axes of these sizes, as `jax.make_jaxpr` does; None where this JAX has changed."""
    bind = getattr(core, "extend_axis_env_nd", None)
    return bind and bind([*axes.items()])


def dispatch_in_c(jitted: Callable[..., object]) -> None:
    """Have JAX dispatch a `jax.jit` in C++ again, for arguments whose first trace has raised: it leaves these to Python."""
    getattr(jitted, "_clear_cache", lambda: None)()


def backends_started() -> bool:
    """Return whether JAX has started a backend, as the first array or question for devices does."""
    return xla_bridge.backends_are_initialized()


def started_without(index: str, option: str) -> bool:
    """Whether JAX has started, and looks no more at what GPU it is to take, with another one or all.

    Args:
      index: of the GPU.
      option: the name of JAX's option for it, which is also read after the start.
    """
    return xla_bridge.backends_are_initialized() and jax.config.values.get(option) != index


def gloo_listens_at(host: str) -> None:
    """Have JAX's collectives on CPUs listen at an address of this host, and not at whatever its name resolves to.

    Before JAX's backend starts. A JAX without these functions keeps to the name.
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
    """Return a function that any thread may call: does this process wait for a program with ordered effects?

    Such a program is either being dispatched by some thread (small ones run on it), or it runs and
    its token, which the runtime token set of the thread that called `watch_communication` holds, is
    not ready yet.
    """
    # a `threading.local`: this thread's own dictionary
    token_set = dispatch.runtime_tokens.__dict__

    def waits() -> bool:
        if any(_dispatches(frame) for frame in sys._current_frames().values()):
            return True
        return any(
            not token._buf.is_ready()
            for token in list(token_set.get("current_tokens", {}).values())
        )

    return waits


def watch_pmap(report: Callable[[], None]) -> None:
    """Have `report` called at each call of what `jax.pmap` has returned, before this or after it, in any module.

    All these functions, as plain closures, look a function of JAX's module up by its name when they
    are called; another one is put in its place. A second call of `watch_pmap` changes nothing.
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


def _dispatches(frame: FrameType | None) -> bool:
    while frame is not None:
        executable = (
            frame.f_locals.get("self") if frame.f_code.co_filename.endswith("pxla.py") else None
        )
        if getattr(executable, "ordered_effects", None):
            return True
        frame = frame.f_back
    return False


def compiling(thread: int | None) -> bool:
    """Whether a thread stands inside of XLA's compiler."""
    frame = sys._current_frames().get(thread or 0)
    while frame and frame.f_code.co_name not in ("backend_compile_and_load", "backend_compile"):
        frame = frame.f_back
    return frame is not None


def leave_as_it_is() -> None:
    """Keep JAX's objects when this process, a forked child, ends: they would wait for threads that only its parent has."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            for value in list(vars(module).values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def wait_for_effects() -> None:
    """As `jax.effects_barrier`; programs that failed have told whoever reads their outputs, and are forgotten here."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        # or every later program with effects of this thread would fail, too
        dispatch.runtime_tokens.clear()
