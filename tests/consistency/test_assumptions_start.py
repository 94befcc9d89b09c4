"""State that differs between the ranks before the first step is named; what may differ is not."""

import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jaxmpi
from jaxmpi._consistency import values
from jaxmpi._consistency.compare import compare_values_again
from jaxmpi._consistency.values import checksum
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

START = (
    r"step: {}.* differ between the ranks before the first step: {} other values than the other "
    r"ranks\. All ranks add the same updates.*jaxmpi\.synchronize.*"
    r"allow=\"unequal_start\" turns this check off"
)


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def start(seed=0):
    return {"w": jax.random.normal(jax.random.key(seed), (3,)), "b": jnp.zeros(())}


def batch():
    return jax.random.normal(jaxmpi.rank_key(jax.random.key(9)), (8, 3))


def as_in_a_new_job():
    """Forget which programs these ranks have run: they are those of other tests, too."""
    compare_values_again(session.current("test"))


def last():
    """Return the number of the last rank, which is the one that differs."""
    return jaxmpi.size() - 1


def unequal_start():
    return start(int(jaxmpi.rank() == last()))


def plain(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jaxmpi.tree_allreduce(value)

    return step


def run(tx, params, jit=jaxmpi.jit, **options):
    step = jit(plain(tx), **options)
    state = tx.init(params)
    for _ in range(3):
        params, state, _ = step(params, state, batch())


def by_transform(tx):
    run(tx, unequal_start())
    return r"argument 0\['w'\]"


def in_train_state():
    state = TrainState.create(
        apply_fn=None, params=unequal_start(), tx=jaxmpi.distributed(optax.adam(0.1))
    )

    @jaxmpi.jit
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), jaxmpi.tree_allreduce(value)

    step(state, batch())


def in_nnx():
    rank = jaxmpi.rank()
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(int(rank == last())))
    optimizer = nnx.Optimizer(model, jaxmpi.distributed(optax.adam(0.1)), wrt=nnx.Param)

    @jaxmpi.nn.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return value

    step(model, optimizer, batch())


def in_pmap():
    tx = jaxmpi.distributed(optax.sgd(0.1))
    params = jax.tree.map(lambda x: x[None], unequal_start())
    step = jaxmpi.pmap(plain(tx), axis_name="batch", out_axes=(0, 0, None))
    step(params, tx.init(params), batch()[None])


def moments():
    """Parameters are equal, and Adam's moments are not: only they were restored."""
    tx = jaxmpi.distributed(optax.adam(0.1))
    params, other = (
        start(),
        optax.tree.map_params(tx, lambda x: x + jaxmpi.rank(), tx.init(start())),
    )
    jaxmpi.jit(plain(tx))(params, other, batch())


def average_of_parameters():
    """An exponential average starts from other values than the parameters."""

    def step(params, average, x):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        params = jax.tree.map(lambda p, g: 0.999 * p - 0.1 * g, params, grads)
        return params, optax.incremental_update(params, average, 0.1)

    jaxmpi.jit(step)(start(), unequal_start(), batch())


def in_a_scan():
    def step(params, xs):
        def one(params, x):
            grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

        return jax.lax.scan(one, params, xs)[0]

    jaxmpi.jit(step)(unequal_start(), jnp.stack([batch(), batch()]))


def where_finite():
    tx = jaxmpi.skip_nonfinite(jaxmpi.distributed(optax.sgd(0.1)))
    run(tx, unequal_start())


def from_outside():
    rates = 0.1 * jnp.arange(3.0) + jaxmpi.rank()

    def step(params, x):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        return {**params, "w": params["w"] - rates * grads["w"]}

    jaxmpi.jit(step)(start(), batch())


def local_sgd_with_anchor():
    tx = jaxmpi.local_sgd(optax.sgd(0.1), every=2, outer=optax.sgd(0.7, momentum=0.9))
    run(tx, unequal_start())


