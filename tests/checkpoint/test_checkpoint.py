"""Checkpoints come back whole on any number of ranks, or an error names the file and the leaf."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._checkpoint import array_files, folders, restoring
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi._job.monitor import monitor
from jaxmpi._world import session
from jaxmpi.data import Batches
from jaxmpi.testing import run_ranks

DTYPES = (
    "bool",
    "int8",
    "uint16",
    "float16",
    "bfloat16",
    "float32",
    "float8_e4m3fn",
    "complex64",
    "int4",
)


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


def everything(scale=1):
    """A tree of all that can be saved."""
    rng = np.random.default_rng(scale)
    return {
        "dtypes": {
            name: jnp.asarray(np.arange(6).reshape(2, 3) * scale % 4, jnp.dtype(name))
            for name in DTYPES
        },
        "wide": np.arange(3.0) * scale,
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(scale),
        "key": jax.random.key(scale),
        "keys": jax.random.split(jax.random.key(scale, impl="rbg"), 3),
        "raw key": jax.random.PRNGKey(scale),
        "numbers": [
            scale,
            scale / 3,
            float("inf"),
            scale == 1,
            "text" * scale,
            10**30 * scale,
            None,
        ],
        "big": jnp.asarray(rng.normal(size=(300, 70)), jnp.float32),
        "a/b.npy": jnp.ones(2) * scale,
    }


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if isinstance(y, jax.Array) and jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype, name
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert type(x) is type(y), name
        if hasattr(y, "dtype"):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
        else:
            assert x == y, name


@run_ranks(1, 2, 3)
def test_everything_comes_back():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    assert jaxmpi.latest(directory) is None
    tree = everything(5)
    jaxmpi.save(directory, 7, tree)
    assert_same(jaxmpi.restore(directory, everything(2)), tree)
    some = {name: tree[name] for name in ("dtypes", "key", "keys", "empty", "scalar", "raw key")}
    shapes = jax.eval_shape(lambda: {name: everything(2)[name] for name in some})
    jaxmpi.save(directory, np.int64(8), some, background=False)
    assert jaxmpi.latest(directory) == 8
    assert_same(jaxmpi.restore(directory, shapes), some)
    assert_same(jaxmpi.restore(directory, everything(2), step=7), tree)
    assert sorted(os.listdir(Path(directory, "step-000000000007"))) == [
        "manifest.json",
        "rank-0.npz",
    ]
    assert not list(Path(directory).glob("unfinished*"))
    # by other programs, too
    with np.load(Path(directory, "step-000000000007", "rank-0.npz")) as opened:
        np.testing.assert_array_equal(opened["['big']"], tree["big"])


@run_ranks(1, 2)
def test_restore_gives_the_weak_types_of_like():
    """What is computed after `restore` has the dtypes that it had before."""
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    tree = {"lr": jnp.asarray(0.1), "n": jnp.asarray(3), "w": jnp.ones(2, jnp.bfloat16)}
    jaxmpi.save(directory, 1, tree)
    strong = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), tree)
    assert tree["lr"].weak_type and not strong["lr"].weak_type
    for like in (tree, strong, jax.eval_shape(lambda: tree)):
        got = jaxmpi.restore(directory, like)
        assert_same(got, tree)
        for name, x in got.items():
            assert x.weak_type == like[name].weak_type, name
    assert (jaxmpi.restore(directory, tree)["lr"] * tree["w"]).dtype == jnp.bfloat16


def test_restore_gives_the_sharding_of_a_shape(tmp_path):
    """A mesh without devices, as in what `jax.eval_shape` returns, asks for no device."""
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    jaxmpi.save(tmp_path, 1, jnp.arange(4.0))
    for sharding, is_asked in (
        (jax.sharding.NamedSharding(mesh, spec), True),
        (jax.sharding.SingleDeviceSharding(jax.devices()[0]), True),
        (jax.sharding.NamedSharding(mesh.abstract_mesh, spec), False),
        (None, False),
    ):
        like = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
        got = jaxmpi.restore(tmp_path, like)
        assert got.committed == is_asked
        assert not is_asked or got.sharding == sharding
        np.testing.assert_array_equal(got, np.arange(4.0))


def test_restore_takes_memory_for_one_copy_and_for_one_rank_that_it_compares(tmp_path):
    x = np.arange(1 << 24, dtype=np.uint8)
    like = np.zeros_like(x)
    jaxmpi.save(tmp_path / "one", 1, x)
    with jaxmpi.simulate(4):
        own = jaxmpi.PerRankState(jaxmpi.PerRank(np.broadcast_to(x, (4, *x.shape))))
        jaxmpi.save(tmp_path / "each", 1, own, background=False)
    for name, copies in (("one", 1), ("each", 2)):
        tracemalloc.start()
        try:
            got = jaxmpi.restore(tmp_path / name, like)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < (copies + 0.5) * x.nbytes
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(("other", "is_equal"), [(np.nan, True), (-np.nan, False)])
@pytest.mark.parametrize("at", [0, 5, 2999])
def test_values_of_ranks_are_compared_by_their_bits(tmp_path, monkeypatch, other, is_equal, at):
    monkeypatch.setattr(restoring, "PIECE_BYTES", 1000)
    rows = np.full((2, 3000), np.nan, np.float32)
    rows[1, at] = other
    with jaxmpi.simulate(2):
        jaxmpi.save(tmp_path, 1, jaxmpi.PerRankState(jaxmpi.PerRank(rows)), background=False)
    if is_equal:
        assert jaxmpi.restore(tmp_path, rows[0]).tobytes() == rows[0].tobytes()
    else:
        with pytest.raises(jaxmpi.CheckpointError, match="saved by 2 ranks, whose values"):
            jaxmpi.restore(tmp_path, rows[0])


@run_ranks(1, 2)
def test_what_is_saved_is_what_it_was_at_the_call():
    """The step may go on, donate its arrays and overwrite them."""
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    step = jaxmpi.jit(lambda x: x * 2, donate_argnums=0)
    x, mine = jnp.ones(1 << 20), np.ones(1 << 20)
    jaxmpi.save(directory, 0, (x, mine))
    x = step(x)
    mine[:] = 9
    for got in jaxmpi.restore(directory, (x, mine)):
        np.testing.assert_array_equal(got, np.ones(1 << 20))


@run_ranks(1, 2)
def test_the_last_ones_are_kept():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    steps = lambda: sorted(folders.step_of(path) for path in folders.found(Path(directory)))
    for step in (1, 2, 3, 4):
        jaxmpi.save(directory, step, {"x": jnp.full(3, step)}, keep=2, background=False)
    jaxmpi.barrier()
    assert steps() == [3, 4]
    jaxmpi.save(directory, 4, {"x": jnp.full(3, 40)}, keep=2, background=False)  # once more
    assert (
        steps() == [3, 4] and int(jaxmpi.restore(directory, {"x": jnp.zeros(3, int)})["x"][0]) == 40
    )
    jaxmpi.save(directory, 1, {"x": jnp.full(3, 1)}, keep=1, background=False)
    assert steps() == [1]  # the others are of a run that went further, and was left
    jaxmpi.save(directory, 5, {"x": jnp.full(3, 5)}, keep=None, background=False)
    assert steps() == [1, 5]
    jaxmpi.barrier()
    aside = sorted(path.name for path in Path(directory).glob("abandoned-*"))
    assert [name[:26] for name in aside] == ["abandoned-step-00000000000"] * 2


# The step that a job restores first, the steps that it saves, and the steps that exist then. An
# earlier job has saved the steps 10, 20 and 30.
STEPS = {
    "goes on": (None, [40], [10, 20, 30, 40]),
    "goes back": (10, [15], [10, 15]),
    "goes back, later steps": (10, [25, 35], [10, 25, 35]),
    "goes back to the middle": (20, [30], [10, 20, 30]),
    "begins afresh": ("fresh", [5, 10, 15], [5, 10, 15]),
    "begins afresh, at a later step": ("fresh", [25], [10, 20, 25]),
}


@run_ranks(1, 2)
def test_no_job_goes_on_from_an_abandoned_run():
    for name, (restored, saved, there) in STEPS.items():
        directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
        for step in (10, 20, 30):
            jaxmpi.save(directory, step, {"x": jnp.full(2, step)}, keep=None)
        like = {"x": jnp.zeros(2, int)}
        if restored != "fresh":
            jaxmpi.restore(directory, like, step=restored)
        for step in saved:
            jaxmpi.save(
                directory, step, {"x": jnp.full(2, -step)}, keep=None, background=step % 2 == 0
            )
        assert jaxmpi.latest(directory) == saved[-1], name
        assert int(jaxmpi.restore(directory, like)["x"][0]) == -saved[-1], name
        assert sorted(map(folders.step_of, folders.found(directory))) == there, name
        jaxmpi.barrier()
        # a damaged newest one leads to one of the same run
        if jaxmpi.rank() == 0:
            shutil.rmtree(folders.found(directory)[0])
        jaxmpi.barrier()
        assert jaxmpi.latest(directory) == there[-2], name
        jaxmpi.barrier()


@run_ranks(1, 2)
def test_a_save_that_fails_leaves_the_step_that_was_restored_to_the_next_one():
    """Else checkpoints of the run that was left would count as those of this one."""
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    for step in (10, 20, 30):
        jaxmpi.save(directory, step, {"x": jnp.full(2, step)})
    jaxmpi.restore(directory, {"x": jnp.zeros(2, int)}, step=10)

    def fails(*_):
        raise OSError(errno.ENOSPC, "no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_files, "write", fails)
        with pytest.raises(jaxmpi.CheckpointError, match="no room"):
            jaxmpi.save(directory, 15, {"x": jnp.full(2, -15)}, background=False)
    for step in (25, 35):
        jaxmpi.save(directory, step, {"x": jnp.full(2, -step)}, background=False)
    jaxmpi.barrier()
    assert [*map(folders.step_of, folders.found(directory))] == [35, 25, 10]
    assert len([*directory.glob("abandoned-*")]) == 2


def test_the_last_save_of_a_step_is_restored_even_if_none_is_removed(tmp_path, monkeypatch):
    """As where a job is killed after the rename, or may not remove what another user has saved."""
    jaxmpi.save(tmp_path, 5, {"x": 0}, background=False)
    jaxmpi.save(tmp_path, 5, {"x": 1}, background=False)
    monkeypatch.setattr(folders, "_remove", lambda checkpoint: None)
    for x in range(2, 12):
        jaxmpi.save(tmp_path, 5, {"x": x}, background=False)
        assert jaxmpi.restore(tmp_path, {"x": 0}) == {"x": x}


def test_abandoned_checkpoints_are_named_and_can_be_had_again(tmp_path, capfd):
    for step in (1, 2):
        jaxmpi.save(tmp_path, step, {"x": step})
    for _ in range(2):  # a second time, the name is taken
        jaxmpi.save(tmp_path, 1, {"x": -1}, background=False)
        jaxmpi.save(tmp_path, 2, {"x": -2}, background=False)
    jaxmpi.save(tmp_path, 1, {"x": -1}, background=False)
    err = capfd.readouterr().err
    assert (
        err.count("save: the checkpoints of steps 2 in") == 3
        and "are of another run than step 1." in err
    )
    assert len(list(tmp_path.glob("abandoned-*"))) == 3
    assert jaxmpi.latest(tmp_path) == 1
    (tmp_path / "abandoned-step-000000000002").rename(tmp_path / "step-000000000002")
    assert jaxmpi.restore(tmp_path, {"x": 0}) == {"x": 2}


RESTARTS = """
import os, signal, sys
import jax.numpy as jnp, jaxmpi
jaxmpi.init()
d, restart = sys.argv[1], os.environ["JAXMPI_RESTART"]
run, first = {"w": jnp.float32(0), "lr": 0.01}, 0
if restart != "0":
    first = jaxmpi.latest(d)
    run = jaxmpi.restore(d, run)
