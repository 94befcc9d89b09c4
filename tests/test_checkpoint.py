"""Checkpoints: everything comes back, on any number of ranks, or there is an error that names the file and the leaf."""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._checkpoint import files
from jaxmpi._run.pool import pool
from jaxmpi._run.task import Task
from jaxmpi._watch import guard
from jaxmpi.testing import run_ranks

DTYPES = ("bool", "int8", "uint16", "float16", "bfloat16", "float32", "float8_e4m3fn", "complex64", "int4")


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


def everything(scale=1):
    """A tree of all that can be saved."""
    rng = np.random.default_rng(scale)
    return {
        "dtypes": {name: jnp.asarray(np.arange(6).reshape(2, 3) * scale % 4, jnp.dtype(name)) for name in DTYPES},
        "wide": np.arange(3.0) * scale,
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(scale),
        "key": jax.random.key(scale),
        "keys": jax.random.split(jax.random.key(scale, impl="rbg"), 3),
        "raw key": jax.random.PRNGKey(scale),
        "numbers": [scale, scale / 3, float("inf"), scale == 1, "text" * scale, 10**30 * scale, None],
        "big": jnp.asarray(rng.normal(size=(300, 70)), jnp.float32),
        "a/b.npy": jnp.ones(2) * scale,
    }


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
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
    assert sorted(os.listdir(Path(directory, "step-000000000007"))) == ["manifest.json", "rank-0.npz"]
    assert not list(Path(directory).glob("unfinished*"))
    with np.load(Path(directory, "step-000000000007", "rank-0.npz")) as opened:  # by other programs, too
        np.testing.assert_array_equal(opened["['big']"], tree["big"])


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
    steps = lambda: sorted(int(path.name[5:].partition(".")[0]) for path in Path(directory).iterdir())
    for step in (1, 2, 3, 4):
        jaxmpi.save(directory, step, {"x": jnp.full(3, step)}, keep=2, background=False)
    jaxmpi.barrier()
    assert steps() == [3, 4]
    jaxmpi.save(directory, 4, {"x": jnp.full(3, 40)}, keep=2, background=False)  # once more
    assert steps() == [3, 4] and int(jaxmpi.restore(directory, {"x": jnp.zeros(3, int)})["x"][0]) == 40
    jaxmpi.save(directory, 1, {"x": jnp.full(3, 1)}, keep=1, background=False)
    assert steps() == [1, 3, 4]  # of another run, perhaps
    jaxmpi.save(directory, 5, {"x": jnp.full(3, 5)}, keep=None, background=False)
    assert steps() == [1, 3, 4, 5]


# on another number of ranks

PARAMS = {"w": (5, 3), "b": (7,), "one": (1,), "s": (), "none": (0, 2)}