W, ANY = r"argument 0\['b'\]|argument 0\['w'\]", "argument "
UNEQUAL = {
    "distributed": (lambda: run(jaxmpi.distributed(optax.adam(0.1)), unequal_start()), W),
    "accumulate": (
        lambda: run(jaxmpi.accumulate(jaxmpi.distributed(optax.adam(0.1)), 2), unequal_start()),
        W,
    ),
    "codec": (
        lambda: run(
            jaxmpi.distributed(optax.sgd(0.1), codec=jaxmpi.codecs.int8()), unequal_start()
        ),
        W,
    ),
    "donated": (
        lambda: run(jaxmpi.distributed(optax.adam(0.1)), unequal_start(), donate_argnums=(0, 1)),
        W,
    ),
    "TrainState": (in_train_state, r"argument 0\.params\['w'\]"),
    "nnx": (in_nnx, r"argument 0\['kernel'\]"),
    "pmap": (in_pmap, W),
    "moments": (moments, r"argument 1\[0\]"),
    "average": (average_of_parameters, r"argument 1\['w'\]"),
    "scan": (in_a_scan, W),
    "skip_nonfinite": (where_finite, W),
    "from outside": (from_outside, "array 0 from outside"),
    "anchor": (local_sgd_with_anchor, ANY),
}
RANKS_THAT_DIFFER = {
    "moments": {2: "rank 1 has", 3: "ranks 1, 2 have"},
    "from outside": {2: "rank 1 has", 3: "ranks 1, 2 have"},
}


def check_unequal(name):
    as_in_a_new_job()
    call, leaf = UNEQUAL[name]
    ranks = RANKS_THAT_DIFFER.get(name, {2: "rank 1 has", 3: "rank 2 has"})[jaxmpi.size()]
    with pytest.raises(jaxmpi.RankMismatchError, match=START.format(f"({leaf})", ranks)) as caught:
        call()
    assert caught.value.leaf and caught.value.function == "step"
    jaxmpi.barrier()  # all ranks have raised


@run_ranks(2, 3)
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_state_is_named_at_the_first_call_on_mpi(name):
    check_unequal(name)


@pytest.mark.slow
@run_ranks(2, 3, backend="xla")
# there, arrays from outside are compared with the program
@pytest.mark.parametrize("name", [name for name in UNEQUAL if name != "from outside"])
def test_unequal_state_is_named_at_the_first_call_on_xla(name):
    check_unequal(name)


# where the start is compared before the step, or by another name


def unequal_init():
    jaxmpi.sharded(optax.adam(0.1)).init(unequal_start())


def unequal_shards():
    jaxmpi.fully_shard(unequal_start())


def unequal_named():
    run(jaxmpi.distributed(optax.adam(0.1)), unequal_start(), replicated_argnums=(0, 1))


@run_ranks(2, 3)
@pytest.mark.parametrize("call", [unequal_init, unequal_shards, unequal_named])
def test_unequal_state_is_named_by_checks_of_old(call):
    with pytest.raises(jaxmpi.RankMismatchError, match=r"\['w'\]"):
        call()


def check_sharded_later():
    """The shards are of equal parameters, and the parameters are not equal any more."""
    as_in_a_new_job()
    tx = jaxmpi.sharded(optax.adam(0.1))
    state = tx.init(start())
    with pytest.raises(jaxmpi.RankMismatchError, match=r"argument 0\['w'\] differ"):
        jaxmpi.jit(plain(tx))(unequal_start(), state, batch())


@run_ranks(2, 3)
def test_parameters_beside_a_sharded_state_are_compared_on_mpi():
    check_sharded_later()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_parameters_beside_a_sharded_state_are_compared_on_xla():
    check_sharded_later()


def check_new_program():
    """A step is compared again where it has become another program."""
    tx = jaxmpi.distributed(optax.sgd(0.1))
    step = jaxmpi.jit(plain(tx))
    step(start(), tx.init(start()), batch())
    more = {**start(), "c": jnp.ones(2) * (1 + (jaxmpi.rank() == 1))}

    def other(params, x):
        return loss(params, x) + jnp.sum((params["c"] * x.mean()) ** 2)

    step = jaxmpi.jit(
        lambda p, x: jax.tree.map(
            lambda p, g: p - 0.1 * g, p, jaxmpi.tree_allreduce(jax.grad(other)(p, x))
        )
    )
    step({**more, "c": jnp.ones(3)}, batch())
    with pytest.raises(jaxmpi.RankMismatchError, match=r"argument 0\['c'\] differ.*rank 1 has"):
        step(more, batch())
    out = step({**more, "c": jnp.ones(2)}, batch())  # and goes on
    assert jnp.isfinite(jaxmpi.local(out["c"])).all()