if jaxmpi.rank() == 0:
    print("from", first, run["lr"], float(run["w"]), flush=True)
for s in range(first + 50, 201, 50):
    run["w"] = run["w"] - 1
    jaxmpi.save(d, s, run, background=False)
    if restart == "0" and s == 150:
        jaxmpi.barrier()
        if jaxmpi.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        jaxmpi.barrier()
"""


@pytest.mark.slow
def test_an_automatic_restart_in_a_used_folder_goes_on_with_its_own_run(tmp_path):
    for s in (100, 200, 300):
        jaxmpi.save(tmp_path / "run", s, {"w": jnp.float32(s), "lr": 0.1}, background=False)
    script = tmp_path / "script.py"
    script.write_text(RESTARTS)
    command = [
        sys.executable,
        "-m",
        "jaxmpi",
        "run",
        "-n",
        "2",
        "--restarts",
        "1",
        str(script),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("from")]
    assert lines == ["from 0 0.01 0.0", "from 150 0.01 -3.0"]


SESSIONS = """
import sys, time, jaxmpi, jax.numpy as jnp
from jaxmpi._checkpoint import array_files
write = array_files.write
array_files.write = lambda *arguments: time.sleep(0.5) or write(*arguments)
for step in (3, 2):
    jaxmpi.init()
    own = jaxmpi.PerRankState(jnp.full(2, jaxmpi.rank()))
    jaxmpi.save(sys.argv[1], step, own)
    jaxmpi.finalize()
    jaxmpi.init()
    assert jaxmpi.latest(sys.argv[1]) == step
    assert int(jaxmpi.restore(sys.argv[1], own).per_rank[0]) == jaxmpi.rank()
    jaxmpi.finalize()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_finalize_waits_for_a_save_which_the_next_session_finds(tmp_path, ranks):
    script = tmp_path / "script.py"
    script.write_text(SESSIONS)
    launch = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, script, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    there = {path.name[:27] for path in (tmp_path / "run").iterdir()}
    assert there == {"step-000000000002", "abandoned-step-000000000003"}


