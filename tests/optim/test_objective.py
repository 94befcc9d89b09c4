"""The extra arguments of `update`, given per rank: `inner` gets those of all ranks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_cases import check

import jaxmpi
from jaxmpi.testing import run_ranks

LOSSES = (  # L-BFGS has a zoom line search
    *("lbfgs", "scale_by_backtracking_linesearch", "polyak_sgd"),
    *("contrib.reduce_on_plateau", "contrib.momo", "contrib.sophia", "contrib.sam"),
)


@pytest.mark.exhaustive
@run_ranks(3, timeout_seconds=400)
def test_transforms_that_take_the_loss():
    check(LOSSES, ("distributed",))


@pytest.mark.exhaustive
@run_ranks(2, backend="xla", timeout_seconds=400)
def test_transforms_that_take_the_loss_on_xla():
    check(LOSSES, ("distributed",))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_transforms_that_take_the_loss_on_simulated_ranks(ranks):
    with jaxmpi.simulate(ranks):
        check(LOSSES, ("distributed",))


@pytest.mark.matrix
@run_ranks(1, 2, 4, timeout_seconds=400)
def test_matrix_of_transforms_that_take_the_loss():
    check(LOSSES)


# closed forms: rank r has the loss f_r(w) = a_r·Σ w² / 2 with a_r = r + 1, so f'_r = a_r·w, f''_r =
# a_r


def recorder():
    """A transform whose state is what it gets."""

    def update(updates, state, params=None, *, value=None, grad=None, value_fn=None, other=None):
        if value_fn is not None:
            value_fn = jax.value_and_grad(value_fn)(params, other=other)
        return updates, {"value": value, "grad": grad, "value_fn": value_fn, "updates": updates}

    return optax.GradientTransformationExtraArgs(lambda params: {}, update)


def loss(w, a, other=1.0):
    return a * jnp.sum(w**2) / 2 * other


def given(tx, weights=None, parameters=(3.0, -1.0), jit=jaxmpi.jit, **only):
    """Return what `recorder` in `tx` gets on these ranks."""

    def step(w):
        a = jaxmpi.rank() + 1.0
        fun = lambda w, other=1.0: loss(w, a, other)
        value, grad = jax.value_and_grad(fun)(w)
        args = {"value": value, "grad": grad, "value_fn": fun, "other": 1.0}
        args = {name: x for name, x in args.items() if only.get(name, True)}
        if weights is not None:
            args["weight"] = jnp.asarray(weights)[jaxmpi.rank()]
        state = tx.update(grad, tx.init(w), w, **args)[1]
        state = jaxmpi.unshard(state) if hasattr(state, "layout") else state
        return getattr(state, "inner", state)

    return jit(step)(jnp.asarray(parameters))


def expected(a, w=(3.0, -1.0)):
    w = np.asarray(w)
    return {"value": a * 5.0, "grad": a * w, "value_fn": (a * 5.0, a * w), "updates": a * w}


def same(got, want):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@run_ranks(1, 2, 3)
def test_means():
    n = jaxmpi.size()
    for jit in (jaxmpi.jit, jax.jit):
        same(given(jaxmpi.distributed(recorder()), jit=jit), expected((n + 1) / 2))
    weights = np.arange(n) + 0.0  # rank 0 does not count, but where it is alone
    a = np.sum(weights * (1 + np.arange(n))) / max(weights.sum(), 1)
    same(
        given(jaxmpi.distributed(recorder()), weights),
        expected(a) | ({} if n > 1 else {"value_fn": expected(1)["value_fn"]}),
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_others(ranks):
    with jaxmpi.simulate(ranks):
        total, mean = ranks * (ranks + 1) / 2, (ranks + 1) / 2
        same(given(jaxmpi.distributed(recorder(), op="sum")), expected(total))
        largest = given(
            jaxmpi.distributed(recorder(), op="max"), value_fn=False, parameters=(3.0, 1.0)
        )
        same(
            largest,
            {
                "value": mean * 5,
                "grad": np.array([3, 1]) * ranks,
                "updates": np.array([3, 1]) * ranks,
            },
        )
        same(given(jaxmpi.distributed(recorder(), codec=jaxmpi.codecs.bf16()))["value"], mean * 5)
        for name, options in (
            ("op 'max'", {"op": "max"}),
            ("op 'adasum'", {"op": "adasum"}),
            ("micro_batches", {"micro_batches": 6}),
        ):
            with pytest.raises(
                ValueError, match=f"distributed: value_fn does not go together with {name}"
            ):
                given(jaxmpi.distributed(recorder(), **options))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards(ranks):
    with jaxmpi.simulate(ranks):
        same(given(jaxmpi.sharded(recorder())), expected((ranks + 1) / 2))
        weights = np.arange(ranks) + 1.0
        same(
            given(jaxmpi.sharded(recorder()), weights), expected(np.sum(weights**2) / weights.sum())
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches(ranks):
    """The loss of each micro-batch, as micro_batch_grads returns it."""
    with jaxmpi.simulate(ranks):
        tx = jaxmpi.distributed(recorder(), micro_batches=6)

        def step(w, x):
            mine = x.reshape(ranks, -1)[jaxmpi.rank()]
            value, grad = jaxmpi.micro_batch_grads(
                jax.value_and_grad(lambda w, x: jnp.mean(x) * jnp.sum(w)), 6
            )(w, mine)
            return tx.update(grad, {}, w, value=value)[1]

        got = jaxmpi.jit(step)(jnp.ones(2), jnp.arange(12.0))
    same(got, {"value": 11.0, "updates": np.array([5.5, 5.5])})


@pytest.mark.parametrize(
    "give", [{"value": 1.0}, {"grad": jnp.ones(2)}, {"value_fn": loss}, {"obj_fn": loss}]
)
def test_average_gradients_takes_none(give):
    tx = optax.chain(jaxmpi.average_gradients(), optax.sgd(0.1))
    for ranks in (1, 2):
        with (
            jaxmpi.simulate(ranks),
            pytest.raises(
                ValueError, match=f"average_gradients: update got {next(iter(give))}.*distributed"
            ),
        ):
            jaxmpi.jit(lambda w: tx.update(w, tx.init(w), w, **give))(jnp.ones(2))


def test_each_rank_of_local_sgd_has_its_own():
    """The rate is value / |grad|² = a² · 5 / 10 a² of the rank's loss.

    The parameters meet at their mean.
    """
    tx = jaxmpi.local_sgd(optax.polyak_sgd(1.0), every=1)

    def step(w):
        a = jaxmpi.rank() + 1.0
        return tx.update(jax.grad(loss)(w, a), tx.init(w), w, value=a**2 * 5)[0]

    with jaxmpi.simulate(2):
        updates = np.asarray(jaxmpi.jit(step)(jnp.asarray([3.0, -1.0])))
    np.testing.assert_allclose(updates, [[-2.25, 0.75]] * 2)


@run_ranks(2)
def test_value_travels_with_the_gradients():
    """The value is sent with the gradients; `grad` is not sent again where it equals them."""

    def explained(*names, weight=None):
        tx = jaxmpi.distributed(recorder())

        def step(g):
            args = {name: g if name == "grad" else 1.0 for name in names}
            return tx.update(
                g, tx.init(g), g, **args, **({} if weight is None else {"weight": weight})
            )[0]

        return jaxmpi.explain(jaxmpi.jit(step), {"w": jnp.ones(5), "b": jnp.ones(3)})

    for names, numbers in (((), 8), (("value",), 9), (("value", "grad"), 9)):
        for weight in (None, 2.0):
            plan = explained(*names, weight=weight)
            assert (plan.messages, plan.sent_bytes) == (1, 4 * (numbers + (weight is not None))), (
                names,
                weight,
            )


@run_ranks(2)
def test_sharded_sends_the_gradients_once():
    tx = jaxmpi.sharded(recorder())

    def sent(*names):
        def step(g):
            args = {name: g if name == "grad" else 1.0 for name in names}
            return tx.update(g, tx.init(g), g, **args)[0]

        plan = jaxmpi.explain(jaxmpi.jit(step), {"w": jnp.ones(5), "b": jnp.ones(3)})
        return plan.messages, plan.sent_bytes

    assert sent("value", "grad") == sent("value")


# average_loss


def cubic(w, x):
    return jnp.mean(x) * jnp.sum(w["a"] ** 3) + jnp.sum(w["b"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_average_loss_and_its_derivatives(ranks):
    w = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.float32(1.0)}
    mean = (ranks + 1) / 2  # of the x_r = r + 1
    with jaxmpi.simulate(ranks):

        @jaxmpi.jit
        def derivatives(w):
            f = lambda w: jaxmpi.average_loss(cubic)(w, jnp.full(4, jaxmpi.rank() + 1.0))
            hessian_times = jax.jvp(jax.grad(f), (w,), (w,))[1]
            value, push = jax.linearize(f, w)
            (back,) = jax.linear_transpose(push, w)(1.0)
            checkpointed = jax.grad(jax.checkpoint(f))(w)
            scanned = jax.lax.scan(
                lambda c, _: (jax.tree.map(lambda x, g: x - 0.1 * g, c, jax.grad(f)(c)), None),
                w,
                None,
                2,
            )[0]
            return value, jax.grad(f)(w), back, checkpointed, push(w), hessian_times, scanned

        value, *gradients, pushed, hessian_times, scanned = derivatives(w)
    np.testing.assert_allclose(value, 9 * mean + 1)
    for gradient in gradients:
        np.testing.assert_allclose(gradient["a"], [3 * mean, 12 * mean], rtol=1e-6)
        np.testing.assert_allclose(gradient["b"], 1)
    np.testing.assert_allclose(pushed, 27 * mean + 1, rtol=1e-6)
    np.testing.assert_allclose(hessian_times["a"], [6 * mean, 24 * mean], rtol=1e-6)
    a = np.asarray([1.0, 2.0])
    for _ in range(2):
        a = a - 0.1 * 3 * mean * a**2
    np.testing.assert_allclose(scanned["a"], a, rtol=1e-5)


def test_a_rank_without_weight_does_not_count():
    """A rank without weight does not count, whatever its loss and derivatives."""
    with jaxmpi.simulate(3):

        def f(w):
            r = jaxmpi.rank()
            fun = jaxmpi.average_loss(
                lambda w: jnp.where(r == 1, jnp.nan, r + 1.0) * w**2,
                weight=jnp.asarray([1.0, 0.0, 3.0])[r],
            )
            return jax.value_and_grad(fun)(w)

        value, grad = jaxmpi.jit(f)(2.0)
    np.testing.assert_allclose((value, grad), (4 * 2.5, 4 * 2.5))


@pytest.mark.slow
@run_ranks(3)
def test_optax_without_distributed():
    """Plain optax L-BFGS minimizes the sum of all ranks' losses, with equal bits on all ranks."""
    center = np.asarray([1.0, -2.0, 4.0])[jaxmpi.rank()]
    loss_of_all = jaxmpi.average_loss(
        lambda w: jnp.sum((w - center) ** 2 * jnp.asarray([1.0, 3.0]))
    )
    tx, value_and_grad = optax.lbfgs(), optax.value_and_grad_from_state(loss_of_all)

    def step(w, state):
        value, grad = value_and_grad(w, state=state)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=loss_of_all)
        return optax.apply_updates(w, updates), state

    step = jaxmpi.jit(step, replicated_argnums=(0, 1), replicated_outnums=(0, 1))
    w = jnp.asarray([9.0, 7.0])
    state = tx.init(w)
    for _ in range(8):
        w, state = step(w, state)
    np.testing.assert_allclose(w, [1.0, 1.0], atol=1e-3)
    assert len(set(jaxmpi.allgather_object(np.asarray(w).tobytes()))) == 1


