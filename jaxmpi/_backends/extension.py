"""The extension `jaxmpi._native`: its import, and the checks that it matches this Python code."""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jaxlib import version as jaxlib_version

from jaxmpi._errors import MPIError

__all__ = [
    "Extension",
    "check_ffi",
    "how_to_build",
    "load",
    "rank_value",
    "register_int8",
    "sources_digest",
]

INTERFACE = 13  # what this Python code calls; the extension exports the number it was built with
ROOT = Path(__file__).parents[2]  # the folder of the sources, in an editable install


class Extension(Protocol):
    """The module `jaxmpi._native`, as Python calls it; native/module.cc has the functions."""

    ffi: str
    kinds: Mapping[str, int]
    operations: Mapping[str, int]
    dtypes: Mapping[str, int]
    piece_bytes: int

    def can_reduce(self) -> bool: ...

    def sum_of_words(
        self,
        words: int,
        count: int,
        factors: int,
        block: int,
        shift: int,
        block_factor: int,
        total: int,
        /,
    ) -> int: ...

    def use_cuda(self, library: str) -> None: ...

    def handler(self, name: str) -> object: ...

    def set_rank(self, rank: int) -> None: ...

    def layout_bytes(self, size: int, slot_bytes: int, slots: int) -> int: ...

    def open(
        self,
        *,
        rank: int,
        order: Sequence[int],
        ranks: Sequence[int],
        node: int,
        local_rank: int,
        local_names: Sequence[int],
        slot_bytes: int,
        slots: int,
        threads: int,
        crowded: bool,
        memory: int,
        file: int,
    ) -> int: ...

    def connect(
        self,
        *,
        group: int,
        library: str,
        comm: int,
        byte: int,
        request_bytes: int,
        small_bytes: int,
        direct_nodes: int,
    ) -> None: ...

    def count_ahead_from(self, first: int) -> None: ...

    def end_started(self) -> None: ...

    def wait_for_all(self) -> None: ...

    def on_mismatch(self, handler: Callable[[int, int, int], str]) -> None: ...

    def compare(self, fingerprint: int) -> tuple[int, int, int]: ...

    def calls_before(self, calls: int) -> tuple[int, Sequence[int]]: ...

    def forget_calls(self) -> None: ...

    def messages(self) -> tuple[int, int]: ...

    def exposed_ns(self) -> int: ...

    def waits(self) -> Sequence[tuple[int, int]]: ...

    def last_fingerprint(self) -> int: ...

    def events(self) -> Sequence[tuple[int, int, int, int, int, int]]: ...

    def close(self) -> None: ...


def load() -> Extension:
    """Import the extension.

    Raises:
      ImportError: it is not built.
      MPIError: it was built for another version of jaxmpi, or, in an editable install, from other
        sources.
    """
    native = importlib.import_module("jaxmpi._native")
    there = getattr(native, "interface", 0)
    if there != INTERFACE:
        raise MPIError(
            f"The extension {native.__file__} has interface {there}, and this jaxmpi needs "
            f"{INTERFACE}.",
            advice="Install jaxmpi again: pip install --force-reinstall --no-deps jaxmpi.",
        )
    built, now = getattr(native, "sources", ""), sources_digest(ROOT / "native")
    if now and built != now:
        raise MPIError(
            f"The extension {native.__file__} was built from other sources than those in "
            f"{ROOT / 'native'}.",
            advice=f"Rebuild it: pip install --no-build-isolation --no-deps -e {ROOT}.",
        )
    return native


def how_to_build() -> str:
    """Return a sentence on how to build the extension.

    If its build fails, pip installs jaxmpi without it and shows no error.
    """
    options = "--no-cache-dir --force-reinstall jaxmpi"
    if sources_digest(ROOT / "native"):
        options = f"--no-build-isolation -e {ROOT}"
    return (
        "Build it with a C++ compiler, and have pip show why a build fails: pip install -v "
        f"--no-deps {options}"
    )


def rank_value(rank: int) -> Callable[[], jax.Array | np.int32]:
    """Return a function that gives this rank's number in traced code.

    It is an FFI call, the same in the programs of all ranks. Without the extension, and on GPUs, it
    is a literal: then each rank compiles a program of its own.
    """
    try:
        native = load()
    except (ImportError, MPIError):
        native = None
    if native is not None:
        native.set_rank(rank)
    if native is None or jax.default_backend() != "cpu":
        return lambda: np.int32(rank)
    jax.ffi.register_ffi_target("jaxmpi_rank", native.handler("rank"), platform="cpu")
    return jax.ffi.ffi_call("jaxmpi_rank", jax.ShapeDtypeStruct((), np.int32))


def register_int8(native: Extension) -> None:
    """Have XLA know the loops of `codecs.int8`."""
    for target in ("int8_encode", "int8_encode_mean", "int8_decode"):
        jax.ffi.register_ffi_target(f"jaxmpi_{target}", native.handler(target), platform="cpu")


def check_ffi(native: Extension) -> None:
    """Check that jaxlib accepts the version of XLA's FFI for which the extension was built.

    jaxlib checks a handler only once JAX's backend has started; before, it just keeps it.

    Raises:
      MPIError: jaxlib refuses the handler.
    """
    try:
        jax.ffi.register_ffi_target("jaxmpi_rehearsal", native.handler("rehearsal"), platform="cpu")
    except Exception as error:  # jaxlib has no narrower type for it
        raise MPIError(
            f"The extension of jaxmpi was built for XLA FFI {native.ffi}, which "
            f"jaxlib {jaxlib_version.__version__} does not accept ({str(error).splitlines()[0]}).",
            advice="Install a jaxmpi and a jaxlib of about the same date: pip install --upgrade "
            "jaxmpi jaxlib. Until then, JAXMPI_TRANSPORT=mpi4jax does without the extension.",
        ) from error


def sources_digest(folder: Path) -> str:
    """Return the digest of the sources in a folder; "" where there are none.

    native/CMakeLists.txt forms the same digest when it builds the extension.
    """
    if not (folder / "transport.h").exists():
        return ""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (".cc", ".h", ".py") or path.name == "CMakeLists.txt"
    )
    files = "".join(
        f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()};" for name in names
    )
    return hashlib.sha256(files.encode()).hexdigest()
