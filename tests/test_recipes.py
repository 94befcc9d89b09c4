"""Recipes of the documentation on several ranks give the numbers of one device."""

import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import run_ranks

ROOT = Path(__file__).parent.parent


def recipe(page, marker):
    """Return the one block of a page that has these words; a doctest loses its prompts."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    [found] = [block for block in blocks if marker in block]
    if ">>> " not in found:
        return found
    lines = [line for line in found.splitlines() if line.startswith((">>> ", "..."))]
    return "".join(line[4:] + "\n" for line in lines)


def run(page, marker, **names):
    """Run a recipe with the names of its page; return what it leaves."""
    modules = {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "jaxmpi": jaxmpi,
        "functools": functools,
    }
    scope = {**modules, **names}
    exec(compile(recipe(page, marker), page, "exec"), scope)
    return scope


def linear_loss(params, batch, mask=None):
    losses = jnp.square(batch @ params["w"] - 1)
    # NaN where a rank has no sample
    return losses.mean() if mask is None else jnp.sum(mask * losses) / mask.sum()


@run_ranks(1, 2, 4)
def test_the_last_window_of_accumulate_is_a_step():
    params = {"w": jnp.full(8, 0.01)}
    got = run("docs/optimizers.md", "flush=last", params=params, loss_of=linear_loss)
    inner = optax.adam(1e-3)
    state, rows = inner.init(params), np.arange(384.0).reshape(48, 8)
    for some in (rows[:32], rows[32:]):
        updates, state = inner.update(jax.grad(linear_loss)(params, some), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(got["params"]["w"], params["w"], rtol=1e-5)
    assert int(got["state"].calls) == 0


@run_ranks(1, 2, 3)
@pytest.mark.parametrize(
    "page, marker",
    [("docs/optimizers.md", "weight=mask.sum()"), ("docs/sharp-bits.md", "n = len(batch)")],
)
def test_the_loss_that_is_shown_is_that_of_all_samples(page, marker):
    r, n = jaxmpi.rank(), jaxmpi.size()
    rows = np.arange(2.0 * n * (n + 1) / 2, dtype=np.float32).reshape(-1, 2)
    first = r * (r + 1) // 2
    mine = rows[first : first + r + 1]  # r + 1 samples
    params, tx = {"w": jnp.full(2, 0.1)}, jaxmpi.distributed(optax.sgd(0.1))
    mask = np.arange(n) < len(mine) if "mask" in marker else None
    batch = np.zeros((n, 2), np.float32) if "mask" in marker else mine
    batch[: len(mine)] = mine
    loss, grads = jax.value_and_grad(linear_loss)(params, batch, mask)
    names = {
        "params": params,
        "tx": tx,
        "state": tx.init(params),
        "batch": batch,
        "loss_of": linear_loss,
        "loss": loss,
    }
    got = run(page, marker, grads=grads, mask=mask, **names)
    want = float(linear_loss(params, rows))
    np.testing.assert_allclose(got["loss" if "mask" in marker else "shown"], want, rtol=1e-6)
    np.testing.assert_allclose(
        got["updates"]["w"], -0.1 * jax.grad(linear_loss)(params, rows)["w"], rtol=1e-6
    )


@run_ranks(2)
def test_the_loss_of_a_rank_without_samples_does_not_count():
    mask = np.full(2, jaxmpi.rank() == 1)
    params, tx = {"w": jnp.ones(2)}, jaxmpi.distributed(optax.sgd(0.1))
    names = {"params": params, "tx": tx, "state": tx.init(params), "loss_of": linear_loss}
    got = run(
        "docs/optimizers.md",
        "weight=mask.sum()",
        batch=np.ones((2, 2), np.float32),
        mask=mask,
        **names,
    )
    assert float(got["loss"]) == 1.0


def check_names_of_pmap():
    got = run("docs/migration.md", 'init(axes={"batch": -1})')
    rows = np.arange(48.0, dtype=np.float32).reshape(-1, 2)
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(jnp.ones(2))
    np.testing.assert_allclose(jaxmpi.local(got["loss"]), loss, rtol=1e-6)
    np.testing.assert_allclose(jaxmpi.local(got["w"]), 1 - 1e-4 * grad, rtol=1e-6)
    checked = jaxmpi.jit(got["train_step"], replicated_argnums=0, replicated_outnums=(0, 1))
    np.testing.assert_allclose(
        jaxmpi.local(checked(jnp.ones(2), jaxmpi.shard(rows)[:])[1]), loss, rtol=1e-6
    )


@run_ranks(1, 2, 3, axes={"batch": -1})
def test_a_port_keeps_the_axis_name_of_pmap():
    check_names_of_pmap()


@run_ranks(2, axes={"batch": -1}, backend="xla")
def test_a_port_keeps_the_axis_name_of_pmap_on_xla():
    check_names_of_pmap()


@run_ranks(1, 2)
def test_equinox_models_with_arrays_of_integers_are_split_by_floats():
    """The page splits by floats: an array of integers has no gradient, and must not be averaged."""
    import equinox as eqx

    class Model(eqx.Module):
        weight: jax.Array
        offsets: jax.Array  # integers
        flags: np.ndarray
        key: jax.Array

        def __call__(self, x):
            return (x @ self.weight)[None] + self.offsets.sum()

    model = Model(jnp.full(8, 0.1), jnp.arange(3), np.ones(2, bool), jax.random.key(0))

    class Layers:
        MLP = staticmethod(lambda *args, **kwargs: model)

    code = recipe("docs/migration.md", "eqx.nn.MLP").replace("eqx.nn.MLP(", "Layers.MLP(")
    scope = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "jaxmpi": jaxmpi, "Layers": Layers}
    exec(compile(code, "page", "exec"), scope)
    np.testing.assert_allclose(scope["loss"], (0.8 + 3) ** 2, rtol=1e-6)
    np.testing.assert_allclose(scope["model"].weight, np.full(8, 0.09), rtol=1e-4)
    np.testing.assert_array_equal(scope["model"].offsets, np.arange(3))


# predictions


def check_predictions():
    params = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    for n_samples in range(8):
        x = np.random.default_rng(1).normal(size=(n_samples, 2)).astype(np.float32)
        got = run(
            "docs/data.md",
            "predictions[row[valid]]",
            x=x,
            params=params,
            apply=lambda params, x: jnp.tanh(x @ params),
        )
        np.testing.assert_allclose(got["predictions"], np.tanh(x @ params), rtol=1e-5, atol=1e-6)


@run_ranks(1, 2, 3)
@pytest.mark.filterwarnings("ignore:batches. an epoch of 0 samples")
def test_predictions_of_all_samples_are_in_order():
    check_predictions()


@run_ranks(2, backend="xla")
def test_predictions_of_all_samples_are_in_order_on_xla():
    check_predictions()


@run_ranks(1, 2, 3)
def test_an_evaluation_counts_every_sample_once():
    params = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    for n_samples in (1, 131):
        x = np.random.default_rng(1).normal(size=(n_samples, 2)).astype(np.float32)
        test = {"x": x, "y": np.arange(n_samples) % 3}
        got = run(
            "docs/data.md",
            "accuracy = ",
            test=test,
            params=params,
            apply=lambda params, x: x @ params,
        )
        want = np.mean((x @ params).argmax(-1) == test["y"])
        np.testing.assert_allclose(got["accuracy"], want, rtol=1e-6)
        assert int(got["n_samples"]) == n_samples


# fp8

FP8 = "_overwrite_with_gradient"


def after_fp8_steps(batch):
    """Return the train state after three steps of the recipe on this rank's rows."""
    mine = jaxmpi.shard(batch)[:]
    got = run("docs/migration.md", "Fp8DirectDotGeneralOp", batch=mine)
    state = got["state"]
    for _ in range(2):
        state, _ = got["step"](state, mine)
    return state.params


