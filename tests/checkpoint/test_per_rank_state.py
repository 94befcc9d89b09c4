"""Per-rank state is marked and returns to its rank; unmarked differences raise on all ranks."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi import PerRankState
from jaxmpi._checkpoint import folders
from jaxmpi.testing import run_ranks


@pytest.fixture(autouse=True)
def initialized():
    jaxmpi.init()


def marked(rank, scale=1):
    """A run of which some is each rank's own."""
    x = scale * (rank + 1)
    return {
        "params": jnp.arange(4.0) * scale,
        "key": PerRankState(jax.random.fold_in(jax.random.key(scale), rank)),
        "stats": PerRankState(nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.BatchStat)),
        "env": PerRankState(
            {
                "board": jnp.full((2, 3), x, jnp.int8),
                "score": x / 3,
                "moves": x + 10**20,
                "name": "z" * x,
            }
        ),
        "host": PerRankState([np.arange(3) * x, np.float64(x), x % 2 == 0]),
        "step": 7 * scale,
    }


def numbers(tree):
    key = jax.random.key(0).dtype
    arrays = []
    for x in jax.tree.leaves(tree):
        is_key = isinstance(x, jax.Array) and x.dtype == key
        arrays.append(np.asarray(jax.random.key_data(x) if is_key else x))
    return arrays


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [type(x) for x in jax.tree.leaves(got)] == [type(x) for x in jax.tree.leaves(want)]
    for x, y in zip(numbers(got), numbers(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_restore_gives_each_rank_its_own():
    r = jaxmpi.rank()
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    state = jaxmpi.sharded(optax.adam(0.1)).init(jnp.ones(5))
    jaxmpi.save(directory, 1, (marked(r), state))
    got = jaxmpi.restore(directory, (marked(0, 2), state))
    assert_same(got[0], marked(r))
    files = sorted(path.name for path in Path(directory, "step-000000000001").iterdir())
    assert files == ["manifest.json", *(f"rank-{rank}.npz" for rank in range(jaxmpi.size()))]
    if r == 0:  # what is equal is there once
        with np.load(Path(directory, "step-000000000001", f"rank-{jaxmpi.size() - 1}.npz")) as last:
            assert ("[0]['params']" in last) == (jaxmpi.size() == 1)


@run_ranks(2, 3)
def test_synchronize_keeps_each_ranks_own():
    r = jaxmpi.rank()
    mixed = marked(r) | {"params": jnp.full(4, float(r)), "step": r}
    assert_same(jaxmpi.synchronize(mixed), marked(r) | {"params": jnp.zeros(4), "step": 0})


UNMARKED = {  # what rank r has
    "array": lambda r: jnp.arange(5.0) + r,
    "one number of many": lambda r: jnp.zeros(100_000).at[99_999].set(r / 1e30),
    "the sign of zero": lambda r: jnp.zeros(2) * (1 - 2 * r),
    "signs": lambda r: np.ones((64, 64)) * (1 - 2 * r),
    "another order": lambda r: np.arange(6, dtype=np.int16)[:: 1 - 2 * r],
    "bfloat16": lambda r: jnp.full((), 1 + r, jnp.bfloat16),
    "key": lambda r: jaxmpi.rank_key(jax.random.key(0)) if r else jax.random.key(0),
    "bool": lambda r: np.bool_(r),
    "Python int": lambda r: r,
    "Python float": lambda r: 0.5 + r,
    "text": lambda r: "x" * 200 + str(r),
}


@run_ranks(2, 3)
def test_an_unmarked_leaf_that_differs_is_an_error_on_all_ranks():
    directory = Path(jaxmpi.broadcast_object(tempfile.mkdtemp()))
    last = jaxmpi.size() - 1
    for name, of_rank in UNMARKED.items():
        x = of_rank(1 if jaxmpi.rank() == last else 0)
        words = (
            rf"leaf \['{name}'\] is not equal on all ranks: rank {last} has other values"
            ".*PerRankState.*synchronize"
        )
        with pytest.raises(jaxmpi.RankMismatchError, match=words):
            jaxmpi.save(directory, 1, {"same": jnp.ones(3), name: x, "sharded": PerRankState(x)})
        jaxmpi.save(directory, 1, {name: PerRankState(x)}, background=False)
    jaxmpi.barrier()
    assert [folders.step_of(path) for path in directory.iterdir()] == [1]
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"leaf \['a'\] .* rank [12] has other values \(1, and 0 elsewhere\), and 1 m",
    ):
        jaxmpi.save(
            directory, 1, {"a": int(jaxmpi.rank() == last), "b": jnp.arange(2) * jaxmpi.rank()}
        )


def test_simulated_ranks_that_differ_are_the_same_error(tmp_path):
    with jaxmpi.simulate(3):
        differs, same = jaxmpi.PerRank(jnp.arange(3.0)), jaxmpi.PerRank(jnp.ones(3))
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=r"leaf \['x'\] is not equal on all ranks: ranks 1, 2 have other",
        ):
            jaxmpi.save(tmp_path, 1, {"x": differs})
        jaxmpi.save(tmp_path, 1, {"x": same, "own": PerRankState(differs)})
        got = jaxmpi.restore(tmp_path, {"x": jnp.zeros(()), "own": PerRankState(jnp.zeros(()))})
        assert float(got["x"]) == 1
        np.testing.assert_array_equal(got["own"].per_rank, np.arange(3.0))
    with jaxmpi.simulate(2), pytest.raises(jaxmpi.CheckpointError, match="saved by 3 ranks"):
        jaxmpi.restore(tmp_path, {"x": jnp.zeros(()), "own": PerRankState(jnp.zeros(()))})


