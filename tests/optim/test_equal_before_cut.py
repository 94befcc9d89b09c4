"""`fully_shard`, `unshard`, `reshard` and `sharded.init` on trees that differ between the ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi.testing import run_ranks

AXES = {"island": 2, "member": 2}


def params(of=0):
    rng = np.random.default_rng(of)
    return {
        "w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(4,)), jnp.bfloat16),
        "scale": jnp.asarray(rng.normal(), jnp.float32),
        "count": jnp.arange(3) + of,
        "key": jax.random.key(of),
        "host": np.full((2, 2), of, np.float32),
    }


def with_leaf(name, of):
    return {**params(), name: params(of)[name]}


def with_leaves(state, **fields):
    """The state with other leaves in these fields of `optax.adam`'s state."""

    def each(path, x):
        name = jax.tree_util.keystr(path)
        return next((value for field, value in fields.items() if f".{field}" in name), x)

    return jax.tree_util.tree_map_with_path(each, state)


def cut_reshard(tree):
    """`reshard` of a state of one rank, as `unshard` and `restore` give it."""
    state = jaxmpi.unshard(jaxmpi.sharded(optax.adam(0.1)).init({"w": jnp.ones((3, 5))}))
    return jaxmpi.reshard(
        with_leaves(state, mu=tree["w"], count=jnp.asarray(tree["count"][0], jnp.int32))
    )


def floats(tree):
    return {name: tree[name] for name in ("w", "half", "scale", "host")}


CUTS = {
    "fully_shard": lambda tree, axis: jaxmpi.fully_shard(tree, axis=axis),
    "sharded.init": lambda tree, axis: jaxmpi.sharded(optax.adam(0.1), axis=axis).init(
        floats(tree)
    ),
    "reshard": lambda tree, axis: cut_reshard(tree),
}


def last_rank(of=7):
    return of if jaxmpi.rank() == jaxmpi.size() - 1 else 0


@run_ranks(2, 3, 4)
@pytest.mark.parametrize("name", CUTS)
def test_cuts_refuse_leaves_that_differ_between_ranks(name):
    cut = CUTS[name]
    cut(params(), jaxmpi.AXIS)
    leaves = {"reshard": ["w", "count"], "sharded.init": ["w", "half", "scale", "host"]}.get(
        name, list(params())
    )
    last = jaxmpi.size() - 1
    for leaf in leaves:
        where = rf"{name}: leaf .*{leaf if name != 'reshard' else ''}.* has other values on rank"
        with pytest.raises(jaxmpi.RankMismatchError, match=where) as caught:
            cut(with_leaf(leaf, last_rank()), jaxmpi.AXIS)
        if jaxmpi.size() > 2:
            assert f"on rank {last} than on ranks 0, 1" in str(caught.value)
        assert len(set(jaxmpi.allgather_object(str(caught.value)))) == 1
    cut(params(), jaxmpi.AXIS)  # the ranks are at one again


@run_ranks(2, backend="xla")
def test_cuts_refuse_leaves_that_differ_between_ranks_on_xla():
    for name, cut in CUTS.items():
        with pytest.raises(
            jaxmpi.RankMismatchError, match=f"{name}: leaf .*w.* has other values on rank"
        ):
            cut(with_leaf("w", last_rank()), jaxmpi.AXIS)
        cut(params(), jaxmpi.AXIS)


@run_ranks(2)
def test_cuts_see_one_bit_and_not_what_each_rank_has_of_its_own():
    tree = params()
    tree["host"][0, 0] = -0.0 if jaxmpi.rank() else 0.0
    with pytest.raises(jaxmpi.RankMismatchError, match=r"fully_shard: leaf \['host'\]"):
        jaxmpi.fully_shard(tree)
    own = {"w": params()["w"], "own": jaxmpi.PerRankState(jnp.full(3, float(jaxmpi.rank())))}
    shards = jaxmpi.fully_shard(own)
    np.testing.assert_array_equal(jaxmpi.local(jaxmpi.unshard(shards)["w"]), own["w"])


@run_ranks(2)
def test_cuts_of_other_structures_are_refused_with_both_sides():
    tree = {"w": jnp.ones((3, 5 + jaxmpi.rank()))}
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"(?s)fully_shard: .*\['w'\]: float32\[3, 5\].*float32\[3, 6\]",
    ):
        jaxmpi.fully_shard(tree)
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"rank 0 called fully_shard at .*, and rank 1 called synchronize",
    ):
        jaxmpi.fully_shard(params()) if jaxmpi.rank() == 0 else jaxmpi.synchronize(params())


@run_ranks(2, 3)
def test_unshard_refuses_what_is_whole_and_differs():
    shards = jaxmpi.fully_shard(params())
    jaxmpi.unshard(shards)
    for name in ("scale", "count", "key"):
        other = {**shards}
        if name == "scale":
            other[name] = jax.tree.map(lambda x: x + last_rank(), shards[name])
        else:
            other[name] = params(last_rank())[name]
        with pytest.raises(jaxmpi.RankMismatchError, match=rf"unshard: leaf \['{name}'\]"):
            jaxmpi.unshard(other)
    state = jaxmpi.sharded(optax.adam(0.1)).init({"w": params()["w"]})
    jaxmpi.unshard(state)
    other = with_leaves(state, count=jnp.asarray(last_rank(), jnp.int32))
    with pytest.raises(jaxmpi.RankMismatchError, match=r"unshard: leaf .*count"):
        jaxmpi.unshard(other)


@run_ranks(4, axes=AXES)
def test_cuts_along_an_axis_compare_within_the_groups():
    rank = jaxmpi.rank()
    island = rank // 2
    for name in ("fully_shard", "sharded.init"):
        CUTS[name](params(island), "member")  # each island has a model of its own
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=f"{name}: .* on rank . than on rank . along axis 'island'",
        ):
            CUTS[name](params(island), "island")
        with pytest.raises(
            jaxmpi.RankMismatchError, match="on rank 3 than on rank 2 along axis 'member'"
        ):
            CUTS[name](params(1 if rank == 3 else 0), "member")
    shards = jaxmpi.fully_shard(params(island), axis="member")
    np.testing.assert_array_equal(jaxmpi.local(jaxmpi.unshard(shards)["w"]), params(island)["w"])


def test_cuts_of_simulated_ranks_refuse_values_that_differ():
    with jaxmpi.simulate(3):
        w = np.ones((3, 4, 2), np.float32)
        jaxmpi.fully_shard({"w": jaxmpi.PerRank(w)})
        w[1] += 1
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=r"fully_shard: leaf \['w'\] .* on rank 1 than on ranks 0, 2",
        ):
            jaxmpi.fully_shard({"w": jaxmpi.PerRank(w)})
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=r"sharded.init: leaf \['w'\] .* on rank 1 than on ranks 0, 2",
        ):
            jaxmpi.sharded(optax.adam(0.1)).init({"w": jaxmpi.PerRank(w)})


@run_ranks(2)
def test_cuts_in_traced_code_and_of_shapes_send_nothing():
    tree = with_leaf("w", last_rank())
    tx = jaxmpi.sharded(optax.adam(0.1))
    jax.eval_shape(tx.init, floats(tree))
    jax.eval_shape(jaxmpi.fully_shard, floats(tree))
    jaxmpi.jit(lambda tree: jaxmpi.fully_shard(tree)["w"].shard)(floats(tree))