def test_simulate_waits_for_a_save_at_the_end_of_its_block(tmp_path):
    script = """
import sys, time, jaxmpi, jax.numpy as jnp
from jaxmpi._checkpoint import array_files
write = array_files.write
array_files.write = lambda *arguments: time.sleep(0.5) or write(*arguments)
with jaxmpi.simulate(2):
    jaxmpi.save(sys.argv[1], 1, jnp.ones(2))
with jaxmpi.simulate(3):
    assert jaxmpi.latest(sys.argv[1]) == 1
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, timeout=60)


# a part of a checkpoint


@run_ranks(1, 2, 3)
def test_a_part_is_restored_by_name_and_the_rest_is_named():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    params = {"body": jnp.arange(5.0) + 1, "head": jnp.arange(3.0) + 7}
    tx = jaxmpi.sharded(optax.adam(0.1))
    run = {
        "params": params,
        "state": tx.init(params),
        "own": jaxmpi.PerRankState(jaxmpi.rank()),
        "step": 4,
    }
    jaxmpi.save(directory, 4, run)
    empty = jax.tree.map(jnp.zeros_like, params)
    first = jaxmpi.rank() == 0

    def warned(match):
        return pytest.warns(UserWarning, match=match) if first else contextlib.nullcontext()

    # parameters for an evaluation
    with warned(r"left out of the checkpoint: .*'state'"):
        assert_same(jaxmpi.restore(directory, {"params": empty}, partial=True), {"params": params})
    # a new head: of another name, which is kept; or of another shape, which is put in afterwards
    new = {"params": {"body": empty["body"], "head2": jnp.full(9, 3.0)}, "step": 0}
    with warned(r"left out .*\['params'\]\['head'\].*; kept from `like`: \['params'\]\['head2'\]"):
        got = jaxmpi.restore(directory, new, partial=True)
    assert_same(got, {"params": {"body": params["body"], "head2": jnp.full(9, 3.0)}, "step": 4})
    with pytest.raises(
        jaxmpi.CheckpointError,
        match=r"leaf \['params'\]\['head'\] is float32\[3\] in it, and .*Take it out",
    ):
        jaxmpi.restore(
            directory, {"params": {"body": empty["body"], "head": jnp.zeros(9)}}, partial=True
        )
    # all of it says nothing; it must be asked for; and it cannot be nothing, or a shape without
    # values
    assert_same(jaxmpi.restore(directory, run, partial=True), run)
    with pytest.raises(
        jaxmpi.CheckpointError, match=r"is in it, and not in `like`\. .*partial=True"
    ):
        jaxmpi.restore(directory, {"params": empty})
    with pytest.raises(jaxmpi.CheckpointError, match="has no leaf of `like`"):
        jaxmpi.restore(directory, {"weights": empty}, partial=True)
    shape = {"params": {**empty, "new": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    with pytest.raises(
        jaxmpi.CheckpointError,
        match=r"leaf \['params'\]\['new'\] is not in it, and `like` has only its",
    ):
        jaxmpi.restore(directory, shape, partial=True)
    if jaxmpi.size() > 1:
        with pytest.raises(jaxmpi.RankMismatchError, match="partial"):
            jaxmpi.restore(directory, run, partial=first)


@run_ranks(2, 3)
def test_a_kept_leaf_that_is_only_a_shape_on_one_rank_is_an_error_on_all():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    saved = {"a": jnp.ones(2)}
    jaxmpi.save(directory, 1, saved)
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    mine = shape if jaxmpi.rank() == jaxmpi.size() - 1 else jnp.zeros(2)
    with pytest.raises(
        jaxmpi.CheckpointError, match=r"leaf \['b'\] is not in it, and `like` has only its shape"
    ):
        jaxmpi.restore(directory, {"a": mine, "b": mine}, partial=True)
    assert_same(jaxmpi.restore(directory, {"a": mine}, partial=True), saved)


# on another number of ranks

PARAMS = {"w": (5, 3), "b": (7,), "one": (1,), "s": (), "none": (0, 2)}


def state_of(optimizer, seed):
    """Parameters and a state full of numbers, the same for any number of ranks."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 100, x.dtype)
    params = {
        name: draw(jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for name, shape in PARAMS.items()
    }
    inner = optax.chain(optax.adam(0.1), optax.trace(0.9))
    if optimizer == "distributed":
        return params, jax.tree.map(draw, jaxmpi.distributed(inner).init(params))
    tx = jaxmpi.sharded(inner, master_dtype=jnp.float32)
    is_per_rank = lambda x: isinstance(x, jaxmpi.PerRank)
    whole = jaxmpi.local(jaxmpi.unshard(tx.init(params)))
    whole = jax.tree.map(lambda x: draw(x[0] if is_per_rank(x) else x), whole, is_leaf=is_per_rank)
    state = jaxmpi.reshard(whole)
    if optimizer == "accumulate":
        state = jaxmpi.accumulate(tx, 2).init(params)._replace(inner=state)
    return params, state


def save_states(directory):
    for optimizer in ("distributed", "sharded", "accumulate"):
        jaxmpi.save(f"{directory}/{optimizer}", 3, state_of(optimizer, 0))
        jaxmpi.latest(f"{directory}/{optimizer}")


def restore_states(directory):
    for optimizer in ("distributed", "sharded", "accumulate"):
        like, want = state_of(optimizer, 1), jaxmpi.local(state_of(optimizer, 0))
        for folder in sorted(Path(directory).iterdir()):
            assert_same(jaxmpi.local(jaxmpi.restore(folder / optimizer, like)), want)


KINDS = ("distributed", "sharded", "fully_shard")
STACKED = {"w": False, "b": False, "s": False, "layers": True}


def same_run(kind, seed):
    """Make parameters and a state of Adam with the same numbers, whole or cut over the ranks."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (5, 3), "b": (7,), "s": (), "layers": {"w": (4, 3, 5), "s": (4,)}}
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params, mu, nu = (
        jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple)) for _ in range(3)
    )
    adam = optax.adam(0.1)
    state = adam.init(params)
    state = (state[0]._replace(count=jnp.int32(seed), mu=mu, nu=nu), *state[1:])
    if kind == "fully_shard":
        cut = lambda tree: jaxmpi.fully_shard(tree, stacked=STACKED)
        return cut(params), (state[0]._replace(mu=cut(mu), nu=cut(nu)), *state[1:])
    if kind == "distributed":
        return params, state
    whole = jaxmpi.unshard(jaxmpi.sharded(adam).init(params))
    return params, jaxmpi.reshard(
        jax.tree.unflatten(jax.tree.structure(whole), jax.tree.leaves(state))
    )


SAMPLES, BATCH_SIZE = np.arange(240), 60  # which 1 to 5 ranks divide
EPOCH = {"seed": 7, "epoch": 1}


def save_kinds(directory):
    for kind in KINDS:
        batches = jaxmpi.batches(SAMPLES, BATCH_SIZE, **EPOCH)
        next(iter(batches))
        jaxmpi.save(
            f"{directory}/{kind}", 3, {"run": same_run(kind, 0), "position": batches.position}
        )
        jaxmpi.latest(f"{directory}/{kind}")


def restore_kinds(directory):
    left = list(
        Batches(SAMPLES, BATCH_SIZE, rank=0, size=1, start=BATCH_SIZE, remainder="drop", **EPOCH)
    )
    for kind in KINDS:
        like, want = same_run(kind, 1), jaxmpi.local(same_run(kind, 0))
        for folder in sorted(Path(directory).glob("*/*")):
            restored = jaxmpi.restore(folder, {"run": like, "position": 0})
            assert_same(jaxmpi.local(restored["run"]), want)
            next_ones = list(
                jaxmpi.batches(SAMPLES, BATCH_SIZE, start=restored["position"], **EPOCH)
            )
            assert len(next_ones) == len(left) == 3
            for batch, whole in zip(next_ones, left, strict=True):
                parts = np.split(whole, jaxmpi.size())
                mine = parts if isinstance(batch, jaxmpi.PerRank) else [parts[jaxmpi.rank()]]
                np.testing.assert_array_equal(
                    np.concatenate(jax.tree.leaves(batch)).reshape(-1), np.concatenate(mine)
                )


def run(function, ranks, backend, directory):
    if backend == "simulate":
        with jaxmpi.simulate(ranks):
            function(directory)
    else:
        pool(ranks, backend).run(Task(__file__, function.__name__, {"directory": directory}, 120.0))


@pytest.mark.exhaustive
def test_saved_in_one_way_and_restored_in_another(tmp_path):
    """A run saved whole, as ZeRO-1 or as FSDP restores as any other, on all backends and sizes."""
    for n, backend in [(1, "auto"), (2, "auto"), (3, "auto"), (2, "xla"), (5, "simulate")]:
        run(save_kinds, n, backend, str(tmp_path / f"{backend}-{n}"))
    for m, backend in [
        (1, "auto"),
        (2, "auto"),
        (3, "auto"),
        (4, "auto"),
        (2, "xla"),
        (3, "simulate"),
    ]:
        run(restore_kinds, m, backend, str(tmp_path))


@pytest.mark.slow
def test_saved_on_n_ranks_and_restored_on_m(tmp_path):
    """Restoring on m ranks what n saved gives the bits of m ranks, for n and m from 1 to 4."""
    for n, backend in [
        (1, "auto"),
        (2, "auto"),
        (3, "auto"),
        (4, "auto"),
        (2, "xla"),
        (5, "simulate"),
    ]:
        run(save_states, n, backend, str(tmp_path / f"{backend}-{n}"))
    assert sorted(os.listdir(tmp_path / "auto-3" / "sharded" / "step-000000000003")) == [
        "manifest.json",
        *(f"rank-{r}.npz" for r in range(3)),
    ]
    for m, backend in [
        (1, "auto"),
        (2, "auto"),
        (3, "auto"),
        (4, "auto"),
        (2, "xla"),
        (5, "simulate"),
    ]:
        run(restore_states, m, backend, str(tmp_path))


def save_own(directory):
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(0.1)), 2)
    params = jnp.ones(3)
    _, state = jaxmpi.jit(tx.update)(params * (jaxmpi.rank() + 1), tx.init(params), params)
    jaxmpi.save(directory, 0, state)
    got = jaxmpi.restore(directory, tx.init(params))
    np.testing.assert_array_equal(got.sums.per_rank[0], np.full(3, jaxmpi.rank() + 1.0))


def restore_own(directory):
    tx = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(0.1)), 2)
    with pytest.raises(
        jaxmpi.CheckpointError, match=r"leaf \.sums\[0\] is each rank's own and was saved by 2"
    ):
        jaxmpi.restore(directory, tx.init(jnp.ones(3)))


def test_what_each_rank_has_of_its_own_needs_as_many(tmp_path):
    run(save_own, 2, "auto", str(tmp_path))
    run(restore_own, 3, "auto", str(tmp_path))


@run_ranks(2)
def test_a_save_does_not_wait_for_the_guards_next_look():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    state = jaxmpi.sharded(optax.adam(0.1)).init(jnp.ones(8))  # of which each rank writes a part
    usual, monitor.POLL_SECONDS = monitor.POLL_SECONDS, 5.0
    try:
        time.sleep(2 * usual)  # by now the monitor's threads sleep for 5 seconds
        start = time.monotonic()
        jaxmpi.save(directory, 0, state, background=False)
        seconds = time.monotonic() - start
    finally:
        monitor.POLL_SECONDS = usual
        session.monitor().signals.wake()
    assert seconds < 2.5


@run_ranks(2)
def test_a_save_handles_no_message_but_its_own():
    """What handles another topic may rely on the monitor's thread."""
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    rank, guard, threads = jaxmpi.rank(), session.monitor(), set()
    write = array_files.write

    def slow(*args):
        for _ in range(30):
            guard.send(0, "probe", None)
            time.sleep(0.01)
        return write(*args)

    guard.topics["probe"] = lambda *_: threads.add(threading.current_thread().name)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(array_files, "write", slow)
            own = jaxmpi.PerRankState(jnp.full(2, rank))
            jaxmpi.save(directory, 1, own, background=False)
    finally:
        del guard.topics["probe"]
    assert "jaxmpi-save" not in threads
    assert (not threads) == (rank == 1)


# what goes wrong


@run_ranks(1, 2)
@pytest.mark.parametrize(
    "how", ["truncated", "flipped", "missing", "manifest", "foreign", "emptied"]
)
def test_a_damaged_checkpoint_is_named_and_passed_over(how):
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    tree = {"a": jnp.arange(1000.0), "b": jnp.ones(3)}
    for step in (1, 2):
        times_step = jax.tree.map(lambda x, step=step: x * step, tree)
        jaxmpi.save(directory, step, times_step, background=False)
    jaxmpi.barrier()
    folder = Path(directory, "step-000000000002")
    if jaxmpi.rank() == 0:
        spoil(folder, how)
    jaxmpi.barrier()
    names = {"manifest": "manifest.json", "foreign": "manifest.json"}.get(how, "rank-0.npz")
    with pytest.raises(jaxmpi.CheckpointError, match=names) as raised:
        warned(jaxmpi.restore, directory, tree, step=2)
    if how == "flipped":
        assert "['a']" in str(raised.value)
    assert warned(jaxmpi.latest, directory) == 1
    assert_same(warned(jaxmpi.restore, directory, tree), tree)


def warned(function, *args, **kwargs):
    """Call a function that warns of the spoiled checkpoint on rank 0."""
    if jaxmpi.rank():
        return function(*args, **kwargs)
    with pytest.warns(UserWarning, match="a checkpoint is passed over: .*step-000000000002"):
        return function(*args, **kwargs)


def test_warnings_are_of_the_line_that_calls(tmp_path):
    for step in (1, 2):
        jaxmpi.save(tmp_path, step, {"a": jnp.ones(3), "b": 1}, background=False)
    spoil(tmp_path / "step-000000000002", "missing")
    for call in (
        lambda: jaxmpi.latest(tmp_path),
        lambda: jaxmpi.restore(tmp_path, {"a": jnp.ones(3), "b": 0}),
        lambda: jaxmpi.restore(tmp_path, {"b": 0}, partial=True),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert {(one.filename, one.lineno) for one in caught} == {
            (__file__, call.__code__.co_firstlineno)
        }


def spoil(folder, how):
    file = folder / "rank-0.npz"
    if how in ("truncated", "emptied"):
        os.truncate(file, file.stat().st_size // 2 if how == "truncated" else 0)
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[2000] ^= 1
        file.write_bytes(data)
    elif how == "missing":
        file.unlink()
    elif how == "foreign":
        (folder / "manifest.json").write_text(json.dumps({"format": "another"}))
    else:
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))


@run_ranks(1, 2)
@pytest.mark.parametrize(
    ("like", "words"),
    [
        (
            {"w": np.zeros(3, np.float32)},
            r"leaf \['b'\] \(float32\[2\]\) is in it, and not in `like`",
        ),
        (
            {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32), "c": 1},
            r"leaf \['c'\] \(int\) of `like` is not in it",
        ),
        (
            {"w": np.zeros(4, np.float32), "b": np.zeros(2, np.float32)},
            r"leaf \['w'\] is float32\[3\] in it, and float32\[4\]",
        ),
        (
            {"w": np.zeros(3, np.int32), "b": np.zeros(2, np.float32)},
            r"leaf \['w'\] is float32\[3\] in it, and int32\[3\]",
        ),
    ],
)
def test_another_tree_is_named(like, words):
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    jaxmpi.save(directory, 1, {"w": jnp.zeros(3), "b": jnp.zeros(2)})
    with pytest.raises(jaxmpi.CheckpointError, match=f"restore: .*step-000000000001: {words}"):
        jaxmpi.restore(directory, like)