def test_simulated_keys_and_numbers_of_each_rank(tmp_path):
    with jaxmpi.simulate(2):
        keys = jaxmpi.jit(lambda key: jaxmpi.rank_key(key))(jax.random.key(3))
        run = {
            "key": PerRankState(keys),
            "host": PerRankState(jaxmpi.PerRank(np.arange(2, dtype=np.int16))),
            "n": PerRankState(4),
        }
        jaxmpi.save(tmp_path, 1, run)
        for like in (
            run,
            {
                "key": PerRankState(jax.random.key(0)),
                "host": PerRankState(np.int16(0)),
                "n": PerRankState(0),
            },
        ):
            got = jaxmpi.restore(tmp_path, like)
            assert got["n"].per_rank == 4
            np.testing.assert_array_equal(got["host"].per_rank, [0, 1])
            np.testing.assert_array_equal(
                jax.random.key_data(got["key"].per_rank.stack), jax.random.key_data(keys.stack)
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_on_another_number_of_ranks(tmp_path, ranks):
    """Per-rank state needs the same number of ranks, or is left out; replicas and shards do not."""
    tx = jaxmpi.sharded(optax.trace(0.9))
    with jaxmpi.simulate(3):
        state = jaxmpi.jit(tx.update)(
            {"w": jnp.arange(5.0)}, tx.init({"w": jnp.ones(5)}), {"w": jnp.ones(5)}
        )[1]
        env = {"board": jaxmpi.PerRank(np.arange(6.0).reshape(3, 2)), "level": 5}
        jaxmpi.save(
            tmp_path,
            1,
            {"state": state, "env": PerRankState(env), "same": PerRankState(jnp.ones(2))},
        )
    with jaxmpi.simulate(ranks):
        like = {"state": tx.init({"w": jnp.ones(5)}), "same": PerRankState(jnp.zeros(2))}
        mine = PerRankState({"board": np.zeros(2), "level": 0})
        if ranks == 3:
            got = jaxmpi.restore(tmp_path, like | {"env": mine})
            np.testing.assert_array_equal(
                got["env"].per_rank["board"], np.arange(6.0).reshape(3, 2)
            )
        else:
            with pytest.raises(
                jaxmpi.CheckpointError,
                match=r"leaf \['env'\]\['board'\] is each rank's own and was saved by 3",
            ):
                jaxmpi.restore(tmp_path, like | {"env": mine})
            got = jaxmpi.restore(tmp_path, like | {"env": PerRankState(None)})
            assert got["env"].per_rank is None
        assert jax.tree.leaves(got["same"])[0].tolist() == [1, 1]
        trace = jaxmpi.unshard(got["state"]).inner.trace["w"]
        np.testing.assert_array_equal(
            np.asarray(trace.stack[0] if isinstance(trace, jaxmpi.PerRank) else trace),
            np.arange(5.0),
        )
        for out in ({"env": ()}, {}):  # which is no way to leave something out
            with pytest.raises(
                jaxmpi.CheckpointError,
                match=r"leaf \['env'\]\['board'\] .* is in it, and not in `like`",
            ):
                jaxmpi.restore(tmp_path, like | out)
        if ranks != 1:
            # unmarked
            with pytest.raises(
                jaxmpi.CheckpointError, match=r"leaf \['env'\]\['board'\] .* in a PerRankState"
            ):
                jaxmpi.restore(tmp_path, like | {"env": mine.per_rank})


def test_only_what_is_marked_can_be_left_out(tmp_path):
    jaxmpi.save(tmp_path, 1, {"a": jnp.ones(2), "ab": PerRankState(1)})
    with pytest.raises(
        jaxmpi.CheckpointError, match=r"leaf \['a'\] .* is in it, and not in `like`"
    ):
        jaxmpi.restore(tmp_path, {"a": PerRankState(None), "ab": PerRankState(0)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OfOthers:
    per_rank: object  # a field of this name is no mark


@run_ranks(2, 3)
def test_a_step_and_its_checks_let_what_is_marked_differ():
    r, n = jaxmpi.rank(), jaxmpi.size()

    def step(run):
        x = jax.lax.psum(run["own"].per_rank, jaxmpi.AXIS)
        return {"mean": x / n, "own": PerRankState(run["own"].per_rank + 1)}

    run = {"mean": jnp.zeros(2), "own": PerRankState(jnp.full(2, float(r)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_CHECK", "1")
        checked = jaxmpi.jit(step, replicated_argnums=0, replicated_outnums=0)
        got = checked(checked(run))
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=r"argument 0\['mean'\]: .* is not equal on all ranks: rank",
        ):
            checked(run | {"mean": jnp.full(2, float(r))})
    np.testing.assert_array_equal(got["own"].per_rank, np.full(2, r + 2.0))
    np.testing.assert_array_equal(got["mean"], np.full(2, (n - 1) / 2 + 1))
    with pytest.raises(
        ValueError,
        match=r"output \['mean'\]\.per_rank of <lambda> is declared replicated but may differ",
    ):
        jaxmpi.jit(lambda x: {"mean": OfOthers(x)}, replicated_outnums=0)(jnp.ones(2))
    with pytest.raises(jaxmpi.RankMismatchError, match=r"leaf \.per_rank is not equal"):
        jaxmpi.save("nowhere", 1, OfOthers(r))


@run_ranks(2, 3)
def test_watch_replicas_does_not_compare_what_is_marked():
    r, last = jaxmpi.rank(), jaxmpi.size() - 1
    tx = jaxmpi.watch_replicas(optax.set_to_zero(), 1)
    update = jaxmpi.jit(tx.update)
    params = {"a": PerRankState(jnp.full(2, float(r))), "b": jnp.ones(2), "c": jnp.ones(3)}
    _, state = update(params, tx.init(params), params)
    jaxmpi.check_replicas(state, params)
    drifted = params | {"c": jnp.full(3, float(r == last))}
    _, state = update(drifted, state, drifted)
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=rf"leaf \['c'\] of the parameters on rank {1 if last == 1 else 2}",
    ):
        jaxmpi.check_replicas(state, params)
