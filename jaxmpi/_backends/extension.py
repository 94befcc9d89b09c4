"""The extension `jaxmpi._native`, and whether it is the one that this Python code was written for."""

import hashlib
import importlib
from pathlib import Path
from typing import Any

from jaxmpi._errors import MPIError

__all__ = ["load", "sources_digest"]

INTERFACE = 2  # as in native/module.cc: another number for every change of what Python calls there
ROOT = Path(__file__).parents[2]  # of the sources, in an editable install


def load() -> Any:
    """Import the extension.

    Raises:
      ImportError: it is not built.
      MPIError: it was built for another version of jaxmpi, or, in an editable install, from other sources.
    """
    native: Any = importlib.import_module("jaxmpi._native")
    there = getattr(native, "interface", 0)
    if there != INTERFACE:
        raise MPIError(
            f"The extension {native.__file__} has interface {there}, and this jaxmpi needs {INTERFACE}. Install jaxmpi "
            "again: pip install --force-reinstall --no-deps jaxmpi."
        )
    built, now = getattr(native, "sources", ""), sources_digest(ROOT / "native")
    if now and built != now:
        raise MPIError(
            f"The extension {native.__file__} was built from other sources than those in {ROOT / 'native'}. Rebuild it: pip "
            f"install --no-build-isolation --no-deps -e {ROOT}."
        )
    return native


def sources_digest(folder: Path) -> str:
    """The digest of the C++ sources in a folder, as native/CMakeLists.txt forms it; "" where there are none."""
    if not (folder / "transport.h").exists():
        return ""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".cc", ".h") or path.name == "CMakeLists.txt")
    files = "".join(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()};" for name in names)
    return hashlib.sha256(files.encode()).hexdigest()