def parts(function, *args, **kwargs):
    """Return the `CheckpointError` of a call: its text must be what is wrong, and the advice."""
    with pytest.raises(jaxmpi.CheckpointError) as raised:
        function(*args, **kwargs)
    error = raised.value
    assert str(error) == f"{error.what} {error.advice}".strip()
    return error


@run_ranks(1, 2)
def test_an_error_of_restore_has_the_folder_the_leaf_and_the_advice():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    jaxmpi.save(directory, 1, {"w": jnp.ones(3)})
    other_shape = parts(jaxmpi.restore, directory, {"w": jnp.ones(4)})
    folder = str(Path(directory, "step-000000000001"))
    assert (other_shape.path, other_shape.leaf) == (folder, "['w']")
    assert other_shape.advice.startswith("Build the model and the optimizer as they were")
    # an error that one rank finds has its parts on all
    last = jaxmpi.rank() == jaxmpi.size() - 1
    mine = jax.ShapeDtypeStruct((3,), jnp.float32) if last else jnp.zeros(3)
    no_values = parts(jaxmpi.restore, directory, {"w": mine, "b": mine}, partial=True)
    assert (no_values.path, no_values.leaf) == (folder, "['b']")
    assert no_values.advice == "Pass an array that it keeps."


@run_ranks(1, 2)
def test_the_damage_of_a_checkpoint_is_no_advice():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    for step in (1, 2):
        jaxmpi.save(directory, step, {"a": jnp.arange(step * 3.0)}, background=False)
    jaxmpi.barrier()
    if jaxmpi.rank() == 0:
        for step in (1, 2):
            spoil(Path(directory, f"step-{step:012}"), "foreign")
    jaxmpi.barrier()
    advice = "look where it was saved."
    for step, advised in ((None, advice.capitalize()), (2, f"Restore an older step, or {advice}")):
        error = parts(warned, jaxmpi.restore, directory, {"a": jnp.zeros(6)}, step=step)
        assert (error.path, error.leaf, error.advice) == (directory, "", advised)
        assert error.what.startswith("restore: there is no whole checkpoint")
        assert "step-000000000002/manifest.json is no manifest of a checkpoint" in error.what
    nowhere = parts(jaxmpi.restore, directory, {}, step=9)
    assert (nowhere.path, nowhere.advice) == (directory, "Look where it was saved.")