@run_ranks(2, 3)
def test_the_first_call_of_each_program_is_compared_on_mpi():
    check_new_program()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_the_first_call_of_each_program_is_compared_on_xla():
    check_new_program()


@run_ranks(2)
def test_a_program_compiled_ahead_is_compared():
    tx = jaxmpi.distributed(optax.sgd(0.1))
    as_in_a_new_job()
    args = unequal_start(), tx.init(start()), batch()
    compiled = jaxmpi.jit(plain(tx)).lower(*args).compile()
    with pytest.raises(jaxmpi.RankMismatchError, match="differ between the ranks before"):
        compiled(*args)


@run_ranks(2, 3)
def test_state_of_another_function_with_such_a_program_is_compared():
    """A new model is trained by a new step: other ranks may have called that step before."""
    tx = jaxmpi.distributed(optax.adam(0.1))
    run(tx, start())
    params, step = unequal_start(), jaxmpi.jit(plain(tx))
    state = tx.init(params)
    # A program that is under way when another rank raises fails: JAX raises where it is read.
    errors = jaxmpi.RankMismatchError, jax.errors.JaxRuntimeError
    with pytest.raises(errors, match=START.format(W, "some rank has")):
        for _ in range(1000):
            params, state, _ = jax.block_until_ready(step(params, state, batch()))
            time.sleep(0.001)
    jaxmpi.barrier()


@run_ranks(2, 3)
def test_state_is_compared_again_after_a_restore():
    directory = jaxmpi.broadcast_object(tempfile.mkdtemp())
    tx = jaxmpi.distributed(optax.sgd(0.1))
    params, step = start(), jaxmpi.jit(plain(tx))
    state = tx.init(params)
    params, state, _ = step(params, state, batch())
    jaxmpi.save(directory, 0, {"params": params}, background=False)
    params = jaxmpi.restore(directory, {"params": params})["params"]
    params, state, _ = step(params, state, batch())
    params = jaxmpi.restore(directory, {"params": params})["params"]
    if jaxmpi.rank() == 1:  # which goes on from something else
        params = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(jaxmpi.RankMismatchError, match=START.format(W, "rank 1 has")):
        step(params, state, batch())


@run_ranks(2)
def test_the_array_in_a_reference_is_state():
    def make(momentum):
        m = jax.new_ref(momentum)

        def step(p, x):
            m[...] = 0.5 * m[...] + jax.lax.pmean(p * x, jaxmpi.AXIS)
            return p - m[...]

        return step

    p, x = jnp.ones(3), jnp.full(3, 1.0 + jaxmpi.rank())
    step = jaxmpi.jit(make(jnp.zeros(3)))
    np.testing.assert_allclose(step(p, x), 1 - 1.5)
    np.testing.assert_allclose(step(p, x), 1 - (0.75 + 1.5))
    # what is written into it may differ, so it is not known to be equal
    declared = jaxmpi.jit(make(jnp.zeros(3)), replicated_argnums=0, replicated_outnums=0)
    with pytest.raises(ValueError, match="uses a reference from outside, which counts as"):
        declared(p, x)
    as_in_a_new_job()
    unequal = jaxmpi.jit(make(jnp.zeros(3) + (jaxmpi.rank() == last())))
    with pytest.raises(jaxmpi.RankMismatchError, match="array 0 from outside differ"):
        unequal(p, x)


@run_ranks(2)
@pytest.mark.parametrize("jit", [jaxmpi.jit, jaxmpi.pmap])
def test_allow_lets_state_differ(jit):
    tx = jaxmpi.distributed(optax.sgd(0.1))
    params, x, options = unequal_start(), batch(), {}
    if jit is jaxmpi.pmap:
        params, x = jax.tree.map(lambda x: x[None], (params, x))
        options = {"axis_name": "batch", "out_axes": (0, 0, None)}
    jit(plain(tx), allow="unequal_start", **options)(params, tx.init(params), x)


