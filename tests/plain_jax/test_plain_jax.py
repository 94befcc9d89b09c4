"""Programs of plain JAX under `jaxmpi run`: their numbers, and how they end."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plain_jax import sharded_cases

import jaxmpi
from jaxmpi._backends import xla
from jaxmpi._job.process import jax_collectives
from jaxmpi.testing import run_ranks

HERE = Path(__file__).parent
# jaxlib has no name of MPI for the type
REFUSED = re.compile(r"(psum|pmax|pmin|all_gather|psum_scatter) float16")


def started(ranks, script, *arguments, **environ):
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), HERE / script, *arguments]
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@cache
def found(ranks, node_ranks, folder):
    """Return what each rank has found wrong in each case."""
    path = f"{folder}/results{ranks}.npz"
    subprocess.run(
        [sys.executable, HERE / "sharded_cases.py", str(ranks), "save", path],
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"},
        timeout=300,
        check=True,
    )
    done = started(
        *(ranks, "sharded_cases.py", str(ranks), "compare", path),
        JAXMPI_NODE_RANKS=node_ranks,
        JAXMPI_STALL_SECONDS="60",
        JAXMPI_STALL_END_SECONDS="120",
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("plain_jax"))


# (ranks, ranks of a node); "" for all on one node
JOBS = [(2, ""), (3, ""), (4, ""), (4, "2"), (3, "1")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "node_ranks", "name"),
    [
        (ranks, node_ranks, name)
        for ranks, node_ranks in JOBS
        for name, (numbers, _) in sharded_cases.CASES.items()
        if ranks in numbers
    ],
)
def test_ranks_give_what_virtual_devices_give(ranks, node_ranks, name, folder):
    for wrong in found(ranks, node_ranks, folder):
        if REFUSED.fullmatch(name):
            assert "Unsupported primitive type for reduction: f16" in wrong[name]
        else:
            assert wrong[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_scatters_of_ranks_that_come_late_are_right(ranks):
    done = started(ranks, "program_of_scatters.py", 60)
    assert done.stdout.count("wrong: 0") == ranks, done.stdout + done.stderr


@pytest.mark.slow
def test_threads_have_meshes_of_their_own():
    done = started(4, "program_of_threads.py", 300, NPROC="8", JAXMPI_STALL_END_SECONDS="100")
    assert done.stdout.count("wrong: []") == 4, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "code", "texts"),
    [
        ("none", 0, ["done"]),
        ("raise", 1, ["ValueError: of rank 1", "the job failed: rank 1 "]),
        ("exit", 3, ["rank 1 ends the job, with code 3", "the job failed: rank 1 "]),
        ("text", 1, ["rank 1 gives up", "the job failed: rank 1 "]),
        ("kill", None, ["the job failed: rank 1 "]),
        (
            "leave",
            1,
            [
                "rank 0 has waited 2 s in an all-reduce of 4 float32 (sum), 16 bytes, with ranks "
                "0, 1; it waits for rank 1.",
                "It ends the job.",
            ],
        ),
        ("stop", 1, ["it waits for rank 1. It ends the job."]),
        (
            "other",
            1,
            [
                "rank 0 is in an all-reduce of 4 float32 (sum), 16 bytes, with ranks 0, 1, and "
                "another of them in another collective"
            ],
        ),
    ],
)
def test_a_rank_that_fails_ends_the_job(how, code, texts):
    done = started(
        2,
        "program_that_fails.py",
        how,
        JAXMPI_STALL_SECONDS="2",
        JAXMPI_STALL_END_SECONDS="5",
    )
    said = done.stdout + done.stderr
    for text in texts:
        assert text in said, said
    assert done.returncode == code if code is not None else done.returncode > 0


def test_several_devices_of_a_process_are_refused():
    done = started(
        *(2, "program_of_all_devices.py"),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert done.returncode != 0
    assert "has more than one CPU device" in done.stderr


def test_an_mpi_that_cannot_be_opened_is_one_sentence():
    done = started(2, "program_that_fails.py", "none", JAXMPI_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode != 0
    assert "no MPI library can be opened (/nowhere/libmpi.so" in done.stderr


def test_unknown_symbols_of_this_jaxlib():
    import jaxlib

    [folder] = jaxlib.__path__
    library = jax_collectives.find_library()
    assert jax_collectives.unknown_symbols(Path(folder), library) == []
    assert jax_collectives.why_not() == ""


def test_unknown_symbols_names_those_that_the_library_lacks(tmp_path):
    library = jax_collectives.find_library()
    assert jax_collectives.unknown_symbols(tmp_path, library) is None
    (tmp_path / "libjax.so").write_bytes(b"x\0MPIABI_Send\0MPIABI_Never_heard\0MPIABI_COMM_WORLD\0")
    assert jax_collectives.unknown_symbols(tmp_path, library) == ["MPIABI_Never_heard"]


@pytest.mark.parametrize(
    ("version", "symbols", "text"),
    [
        ("99.0", b"\0MPIABI_Never_heard\0", "jaxlib 99.0 asks for MPIABI_Never_heard"),
        ("99.0", b"", "jaxlib 99.0 has no collectives over MPI"),
        ("99.0", b"\0MPIABI_Send\0", ""),
    ],
)
def test_why_not_of_another_jaxlib(version, symbols, text, tmp_path, monkeypatch):
    package = tmp_path / "jaxlib"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "libjax.so").write_bytes(symbols or b"nothing")
    spec = type("Spec", (), {"submodule_search_locations": [str(package)], "origin": None})
    find = jax_collectives.find_spec
    monkeypatch.setattr(
        jax_collectives, "find_spec", lambda name: spec if name == "jaxlib" else find(name)
    )
    monkeypatch.setattr(jax_collectives.metadata, "version", lambda name: version)
    why = jax_collectives.why_not()
    assert why.startswith(text) if text else why == ""


def test_only_cpus_by_platforms():
    assert jax_collectives.only_cpus({"JAX_PLATFORMS": "cpu"})
    assert not jax_collectives.only_cpus({"JAX_PLATFORMS": "cuda,cpu"})


@run_ranks(2, backend="xla")
def test_backend_xla_gathers_every_type_over_mpi():
    """float16 travels as bits: XLA does not know it in collectives over MPI."""
    assert jax.config.jax_cpu_collectives_implementation == "mpi"
    for dtype in ("float16", "bfloat16", "float32", "int8", "bool"):
        x = (np.arange(4) + jaxmpi.rank()).astype(jnp.dtype(dtype))
        got = jaxmpi.jit(lambda x: lax.all_gather(x, jaxmpi.AXIS))(x)
        want = np.stack([(np.arange(4) + rank).astype(jnp.dtype(dtype)) for rank in range(2)])
        assert got.dtype == want.dtype and (np.asarray(got) == want).all()


def test_gloo_carries_backend_xla_where_the_setting_says_so():
    done = started(2, "program_of_backend_xla.py", JAXMPI_XLA="gloo")
    assert done.stdout.count("gloo [0.5 0.5]") == 2, done.stderr


def test_mpi_for_backend_xla_needs_the_library(monkeypatch):
    monkeypatch.setenv("JAXMPI_XLA", "mpi")
    monkeypatch.delenv(jax_collectives.LIBRARY_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="JAXMPI_XLA is mpi, and jaxlib has not loaded"):
        xla._choose_collectives()
