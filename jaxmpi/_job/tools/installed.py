"""What `jaxmpi doctor` says of the installation: wheel or source, dtypes, CUDA in the MPI."""

import json
import re
from importlib import metadata

from jaxmpi._job.launch import mpiexec
from jaxmpi._job.tools.finding import Finding, ask

__all__ = ["cuda_in_mpi", "dtypes", "package"]

_DTYPES = """
import numpy as np
from jaxmpi._backends.native import TYPES
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
wrong = [np.dtype(t).name for t in TYPES if (jax.jit(lambda x: x + x)(jnp.ones(3, t)) != 2).any()]
print(f"wrong sums of {', '.join(wrong)}" if wrong else f"{len(TYPES)} dtypes, float64 among them")
"""

_CUDA = """
import ctypes
from mpi4py import MPI
library = ctypes.CDLL({path!r})
if hasattr(library, "MPIX_Query_cuda_support"):
    print("yes" if library.MPIX_Query_cuda_support() else "no")
elif hasattr(library, "MPIX_GPU_query_support"):
    found = ctypes.c_int()
    library.MPIX_GPU_query_support(0, ctypes.byref(found))
    print("yes" if found.value else "no")
else:
    print("unknown")
"""


def package() -> Finding:
    """Where jaxmpi was installed from, and what compiled its extension."""
    there = metadata.distribution("jaxmpi")
    origin = json.loads(there.read_text("direct_url.json") or "{}")
    tags = re.findall(r"^Tag: (.*)$", there.read_text("WHEEL") or "", re.MULTILINE)
    binary = any("manylinux" in tag for tag in tags)
    kind = (
        "editable"
        if origin.get("dir_info", {}).get("editable")
        else "a binary wheel"
        if binary
        else "built here from source"
    )
    ok, said = ask("import jaxmpi._native as n; print(f'{n.compiler}, XLA FFI {n.ffi}')")
    text = f"{there.version}, {kind} ({', '.join(tags) or 'no tags'})"
    return Finding(
        "ok",
        "jaxmpi",
        f"{text}; the extension by {said}" if ok else f"{text}; without the extension",
    )


def dtypes() -> Finding:
    """Whether sums of all dtypes are right on what JAX computes on."""
    ok, said = ask(_DTYPES)
    if ok and "wrong" not in said:
        return Finding("ok", "dtypes", said)
    return Finding(
        "broken",
        "dtypes",
        said,
        "This is a defect of JAX or of its device: report it, with this text.",
    )


def cuda_in_mpi() -> Finding:
    """Whether the MPI library takes arrays of a GPU; jaxmpi needs none that does."""
    try:
        _, _, path = mpiexec.library()
    except mpiexec.LaunchError:
        return Finding("ok", "CUDA in MPI", "unknown, as there is no MPI")
    _, said = ask(_CUDA.format(path=path))
    return Finding(
        "ok",
        "CUDA in MPI",
        f"{said if said in ('yes', 'no') else 'unknown'}; arrays of GPUs go through memory of the "
        "host",
    )
