"""The one file that touches `jax._src`; `TESTED` names the versions of JAX that it was tested with."""

import contextlib
import ctypes
import functools
import hashlib
import inspect
import io
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import jax
from jax._src import ad_checkpoint, core, dispatch, source_info_util, util, xla_bridge
from jax._src.lax import parallel
from jax._src.lax.lax import _convert_element_type
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.ffi import ffi_lowering
from jax.interpreters import ad, mlir

try:
    from jax._src import effects
    from jax._src.interpreters.mlir import TokenSet
except ImportError:  # a JAX in which they moved: programs keep their effects, and are dispatched more slowly
    effects = TokenSet = None  # type: ignore[assignment, misc]

try:
    from jax._src.interpreters.mlir import ir_consts, jaxpr_subcomp

    if not {"dim_var_values", "const_lowering", "outer_traceback"} <= set(inspect.signature(jaxpr_subcomp).parameters):
        jaxpr_subcomp = None
except ImportError:  # programs are traced again to be lowered, which takes longer
    jaxpr_subcomp = None  # type: ignore[assignment]

try:
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer

    _ = DynamicJaxprTrace.emit_eqn, DynamicJaxprTrace.to_jaxpr_tracer, core.trace_ctx
except (ImportError, AttributeError):  # equations are traced again, which takes longer
    DynamicJaxprTrace = DynamicJaxprTracer = None  # type: ignore[assignment, misc]

try:
    from jax._src import cache_key, compilation_cache, compiler
    from jax._src.compilation_cache_interface import CacheInterface
    from jax._src.lib.mlir import passmanager

    for module, name in (
        (compilation_cache, "_cache"),
        (compilation_cache, "_initialize_cache"),
        (compilation_cache, "combine_executable_and_time"),
        (cache_key, "_hash_serialized_compile_options"),
        (compiler, "get_compile_options"),
    ):
        getattr(module, name)
except (ImportError, AttributeError):  # each rank compiles for itself
    compilation_cache = None  # type: ignore[assignment]

try:
    from jax._src import distributed
    from jax._src.lib import _jax

    _ = xla_bridge.make_cpu_client, xla_bridge.register_backend_factory, _jax.make_gloo_tcp_collectives
except (ImportError, AttributeError):
    distributed = _jax = None  # type: ignore[assignment]

__all__ = [
    "TESTED",
    "Entries",
    "allow_in_checkpoint",
    "as_function",
    "as_weak",
    "at_source",
    "at_top_level",
    "axis_effect",
    "bind",
    "call_site",
    "caller_line",
    "can_hide_effects",
    "can_keep",
    "compile_entry",
    "compiling",
    "failed_collective",
    "ffi_call_in_order",
    "function_names",
    "gloo_listens_at",
    "in_library",
    "is_axis_effect",
    "is_reference",
    "keep",
    "keep_compiled",
    "kept_with_jaxpr",
    "leave_as_it_is",
    "load_entry",
    "lower_with_tokens",
    "module_digest",
    "module_text",
    "ordered_effect",
    "parts",
    "scan_counts",
    "source_line",
    "started_without",
    "tracing",
    "wait_for_effects",
    "watch_communication",
    "with_equations",
]


TESTED = ("0.10.2", "0.11.2", "0.12.0.1")


# The identities of `_axis` may stand in a linear function, such as the derivative of a mean; JAX has no rule for that.
ad.primitive_transposes.setdefault(ad_checkpoint.name_p, lambda cotangent, x, *, name: [cotangent])

at_top_level: Callable[[], bool] = core.trace_state_clean  # whether the caller stands outside of traced functions


def tracing() -> bool:
    """Whether the caller stands inside a traced function (`jit`, `grad`, `vmap`, ...)."""
    return not at_top_level()


def started_without(index: str) -> bool:
    """Whether JAX has started, and looks no more at what GPU it is to take, with another one or all."""
    return xla_bridge.backends_are_initialized() and xla_bridge.CUDA_VISIBLE_DEVICES.value != index


def gloo_listens_at(host: str) -> None:
    """Have JAX's collectives on CPUs listen at an address of this host, and not at whatever its name resolves to.

    Before JAX's backend starts. A JAX without these functions keeps to the name.
    """

    def make_client() -> Any:
        client = distributed.global_state.client
        if client is None or jax.config.jax_cpu_collectives_implementation != "gloo":
            return xla_bridge.make_cpu_client()
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    if _jax is not None:
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


# jaxprs


def parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr and its constants, of either class; jax 0.12 has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", None) or ()


def kept_with_jaxpr(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function says of a jaxpr, its first argument, as long as that lives; some JAX has no such cache."""
    try:
        return util.weakref_lru_cache(function, trace_context_in_key=False)  # type: ignore[no-any-return]
    except (AttributeError, TypeError):
        return function


def with_equations(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Any:
    """The same jaxpr with other equations, and other variables for its outputs."""
    inner, _ = parts(jaxpr)
    edited = inner.replace(eqns=list(eqns), outvars=list(inner.outvars if outvars is None else outvars))
    return edited if inner is jaxpr else jaxpr.replace(jaxpr=edited)


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr as a function of arrays. That of `jax.extend.core` turns `jax_debug_nans` off, for the whole thread."""
    inner, consts = parts(jaxpr)

    def function(*args: Any) -> list[Any]:
        if not can_keep():
            return list(core.eval_jaxpr(inner, consts, *args))
        values = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]

        for eqn in inner.eqns:
            values.update(zip(eqn.outvars, keep(eqn, read(eqn.invars)), strict=True))
        return read(inner.outvars)

    return function


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many its carry; the rest it scans over."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def axis_effect(name: str) -> Any:
    """The effect that says that an axis of this name must be bound."""
    return core.NamedAxisEffect(name)


def is_axis_effect(effect: Any) -> bool:
    """Whether it says no more than that an axis must be bound."""
    return isinstance(effect, core.NamedAxisEffect)


def is_reference(aval: Any) -> bool:
    """Whether it is the type of a reference, as `jax.new_ref` makes them, and not of an array."""
    return isinstance(aval, AbstractRef)


@contextlib.contextmanager
def at_source(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced here gets the source line and the context of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def as_weak(x: Any) -> Any:
    """The same numbers with a weak type, as Python's numbers have."""
    return _convert_element_type(x, x.dtype, weak_type=True)


def bind(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Trace an equation again, on `args` and with other `params`."""
    with at_source(eqn):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return list(out) if eqn.primitive.multiple_results else [out]


def can_keep() -> bool:
    """Whether `keep` need not trace what it keeps."""
    return DynamicJaxprTrace is not None and type(core.trace_ctx.trace) is DynamicJaxprTrace


def keep(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Put an equation, as it stands, into the function that is being traced, with `args` for its operands.

    Nothing of it is traced again, unless it has effects, or this is no plain trace, as under `vmap`, or a JAX in which that is
    not possible.
    """
    if eqn.effects or not can_keep():
        return bind(eqn, args)
    trace, source = core.trace_ctx.trace, eqn.source_info
    if len(around := source_info_util.current_name_stack()):
        source = source.replace(name_stack=around + source.name_stack)
    operands = []
    for v, x in zip(eqn.invars, args, strict=True):
        if isinstance(v, Literal):
            operands.append(DynamicJaxprTracer(trace, v.aval, v, source))
        elif isinstance(x, core.Tracer):
            operands.append(trace.to_jaxpr_tracer(x, source))
        else:  # a number in its place now
            return bind(eqn, args)
    avals = [v.aval for v in eqn.outvars]
    return list(trace.emit_eqn(operands, avals, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx))


def call_site(eqn: JaxprEqn) -> tuple[tuple[str, int, int], ...]:
    """The call that an equation comes from: its frames outside of JAX. That of a derivative is that of what it is one of."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple((frame.file_name, frame.start_line, frame.start_column) for frame in frames)


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, "file:line": the innermost one outside of the libraries; "" for none."""
    libraries = _library_folders()
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(libraries):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return ""


def function_names(eqn: JaxprEqn) -> list[str]:
    """The qualified names of the functions that an equation comes from, innermost first."""
    traceback = eqn.source_info.traceback
    return [frame.function_name for frame in traceback.frames] if traceback else []


def caller_line() -> str:
    """The user's line that runs now, as in `source_line`."""
    libraries, frame = _library_folders(), sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def failed_collective(error: BaseException) -> tuple[str, dict[str, Any], str]:
    """The function of JAX's collectives that an error was raised in, its arguments, and the user's line; "" for no such."""
    libraries, line, traceback = _library_folders(), "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        file = frame.f_code.co_filename
        if file == parallel.__file__:
            return frame.f_code.co_name.lstrip("_"), dict(frame.f_locals), line
        if not file.startswith(libraries):
            line = f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return "", {}, ""


def in_library(file: str) -> bool:
    """Whether a file is one of JAX's, Flax's, optax's or jaxmpi's, or Python's own."""
    return file.startswith((*_library_folders(), "<frozen", sysconfig.get_path("stdlib") + os.sep))


def _library_folders() -> tuple[str, ...]:
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("jax", "flax", "optax", "jaxmpi"))
    return tuple(os.path.dirname(file) + os.sep for file in files if file)


LARGE = 4096  # numbers of a constant


def module_text(lowered: Any) -> str:
    """The module of a `jax.stages.Lowered` without source lines, and without the numbers of large constants."""
    operation = lowered.compiler_ir("stablehlo").operation
    return str(operation.get_asm(large_elements_limit=LARGE, enable_debug_info=False))


# what was compiled


def module_digest(lowered: Any) -> str:
    """That of all that XLA gets of a `jax.stages.Lowered`: the module without source lines, and the options.

    "" where the executable belongs to this process alone, as one that calls Python does.
    """
    arguments = lowered._lowering.compile_args
    if compilation_cache is None or arguments["host_callbacks"] or arguments["keepalive"]:
        return ""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    flags = options.executable_build_options.debug_options
    flags.xla_gpu_kernel_cache_file = flags.xla_gpu_per_fusion_autotune_cache_dir = ""  # folders of each rank
    digest = hashlib.blake2b(repr(lowered._lowering._compiler_options_kvs).encode(), digest_size=16)
    cache_key._hash_serialized_compile_options(digest, options)
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        copy, text = module.operation.clone(), io.BytesIO()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy.operation)
        copy.operation.write_bytecode(text)
    digest.update(text.getbuffer())
    return digest.hexdigest()


