"""A process that has loaded two MPI libraries is told of both, by their paths."""

import os
import subprocess
import sys

import pytest
from programs import on_ranks, run

from jaxmpi._backends import mpi_library
from jaxmpi._errors import MPIError
from jaxmpi._job.launch import mpiexec
from jaxmpi._job.process import loaded_mpi

SCRIPT = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # as a package does that was built against another MPI
import jaxmpi
jaxmpi.init()
print("sum", float(jaxmpi.tree_allreduce(jaxmpi.rank() + 1.0, "sum")))
"""


@pytest.fixture
def other(tmp_path):
    """The path of a library that is named like an MPI's."""
    path = tmp_path / "other" / "libmpi.so.12"
    path.parent.mkdir()
    source = tmp_path / "other.c"
    source.write_text("int MPI_Nothing(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return str(path)


def test_a_job_is_warned_once_and_goes_on(tmp_path, other):
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    output = run(on_ranks(2, str(script), other))
    _, _, own = mpiexec.library()
    [line] = [line for line in output.splitlines() if "two MPI libraries" in line]
    assert (
        f"{own}, which mpi4py uses, and {other}. " in line and "against the MPI of mpi4py" in line
    )
    assert output.count("sum 3.0") == 2


def test_the_extension_gets_the_library_that_mpi4py_uses(tmp_path, other):
    """The extension takes mpi4py's library, not the one with the shortest path."""
    short = tmp_path.parents[-1] / "tmp" / f"libmpi.so.{os.getpid()}"
    os.rename(other, short)
    code = f"""
import ctypes
ctypes.CDLL({str(short)!r})
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
from jaxmpi._backends.mpi_library import libmpi
print(libmpi(MPI))
"""
    try:
        assert run([sys.executable, "-c", code]).strip() == mpiexec.library()[2]
    finally:
        os.unlink(short)


def test_doctor_names_both(tmp_path, other):
    (tmp_path / "sitecustomize.py").write_text(f"import ctypes\nctypes.CDLL({other!r})\n")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    code = "from jaxmpi._job.tools import checks; print(next(checks.mpi()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env=environ,
        check=True,
    )
    text = "".join(done.stdout.split())  # wrapped at a width
    assert done.stdout.startswith("  broken  mpi4py: this process has loaded two MPI libraries"), (
        done.stdout
    )
    assert other in text and "->" in text


def test_an_mpi4jax_of_another_library_is_refused_with_both(tmp_path, other, monkeypatch):
    (tmp_path / "mpi4jax.py").write_text(f"import ctypes\nctypes.CDLL({other!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mpi4jax", raising=False)
    libraries = lambda: ["/own/libmpi.so.40", *([other] if "mpi4jax" in sys.modules else [])]
    monkeypatch.setattr(mpi_library.loaded_mpi, "loaded", libraries)
    with pytest.raises(
        MPIError,
        match=r"mpi4jax uses the MPI library .*/other/libmpi.so.12, "
        "and mpi4py uses /own/libmpi.so.40",
    ):
        mpi_library.import_mpi4jax(2)


def test_bindings_and_parts_of_a_library_are_no_second_one():
    own = [
        "/m/libmpi.so.40",
        "/m/libmpi_mpifh.so.40",
        "/m/libmpi_usempif08.so.40",
        "/m/libmpi_cxx.so.40",
    ]
    assert loaded_mpi.mpi_libraries(own) == ["/m/libmpi.so.40"]
    cray = [
        "/c/libmpi_cray.so.12",
        "/c/libmpifort_cray.so.12",
        "/c/libmpi_gtl_cuda.so.0",
        "/c/libmpi_cray.so.12",
    ]
    assert loaded_mpi.mpi_libraries(cray) == ["/c/libmpi_cray.so.12"]
    both = ["/usr/lib/libmpich.so.12", "/usr/lib/libmpi-1a2b3c.so.40.30.4", "/usr/lib/libmpi4.txt"]
    assert loaded_mpi.mpi_libraries(both) == sorted(both[:2])