def different_values(directory):
    jaxmpi.save(directory, 1, {"s": jaxmpi.PerRankState(jnp.full(3, jaxmpi.rank() + 1.0))})
    jaxmpi.latest(directory)


def restored_by_more_ranks(directory):
    error = parts(jaxmpi.restore, directory, {"s": jaxmpi.PerRankState(jnp.zeros(3))})
    assert isinstance(error, jaxmpi.RankCountError)
    assert error.leaf == "['s']" and error.advice.startswith("Go on with 2 ranks, or")


def test_an_error_of_the_number_of_ranks_has_the_leaf_and_the_advice(tmp_path):
    for ranks, function in ((2, different_values), (3, restored_by_more_ranks)):
        pool(ranks, "auto").run(
            Task(__file__, function.__name__, {"directory": str(tmp_path)}, 120.0)
        )


@run_ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_save_has_the_file_and_the_advice_on_all_ranks(background):
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    tree = jaxmpi.PerRankState(jnp.full(3, jaxmpi.rank() + 1.0))
    rank = jaxmpi.size() - 1

    def refuse(_):
        raise OSError(errno.ENOSPC, "no room")

    with pytest.MonkeyPatch.context() as patch:
        if jaxmpi.rank() == rank:
            patch.setattr(os, "fsync", refuse)

        def save_and_wait():
            jaxmpi.save(directory, 1, tree, background=background)
            jaxmpi.latest(directory)

        error = parts(save_and_wait)
    assert error.what.startswith(f"save: step 1: {error.path} could not be written: ")
    assert error.path.endswith(f"rank-{rank}.part")
    assert error.advice == "Free some space, or save elsewhere."


