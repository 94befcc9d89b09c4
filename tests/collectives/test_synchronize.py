"""synchronize and the object collectives."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmpi
from jaxmpi.testing import run_ranks


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Plain:
    """Not registered as a pytree; two of different arrays cannot be compared by ==."""

    x: np.ndarray


class Unreadable:
    """Cannot be pickled, nor printed."""

    def __reduce__(self):
        raise RuntimeError("not between processes")

    def __repr__(self):
        raise ValueError("not now")


@run_ranks(1, 2, 3, 4)
def test_synchronize_gives_roots_values_and_keeps_kinds():
    r, n = jaxmpi.rank(), jaxmpi.size()
    for root in range(n):
        make = lambda r: {
            "jax": jnp.arange(3.0) + r,
            "bf16": jnp.full((2, 2), r, jnp.bfloat16),
            "int4": jnp.array([r, 1], jnp.int4),
            "numpy": np.arange(4, dtype=np.float64) * r,
            "scalar": np.int16(r),
            "empty": jnp.zeros((0, 2)),
            "key": jax.random.split(jax.random.key(r), 2),
            "old_key": jax.random.PRNGKey(r),
            "numbers": [r, 1.5 * r, 1j * r, r % 2 == 0],
            "adam": optax.adam(0.1).init({"w": jnp.full(2, 1.0 * r)}),
            "nothing": None,
            "same": [
                "text",
                jnp.tanh,
                Color.RED,
                lambda x: x in {"a", "b"},
                frozenset({"a", "b", "c"}),
                Plain(np.arange(3)),
                Unreadable(),
            ],
        }
        mine, want = make(r), make(root)
        got = jaxmpi.synchronize(mine, root)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            if "same" in str(path):
                continue
            assert type(a) is type(b), path
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None), path
            if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert np.array_equal(np.asarray(a), np.asarray(b)), path
        assert got["same"][:3] == mine["same"][:3]


@run_ranks(1, 2, 3)
def test_synchronize_nnx_module_and_state():
    model = nnx.Sequential(
        nnx.Linear(2, 4, rngs=nnx.Rngs(jaxmpi.rank())), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    )
    state = jaxmpi.synchronize(nnx.state(model))
    nnx.update(model, state)
    reference = nnx.Linear(2, 4, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_array_equal(model.layers[0].kernel[...], reference)
    again = jaxmpi.synchronize(nnx.Linear(2, 4, rngs=nnx.Rngs(jaxmpi.rank() + 3)), root=0)
    np.testing.assert_array_equal(again.kernel[...], nnx.Linear(2, 4, rngs=nnx.Rngs(3)).kernel[...])


DIFFERENCES = [  # rank r's tree, and what every rank reads
    (
        lambda r, last: {"w": jnp.ones(2 + (r == last))},
        r"leaf \['w'\] is float32 \[3\] on rank {last} and float32 \[2\] on rank 0",
    ),
    (
        lambda r, last: {"w": jnp.ones(2, jnp.int32 if r == last else jnp.float32)},
        r"leaf \['w'\] is int32 \[2\] on rank {last}",
    ),
    (
        lambda r, last: {"w": 1.0} | ({"b": 2.0} if r == last else {}),
        r"leaf \['b'\] is on rank {last} \(number\) and missing",
    ),
    (
        lambda r, last: {"w": 1.0} | ({} if r == last else {"b": 2.0}),
        r"leaf \['b'\] is on rank 0 \(number\) and missing",
    ),
    (
        lambda r, last: {"w": "text" if r == last else 1.0},
        r"leaf \['w'\] is str on rank {last} and number on rank 0",
    ),
    (
        lambda r, last: [1.0] if r == last else (1.0,),
        r"the tree is list\[None\]\(\*\) on rank {last} and tuple",
    ),
    (
        lambda r, last: {"s": f"rank{r // last}"},
        r"leaf \['s'\], a str, cannot be sent and is 'rank1' on rank {last}",
    ),
    (lambda r, last: {"c": Color.BLUE if r == last else Color.RED}, r"leaf \['c'\], a Color"),
    (lambda r, last: {"f": jnp.sin if r == last else jnp.cos}, r"leaf \['f'\]"),
    (
        lambda r, last: {"f": (lambda x: x + 1) if r == last else (lambda x: x + 2)},
        r"leaf \['f'\], a function",
    ),
    (
        lambda r, last: {"p": Plain(np.arange(3) + (r == last))},
        r"leaf \['p'\], a Plain, cannot be sent and is Plain\(x=array\(\[1, .* on rank {last}",
    ),
]


@run_ranks(2, 3)
@pytest.mark.parametrize("case", range(len(DIFFERENCES)))
def test_synchronize_names_the_difference_on_every_rank(case):
    r, last = jaxmpi.rank(), jaxmpi.size() - 1
    tree, text = DIFFERENCES[case]
    with pytest.raises(jaxmpi.RankMismatchError, match=text.replace("{last}", str(last))):
        jaxmpi.synchronize(tree(r, last))
    assert jaxmpi.synchronize({"x": 10.0 * r}) == {"x": 0.0}  # the job goes on


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    w: object
    tags: object = dataclasses.field(metadata={"static": True})


@run_ranks(2, 3)
def test_synchronize_compares_static_fields():
    r = jaxmpi.rank()
    # a set of strings prints in another order in every process
    words = [f"tag{i}" for i in range(30)]
    fields = (frozenset(words), jnp.tanh, {"a": 1}, "text")
    assert jaxmpi.synchronize(Tagged(1.0 * r, fields)).w == 0.0
    with pytest.raises(jaxmpi.RankMismatchError, match="the tree is Tagged"):
        jaxmpi.synchronize(Tagged(1.0, frozenset(words[r:])))


@run_ranks(1, 2, 3)
def test_synchronize_not_strict_keeps_each_ranks_own():
    r = jaxmpi.rank()
    out = jaxmpi.synchronize({"name": f"rank {r}", "x": r + 5}, strict=False)
    assert out == {"name": f"rank {r}", "x": 5}


@run_ranks(1, 2, 3, 4)
def test_objects_travel():
    r, n = jaxmpi.rank(), jaxmpi.size()
    assert jaxmpi.broadcast_object({"from": r, "set": {1, r}}, n - 1) == {
        "from": n - 1,
        "set": {1, n - 1},
    }
    assert jaxmpi.allgather_object(("r", r)) == [("r", q) for q in range(n)]
    jaxmpi.barrier()


@run_ranks(1, 2, 3)
def test_many_collectives_of_both_kinds_in_turn():
    r, n = jaxmpi.rank(), jaxmpi.size()
    step = jax.jit(lambda x: jaxmpi.tree_allreduce(x + r))
    x = jnp.zeros(50_000)
    for i in range(20):
        x = step(x)  # still running when the next line starts
        assert jaxmpi.allgather_object(i + r) == [i + q for q in range(n)]
    np.testing.assert_allclose(x, 20 * (n - 1) / 2, rtol=1e-6)


def test_synchronize_gives_simulated_ranks_the_values_of_root():
    each = jnp.arange(6.0).reshape(3, 2)
    with jaxmpi.simulate(3):
        keys = jaxmpi.rank_key(jax.random.key(0))
        tree = {
            "w": jaxmpi.PerRank(each),
            "key": keys,
            "step": 3,
            "host": jaxmpi.PerRank(np.arange(3)),
            "same": jnp.ones(2),
        }
        tree["own"] = jaxmpi.PerRankState(jaxmpi.PerRank(each))
        tree["nnx"] = nnx.State(
            {"w": nnx.Param(jaxmpi.PerRank(each)), "mean": nnx.BatchStat(jaxmpi.PerRank(each))}
        )
        got = jaxmpi.synchronize(tree, root=2)
        # equal on all ranks, so one array
        np.testing.assert_array_equal(jaxmpi.jit(lambda x: x)(got["w"]), each[2])
    np.testing.assert_array_equal(
        jax.random.key_data(got["key"]),
        jax.random.key_data(jax.random.fold_in(jax.random.key(0), 2)),
    )
    assert got["step"] == 3 and got["host"] == 2
    np.testing.assert_array_equal(got["same"], np.ones(2))
    np.testing.assert_array_equal(got["own"].per_rank.stack, each)
    np.testing.assert_array_equal(got["nnx"]["w"].get_value(), each[2])
    np.testing.assert_array_equal(got["nnx"]["mean"].get_value().stack, each)