def state_of(optimizer, seed):
    """Parameters and a state full of numbers, the same for any number of ranks."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 100, x.dtype)
    params = {name: draw(jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for name, shape in PARAMS.items()}
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


def run(function, ranks, backend, directory):
    if backend == "simulate":
        with jaxmpi.simulate(ranks):
            function(directory)
    else:
        pool(ranks, backend).run(Task(__file__, function.__name__, {"directory": directory}, 120.0))


def test_saved_on_n_ranks_and_restored_on_m(tmp_path):
    """For n and m from 1 to 4, and on all backends: bit by bit what these ranks would have had themselves."""
    for n, backend in [(1, "auto"), (2, "auto"), (3, "auto"), (4, "auto"), (2, "xla"), (5, "simulate")]:
        run(save_states, n, backend, str(tmp_path / f"{backend}-{n}"))
    assert sorted(os.listdir(tmp_path / "auto-3" / "sharded" / "step-000000000003")) == [
        "manifest.json",
        *(f"rank-{r}.npz" for r in range(3)),
    ]
    for m, backend in [(1, "auto"), (2, "auto"), (3, "auto"), (4, "auto"), (2, "xla"), (5, "simulate")]:
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
    with pytest.raises(jaxmpi.CheckpointError, match=r"leaf \.sums\[0\] is each rank's own and was saved by 2"):
        jaxmpi.restore(directory, tx.init(jnp.ones(3)))


def test_what_each_rank_has_of_its_own_needs_as_many(tmp_path):
    run(save_own, 2, "auto", str(tmp_path))
    run(restore_own, 3, "auto", str(tmp_path))


@run_ranks(2)
def test_a_save_does_not_wait_for_the_guards_next_look():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    state = jaxmpi.sharded(optax.adam(0.1)).init(jnp.ones(8))  # of which each rank writes a part
    usual, guard.POLL_SECONDS = guard.POLL_SECONDS, 5.0
    try:
        time.sleep(2 * usual)  # by now the guard's threads sleep for 5 seconds
        start = time.monotonic()
        jaxmpi.save(directory, 0, state, background=False)
        seconds = time.monotonic() - start
    finally:
        guard.POLL_SECONDS = usual
        guard.active().signals.wake()
    assert seconds < 2.5


# what goes wrong


@run_ranks(1, 2)
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "manifest", "foreign", "emptied"])
def test_a_damaged_checkpoint_is_named_and_passed_over(how):
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    tree = {"a": jnp.arange(1000.0), "b": jnp.ones(3)}
    for step in (1, 2):
        jaxmpi.save(directory, step, jax.tree.map(lambda x, step=step: x * step, tree), background=False)
    jaxmpi.barrier()
    folder = Path(directory, "step-000000000002")
    if jaxmpi.rank() == 0:
        spoil(folder, how)
    jaxmpi.barrier()
    names = {"manifest": "manifest.json", "foreign": "manifest.json"}.get(how, "rank-0.npz")
    with pytest.raises(jaxmpi.CheckpointError, match=names) as raised:
        jaxmpi.restore(directory, tree, step=2) if jaxmpi.rank() else warned(jaxmpi.restore, directory, tree, step=2)
    if how == "flipped":
        assert "['a']" in str(raised.value)
    assert (jaxmpi.latest(directory) if jaxmpi.rank() else warned(jaxmpi.latest, directory)) == 1
    got = jaxmpi.restore(directory, tree) if jaxmpi.rank() else warned(jaxmpi.restore, directory, tree)
    assert_same(got, tree)


def warned(function, *args, **kwargs):
    with pytest.warns(UserWarning, match="a checkpoint is passed over: .*step-000000000002"):
        return function(*args, **kwargs)


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
        ({"w": np.zeros(3, np.float32)}, r"leaf \['b'\] \(float32\[2\]\) is in it, and not in `like`"),
        (
            {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32), "c": 1},
            r"leaf \['c'\] \(int\) of `like` is not in it",
        ),
        ({"w": np.zeros(4, np.float32), "b": np.zeros(2, np.float32)}, r"leaf \['w'\] is float32\[3\] in it, and float32\[4\]"),
        ({"w": np.zeros(3, np.int32), "b": np.zeros(2, np.float32)}, r"leaf \['w'\] is float32\[3\] in it, and int32\[3\]"),
    ],
)
def test_another_tree_is_named(like, words):
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    jaxmpi.save(directory, 1, {"w": jnp.zeros(3), "b": jnp.zeros(2)})
    with pytest.raises(jaxmpi.CheckpointError, match=f"restore: .*step-000000000001: {words}"):
        jaxmpi.restore(directory, like)


@run_ranks(1, 2)
def test_bad_arguments():
    with pytest.raises(ValueError, match=r"save: step is -1 and keep is 3"):
        jaxmpi.save("nowhere", -1, {})
    with pytest.raises(TypeError, match="float"):
        jaxmpi.save("nowhere", 1.0, {})
    with pytest.raises(TypeError, match=r"leaf \['s'\] is a ShapeDtypeStruct, which holds no numbers"):
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
    whole = files.write

    def fails(*_):
        raise error("no room")

    try:
        if jaxmpi.rank() == jaxmpi.size() - 1:
            files.write = fails
        jaxmpi.save(directory, 1, state)
    finally:
        time.sleep(0.3)
        files.write = whole
    with pytest.raises(jaxmpi.CheckpointError, match=r"save: step 1: .*no room"):
        jaxmpi.save(directory, 2, state)
    assert jaxmpi.latest(directory) == 2  # which was written nevertheless
    jaxmpi.barrier()
    assert [path.name for path in directory.iterdir()] == ["step-000000000002"]


@run_ranks(2)
def test_numbers_that_differ_are_no_checkpoint():
    with pytest.raises(jaxmpi.RankMismatchError, match=r"leaf \['t'\]: float = 0.5"):
        jaxmpi.save("nowhere", 1, {"t": jaxmpi.rank() + 0.5})


def test_any_flipped_bit_is_found(tmp_path):
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2), jnp.bfloat16), "n": 5}
    jaxmpi.save(tmp_path, 1, tree, background=False)
    jaxmpi.save(tmp_path, 2, tree, background=False)
    for file in sorted((tmp_path / "step-000000000002").iterdir()):
        whole = file.read_bytes()
        for i in range(len(whole)):
            file.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
            newest, _ = files.newest(tmp_path)
            if newest.name == "step-000000000002":  # a bit that nobody reads
                assert_same(jaxmpi.restore(tmp_path, tree), tree)
        file.write_bytes(whole)


def test_steps_of_any_length(tmp_path):
    for step in (0, 10**12, 10**15, 5):
        jaxmpi.save(tmp_path, step, {"x": step})
    assert jaxmpi.latest(tmp_path) == 10**15
    assert jaxmpi.restore(tmp_path, {"x": 0}, step=5) == {"x": 5}


FAILS = """
import os, sys, jaxmpi, jax.numpy as jnp
from jaxmpi._checkpoint import files
jaxmpi.init()
whole = files.write
files.write = lambda folder, *_: whole(folder / "gone", *_)
jaxmpi.save(sys.argv[1], 1, {"w": jnp.zeros(2)})
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_fails_at_the_end_of_the_script_fails_the_job(tmp_path, ranks):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    launch = ["-m", "jaxmpi", "run", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, script, tmp_path], capture_output=True, text=True, timeout=60)
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