@run_ranks(2)
def test_the_variable_turns_the_comparison_off(jaxmpi_check="0"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_CHECK", jaxmpi_check)
        run(jaxmpi.distributed(optax.sgd(0.1)), unequal_start())


@run_ranks(2)
def test_ranks_with_other_programs_are_told_so():
    """The comparison of a start meets another program, and says that."""
    tx = jaxmpi.distributed(optax.sgd(0.1))
    step = jaxmpi.jit(plain(tx))
    params = start() if jaxmpi.rank() else {**start(), "c": jnp.ones(2)}
    with pytest.raises(jaxmpi.RankMismatchError, match="do not agree"):
        step(params, tx.init(params), batch())


# what may differ


def exploration_rates():
    """Each rank explores at a rate of its own, which decays."""

    def step(params, rate, x):
        acted = x * (1 + rate)
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, acted))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rate * 0.99

    return step, (start(), jnp.float32(0.1 * (1 + jaxmpi.rank())), batch())


def chains():
    """Markov chains, and the mean over all of them to look at."""

    def step(position, key, x):
        key, use = jax.random.split(key)
        new = position + 0.1 * jax.random.normal(use, position.shape)
        accept = jnp.sum(new**2) < jnp.sum(position**2) + 1
        return jnp.where(accept, new, position), key, jaxmpi.tree_allreduce(position.mean() + x)

    key = jaxmpi.rank_key(jax.random.key(0))
    return step, (jnp.ones(3) * jaxmpi.rank(), key, jnp.ones(()))


def coupled_chains(raw):
    """Chains that are drawn to their mean, with a key each."""

    def step(state, x):
        key, use = jax.random.split(state["key"])
        position = state["position"]
        mean = jaxmpi.tree_allreduce(position)
        noise = jax.random.normal(use, position.shape)
        return {"key": key, "position": position + 0.1 * (mean - position) + noise}, x

    key = jax.random.PRNGKey(jaxmpi.rank()) if raw else jaxmpi.rank_key(jax.random.key(0))
    return step, ({"key": key, "position": jnp.ones(3) * jaxmpi.rank()}, jnp.ones(()))


def weights_of_particles():
    """Weights of each rank's particles, which add up to 1 over all ranks."""

    def step(weights, x):
        return weights / jax.lax.psum(weights.sum(), jaxmpi.AXIS), x

    return step, (jnp.arange(1.0, 4.0) + jaxmpi.rank(), jnp.ones(()))


def part_of_a_domain():
    """The explicit Euler method on each rank's cells, at the smallest time step of all ranks."""

    def step(state, widths):
        u, time = state
        dt = jax.lax.pmin((widths / (1 + jnp.abs(u))).min(), jaxmpi.AXIS)
        return u + dt * jnp.sin(u), time + dt

    return step, ((jnp.arange(3.0) + jaxmpi.rank(), jnp.zeros(())), jnp.ones(3))


def part_of_a_linear_system():
    """Conjugate gradients, with a block of the matrix and of the vectors on each rank."""

    def step(state, block):
        x, residual, direction = state
        product = block @ direction
        over_all = lambda a, b: jax.lax.psum(a @ b, jaxmpi.AXIS)
        alpha = over_all(residual, residual) / over_all(direction, product)
        new = residual - alpha * product
        beta = over_all(new, new) / over_all(residual, residual)
        return x + alpha * direction, new, new + beta * direction

    right = jnp.arange(1.0, 4.0) + jaxmpi.rank()
    return step, ((jnp.zeros(3), right, right), jnp.diag(right))


def attracted_by_the_mean():
    """Elastic averaging: the mean of all models attracts each of them."""

    def step(params, x):
        mean = jaxmpi.tree_allreduce(params)
        return jax.tree.map(lambda p, m: p - 0.1 * (p - m), params, mean), x

    return step, (unequal_start(), jnp.ones(()))


def averaged_models():
    """FedAvg by hand: each rank trains its own model, and the models are averaged."""

    def step(params, count, x):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
        return jax.lax.cond(
            count % 2 == 1,
            lambda p: jaxmpi.tree_allreduce(p),
            lambda p: p,
            params,
        ), count + 1

    return jaxmpi.jit(step, replicated_argnums=1), (unequal_start(), jnp.int32(0), batch())


def averaged_at_each_call():
    def step(params, x):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))
        return jaxmpi.tree_allreduce(params)

    return step, (unequal_start(), batch())


def averaged_now_and_then():
    """A function that only averages, at some calls."""

    def step(params, due):
        return jax.tree.map(
            lambda x: jax.lax.cond(due > 0, jaxmpi.tree_allreduce, lambda x: x, x) * 1.0, params
        )

    return jaxmpi.jit(step, replicated_argnums=1), (unequal_start(), jnp.int32(0))