class Entries(Protocol):
    """What JAX's compilation cache reads and writes."""

    def get(self, key: str) -> bytes | None:
        """The entry with this key."""

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry."""


def compile_entry(lowered: Any) -> bytes:
    """Compile a `jax.stages.Lowered`, and return the entry of it for JAX's compilation cache, or the one that was there.

    It is empty if the executable cannot be serialized.
    """
    found: list[bytes] = []

    def keep(_: str, value: bytes | None) -> bytes | None:
        found.extend([value] if value else [])
        return value

    with _cache_passed(keep):
        executable = lowered.compile().runtime_executable()
    if found and _is_intact(found[-1]):
        return found[-1]  # what was loaded cannot be serialized again: its functions are missing
    try:
        data = compilation_cache.combine_executable_and_time(executable.serialize(), 0)
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return b""
    if compilation_cache.zstandard or getattr(compilation_cache, "zstd", None):
        return bytes(compilation_cache.compress_executable(data))
    return zlib.compress(data, 0)  # it takes longer to compress than to send


def _is_intact(entry: bytes) -> bool:
    """Whether JAX has used an entry, and not compiled in its place."""
    try:
        return bool(compilation_cache.decompress_executable(entry))
    except Exception:  # of whichever library decompresses
        return False


def load_entry(lowered: Any, entry: bytes) -> None:
    """Have a `jax.stages.Lowered`, and calls of its function, run what another process has compiled: see `compile_entry`."""
    with _cache_passed(lambda key, value: entry or value):
        lowered.compile()


@contextlib.contextmanager
def _cache_passed(change: Callable[[str, bytes | None], bytes | None]) -> Iterator[None]:
    """Have this thread find `change(key, entry)` in JAX's compilation cache, whether there is one or not."""
    compilation_cache._initialize_cache()
    before, thread = compilation_cache._cache, get_ident()

    class Passed(CacheInterface):  # type: ignore[misc]
        _path = getattr(before, "_path", None)

        def get(self, key: str) -> bytes | None:
            entry = before.get(key) if before else None
            return change(key, entry) if get_ident() == thread else entry

        def put(self, key: str, value: bytes) -> None:
            if before:
                before.put(key, value)

    compilation_cache._cache = passed = Passed()
    try:
        yield
    finally:
        if compilation_cache._cache is passed:
            compilation_cache._cache = before


def keep_compiled(entries: Entries) -> None:
    """Have JAX's compilation cache keep its entries here, unless the user names a folder for it; before it is used."""
    if compilation_cache is None or jax.config.jax_compilation_cache_dir:
        return
    folders: dict[str, Any] = {}

    class Kept(CacheInterface):  # type: ignore[misc]
        _path = None

        def _entries(self) -> Any:
            if not (folder := jax.config.jax_compilation_cache_dir):  # which a script may name later
                return entries
            if folder not in folders:
                folders[folder] = compilation_cache.get_file_cache(folder)[0]
            return folders[folder]

        def get(self, key: str) -> bytes | None:
            return self._entries().get(key)

        def put(self, key: str, value: bytes) -> None:
            self._entries().put(key, value)

    if compilation_cache._cache is None:
        compilation_cache._cache, compilation_cache._cache_initialized = Kept(), True
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