@run_ranks(1, 2, 4)
def test_scales_of_fp8_are_those_of_all_samples():
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch *= np.arange(1, 9, dtype=np.float32)[:, None]  # the last rank has the largest inputs
    params = jax.tree.map(np.asarray, after_fp8_steps(batch))
    for other in jaxmpi.allgather_object(params):
        jax.tree.map(np.testing.assert_array_equal, other, params)
    from flax.linen.fp8_ops import get_fp8_max

    [scales] = params[FP8].values()
    largest = np.abs(batch).max()
    np.testing.assert_array_equal(scales["input_amax_history"][[0, -1, -2]], [largest] * 3)
    np.testing.assert_allclose(
        scales["input_scale"], largest / get_fp8_max(jnp.float8_e4m3fn, jnp.float32), rtol=1e-6
    )


# local_sgd in checkpoints


def local_steps(params, state, tx, first, last):
    """Run each rank's steps on its own samples."""

    @jaxmpi.jit
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"]) - 1) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(first, last):
        x = jax.random.normal(jax.random.key(10 * i + jaxmpi.rank()), (4, 8))
        params, state = step(params, state, x)
    return params, state


def made_local(codec):
    options = (
        {"outer": optax.sgd(0.7, momentum=0.9), "codec": jaxmpi.codecs.int8()} if codec else {}
    )
    tx, params = jaxmpi.local_sgd(optax.adam(0.05), 3, **options), {"w": jnp.full(8, 0.1)}
    return tx, params, tx.init(params)


@run_ranks(1, 2)
@pytest.mark.parametrize("codec", [False, True])
def test_local_sgd_goes_on_where_it_was_on_as_many_ranks(codec):
    tx, params, state = made_local(codec)
    params, state = local_steps(params, state, tx, 0, 4)  # one step behind an averaging
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    got = run(
        "docs/optimizers.md",
        "run = jaxmpi.restore(directory, run)",
        params=params,
        state=state,
        directory=directory,
        step=4,
    )
    again = local_steps(got["params"], got["state"], tx, 4, 8)
    jax.tree.map(np.testing.assert_array_equal, again, local_steps(params, state, tx, 4, 8))