def mean_beside_an_argument():
    """The output has the shape of an argument, and is not its next value."""

    def step(x, y, due):
        return y + jax.lax.cond(due > 0, jaxmpi.tree_allreduce, lambda x: x, x)

    x = jnp.ones(3) * jaxmpi.rank()
    return jaxmpi.jit(step, replicated_argnums=2), (x, 2 * x, jnp.int32(1))


def residuals():
    """Gradients are averaged, and what the average lacks of a rank's own is kept."""

    def step(grads, state):
        sums = jax.tree.map(jnp.add, grads, state["residual"])
        means = jaxmpi.tree_allreduce(sums)
        return means, {"residual": jax.tree.map(jnp.subtract, sums, means)}

    return step, (unequal_start(), {"residual": jax.tree.map(jnp.zeros_like, start())})


def weighted():
    def step(params, count, x):
        n = jnp.float32(len(x))
        grads, total = jaxmpi.tree_allreduce(
            (jax.tree.map(lambda g: n * g, jax.grad(loss)(params, x)), n), op="sum"
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g / total, params, grads), count + n

    return step, (start(), jnp.float32(5 * jaxmpi.rank()), batch()[: 4 + jaxmpi.rank()])


def local_environment():
    """Each rank has an environment, which all reset together."""

    def step(params, position, x):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        done = jaxmpi.tree_allreduce(position.max(), op="max") > 3
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, jnp.where(done, jnp.zeros_like(position), position + 1)

    return step, (start(), jnp.ones(3) * jaxmpi.rank(), batch())


def gradients_alone():
    def step(params, x):
        return jaxmpi.tree_allreduce(jax.grad(loss)(params, x))

    return step, (unequal_start(), batch())


def local_statistics():
    def step(params, mean, x):
        grads = jaxmpi.tree_allreduce(jax.grad(loss)(params, x))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, 0.9 * mean + 0.1 * x.mean(0)

    return step, (start(), jnp.ones(3) * jaxmpi.rank(), batch())


MAY_DIFFER = {
    "exploration rates": exploration_rates,
    "chains": chains,
    "coupled chains": lambda: coupled_chains(False),
    "coupled chains, raw keys": lambda: coupled_chains(True),
    "weights of particles": weights_of_particles,
    "part of a domain": part_of_a_domain,
    "part of a linear system": part_of_a_linear_system,
    "attracted by the mean": attracted_by_the_mean,
    "averaged models": averaged_models,
    "averaged at each call": averaged_at_each_call,
    "averaged now and then": averaged_now_and_then,
    "a mean beside an argument": mean_beside_an_argument,
    "residuals": residuals,
    "weighted": weighted,
    "environment": local_environment,
    "gradients": gradients_alone,
    "statistics": local_statistics,
}


def check_may_differ(name):
    step, args = MAY_DIFFER[name]()
    step = step if isinstance(step, type(jaxmpi.jit(len))) else jaxmpi.jit(step)
    step(*args)


@run_ranks(2, 3)
@pytest.mark.parametrize("name", MAY_DIFFER)
def test_state_that_may_differ_is_not_reported_on_mpi(name):
    check_may_differ(name)


@pytest.mark.slow
@run_ranks(2, backend="xla")
@pytest.mark.parametrize("name", [name for name in MAY_DIFFER if name != "weighted"])
def test_state_that_may_differ_is_not_reported_on_xla(name):
    check_may_differ(name)


TRANSFORMS = {
    "distributed": lambda: jaxmpi.distributed(optax.adam(0.1)),
    "sharded": lambda: jaxmpi.sharded(optax.adam(0.1)),
    "accumulate": lambda: jaxmpi.accumulate(jaxmpi.distributed(optax.adam(0.1)), 2),
    "local_sgd": lambda: jaxmpi.local_sgd(optax.sgd(0.1), every=2),
    "DiLoCo": lambda: jaxmpi.local_sgd(optax.adam(0.1), every=2, outer=optax.sgd(0.7)),
    "codec": lambda: jaxmpi.distributed(optax.sgd(0.1), codec=jaxmpi.codecs.int8()),
    "noise": lambda: optax.chain(
        jaxmpi.distributed(optax.identity()), optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)
    ),
}


@run_ranks(2, 3)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_equal_start_is_not_reported(name):
    run(TRANSFORMS[name](), start())


