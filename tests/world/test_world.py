"""init, the World, and what must hold before any of it."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from programs import on_ranks, run

import jaxmpi
from jaxmpi import _devices
from jaxmpi._backends import mpi_library
from jaxmpi._job.process import launchers, live_record
from jaxmpi._world.init import _choose
from jaxmpi._world.world import sized_axes
from jaxmpi.testing import run_ranks

PACKAGE = Path(jaxmpi.__file__).parent


def python(code, **environ):
    clean = {k: v for k, v in os.environ.items() if k not in launchers.names(lambda row: row.size)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, **environ},
    )


def test_import_starts_neither_mpi_nor_a_backend():
    code = """
import sys, jaxmpi, jaxmpi.testing
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not [name for name in sys.modules if name.split(".")[0] in ("mpi4py", "mpi4jax")]
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_one_rank_needs_no_mpi(tmp_path):
    for package in ("mpi4py", "mpi4jax"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not installed')")
    code = """
import jaxmpi
world = jaxmpi.init()
assert (world.size, world.backend) == (1, "single")
print(jaxmpi.tree_allreduce(3.0))
"""
    done = python(code, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "3.0", done.stderr


OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_btl")
MPICH = ("PMI_SIZE", "MPI_LOCALNRANKS", "UCX_NET_DEVICES")


@pytest.mark.parametrize(
    ("names", "ranks", "here", "set_by_user", "room", "wanted"),
    [
        (OPEN_MPI, "2", "2", None, True, "^ofi,tcp"),
        (OPEN_MPI, "2", "2", None, False, "^ofi"),  # tcp is the way out
        (OPEN_MPI, "2", "2", "self,sm", True, "self,sm"),
        (OPEN_MPI, "4", "2", None, True, None),
        (OPEN_MPI, None, None, None, True, None),
        (MPICH, "2", "2", None, True, "lo"),
        (MPICH, "2", "2", "eth0", True, "eth0"),
        (MPICH, "4", "2", None, True, None),
        (MPICH, None, None, None, True, None),
    ],
)
def test_in_a_job_of_one_host_mpi_opens_no_port_to_others(
    monkeypatch, names, ranks, here, set_by_user, room, wanted
):
    monkeypatch.setattr(mpi_library, "_has_shared_memory", lambda ranks: room)
    environ = dict(zip(names, (ranks, here, set_by_user), strict=True))
    environ = {name: value for name, value in environ.items() if value is not None}
    mpi_library._keep_to_this_host(environ)
    assert environ.get(names[2]) == wanted
    assert set(environ) <= set(names)


@pytest.mark.parametrize(
    ("free", "writable", "has"),
    [(512, True, True), (64, True, False), (512, False, False), (None, True, False)],
)
def test_whether_shared_memory_will_do(monkeypatch, free, writable, has):
    def statvfs(path):
        if free is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(f_bavail=free, f_frsize=1 << 20)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert mpi_library._has_shared_memory(4) is has


def test_before_init_every_function_says_what_to_call():
    code = """
import jax, numpy as np, optax, jaxmpi
calls = {
    "tree_allreduce": lambda: jaxmpi.tree_allreduce(1.0),
    "tree_bcast": lambda: jaxmpi.tree_bcast(1.0),
    "tree_reduce": lambda: jaxmpi.tree_reduce(1.0),
    "tree_allgather": lambda: jaxmpi.tree_allgather(1.0),
    "tree_alltoall": lambda: jaxmpi.tree_alltoall(np.ones(1)),
    "tree_reduce_scatter": lambda: jaxmpi.tree_reduce_scatter(np.ones(1)),
    "synchronize": lambda: jaxmpi.synchronize(1.0),
    "broadcast_object": lambda: jaxmpi.broadcast_object(1),
    "allgather_object": lambda: jaxmpi.allgather_object(1),
    "barrier": jaxmpi.barrier,
    "rank": jaxmpi.rank,
    "size": jaxmpi.size,
    "local_rank": jaxmpi.local_rank,
    "local_size": jaxmpi.local_size,
    "shard": lambda: jaxmpi.shard([1]),
    "check_data": lambda: jaxmpi.check_data([1]),
    "get_logger": lambda: jaxmpi.get_logger("early", "somewhere"),
    "preempted": jaxmpi.preempted,
    "save": lambda: jaxmpi.save("x", 1, 2),
    "latest": lambda: jaxmpi.latest("x"),
    "restore": lambda: jaxmpi.restore("x", 1),
    "batches": lambda: jaxmpi.batches([1], 1),
    "rank_key": lambda: jaxmpi.rank_key(jax.random.key(0)),
}
for name, call in calls.items():
    try:
        call()
    except jaxmpi.NotInitializedError as error:
        assert f"{name} was called before jaxmpi.init()" in str(error), (name, error)
    else:
        raise AssertionError(name)
assert not jaxmpi.initialized()
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@run_ranks(1, 2, 3, 4)
def test_world_of_one_node():
    world = jaxmpi.init()
    n = world.size
    assert (world.rank, world.local_rank, world.local_size, world.node) == (
        jaxmpi.rank(),
        jaxmpi.local_rank(),
        n,
        0,
    )
    assert jaxmpi.allgather_object((world.rank, world.local_rank)) == [(r, r) for r in range(n)]
    assert world.backend == ("mpi" if n > 1 else "single") and world.device in jax.local_devices()
    assert jaxmpi.init() is world and jaxmpi.init("auto") is world
    other = "single" if n > 1 else "mpi"
    with pytest.raises(ValueError, match=r"init: the backend is .* since the first call"):
        jaxmpi.init(other)


@run_ranks(1, 2, 3)
def test_finalize_then_init_again():
    n = jaxmpi.size()
    jaxmpi.finalize()
    assert not jaxmpi.initialized()
    with pytest.raises(jaxmpi.NotInitializedError):
        jaxmpi.rank()
    jaxmpi.init()
    assert jaxmpi.size() == n
    np.testing.assert_array_equal(jaxmpi.tree_allgather(jaxmpi.rank()), np.arange(n))


def test_simulated_ranks_of_two_threads_at_a_time_are_refused():
    entered, done = threading.Event(), threading.Event()
    errors = []

    def other():
        assert entered.wait(10)
        try:
            with jaxmpi.simulate(3):
                pass
        except RuntimeError as error:
            errors.append(str(error))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jaxmpi.simulate(2):
        entered.set()
        assert done.wait(10) and jaxmpi.size() == 2
        with jaxmpi.simulate(4):  # in one thread they may be nested
            assert jaxmpi.size() == 4
    thread.join()
    assert len(errors) == 1 and errors[0].startswith("simulate: another thread of this process")


@run_ranks(2)
def test_after_finalize_the_process_is_no_rank_for_jaxmpi_top():
    for _ in range(2):
        assert os.getpid() in live_record.processes()
        jaxmpi.finalize()
        assert os.getpid() not in live_record.processes()
        jaxmpi.init()


@run_ranks(2)
def test_tree_functions_after_finalize_use_the_new_communicator():
    step = jax.jit(lambda x: jaxmpi.tree_allreduce(x, "sum"))
    assert step(1.0 * jaxmpi.rank()) == 1.0
    jaxmpi.finalize()
    jaxmpi.init()
    assert step(2.0 * jaxmpi.rank()) == 2.0


@pytest.mark.parametrize(
    ("function", "axes", "ranks", "advice"),
    [
        (
            "init",
            {"island": 2, "member": 2},
            1,
            r"Start 4 ranks\. On one rank, .*simulate\(4, axes={'island': 2, 'member': 2}",
        ),
        (
            "init",
            {"island": 2, "member": -1},
            1,
            r"Start a multiple of 2 ranks\. On one rank, .*simulate\(2, axes=.*-1}\):`\.$",
        ),
        (
            "init",
            {"member": 3},
            1,
            r"Start 3 ranks, or let the size of axis 'member' be -1\. On one rank, ",
        ),
        (
            "init",
            {"island": 2, "member": 3},
            4,
            r"Start 6 ranks, or let the size of axis 'member' be -1\.$",
        ),
        ("init", {"island": 3, "member": -1}, 4, r"Start a multiple of 3 ranks\.$"),
        ("simulate", {"island": 2, "member": 2}, 3, r"Simulate 4 ranks\.$"),
    ],
)
def test_axes_of_other_sizes_get_advice_that_works(function, axes, ranks, advice):
    with pytest.raises(jaxmpi.RankCountError, match=advice) as caught:
        sized_axes(function, axes, ranks)
    for name in axes:
        if f"axis {name!r} be -1" in str(caught.value):
            sized_axes(function, {**axes, name: -1}, ranks)


GROUPED = """
import sys
import jax, jaxmpi, numpy as np, optax
def main(islands):
    world = jaxmpi.init(axes={"island": islands, "member": -1})
    inner, outer = jaxmpi.distributed(optax.sgd(0.1), axis="member"), optax.sgd(0.7)
    tx = jaxmpi.local_sgd(inner, every=2, outer=outer, axis="island")
    w = np.ones(3, np.float32)
    state = tx.init(w)
    @jaxmpi.jit
    def step(w, state, x):
        updates, state = tx.update(jax.grad(lambda w: ((w - x) ** 2).sum())(w), state, w)
        return optax.apply_updates(w, updates), state
    for _ in range(2):
        w, state = step(w, state, np.float32(2.0))
    print(world.size, *np.asarray(w))
main(1)
with jaxmpi.simulate(4, axes={"island": 2, "member": 2}):
    main(2)
"""


def test_a_grouped_script_runs_on_one_rank_and_on_simulated_ranks():
    done = python(GROUPED)
    assert done.returncode == 0, done.stderr
    alone, simulated = done.stdout.splitlines()
    # two steps w <- w + 0.2 (2 - w), of which the outer step takes 0.7
    w = 1.0 + 0.7 * (1 - 0.8**2)
    np.testing.assert_allclose([float(x) for x in alone.split()], [1, w, w, w], rtol=1e-6)
    np.testing.assert_allclose([float(x) for x in simulated.split()], [4, w, w, w], rtol=1e-6)


@pytest.mark.slow
@run_ranks(1, 2, 4)
def test_axes_give_each_rank_coordinates():
    n, rank = jaxmpi.size(), jaxmpi.rank()
    jaxmpi.finalize()
    with pytest.raises(
        ValueError,
        match=f"init: axes are .*, which are a multiple of 3 ranks together, and there .* {n} rank",
    ):
        jaxmpi.init(axes={"island": 3, "member": -1})
    islands = min(n, 2)
    world = jaxmpi.init(axes={"island": islands, "member": -1})
    assert world.axes == {"island": islands, "member": n // islands}
    assert world.coordinates == {"island": rank // (n // islands), "member": rank % (n // islands)}
    assert (
        jaxmpi.init() is world and jaxmpi.init(axes={"island": -1, "member": n // islands}) is world
    )
    with pytest.raises(
        ValueError,
        match=r"init: axes are .* since the first call, and now {'member': \d} were asked for",
    ):
        jaxmpi.init(axes={"member": n})
    place = jaxmpi.jit(lambda: {name: jax.lax.axis_index(name) for name in world.axes})()
    assert place == world.coordinates
    total = jaxmpi.tree_allreduce(1.0 + rank, "sum", axis="member")
    assert total == sum(1.0 + r for r in range(n) if r // (n // islands) == rank // (n // islands))
    jaxmpi.finalize()
    assert jaxmpi.init().axes == {}
    assert jaxmpi.tree_allreduce(1.0, "sum") == n


def test_unknown_backend():
    done = python("import jaxmpi; jaxmpi.init('nccl')")
    assert (
        "ValueError: init: backend 'nccl' is unknown. Use one of auto, single, mpi, xla."
        in done.stderr
    )
    done = python("import jaxmpi; jaxmpi.init()", JAXMPI_BACKEND="nccl")
    assert (
        "ValueError: init: JAXMPI_BACKEND is 'nccl'. It is one of auto, single, mpi, xla."
        in done.stderr
    )


def test_launched_without_mpi_says_what_to_install(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not installed')")
    done = python(
        "import jaxmpi; jaxmpi.init()",
        PYTHONPATH=str(tmp_path),
        OMPI_COMM_WORLD_SIZE="4",
        OMPI_COMM_WORLD_LOCAL_SIZE="4",
    )
    assert (
        "MPIError: 4 ranks were launched by Open MPI, but mpi4py does not work here" in done.stderr
    )
    assert "pip install" in done.stderr


def launched_by_another_mpi():
    """Set what another MPI's mpiexec sets, so that the library starts alone.

    MPICH's variables, or Open MPI's where the library is MPICH.
    """
    has_open_mpi = Path(sys.executable).with_name("ompi_info").exists()
    return {"PMI_SIZE" if has_open_mpi else "OMPI_COMM_WORLD_SIZE": "3"}


FLUX = {"FLUX_JOB_SIZE": "3", "FLUX_TASK_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "by"),
    [(launched_by_another_mpi(), "( by Open MPI)?"), (FLUX, " by Flux")],
    ids=["another MPI", "Flux"],
)
def test_launched_by_another_mpi_says_so(environ, by):
    done = python("import jaxmpi; jaxmpi.init()", **environ)
    says = rf"MPIError: 3 ranks were launched{by}, but each of them is alone: mpi4py runs on "
    assert re.search(says, done.stderr)
    assert "Start the job with the mpirun of that MPI" in done.stderr


def test_a_second_try_after_mpi_has_ended_says_so():
    code = """
import jaxmpi
for _ in range(2):
    try:
        jaxmpi.init()
    except jaxmpi.MPIError as error:
        print(error)
"""
    done = python(code, **launched_by_another_mpi())
    first, second = done.stdout.splitlines()
    assert (
        "each of them is alone" in first
        and "MPI has ended in this process already. Start a new one." in second
    )


def test_mpi4jax_of_another_mpi_says_so(tmp_path):
    (tmp_path / "mpi4jax.py").write_text("raise RuntimeError('MPI ABI incompatibility detected!')")
    done = python(
        "import jaxmpi; jaxmpi.init('mpi')", PYTHONPATH=str(tmp_path), JAXMPI_TRANSPORT="mpi4jax"
    )
    assert (
        "MPIError: MPI was asked for, but mpi4jax does not work here: MPI ABI incompatibility"
        in done.stderr
    )
    assert "--no-build-isolation --no-cache-dir" in done.stderr


@pytest.mark.parametrize(
    ("visible", "devices", "local_rank", "size", "chosen"),
    [
        ("0,1,2,3", None, 2, 4, ("2", "2")),
        ("4,5", None, 3, 4, ("1", "5")),  # two ranks a GPU
        ("4,5,6", [2, 0], 1, 2, ("0", "4")),
        ("0", None, 0, 1, (None, None)),
        ("0,1", None, 0, 1, (None, None)),  # one rank keeps them all
        ("0,1", [1], 0, 1, ("1", "1")),
        ("0,1", None, 0, 2, ("0", "0")),  # alone on its node, and not in the job
        ("", None, 1, 2, (None, None)),
        ("-1", None, 1, 2, (None, None)),
        ("NoDevFiles", None, 1, 2, (None, None)),
        ("3,-1,4", None, 1, 2, ("0", "3")),
        ("GPU-ab-12, GPU-7", None, 1, 2, ("1", "GPU-7")),
        ("MIG-7, MIG-8", None, 1, 2, ("0", "MIG-8")),  # CUDA shows a process one slice
    ],
)
def test_device_goes_by_local_rank(monkeypatch, visible, devices, local_rank, size, chosen):
    updates = {}
    monkeypatch.setattr(_devices, "find_spec", lambda name: object())
    monkeypatch.setattr(_devices.jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(_devices, "started_without", lambda index, option: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    index, name = chosen
    assert _devices.choose(local_rank, size, devices) == name
    assert updates.get("jax_cuda_visible_devices") == index
    shown = "MIG-8" if "MIG" in visible else visible
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.parametrize(
    ("variables", "local_rank", "chosen"),
    [
        ({}, 1, ("1", "1")),
        ({}, 3, ("1", "1")),  # two GPUs are there
        ({"HIP_VISIBLE_DEVICES": "5,6,7"}, 2, ("2", "7")),
        ({"ROCR_VISIBLE_DEVICES": "4,3"}, 1, ("1", "3")),
        ({"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,3"}, 1, ("0", "1")),
        ({"JAX_PLATFORMS": "cpu"}, 1, (None, None)),
        ({"JAX_PLATFORMS": "rocm"}, 1, ("1", "1")),
    ],
)
def test_gpus_of_amd_go_by_local_rank(monkeypatch, tmp_path, variables, local_rank, chosen):
    updates = {}
    for node, units in enumerate((0, 304, 304)):  # the first is the CPU
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(
            f"cpu_cores_count {64 * (units == 0)}\nsimd_count {units}\n"
        )
    monkeypatch.setattr(_devices, "find_spec", lambda name: object() if "rocm" in name else None)
    monkeypatch.setattr(_devices.jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(_devices, "started_without", lambda index, option: False)
    visible = _devices.visible
    monkeypatch.setattr(_devices, "visible", lambda devices=None: visible(devices, kfd=tmp_path))
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "JAX_PLATFORMS",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    index, name = chosen
    assert _devices.choose(local_rank, 4, None) == name
    assert (
        updates.get("jax_rocm_visible_devices") == index
        and "jax_cuda_visible_devices" not in updates
    )


def test_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(_devices, "find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ValueError, match=r"init: devices=\[2\], and this node shows GPUs 0 to 1"):
        _devices.choose(0, 2, [2])


@pytest.mark.parametrize(("vendor", "tool"), [("cuda", "nvidia-smi"), ("rocm", "rocm-smi")])
def test_devices_on_a_node_without_gpus(monkeypatch, tmp_path, vendor, tool):
    monkeypatch.setattr(_devices, "find_spec", lambda name: object() if vendor in name else None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ValueError) as caught:
        _devices.visible([0], dev=tmp_path, kfd=tmp_path)
    assert str(caught.value) == (
        "init: devices=[0], and this node shows no GPU. Leave devices out, or start the job where "
        f"{tool} lists one."
    )


def test_a_gpu_cannot_be_chosen_once_jax_has_started(monkeypatch):
    jax.devices()
    monkeypatch.setattr(_devices, "find_spec", lambda name: object())
    monkeypatch.setattr(_devices.jax.config, "update", lambda name, value: pytest.fail("too late"))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        RuntimeError,
        match=r"init: JAX has started already, .* is to have GPU 5 alone\. "
        r"Call jaxmpi\.init\(\) before",
    ):
        _devices.choose(1, 2, None)


@pytest.mark.parametrize(
    ("shown", "enough"),
    [
        ([("a", "0123")] * 4, True),
        ([("a", "012")] * 4, False),
        ([("a", "01"), ("b", "01"), ("a", "01"), ("b", "01")], True),
        ([("a", "01"), ("b", "01"), ("a", "01"), ("a", "01")], False),
        ([("a", "")] * 2, False),
        ([("a", "0"), ("b", "")], False),
        ([("a", "0"), ("a", "1")], True),  # bound by the launcher
        ([("a", "0"), ("a", "0")], False),
        ([("a", "01"), ("a", "23")], True),
        ([("a", "01"), ("a", "12")], True),  # the first takes 0, the second 2
        ([("a", "0"), ("a", "01")], True),
    ],
)
def test_xla_is_the_default_with_a_gpu_for_every_rank(shown, enough):
    assert _devices.each_has_own_gpu([(host, list(names)) for host, names in shown]) is enough
    slices = [(host, [f"MIG-{name}" for name in names]) for host, names in shown]
    assert not _devices.each_has_own_gpu(slices)  # NCCL takes two slices of a GPU for one GPU


@pytest.mark.parametrize(
    ("listed", "exists", "uuid"),
    [
        ("0", "GPU-a", "GPU-a"),
        ("0,1", "GPU-a GPU-b", "GPU-b"),
        ("0", "GPU-a GPU-b", "0"),
        ("0", None, "0"),
        ("GPU-c", "GPU-c", "GPU-c"),
    ],
)
def test_gpus_that_slurm_has_numbered_anew_are_told_apart(
    monkeypatch, tmp_path, listed, exists, uuid
):
    if exists is not None:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '%s\\n' " + exists)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if exists else "")
    monkeypatch.setattr(_devices, "find_spec", lambda name: object())
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert _devices.unique(listed.split(",")[-1]) == uuid


@pytest.mark.parametrize(("uuids", "backend"), [("GPU-a GPU-b", "xla"), ("GPU-a GPU-a", "mpi")])
def test_ranks_with_bound_gpus_choose_together(monkeypatch, uuids, backend):
    """Two ranks that are both shown GPU 0; `gathered` is theirs."""
    ranks = iter([0, 1] * 2)

    def gathered(launched, answer):
        def of(rank):
            monkeypatch.setattr(_devices, "unique", lambda name: uuids.split()[rank])
            return answer()

        return [of(next(ranks)) for _ in range(launched)]

    monkeypatch.setattr("jaxmpi._backends.start.gathered", gathered)
    monkeypatch.setattr(_devices, "visible", lambda devices: ["0"])
    assert _choose(2, None) == backend


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "['mpi', 'xla'][rank]",
            "backend is 'mpi' on rank 0 and 'xla' on rank 1. Give every rank the same",
        ),
        (
            "'mpi', axes=[{'a': 2, 'b': 1}, {'b': 1, 'a': 2}][rank]",
            "axes is {'a': 2, 'b': 1} on rank 0 and {'b': 1, 'a': 2} on rank 1. Give every rank "
            "the same",
        ),
    ],
    ids=["backend", "axes"],
)
def test_ranks_that_ask_for_different_things_all_say_so(tmp_path, arguments, message):
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, jaxmpi
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
try:
    jaxmpi.init({arguments})
except jaxmpi.RankMismatchError as error:
    os.write(1, f"caught {{error}}\\n".encode())
""")
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count(f"caught init: {message}") == 2


BREAKS = {  # on rank 1 alone, and what both ranks say; the first two are of the mpi backend
    "mpi4jax of another jaxlib": (
        "def broken(*_): raise RuntimeError('Unable to find mpi_allreduce_ffi')\n"
        "    import mpi4jax; jax.local_devices = broken",
        (
            "mpi4jax was built for another jaxlib",
            "init: rank 1 cannot join the others. MPIError: mpi4jax was built for another",
        ),
    ),
    "an extension of older sources": (
        "from jaxmpi._backends import extension; extension.sources_digest = lambda folder: 'other'",
        (
            "was built from other sources than those in",
            "init: rank 1 cannot join the others. MPIError: The extension",
        ),
    ),
    "a node with fewer GPUs": (
        "def broken(*_): raise ValueError('init: devices=[3], and this node shows')\n"
        "    from jaxmpi import _devices; _devices.choose = _devices.visible = broken",
        (
            "ValueError: init: devices=[3]",
            "init: rank 1 cannot join the others. ValueError: init: devices=[3]",
        ),
    ),
    "something unforeseen": (
        "def broken(*_): raise OSError('unforeseen')\n"
        "    from jaxmpi._backends import mpi_ranks; mpi_ranks.unlink_shared_memory = "
        "broken",
        ("OSError: unforeseen", "rank 1"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "what"),
    [
        pytest.param("mpi", next(iter(BREAKS)), marks=pytest.mark.mpi4jax),
        *(("mpi", what) for what in list(BREAKS)[1:]),
        *(("xla", what) for what in list(BREAKS)[2:]),
    ],
)
def test_a_rank_that_cannot_join_ends_the_job(tmp_path, backend, what):
    breaks, said = BREAKS[what]
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, jax, jaxmpi
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    {breaks}
jaxmpi.init()
""")
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(script)]
    environ = {**os.environ, "JAXMPI_BACKEND": backend}
    if "mpi4jax" in what:  # the native transport does not import it
        environ["JAXMPI_TRANSPORT"] = "mpi4jax"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode
    for words in said:
        assert words in done.stderr + done.stdout


@pytest.mark.slow
def test_jax_knows_the_ranks_where_that_is_asked_for():
    output = run(on_ranks(3, str(Path(__file__).with_name("jax_processes_script.py"))))
    assert output.count("right") == 3


@pytest.mark.slow
def test_an_array_before_init_on_xla_is_an_error_that_says_so():
    command = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        "2",
        str(Path(__file__).with_name("early_array.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(
        "init: JAX has started already.* before any code that makes an array",
        done.stdout + done.stderr,
    )


RANDOM = """
import random
import jax
import numpy as np
import jaxmpi

random.seed(3)
np.random.seed(3)
before = random.getstate(), np.random.get_state()[1].tolist()
w = jaxmpi.init()
jaxmpi.jit(jaxmpi.tree_allreduce)(np.ones(3, np.float32))
assert (random.getstate(), np.random.get_state()[1].tolist()) == before
jaxmpi.print("as before")
"""


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "mpi"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "single"), (1, "mpi"), (1, "xla"), (2, "xla"))
        ),
    ],
)
def test_init_and_a_step_leave_global_random_states_as_they_were(ranks, backend, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANDOM)
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", str(ranks), str(script)]
    environ = {**os.environ, "JAXMPI_BACKEND": backend}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.count("as before") == ranks, done.stdout + done.stderr
