"""Choice of GPUs, tested without one: which a rank takes, sharing, several devices in a process."""

import os
import pathlib
import tempfile
import warnings

import pytest
from test_native import run

import jaxmpi
from jaxmpi import _devices
from jaxmpi._backends import start
from jaxmpi.testing import run_ranks

MEMORY = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks"), [("mpi", 2), ("xla", 1), ("xla", 2), ("xla", 3)])
def test_a_process_with_several_devices(backend, ranks, tmp_path):
    """A process with several devices uses one, and gives the results of one device a rank."""
    code = f"""
import numpy as np, jax, jax.numpy as jnp, optax, jaxmpi
world = jaxmpi.init({backend!r})
n = world.size
assert len(jax.local_devices()) == 2 and world.device == jax.local_devices()[0]
tx = jaxmpi.distributed(optax.sgd(1.0))
@jaxmpi.jit
def step(params, state, x):
    updates, state = tx.update(jax.grad(lambda p: jnp.sum(p["w"] * x))(params), state, params)
    return optax.apply_updates(params, updates), state, jax.lax.axis_index(jaxmpi.AXIS)
params = {{"w": jnp.arange(3.0)}}
state = tx.init(params)
for turn in range(2):
    params, state, rank = step(params, state, jnp.full(3, world.rank + 1.0))
    assert int(rank) == world.rank
np.testing.assert_allclose(np.asarray(params["w"]), np.arange(3.0) - (n + 1))
np.testing.assert_array_equal(jaxmpi.tree_allgather(world.rank), np.arange(n))
jaxmpi.print("fine")
"""
    done = run(ranks, code, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0 and done.stdout.count("fine") == ranks, done.stdout + done.stderr


def taken(names, size, **given):
    """Choose from the GPUs `names`, one a rank; return the warnings and the memory fraction."""
    before = {name: os.environ.pop(name, None) for name in MEMORY}
    choose, unique = _devices.choose, _devices.unique
    _devices.choose, _devices.unique = lambda *_: names[jaxmpi.rank()], lambda name: name
    os.environ.update(given)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start.take_device(size, None)
        return [str(warning.message) for warning in caught], os.environ.get(
            "XLA_CLIENT_MEM_FRACTION"
        )
    finally:
        _devices.choose, _devices.unique = choose, unique
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


@pytest.mark.slow
@run_ranks(2, 3, 4)
def test_ranks_that_share_a_gpu_share_its_memory():
    n, rank = jaxmpi.size(), jaxmpi.rank()
    said, fraction = taken(["7"] * n, n)
    assert fraction == f"{0.75 / n:.4f}"[:5]
    everyone = list(range(n))
    assert len(said) == (1 if rank == 0 else 0)
    shared = f"init: ranks {everyone} share GPU 7 of {os.uname().nodename}"
    assert all(text.startswith(shared) for text in said)
    assert all("XLA_CLIENT_MEM_FRACTION" in text for text in said)


@pytest.mark.slow
@run_ranks(2, 3, 4)
def test_ranks_with_a_gpu_of_their_own_share_nothing():
    n = jaxmpi.size()
    assert taken([str(rank) for rank in range(n)], n) == ([], None)
    assert taken([None] * n, n) == ([], None)


@pytest.mark.slow
@run_ranks(3, 4)
def test_some_ranks_share_a_gpu():
    n, rank = jaxmpi.size(), jaxmpi.rank()
    said, fraction = taken(["0", "1", "0", None][:n], n)
    assert fraction == ("0.375" if rank in (0, 2) else None)
    assert len(said) == (1 if rank == 0 else 0)
    assert all(text.startswith("init: ranks [0, 2] share GPU 0") for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
@run_ranks(2)
def test_memory_that_the_user_has_shared_out_is_left_alone(name):
    said, _ = taken(["0", "0"], 2, **{name: "0.1"})
    assert all(f"as {name}=0.1 says" in text for text in said) and len(said) == (jaxmpi.rank() == 0)


def test_of_many_ranks_each_takes_something(monkeypatch):
    for name in MEMORY:
        monkeypatch.delenv(name, raising=False)
    _devices.share_memory(64)
    fraction = float(os.environ.pop("XLA_CLIENT_MEM_FRACTION"))
    assert 0.01 < fraction <= 0.75 / 64


@pytest.mark.slow
def test_the_memory_is_shared_out_before_jax_starts(tmp_path):
    code = """
import os, warnings
from jaxmpi import _devices, _jaxcompat
_devices.choose = lambda *_: "0"
share = _devices.share_memory
def before(ranks):
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
    print("in time", flush=True)
    return share(ranks)
_devices.share_memory = before
import jaxmpi
jaxmpi.init(os.environ["ASKED"])
"""
    for backend in ("mpi", "xla"):
        done = run(2, code, tmp_path, ASKED=backend)
        assert done.returncode == 0 and done.stdout.count("in time") == 2, done.stdout + done.stderr
        assert done.stderr.count("share GPU 0 of") == 1 and "script.py" in done.stderr, done.stderr


def test_ranks_on_different_platforms_are_refused():
    start.check_platforms(["gpu", "gpu"])
    with pytest.raises(
        jaxmpi.MPIError,
        match=r"rank 0 uses platform gpu, and rank 2 uses platform cpu.*JAX_PLATFORMS",
    ):
        start.check_platforms(["gpu", "gpu", "cpu", "cpu"])


# what a first-time user of GPUs meets, and the line of `init(verbose=True)` about it

OWN = "2 ranks, each with a {} of its own: "
ALL = "JAX takes 75% of its memory when it starts (XLA_CLIENT_MEM_FRACTION)"
HALF = "each takes 37.5% of its memory (XLA_CLIENT_MEM_FRACTION)"
ONLY = "the only one that CUDA_VISIBLE_DEVICES shows it"
# {case: (CUDA_VISIBLE_DEVICES of each rank, UUIDs that nvidia-smi lists on it, more variables, the
# line, the GPU that each takes, as jax_cuda_visible_devices and CUDA_VISIBLE_DEVICES name it)}
MEETS = {
    "the launcher shows all": (
        ("0,1", "0,1"),
        ("GPU-a GPU-b", "GPU-a GPU-b"),
        {},
        OWN.format("GPU") + f"by its number within the node, of 2 in CUDA_VISIBLE_DEVICES; {ALL}",
        (("0", "0,1"), ("1", "0,1")),
    ),
    "srun --gpus-per-task": (
        ("0", "0"),
        ("GPU-a", "GPU-b"),
        {},
        OWN.format("GPU") + f"{ONLY}; {ALL}",
        (("0", "0"), ("0", "0")),
    ),
    "srun with one GPU for two tasks": (
        ("0", "0"),
        ("GPU-a", "GPU-a"),
        {},
        f"2 ranks share 1 GPU: {ONLY}; {HALF}",
        (("0", "0"), ("0", "0")),
    ),
    "MIG slices": (
        ("MIG-a,MIG-b", "MIG-a,MIG-b"),
        ("GPU-a", "GPU-a"),
        {},
        OWN.format("MIG slice")
        + f"by its number within the node, of 2 in CUDA_VISIBLE_DEVICES; {ALL}",
        (("0", "MIG-a"), ("0", "MIG-b")),
    ),
    "one MIG slice": (
        ("MIG-a", "MIG-a"),
        ("GPU-a", "GPU-a"),
        {},
        f"2 ranks share 1 MIG slice: {ONLY}; {HALF}",
        (("0", "MIG-a"), ("0", "MIG-a")),
    ),
    "no preallocation": (
        ("0,1", "0,1"),
        ("GPU-a GPU-b", "GPU-a GPU-b"),
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        OWN.format("GPU")
        + "by its number within the node, of 2 in CUDA_VISIBLE_DEVICES; JAX takes memory as "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false says",
        (("0", "0,1"), ("1", "0,1")),
    ),
    "a GPU for one of them": (
        ("0", ""),
        ("GPU-a", ""),
        {},
        f"1 rank with a GPU of its own (1 more without): {ONLY}; {ALL}",
        (("0", "0"), (None, "")),
    ),
    "hidden": (("-1", "-1"), ("", ""), {}, "", ((None, "-1"), (None, "-1"))),
}
CLEARED = (*MEMORY, "XLA_PYTHON_CLIENT_ALLOCATOR", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
@pytest.mark.parametrize("case", MEETS)
@run_ranks(2)
def test_a_line_about_the_gpus(case):
    """The driver, the plugin and nvidia-smi are stand-ins."""
    shown, uuids, variables, line, takes = MEETS[case]
    rank, updates = jaxmpi.rank(), {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "nvidia-smi")
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {uuids[rank]}")
        program.chmod(0o755)
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setattr(_devices, "find_spec", lambda name: object() if "cuda" in name else None)
        patch.setattr(_devices.jax.config, "update", updates.__setitem__)
        patch.setattr(_devices, "started_without", lambda index, option: False)
        for name in CLEARED:
            patch.delenv(name, raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", shown[rank])
        for name, value in variables.items():
            patch.setenv(name, value)
        # deleted again at the end
        patch.setenv("XLA_CLIENT_MEM_FRACTION", "")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert start.take_device(2, None) == line
        assert len(caught) == ("share" in line and rank == 0)
        index, listed = takes[rank]
        assert updates.get("jax_cuda_visible_devices") == index
        assert os.environ["CUDA_VISIBLE_DEVICES"] == listed
        shares = "share" in line
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == ("0.375" if shares else "")


@pytest.mark.slow
def test_init_prints_the_line_once(tmp_path):
    code = """
import os
from jaxmpi import _devices
_devices.find_spec = lambda name: object() if "cuda" in name else None
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
os.environ.pop("JAX_PLATFORMS", None)
import jaxmpi
world = jaxmpi.init(verbose=True)
print(world.backend, flush=True)
"""
    done = run(2, code, tmp_path)
    assert done.returncode == 0 and done.stdout.count("xla") == 2, done.stdout + done.stderr
    line = "jaxmpi: 2 ranks, each with a GPU of its own: by its number within the node, of 2 in "
    assert done.stderr.count(line) == 1, done.stderr