@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, seed):
    delay = str(np.random.default_rng(seed).uniform(0, 0.3))
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, delay], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    step = jaxmpi.latest(tmp_path)  # without a warning: no half one has the name of a checkpoint
    got = jaxmpi.restore(tmp_path, {"x": jnp.zeros(1 << 20, jnp.int32)})
    np.testing.assert_array_equal(got["x"], np.arange(1 << 20) + (step if step > 1 else 0))
    jaxmpi.save(tmp_path, step + 1, {"x": 0}, background=False)
    assert not list(tmp_path.glob("unfinished*"))


def test_nothing_is_unpickled(tmp_path):
    """An array of objects in a file, whose checksums are right, is refused and not run."""
    jaxmpi.save(tmp_path, 1, {"x": jnp.zeros(3)}, background=False)
    file = tmp_path / "step-000000000001" / "rank-0.npz"
    size = file.stat().st_size
    np.savez(file, **{"['x']": np.array([print], dtype=object)})
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b" " * max(0, size - file.stat().st_size)
    manifest = tmp_path / "step-000000000001" / "manifest.json"
    text = json.loads(manifest.read_text())
    text.pop("checksum")
    text["files"]["rank-0.npz"][0] = file.stat().st_size

    manifest.write_text(json.dumps({"checksum": zlib.crc32(json.dumps(text, indent=1).encode()), **text}))
    assert files.read_manifest(manifest.parent)["step"] == 1
    with pytest.raises(jaxmpi.CheckpointError, match=r"\['x'\] cannot be read: Object arrays cannot be loaded"):
        jaxmpi.restore(tmp_path, {"x": jnp.zeros(3)})