@run_ranks(2)
def test_local_models_of_local_sgd_may_start_apart():
    run(jaxmpi.local_sgd(optax.sgd(0.1), every=2), unequal_start())


@run_ranks(2)
def test_state_beside_equal_keys_is_compared():
    """Noise after the mean: its key is the state of the transform, and equal on all ranks."""
    as_in_a_new_job()
    with pytest.raises(jaxmpi.RankMismatchError, match=START.format(W, "rank 1 has")):
        run(TRANSFORMS["noise"](), unequal_start())


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(4)(x))
        return linen.Dropout(0.5, deterministic=False)(x).sum()


@run_ranks(2)
def test_batch_statistics_and_dropout_of_each_rank_are_not_reported():
    net, tx = Net(), jaxmpi.distributed(optax.sgd(0.1))
    key = jaxmpi.rank_key(jax.random.key(1))
    variables = net.init({"params": jax.random.key(0), "dropout": key}, batch())
    statistics = jax.tree.map(lambda x: x + jaxmpi.rank(), variables["batch_stats"])

    @jaxmpi.jit
    def step(params, statistics, state, key, x):
        key, use = jax.random.split(key)

        def value(params):
            return net.apply(
                {"params": params, "batch_stats": statistics},
                x,
                rngs={"dropout": use},
                mutable=["batch_stats"],
            )

        grads, new = jax.grad(value, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new["batch_stats"], state, key

    params = variables["params"]
    step(params, statistics, tx.init(params), key, batch())


@run_ranks(2)
def test_nnx_statistics_metrics_and_keys_of_each_rank_are_not_reported():
    rank = jaxmpi.rank()
    model = nnx.Sequential(
        nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(rank)),
    )
    model.layers[1].mean[...] += rank
    metrics = nnx.metrics.Average()
    metrics.update(values=jnp.ones(()) * rank)
    optimizer = nnx.Optimizer(model, jaxmpi.distributed(optax.sgd(0.1)), wrt=nnx.Param)

    @jaxmpi.nn.jit
    def step(model, optimizer, metrics, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        metrics.update(values=value)
        return value

    step(model, optimizer, metrics, batch())


@run_ranks(2)
def test_a_program_of_one_rank_alone_waits_for_nobody():
    if jaxmpi.rank() == 0:
        out = jaxmpi.jit(lambda p, x: {"w": p["w"] + x})(start(), 1.0)
        assert out["w"].shape == (3,)
    jaxmpi.barrier()


# checksums


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint16, np.bool_])
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 70_001])
def test_a_checksum_notices_one_bit(dtype, size):
    x = (np.random.default_rng(size).random(size) * 100).astype(dtype)
    before = checksum(x)
    contents = x.view(np.uint8)
    for i in (0, contents.size // 2, contents.size - 1):
        for bit in range(1 if dtype is np.bool_ else 8):
            contents[i] ^= 1 << bit
            assert checksum(x) != before
            contents[i] ^= 1 << bit
    assert checksum(x) == before
    if x.dtype.itemsize < 8:
        assert checksum(jnp.asarray(x)) == before


def test_a_checksum_notices_elements_that_change_places():
    x = np.zeros(40_000, np.float32)
    x[:20_000] = 1.0  # simple numbers differ in few high bits
    before = checksum(x)
    rng = np.random.default_rng(0)
    for i, j in zip(rng.integers(0, 20_000, 500), rng.integers(20_000, 40_000, 500), strict=True):
        y = x.copy()
        y[[i, j]] = y[[j, i]]
        assert checksum(y) != before
    pairs = np.array([1, 2, 2, 1], np.float32).repeat(1)
    assert checksum(pairs) != checksum(pairs[[2, 3, 0, 1]])


def test_a_checksum_depends_on_the_length():
    sums = {checksum(np.zeros(n, np.uint8)) for n in (1, 3, 9, 17, 80_000)}
    assert len(sums) == 5


@pytest.mark.parametrize("size", [1, 8, 131_072, 131_073, 300_007])
def test_numpy_and_the_extension_give_the_same_checksum(size, monkeypatch):
    contents = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8)
    views = [contents[offset : offset + size] for offset in (0, 3)]  # of any alignment
    assert values._native() is not None
    fast = [checksum(view) for view in views]
    monkeypatch.setattr(values, "_native", lambda: None)
    assert [checksum(view) for view in views] == fast