# order inside a program


def can_hide_effects() -> bool:
    """Whether this JAX has what `lower_with_tokens` needs."""
    return TokenSet is not None


@functools.cache
def ordered_effect() -> Any:
    """The JAX effect of a primitive whose calls stay in program order, also from one program to the next."""

    class InOrder(effects.Effect):  # type: ignore[misc]
        __str__ = lambda self: "jaxmpi"

    kinds = (effects.ordered_effects, effects.lowerable_effects)
    for allowed in (*kinds, effects.control_flow_allowed_effects, effects.custom_derivatives_allowed_effects):
        allowed.add_type(InOrder)
    return allow_in_checkpoint(InOrder())


def allow_in_checkpoint(effect: Any) -> Any:
    """The same effect, of which JAX knows that `jax.checkpoint` may carry out its primitives again: all ranks do."""
    if effects is not None:
        effects.remat_allowed_effects.add_type(type(effect))
    return effect


def ffi_call_in_order(
    ctx: Any, name: str, xs: Sequence[Any], effect: Any, in_place: Iterable[int], attributes: dict[str, Any]
) -> list[Any]:
    """Lower a primitive with an ordered effect to an FFI call behind the one before.

    Args:
      ctx: of the lowering rule.
      name: of the FFI target.
      xs: the operands.
      effect: the ordered effect.
      in_place: numbers of operands whose memory the results of the same numbers take.
      attributes: of the FFI call.
    """
    lower = ffi_lowering(name, operand_output_aliases={i: i for i in in_place}, has_side_effect=True)
    avals_in, avals_out = ((*avals, core.abstract_token) for avals in (ctx.avals_in, ctx.avals_out))
    *outs, token = lower(ctx.replace(avals_in=avals_in, avals_out=avals_out), *xs, ctx.tokens_in.get(effect), **attributes)
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return outs


def lower_with_tokens(ctx: Any, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    """Lower a program with ordered effects into a module that makes the tokens itself, so that no effect shows outside."""
    inner, consts = parts(jaxpr)
    tokens = TokenSet.create(list(effects.ordered_effects.filter_in(inner.effects)))
    if not _lowers_as_it_is(inner):
        return mlir.lower_fun(as_function(jaxpr))(ctx.replace(tokens_in=tokens, tokens_out=None), *args)
    module = ctx.module_context if ctx.platforms is None else ctx.module_context.replace(platforms=ctx.platforms)
    numbers = ir_consts(consts, [v.aval for v in inner.constvars])
    given = {name: getattr(ctx, name) for name in ("dim_var_values", "const_lowering")}
    outs, _ = jaxpr_subcomp(module, inner, ctx.name_stack, tokens, numbers, *args, outer_traceback=None, **given)
    return outs


def _lowers_as_it_is(jaxpr: Any) -> bool:
    """Whether a jaxpr can be lowered without being traced again: it has no references and types of its own."""
    plain = all(
        isinstance(effect, core.NamedAxisEffect) or effects.ordered_effects.contains(effect) for effect in jaxpr.effects
    )
    return jaxpr_subcomp is not None and plain and not getattr(jaxpr, "is_high", False)


# what runs


def watch_communication() -> Callable[[], bool]:
    """Return a function that any thread may call: does this process wait for a program with ordered effects?

    Such a program is either being dispatched by some thread (small ones run on it), or it runs and its token, which the
    runtime token set of the thread that called `watch_communication` holds, is not ready yet.
    """
    token_set = dispatch.runtime_tokens.__dict__  # a `threading.local`: this thread's own dictionary

    def waits() -> bool:
        if any(_dispatches(frame) for frame in sys._current_frames().values()):
            return True
        return any(not token._buf.is_ready() for token in list(token_set.get("current_tokens", {}).values()))

    return waits


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
        dispatch.runtime_tokens.clear()  # or every later program with effects of this thread would fail, too


def _dispatches(frame: FrameType | None) -> bool:
    while frame is not None:
        executable = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("pxla.py") else None
        if getattr(executable, "ordered_effects", None):
            return True
        frame = frame.f_back
    return False