@run_ranks(1, 2)
def test_bad_arguments():
    with pytest.raises(ValueError, match=r"save: step is -1 and keep is 3"):
        jaxmpi.save("nowhere", -1, {})
    with pytest.raises(TypeError, match="float"):
        jaxmpi.save("nowhere", 1.0, {})
    with pytest.raises(
        TypeError, match=r"leaf \['s'\] is a ShapeDtypeStruct, which holds no numbers"
    ):
        jaxmpi.save("nowhere", 1, {"s": jax.ShapeDtypeStruct((), jnp.float32)})
    with pytest.raises(TypeError, match=r"leaf \['s'\] has dtype <U1"):
        jaxmpi.save("nowhere", 1, {"s": np.array(["a"])})
    with pytest.raises(ValueError, match=r"keep is 0"):
        jaxmpi.save("nowhere", 1, {}, keep=0)
    with pytest.raises(TypeError, match=r"leaf \['f'\] is a function"):
        jaxmpi.save("nowhere", 1, {"f": test_bad_arguments})
    with pytest.raises(jaxmpi.CheckpointError, match="there is no whole checkpoint in nowhere"):
        jaxmpi.restore("nowhere", {})
    file = jaxmpi.broadcast_object(tempfile.mkstemp()[1])
    with pytest.raises(jaxmpi.CheckpointError, match=r"File exists|Not a directory"):
        jaxmpi.save(file, 1, {})


ANY_DTYPES = ("bool", "i1", ">f4", ">i8", "f8", "longdouble", "clongdouble", "bfloat16", "int4")
ANY_DTYPES += ("V8", "S3", "U2", "M8[s]", "m8[s]", "O", "f4,i4", "(2,)f4")


@run_ranks(1, 2)
@pytest.mark.parametrize("dtype", ANY_DTYPES)
def test_save_refuses_a_dtype_or_restores_it(dtype):
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    x = np.zeros(3, jnp.dtype(dtype) if dtype in ("bfloat16", "int4") else dtype)
    tree = {"other": jnp.arange(3.0), "x": x}
    try:
        jaxmpi.save(directory, 1, tree, background=False)
    except TypeError as error:
        assert x.dtype.kind in "VSUMmO" and "leaf ['x'] has dtype" in str(error)
        assert not os.listdir(directory)
    else:
        assert_same(jaxmpi.restore(directory, tree), tree)


@run_ranks(1, 2)
def test_save_refuses_a_step_or_restores_it():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    for step in (0, True, 2**63 - 1):
        jaxmpi.save(directory, step, {"x": step})
        assert jaxmpi.latest(directory) == step
    for step in (-1, 2**63, 2**64):
        with pytest.raises(ValueError, match=f"save: step is {step} and keep is 3"):
            jaxmpi.save(directory, step, {"x": step})


@run_ranks(1, 2)
def test_a_masked_array_is_refused():
    x = np.ma.masked_array([1.0, 2.0], [True, False])
    for call in (
        lambda: jaxmpi.save("nowhere", 1, {"x": x}),
        lambda: jaxmpi.restore("nowhere", {"x": x}),
    ):
        with pytest.raises(TypeError, match=r"leaf \['x'\] is a MaskedArray"):
            call()


@run_ranks(2, 3)
def test_ranks_with_different_trees_all_say_so():
    with pytest.raises(jaxmpi.RankMismatchError, match=r"leaf \['w'\]: float32\[2\]"):
        jaxmpi.save("nowhere", 1, {"w": jnp.zeros(2 + jaxmpi.rank() // (jaxmpi.size() - 1))})


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_save_that_fails_on_one_rank_is_raised_by_the_next_call_on_all(error):
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    tx = jaxmpi.sharded(optax.adam(0.1))
    state = tx.init(jnp.ones(8))
    whole = array_files.write

    def fails(*_):
        raise error("no room")

    try:
        if jaxmpi.rank() == jaxmpi.size() - 1:
            array_files.write = fails
        jaxmpi.save(directory, 1, state)
    finally:
        time.sleep(0.3)
        array_files.write = whole
    with pytest.raises(jaxmpi.CheckpointError, match=r"save: step 1: .*no room"):
        jaxmpi.save(directory, 2, state)
    assert jaxmpi.latest(directory) == 2  # which was written nevertheless
    jaxmpi.barrier()
    assert [path.name for path in directory.iterdir()] == ["step-000000000002"]


@run_ranks(2)
def test_numbers_that_differ_are_no_checkpoint():
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"leaf \['t'\] is not equal on all ranks: rank 1 has other values \(1.5, and 0.5",
    ):
        jaxmpi.save("nowhere", 1, {"t": jaxmpi.rank() + 0.5})


@pytest.mark.slow
def test_any_flipped_bit_is_found(tmp_path):
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2), jnp.bfloat16), "n": 5}
    jaxmpi.save(tmp_path, 1, tree, background=False)
    jaxmpi.save(tmp_path, 2, tree, background=False)
    for file in sorted((tmp_path / "step-000000000002").iterdir()):
        whole = file.read_bytes()
        for i in range(len(whole)):
            file.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
            newest, _ = folders.newest([tmp_path])
            if newest[0].name == "step-000000000002":  # a bit that nobody reads
                assert_same(jaxmpi.restore(tmp_path, tree), tree)
        file.write_bytes(whole)


def test_steps_of_any_length(tmp_path):
    for step in (0, 5, 10**12, 10**15):
        jaxmpi.save(tmp_path, step, {"x": step})
    assert jaxmpi.latest(tmp_path) == 10**15
    assert jaxmpi.restore(tmp_path, {"x": 0}, step=5) == {"x": 5}


