"""Compiled modules: their text for XLA, and the entries of JAX's compilation cache."""

import contextlib
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Protocol

import jax
from jax.stages import Lowered

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


LARGE = 4096  # numbers of a constant


def module_text(lowered: Lowered) -> str:
    """Return a module as text, without source lines and the numbers of large constants.

    Args:
      lowered: a `jax.stages.Lowered`.
    """
    operation = lowered.compiler_ir("stablehlo").operation
    return str(operation.get_asm(large_elements_limit=LARGE, enable_debug_info=False))


def module_digest(lowered: Lowered) -> str:
    """Return a digest of all that XLA gets: the module without source lines, and the options.

    It is "" if the executable belongs to this process alone, as one that calls Python does.
    """
    arguments = lowered._lowering.compile_args
    if compilation_cache is None or arguments["host_callbacks"] or arguments["keepalive"]:
        return ""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    flags = options.executable_build_options.debug_options
    # these folders may differ between the ranks
    flags.xla_gpu_kernel_cache_file = flags.xla_gpu_per_fusion_autotune_cache_dir = ""
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
    """Storage of the entries of JAX's compilation cache."""

    def get(self, key: str) -> bytes | None:
        """Return the entry with a key, or None."""

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry."""


def compile_entry(lowered: Lowered) -> bytes:
    """Compile a lowered module and return its entry for JAX's compilation cache.

    If the cache has an entry already, that one is returned. The entry is empty if the executable
    cannot be serialized.
    """
    found: list[bytes] = []

    def keep(_: str, value: bytes | None) -> bytes | None:
        found.extend([value] if value else [])
        return value

    with _cache_passed(keep):
        executable = lowered.compile().runtime_executable()
    if found and _is_intact(found[-1]):
        # A loaded executable cannot be serialized again: its functions are missing.
        return found[-1]
    try:
        data = compilation_cache.combine_executable_and_time(executable.serialize(), 0)
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return b""
    if compilation_cache.zstandard or getattr(compilation_cache, "zstd", None):
        return bytes(compilation_cache.compress_executable(data))
    return zlib.compress(data, 0)  # it takes longer to compress than to send


def _is_intact(entry: bytes) -> bool:
    """Return whether JAX can read an entry; otherwise it has compiled the module itself."""
    try:
        return bool(compilation_cache.decompress_executable(entry))
    except Exception:  # of whichever library decompresses
        return False


def load_entry(lowered: Lowered, entry: bytes) -> None:
    """Make calls of a lowered module run an entry of `compile_entry` of another process."""
    with _cache_passed(lambda key, value: entry or value):
        lowered.compile()


@contextlib.contextmanager
def _cache_passed(change: Callable[[str, bytes | None], bytes | None]) -> Iterator[None]:
    """Make this thread find `change(key, entry)` in JAX's cache, even if there is no cache."""
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
    """Make JAX's compilation cache keep its entries in `entries`; call it before its first use.

    If the user names a folder for JAX's cache, then or later, JAX uses that folder.
    """
    if compilation_cache is None or jax.config.jax_compilation_cache_dir:
        return
    folders: dict[str, Entries] = {}

    class Kept(CacheInterface):  # type: ignore[misc]
        _path = None

        def _entries(self) -> Entries:
            # a script may set the option after `init`
            if not (folder := jax.config.jax_compilation_cache_dir):
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
