"""Checkpoints of shards over an axis: equal bits on equal axes; elsewhere right or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS

GRID = {"island": 2, "member": 2}
OTHERS = [
    ({"island": 2, "member": 3}, "member"),
    ({"island": 3, "member": 2}, "member"),
    ({"island": 2, "member": 2}, "island"),
    ({"island": 2, "member": 2}, ("member", "island")),
    ({"island": 4, "member": 1}, "member"),
    ({"island": 4, "member": 1}, "island"),
    ({"island": 1, "member": 1}, "member"),
    ({}, jaxmpi.AXIS),
]
SHAPES = {"w": (5, 3), "b": (7,), "one": (1,), "s": (), "none": (0, 2)}


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def run_of(axis, differ, shapes=SHAPES):
    """Shards and states of ZeRO-1 and FSDP, different in each island where they may `differ`."""
    params = {name: parameters()[name] for name in shapes}
    adam = optax.scale_by_adam()
    filled = lambda seed: {name: parameters(seed)[name] for name in shapes}
    inner = adam.init(params)._replace(count=jnp.int32(7), mu=filled(1), nu=filled(2))
    tx = jaxmpi.sharded(adam, axis=axis, master_dtype=jnp.float64)
    masters = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    structure = jax.tree.structure(jaxmpi.unshard(tx.init(params)), is_leaf=is_stack)
    zero = jaxmpi.reshard(structure.unflatten(jax.tree.leaves((inner, masters))))
    layers = {"w": jnp.arange(20.0).reshape(4, 5), "s": jnp.arange(4.0)} if len(shapes) > 1 else {}
    fsdp = jaxmpi.fully_shard(
        {"flat": params, "layers": layers}, axis=axis, stacked={"flat": False, "layers": True}
    )
    tree = jaxmpi.local({"zero": zero, "fsdp": fsdp, "local": jaxmpi.PerRankState(zero)})
    return jax.tree.map(of_island, tree, is_leaf=is_stack) if differ else tree


def is_stack(x):
    return isinstance(x, jaxmpi.PerRank)


def of_island(x):
    """Make numbers that differ in the second island of GRID."""
    if jaxmpi.init().backend != "simulate":
        return x * (1 + jaxmpi.rank() // 2)
    return jaxmpi.PerRank(
        jnp.stack([(x[r] if is_stack(x) else x) * (1 + r // 2) for r in range(4)])
    )


def simulated(axes):
    return jaxmpi.simulate(int(np.prod([*axes.values()])) if axes else 3, axes=axes or None)


def rows(tree, size):
    """The bits of each rank's leaves."""
    leaves = jax.tree.leaves(tree, is_leaf=is_stack)
    return [[np.asarray(x[r] if is_stack(x) else x).tobytes() for x in leaves] for r in range(size)]


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("names", [("island", "member"), ("node", "local")])
def test_the_same_axes_restore_each_ranks_bits(tmp_path, names):
    """Under other names, too."""
    with simulated(GRID):
        saved = run_of("member", True)
        jaxmpi.save(tmp_path, 1, saved)
        jaxmpi.latest(tmp_path)
        want = rows(saved, 4)
    assert len({*map(tuple, want)}) == 4
    with simulated(dict(zip(names, GRID.values(), strict=True))):
        like = run_of(names[1], False)
        assert rows(jaxmpi.restore(tmp_path, like), 4) == want


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "axis"), OTHERS, ids=str)
def test_equal_groups_are_restored_on_other_axes(tmp_path, axes, axis):
    with simulated(GRID):
        jaxmpi.save(tmp_path / "grid", 1, run_of("member", False))
        jaxmpi.latest(tmp_path)
        want_grid = rows(run_of("member", False), 4)
    with simulated(axes) as world:
        want = run_of(axis, False)
        like = jax.tree.map(
            lambda x: x * 0 if not is_stack(x) else jaxmpi.PerRank(x.stack * 0),
            want,
            is_leaf=is_stack,
        )
        assert rows(jaxmpi.restore(tmp_path / "grid", like), world.size) == rows(want, world.size)
        jaxmpi.save(tmp_path / "other", 1, want)
        jaxmpi.latest(tmp_path)
    with simulated(GRID):
        assert rows(jaxmpi.restore(tmp_path / "other", run_of("member", True)), 4) == want_grid


@pytest.mark.parametrize("shapes", [("one",), ("s",), tuple(SHAPES)], ids=str)
@pytest.mark.parametrize(("axes", "axis"), OTHERS, ids=str)
def test_groups_that_differ_need_the_same_axes(tmp_path, axes, axis, shapes):
    with simulated(GRID):
        jaxmpi.save(tmp_path, 1, run_of("member", True, shapes))
        jaxmpi.latest(tmp_path)
    with simulated(axes):
        like = run_of(axis, False, shapes)
        with pytest.raises(
            jaxmpi.CheckpointError,
            match=r"leaf \['(fsdp|zero)'\].* over axis member of \{'island': 2, 'member': 2\} "
            r"by 4 ranks, .* different values, "
            r"and `like` has .* on \d ranks?: only 4 ranks",
        ):
            jaxmpi.restore(tmp_path, like)


def check_on_ranks(directory):
    with jax.enable_x64(True):
        saved = run_of("member", True)
        jaxmpi.save(directory, 1, saved)
        got = jaxmpi.restore(directory, run_of("member", False))
        assert rows(jaxmpi.local(got), 1) == rows(jaxmpi.local(saved), 1)
        with pytest.raises(jaxmpi.CheckpointError, match=r"leaf \['fsdp'\].*different values"):
            jaxmpi.restore(directory, run_of("island", False))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", pytest.param("xla", marks=pytest.mark.exhaustive)])
def test_on_ranks(tmp_path, backend):
    pool(4, backend, IDLE_RANKS_SECONDS, GRID).run(
        Task(__file__, "check_on_ranks", {"directory": str(tmp_path)}, 120.0)
    )


def test_states_of_axes_that_the_ranks_do_not_have(tmp_path):
    with simulated(GRID):
        state = run_of("member", False)
    for axes, text in (
        (None, "is cut over axis 'member', and the ranks have 'ranks'"),
        ({"m": 1, "member": 4}, "and there are 4"),
    ):
        with jaxmpi.simulate(4, axes=axes), pytest.raises(ValueError, match=text):
            jaxmpi.save(tmp_path, 1, state)