FAILS = """
import os, sys, jaxmpi, jax.numpy as jnp
from jaxmpi._checkpoint import array_files
jaxmpi.init()
whole = array_files.write
array_files.write = lambda folder, *_: whole(folder / "gone", *_)
jaxmpi.save(sys.argv[1], 1, {"w": jnp.zeros(2)})
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_at_the_end_of_the_script_fails_the_job(tmp_path, ranks):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    launch = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, script, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode and "CheckpointError: save: step 1: " in done.stderr


KILLED = """
import os, signal, sys, threading, time, jaxmpi, jax.numpy as jnp
jaxmpi.init()
x = jnp.arange(1 << 20)
jaxmpi.save(sys.argv[1], 1, {"x": x}, background=False)
threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
for step in range(2, 10_000):
    jaxmpi.save(sys.argv[1], step, {"x": x + step}, keep=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, seed):
    delay = str(np.random.default_rng(seed).uniform(0, 0.3))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, delay], capture_output=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    step = jaxmpi.latest(tmp_path)  # without a warning: no half one has the name of a checkpoint
    got = jaxmpi.restore(tmp_path, {"x": jnp.zeros(1 << 20, jnp.int32)})
    np.testing.assert_array_equal(got["x"], np.arange(1 << 20) + (step if step > 1 else 0))
    jaxmpi.save(tmp_path, step + 1, {"x": 0}, background=False)
    assert not list(tmp_path.glob("unfinished*"))


# what fits what

NUMBERS = [  # saved, in `like`, and what comes back; None where they don't fit
    (jnp.int32(5), 0, 5),
    (5, jnp.int32(0), jnp.int32(5)),
    (np.int64(2**40), 0, 2**40),
    (2**40, np.int64(0), np.int64(2**40)),
    (5, np.zeros((), np.uint8), np.array(5, np.uint8)),
    (5, jax.ShapeDtypeStruct((), jnp.int32), jnp.int32(5)),
    (jnp.bfloat16(0.5), 0.0, 0.5),
    (0.1, jnp.float32(0), jnp.float32(0.1)),
    (0.1, np.float64(0), np.float64(0.1)),
    (np.float64(0.1), 0.0, 0.1),
    (jnp.float32(jnp.inf), 0.0, float("inf")),
    (float("inf"), jnp.bfloat16(0), jnp.bfloat16(jnp.inf)),
    (jnp.bool_(True), False, True),
    (True, np.bool_(False), np.bool_(True)),
    (np.float32(3), jnp.float32(0), jnp.float32(3)),
    (jnp.float32(3), np.float32(0), np.float32(3)),
    (2**40, jnp.int32(0), "cannot hold"),
    (-1, np.uint8(0), "cannot hold"),
    (1e300, jnp.float32(0), "cannot hold"),
    (5, 0.0, "is int in it, and float in"),
    (True, 0, "is bool in it, and int in"),
    (1, jnp.bool_(True), r"is int in it, and bool\[\] in"),
    (jnp.float32(1), 0, r"is float32\[\] in it, and int in"),
    (jnp.int32(1), 0.0, r"is int32\[\] in it, and float in"),
    (jnp.ones(1, jnp.int32), 0, r"is int32\[1\] in it, and int in"),
    ("5", 0, "is str in it, and int in"),
    (jnp.int32(5), np.int64(0), r"is int32\[\] in it, and int64\[\] in"),
]


def test_python_numbers_fit_arrays_of_their_kind(tmp_path):
    for number, (saved, like, want) in enumerate(NUMBERS):
        jaxmpi.save(tmp_path, number, {"x": saved}, background=False)
        if isinstance(want, str):
            with pytest.raises(jaxmpi.CheckpointError, match=want):
                jaxmpi.restore(tmp_path, {"x": like}, step=number)
        else:
            assert_same(jaxmpi.restore(tmp_path, {"x": like}, step=number), {"x": want})


@run_ranks(1, 2)
def test_a_train_state_fits_a_fresh_one():
    """The step of a train state is a Python number before the first step, and an array later."""
    from flax.training.train_state import TrainState

    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    fresh = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=jaxmpi.distributed(optax.adam(0.1))
    )
    step = jaxmpi.jit(
        lambda state, x: state.apply_gradients(grads={"w": x * state.params["w"]}),
        replicated_argnums=0,
    )
    trained = step(step(fresh, jnp.float32(jaxmpi.rank())), jnp.float32(1))
    for number, (saved, like) in enumerate(
        [(fresh, trained), (trained, fresh), (trained, trained)]
    ):
        jaxmpi.save(directory, number, saved)
        got = jaxmpi.restore(directory, like)
        assert type(got.step) is type(jaxmpi.local(like.step)) and int(got.step) == int(saved.step)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(x, y)
    went_on, unbroken = step(got, jnp.float32(2)), step(trained, jnp.float32(2))
    np.testing.assert_array_equal(went_on.params["w"], unbroken.params["w"])


@dataclasses.dataclass(frozen=True, order=True)
class PrintsAlike:
    number: int

    def __repr__(self):
        return "it"