@run_ranks(1)
def test_one_rank_has_the_jaxpr_of_plain_optax():
    def text(tx):
        def step(w):
            value, grad = jax.value_and_grad(loss)(w, 2.0)
            return tx.update(
                grad, tx.init(w), w, value=value, grad=grad, value_fn=lambda w: loss(w, 2.0)
            )

        return str(jax.make_jaxpr(step)(jnp.ones(3)))

    for wrap in (jaxmpi.distributed, jaxmpi.sharded):
        assert text(wrap(optax.lbfgs())) == text(optax.lbfgs())


# losses that are means already: the gradient of a pmean is each rank's own

MEANS = {
    "own": lambda f: f,
    "pmean": lambda f: lambda w: jax.lax.pmean(f(w), jaxmpi.AXIS),
    "tree_allreduce": lambda f: lambda w: jaxmpi.tree_allreduce(f(w)),
    "average_loss": jaxmpi.average_loss,
}
WRAP = {"plain": lambda tx: tx, "distributed": jaxmpi.distributed, "sharded": jaxmpi.sharded}


def searched(tx, mean, x, jit):
    """The parameters after three steps of a line search whose `value_fn` is `mean` of the loss."""

    def step(w, state, x):
        fun = mean(lambda w: jnp.mean((jnp.tanh(x @ w) - 0.3) ** 2) + 0.1 * jnp.sum(w**4))
        value, grad = jax.value_and_grad(fun)(w)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=fun)
        return optax.apply_updates(w, updates), state

    w = jnp.asarray([1.0, -2.0, 0.5])
    state, step = tx.init(w), jit(step)
    for _ in range(3):
        w, state = step(w, state, x)
    return np.asarray(w)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:step. the value summed or averaged")  # of a mean of means
@pytest.mark.parametrize(
    "make", [optax.lbfgs, lambda: optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(9))]
)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("wrap", WRAP)
def test_a_line_search_is_right_or_refused(make, mean, wrap):
    """Line searches are right in distributed and sharded, for any of these losses.

    Plain optax takes average_loss, and no pmean.
    """
    x = np.sin(np.arange(36.0)).reshape(3, 4, 3)
    with jaxmpi.simulate(3):
        run = lambda: searched(
            WRAP[wrap](make()),
            MEANS[mean],
            jaxmpi.PerRank(x),
            partial(jaxmpi.jit, replicated_argnums=(0, 1)),
        )
        if wrap == "plain" and mean in ("pmean", "tree_allreduce"):
            with pytest.raises(
                ValueError, match=r"in a line search, use jaxmpi\.average_loss for its value_fn"
            ):
                run()
            return
        got = run()
    want = searched(make(), MEANS["own"], x.reshape(12, 3), jax.jit)
    if wrap == "plain" and mean == "own":
        # each rank trains alone, which its PerRank shows
        assert not np.allclose(got, want, atol=1e-3)
        assert got.shape == (3, 3)
        return
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