def save_local(directory, codec):
    tx, params, state = made_local(codec)
    params, state = local_steps(params, state, tx, 0, 3)
    jaxmpi.save(directory, 3, {"params": params, "state": state}, background=False)


def restore_local(directory, codec):
    tx, params, state = made_local(codec)
    text = "" if codec else r"inner.* Go on with 2 ranks, or .*PerRankState\(None\).*local_sgd"
    with pytest.raises(jaxmpi.CheckpointError, match=text):
        jaxmpi.restore(directory, {"params": params, "state": state})
    got = run(
        "docs/optimizers.md", "fresh = tx.init(params)", params=params, tx=tx, directory=directory
    )
    assert float(jnp.abs(got["params"]["w"] - params["w"]).max()) > 0.01
    if codec:
        assert float(jnp.abs(optax.tree.get(got["state"].outer, "trace")["w"]).max()) > 0
    params, state = local_steps(got["params"], got["state"], tx, 3, 6)
    jaxmpi.testing.assert_replicated(params)  # after an averaging
    assert int(state.calls) == 0


@pytest.mark.parametrize("codec", [False, True])
def test_local_sgd_is_restored_on_another_number_of_ranks(tmp_path, codec):
    for ranks, function in ((2, save_local), (3, restore_local)):
        pool(ranks, "auto").run(
            Task(__file__, function.__name__, {"directory": str(tmp_path), "codec": codec}, 120.0)
        )


# checkpoints of nnx models


def train_nnx(model, optimizer, steps):
    """Train on samples that differ between the ranks."""
    from flax import nnx

    @jaxmpi.nn.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x = (jaxmpi.rank() + 1) * jnp.arange(32.0).reshape(4, 8) / 32
    return [float(jaxmpi.local(step(model, optimizer, x))) for _ in range(steps)]


@run_ranks(1, 2)
def test_an_nnx_model_goes_on_where_it_was():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    names = {"directory": directory}
    first = run("docs/checkpoints.md", '"model": nnx.state(model)', **names)
    train_nnx(first["model"], first["optimizer"], 3)
    jaxmpi.save(directory, 3, first["parts"](), background=False)
    want = train_nnx(first["model"], first["optimizer"], 2)
    again = run("docs/checkpoints.md", '"model": nnx.state(model)', **names)
    assert int(again["optimizer"].step[...]) == 3
    assert train_nnx(again["model"], again["optimizer"], 2) == want


def nnx_on_any_ranks(directory, steps_before):
    from flax import nnx

    made = run(
        "docs/checkpoints.md",
        '"model": nnx.state(model)',
        directory=jaxmpi.broadcast_object(tempfile.mkdtemp()),
    )
    model, optimizer = made["model"], made["optimizer"]
    run(
        "docs/checkpoints.md",
        '"stats": jaxmpi',
        directory=directory,
        model=model,
        optimizer=optimizer,
    )
    assert int(optimizer.step[...]) == steps_before
    stats = jaxmpi.allgather_object(
        jax.device_get(jax.tree.leaves(nnx.state(model, nnx.BatchStat)))
    )
    for other in stats:
        jax.tree.map(np.testing.assert_array_equal, other, stats[0])
    assert (np.abs(stats[0][0]).max() > 0) == (steps_before > 0)
    train_nnx(model, optimizer, 3)
    own, elsewhere = nnx.state(model, nnx.BatchStat), jaxmpi.broadcast_object(tempfile.mkdtemp())
    got = run(
        "docs/checkpoints.md",
        '"stats": jaxmpi',
        directory=elsewhere,
        model=model,
        optimizer=optimizer,
    )
    parts = got["parts"]()
    assert jax.tree.structure(parts["stats"]) == jax.tree.structure(own)
    jaxmpi.save(directory, steps_before + 3, parts, background=False)


def test_an_nnx_model_goes_on_with_another_number_of_ranks(tmp_path):
    for ranks, steps in ((2, 0), (3, 3), (1, 6)):
        pool(ranks, "auto").run(
            Task(
                __file__,
                "nnx_on_any_ranks",
                {"directory": str(tmp_path), "steps_before": steps},
                120.0,
            )
        )


@run_ranks(1, 2)
def test_a_schedule_under_accumulate_counts_updates():
    """Outside of `accumulate` a schedule counts calls, as docs/optimizers.md says."""
    halved = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    inside = jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(halved)), every=2)
    outside = optax.chain(
        jaxmpi.accumulate(jaxmpi.distributed(optax.sgd(1.0)), every=2),
        optax.scale_by_schedule(halved),
    )
    for tx, want in ((inside, [0, -1, 0, -1, 0, -0.5]), (outside, [0, -1, 0, -0.5, 0, -0.5])):
        params, got = jnp.zeros(()), []
        state = tx.init(params)
        for _ in want:
            updates, state = tx.update(jnp.ones(()), state, params)
            got.append(float(updates))
        assert got == want
