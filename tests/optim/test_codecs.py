"""Codecs: their distance from the mean, the residuals they keep, and equal results on all ranks."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi import codecs
from jaxmpi.testing import run_ranks

SHAPES = {"w": (40, 30), "b": (30,), "deep": (3, 20, 25), "scale": (), "none": (0,)}
ALL = {
    "bf16": codecs.bf16,
    "f16": codecs.f16,
    "int8": codecs.int8,
    "topk": lambda: codecs.topk(0.1),
    "powersgd": lambda: codecs.powersgd(3),
}
RESIDUAL = ("int8", "topk", "powersgd")  # those with error feedback


def gradient(rank, step=0):
    rng = np.random.default_rng([rank, step])
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def params():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])


def mean_of(codec):
    @jaxmpi.jit
    def mean(grads, state):
        return codec.mean(grads, state)

    return mean


@run_ranks(2, 3)
@pytest.mark.parametrize("name", list(ALL))
def test_all_ranks_get_the_same_and_nothing_is_lost(name):
    """For a constant gradient, what arrives over all steps lacks only the kept residual."""
    codec, r, n = ALL[name](), jaxmpi.rank(), jaxmpi.size()
    mean, state = mean_of(codec), codec.init(params())
    exact = np.mean([flat(gradient(q)) for q in range(n)], axis=0)
    arrived, steps = 0, 30
    for _ in range(steps):
        out, state = mean(gradient(r), state)
        assert {k: x.shape for k, x in out.items()} == SHAPES
        assert all(x.dtype == jnp.float32 for x in out.values())
        arrived = arrived + flat(out)
    assert len(set(jaxmpi.allgather_object(arrived.tobytes()))) == 1
    error = np.linalg.norm(arrived / steps - exact) / np.linalg.norm(exact)
    assert error < {"bf16": 4e-3, "f16": 5e-4, "int8": 1e-3, "topk": 0.25, "powersgd": 0.35}[name]
    if name in ("int8", "topk"):
        own = jaxmpi.tree_allreduce(kept(name, state), "sum")
        np.testing.assert_allclose(
            arrived * n + np.asarray(own)[: exact.size], exact * n * steps, rtol=0, atol=2e-3
        )


def kept(name, state):
    if name == "topk":
        return jnp.concatenate(state)
    whole = jnp.zeros_like(state.sent).at[jaxmpi.rank()].set(state.summed * jaxmpi.size())
    return (state.sent + whole).reshape(-1)


@run_ranks(2, 3)
def test_int8_is_within_a_half_of_its_steps():
    codec, r, n = codecs.int8(block=64), jaxmpi.rank(), jaxmpi.size()
    out, _ = mean_of(codec)(gradient(r), codec.init(params()))
    exact = np.mean([flat(gradient(q)) for q in range(n)], axis=0)
    largest = max(np.abs(flat(gradient(q))).max() for q in range(n))
    assert np.abs(flat(out) - exact).max() <= 2 * (largest / 127 / 2) * 1.01


@run_ranks(2, 3)
def test_topk_of_everything_is_the_mean():
    codec = codecs.topk(1.0)
    out, state = mean_of(codec)(gradient(jaxmpi.rank()), codec.init(params()))
    np.testing.assert_allclose(
        flat(out), np.mean([flat(gradient(q)) for q in range(jaxmpi.size())], axis=0), atol=1e-6
    )
    assert all(not np.any(x) for x in state)


@run_ranks(2, 3)
def test_powersgd_of_a_low_rank_is_the_mean():
    """PowerSGD of rank 2 finds a mean of rank 2 in two steps.

    The ranks' gradients have rank 2 and the same columns.
    """
    rng = np.random.default_rng(0)
    right = rng.normal(size=(2, 30))
    grads = [
        {"w": (np.random.default_rng(q + 1).normal(size=(40, 2)) @ right).astype(np.float32)}
        for q in range(jaxmpi.size())
    ]
    codec = codecs.powersgd(2)
    mean, state = mean_of(codec), codec.init({"w": jnp.zeros((40, 30))})
    for _ in range(2):
        state = state._replace(error=[jnp.zeros_like(e) for e in state.error])
        out, state = mean(grads[jaxmpi.rank()], state)
    np.testing.assert_allclose(out["w"], np.mean([g["w"] for g in grads], axis=0), atol=1e-4)
    np.testing.assert_allclose(state.q[0].shape, (30, 2))


@run_ranks(1, 2, 3)
@pytest.mark.parametrize("name", list(ALL))
def test_training_with_a_codec_arrives_where_training_without_does(name):
    """A least-squares problem; with weights, and a rank that has no samples in some steps."""
    rng = np.random.default_rng(3)
    x, truth = (
        rng.normal(size=(48, 16)).astype(np.float32),
        rng.normal(size=(16, 12)).astype(np.float32),
    )
    y = x @ truth
    part = jaxmpi.shard((x, y))[:]
    tx = jaxmpi.distributed(optax.sgd(0.05, momentum=0.8), codec=ALL[name]())

    @jaxmpi.jit
    def step(w, state, batch, weight):
        grads = jax.grad(lambda w: jnp.mean((batch[0] @ w - batch[1]) ** 2) * 6)(w)
        updates, state = tx.update(grads, state, w, weight=weight)
        return optax.apply_updates(w, updates), state

    w = jnp.zeros((16, 12))
    state = tx.init(w)
    for i in range(400):
        weight = 0 if jaxmpi.size() > 1 and jaxmpi.rank() == 0 and i % 7 == 3 else len(part[0])
        w, state = step(w, state, part, np.int32(weight))
    assert np.abs(np.asarray(w) - truth).max() < (0.05 if name != "bf16" else 0.1)


@pytest.mark.slow
@run_ranks(2)
def test_a_nan_is_not_hidden():
    grads = gradient(jaxmpi.rank())
    if jaxmpi.rank() == 1:
        grads["w"][3, 4] = np.nan
    for name in ("bf16", "int8", "powersgd"):
        codec = ALL[name]()
        out, _ = mean_of(codec)(grads, codec.init(params()))
        assert np.isnan(np.asarray(out["w"])).any(), name


@pytest.mark.parametrize("name", ["bf16", "f16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_cast_leaves_what_is_not_finite(name, dtype, bad):
    """The other numbers stay finite, and only those that are too large are clipped."""
    largest = float(jnp.finfo(dtype).max)
    x = np.asarray([[bad, 1, largest, -largest], [1, 1, 0, 0]], dtype)
    with jaxmpi.simulate(2):
        tx = jaxmpi.distributed(optax.identity(), codec=ALL[name]())
        got = jaxmpi.jit(lambda g: tx.update(g, tx.init(g))[0])(jaxmpi.PerRank(x))
    sent = min(largest, 65504 if name == "f16" else 3.3895e38)
    np.testing.assert_allclose(np.float64(got), [bad, 1, sent / 2, -sent / 2], rtol=1e-2)


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("weight", [2.0**-20, 1.0, 32768.0, 2.0**40])
def test_the_size_of_the_weights_changes_no_mean(name, weight):
    """Only their ratios count: weights w, 3w give the mean of weights 1, 3 bit by bit."""
    tx = jaxmpi.distributed(optax.identity(), codec=ALL[name]())

    def mean(weights):
        w = jnp.asarray(weights, jnp.float32)[jaxmpi.rank()]
        g = jnp.full((6, 6), 10.0) * (jaxmpi.rank() + 1)
        return tx.update(g, tx.init(g), weight=w)[0]

    with jaxmpi.simulate(2):
        got = jaxmpi.jit(lambda: mean([weight, 3 * weight]))()
        want = jaxmpi.jit(lambda: mean([1.0, 3.0]))()
    np.testing.assert_array_equal(got, want)
    if name != "topk":  # which sends a tenth of the numbers
        np.testing.assert_allclose(got, np.full((6, 6), 17.5), rtol=1e-2)


@run_ranks(2)
def test_a_codec_in_twenty_lines():
    """The codec of docs/optimizers.md: the sign of each number, and one scale for an array."""

    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    names = {"jax": jax, "jnp": jnp, "jaxmpi": jaxmpi}
    exec(re.search(r"```python\n(def signs\(\):.*?)```", text, re.DOTALL)[1], names)
    signs = names["signs"]
    tx = jaxmpi.distributed(optax.sgd(1.0), codec=signs())
    grads = {"w": jnp.array([1.0, -3.0, 2.0]) * (1 + jaxmpi.rank())}
    updates, state = jaxmpi.jit(lambda g, s: tx.update(g, s))(grads, tx.init(grads))
    np.testing.assert_allclose(updates["w"], [-3.0, 3.0, -3.0])
    np.testing.assert_allclose(
        state.codec.per_rank["w"], np.array([-1.0, -1.0, 0.0]) * (1 + jaxmpi.rank())
    )


@run_ranks(2)
@pytest.mark.parametrize("name", list(ALL))
def test_what_is_sent_is_less(name):
    """The bytes are those that `explain` counts for a 512 by 512 matrix."""
    codec = ALL[name]()
    grads = {"w": jnp.zeros((512, 512))}
    step = jaxmpi.jit(lambda g, s: codec.mean(g, s))
    entries = step.program(grads, codec.init(grads)).entries
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4}
    sent = 0
    for entry in entries:
        for shape, dtype in entry.arrays:
            sent += int(np.prod(shape)) * sizes[dtype]
    bound = {"bf16": 2, "f16": 2, "int8": 1.6, "topk": 0.85, "powersgd": 0.05}[name]
    assert sent <= 512 * 512 * (bound if name not in ("bf16", "f16") else 4) * 1.01


@pytest.mark.parametrize(
    "options", [{"codec": codecs.topk(0.1)}, {"op": "adasum"}], ids=["topk", "adasum"]
)
def test_the_program_grows_with_ranks_plus_arrays(options):
    """The number of lines has no term of ranks times arrays."""
    lines = {}
    for ranks in (2, 6):
        for arrays in (2, 6):
            with jaxmpi.simulate(ranks):
                tx, grads = jaxmpi.distributed(optax.sgd(1.0), **options), [jnp.ones(24)] * arrays
                step = jaxmpi.jit(lambda g, s, tx=tx: tx.update(g, s)[0])
                lowered = step.lower(grads, tx.init(grads)).as_text()
            lines[ranks, arrays] = lowered.count("\n")
    assert lines[6, 6] - lines[2, 6] == lines[6, 2] - lines[2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: codecs.topk(0), "codecs.topk: fraction is 0"),
        (lambda: codecs.topk(1.5), "codecs.topk: fraction is 1.5"),
        (lambda: codecs.powersgd(0), "codecs.powersgd: rank is 0"),
        (lambda: codecs.int8(block=0), "codecs.int8: block is 0"),
        (
            lambda: jaxmpi.distributed(optax.sgd(1.0), op="max", codec=codecs.bf16()),
            "do not go together",
        ),
        (
            lambda: jaxmpi.distributed(optax.sgd(1.0), micro_batches=2, codec=codecs.bf16()),
            "do not go together",
        ),
        (lambda: jaxmpi.distributed(optax.sgd(1.0), micro_batches=0), "micro_batches is 0"),
        (lambda: jaxmpi.distributed(optax.sgd(1.0), op="median"), "op 'median' is unknown"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
@run_ranks(1, 2)
def test_bad_leaves_and_codecs():
    with pytest.raises(TypeError, match="codec is a str"):
        jaxmpi.distributed(optax.sgd(1.0), codec="bf16")
    with pytest.raises(TypeError, match=r"leaf \['n'\] is int32"):
        codecs.int8().init({"n": jnp.ones(2, jnp.int32)})