@jax.tree_util.register_pytree_with_keys_class
class OneName:
    """A node whose children have one key."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@run_ranks(1, 2)
def test_two_leaves_of_one_name_are_refused():
    alike = {"a": OneName(jnp.zeros(2), jnp.ones(2))}
    for tree, name in [
        (alike, r"\['a'\]\.x"),
        ({PrintsAlike(1): 1, PrintsAlike(2): 2}, r"\[it\]"),
        ({"a": [OneName(1, 2)]}, r"\['a'\]\[0\]\.x"),
        (jaxmpi.PerRankState(alike), r"\['a'\]\.x"),
        (OneName(jaxmpi.PerRankState(1), 2), r"\.x"),
    ]:
        for call in (
            lambda tree: jaxmpi.save("nowhere", 1, tree),
            lambda tree: jaxmpi.restore("nowhere", tree),
        ):
            with pytest.raises(
                ValueError,
                match=f"two leaves of the tree are called {name}, and one would overwrite",
            ):
                call(tree)


@run_ranks(2, 3)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all():
    last = jaxmpi.rank() == jaxmpi.size() - 1
    for tree, step, keep in [
        ({"f": print if last else 1}, 1, 3),
        ({"f": 1}, -1 if last else 1, 3),
        ({"f": 1}, 1, 0 if last else 3),
    ]:
        errors = (TypeError, ValueError) if last else jaxmpi.RankMismatchError
        said = "" if last else "(Type|Value)Error: "
        with pytest.raises(errors, match=f"{said}(leaf|save: step is)"):
            jaxmpi.save("nowhere", step, tree, keep=keep)


# two jobs and one folder


def test_a_job_leaves_what_another_is_writing(tmp_path):
    mine, lock = folders.begin(tmp_path)
    jaxmpi.save(tmp_path, 1, {"x": 1}, background=False)
    assert mine.exists() and jaxmpi.latest(tmp_path) == 1
    array_files.write(mine, 0, {"x": np.arange(3)})
    lock.close()  # as that of a job that was killed
    jaxmpi.save(tmp_path, 2, {"x": 2}, background=False)
    assert not mine.exists() and [*tmp_path.glob("unfinished*")] == []


def test_what_has_no_lock_is_left_until_nothing_changes_in_it(tmp_path):
    """A folder without a lock stays until nothing in it changes.

    The file system may have no locks, or the job was killed before it made one.
    """
    new, old = tmp_path / "unfinished-new", tmp_path / "unfinished-old"
    for folder in (new, old):
        folder.mkdir()
        (folder / "rank-0.part").write_bytes(b"part")
    for path in (old, old / "rank-0.part", new):
        os.utime(path, (1, 1))
    (tmp_path / "removed-0").mkdir()
    jaxmpi.save(tmp_path, 1, {"x": 1}, background=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000000001",
        "unfinished-new",
    ]


def test_a_kill_before_there_is_a_lock_leaves_nothing(tmp_path):
    """A kill before the lock leaves nothing; another machine's folder without one stays an hour."""
    made = "import os, sys; from jaxmpi._checkpoint import folders; from pathlib import Path;"
    made += (
        "folders.create = lambda path: os.kill(os.getpid(), 9); folders.begin(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", made, tmp_path]).returncode == -9
    (left,) = tmp_path.iterdir()
    elsewhere = left.with_name(left.name.replace(folders._machine(), "0" * 8))
    elsewhere.mkdir()
    jaxmpi.save(tmp_path, 1, {"x": 0}, background=False)
    assert not left.exists() and elsewhere.exists()


def test_a_folder_that_another_job_renames_is_no_error(tmp_path, monkeypatch):
    folder = tmp_path / "unfinished-of-another"
    folder.mkdir()
    listed = os.listdir
    monkeypatch.setattr(folders.os, "listdir", lambda path: shutil.rmtree(path) or listed(path))
    assert not folders._writer_is_gone(folder)


BESIDE = """
import sys, jaxmpi, jax.numpy as jnp
jaxmpi.init()
first = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for step in range(first, first + 60, 2):
    jaxmpi.save(sys.argv[1], step, {"x": jnp.full(1000, step)}, keep=None)
"""


@pytest.mark.slow
def test_two_jobs_save_into_one_folder(tmp_path):
    command = [sys.executable, "-c", BESIDE, tmp_path]
    jobs = [
        subprocess.Popen([*command, str(i)], stdin=-1, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    for job in jobs:
        _, error = job.communicate(timeout=60)
        assert job.returncode == 0, error
    for step in (0, 29, 59):
        assert int(jaxmpi.restore(tmp_path, {"x": jnp.zeros(1000, int)}, step=step)["x"][9]) == step
    assert len([*tmp_path.iterdir()]) == 60


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_checkpoint_that_another_job_writes_during_a_save_stays(tmp_path, monkeypatch, in_memory):
    jaxmpi.save(tmp_path, 1, {"x": 1}, background=False, in_memory=in_memory)
    found, made = folders.found, []

    def other_job_writes(directory):
        listed = found(directory)
        made.append(directory / f"step-{100 + len(made):012}")
        made[-1].mkdir()
        return listed

    monkeypatch.setattr(folders, "found", other_job_writes)
    jaxmpi.save(tmp_path, 2, {"x": 2}, background=False, in_memory=in_memory)
    jaxmpi.save(tmp_path, 3, {"x": 3}, background=False)
    assert made and all(folder.is_dir() for folder in made)


def test_a_restore_leaves_behind_what_another_job_has_written_meanwhile(tmp_path):
    """A notebook can go back to a step of a job that has trained since the notebook started."""
    jaxmpi.init()
    save = """
import sys, jaxmpi
jaxmpi.init()
for i in (10, 20, 30):
    jaxmpi.save(sys.argv[1], i, {'x': i}, keep=None)
"""
    subprocess.run([sys.executable, "-c", save, tmp_path], check=True, timeout=120)
    jaxmpi.save(tmp_path, 5, {"x": 5}, keep=None, background=False)
    assert jaxmpi.latest(tmp_path) == 30  # it may run still
    assert jaxmpi.restore(tmp_path, {"x": 0}, step=10) == {"x": 10}
    jaxmpi.save(tmp_path, 11, {"x": 11}, keep=None, background=False)
    assert [folders.step_of(path) for path in folders.found(tmp_path)] == [11, 10, 5]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EACCES, "Save to a folder that"),
        (errno.EIO, "Look at the disk"),
    ],
)
def test_an_error_says_what_to_do(tmp_path, monkeypatch, code, advice):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(code, "no")))
    for tree in ({"x": jnp.ones(3)}, {"x": 1}):
        with pytest.raises(
            jaxmpi.CheckpointError, match=rf"save: step 1: .* could not be written: .*no\. {advice}"
        ):
            jaxmpi.save(tmp_path, 1, tree, background=False)


def test_a_folder_that_is_removed_while_it_is_written_is_said(tmp_path, monkeypatch):
    write = array_files.write

    def removed(folder, *args):
        shutil.rmtree(folder)
        return write(folder, *args)

    monkeypatch.setattr(array_files, "write", removed)
    with pytest.raises(
        jaxmpi.CheckpointError,
        match=r"No such file .* Something has removed it meanwhile: look for what cleans",
    ):
        jaxmpi.save(tmp_path, 1, {"x": jnp.ones(3)}, background=False)


def test_files_have_the_modes_of_the_umask_and_nothing_is_written_through_links(tmp_path):
    before = os.umask(0o027)
    try:
        jaxmpi.save(tmp_path, 1, {"x": jnp.ones(3)}, background=False)
    finally:
        os.umask(before)
    folder = tmp_path / "step-000000000001"
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: "0o750", "manifest.json": "0o640", "rank-0.npz": "0o640"}
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "rank-1.part").symlink_to(victim)
    with pytest.raises(jaxmpi.CheckpointError, match="File exists"):
        array_files.write(folder, 1, {"x": np.ones(3)})
    assert victim.read_text() == "mine"
