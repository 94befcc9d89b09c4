"""jaxmpi's states inside nnx, Flax and Equinox objects behave as plain optax states.

Each pair of a transform and an object that holds its state is trained, synchronized, saved,
restored, resharded, watched, and passed as a replicated argument; the numbers, and the errors, are
those of the plain state. The plain states of the transforms that are exact means are compared with
NumPy.
"""

import tempfile
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import run_ranks

RATE, MOMENTUM, STEPS = 0.05, 0.9, 4
SHAPES = {"bias": (3,), "kernel": (4, 3)}


def sgd():
    return optax.sgd(RATE, momentum=MOMENTUM)


TRANSFORMS = {
    "sharded": lambda: jaxmpi.sharded(sgd()),
    "sharded with masters": lambda: jaxmpi.sharded(optax.adamw(RATE), master_dtype=jnp.float32),
    "sharded with norms": lambda: jaxmpi.sharded(optax.lamb(RATE)),
    "fully sharded": sgd,
    "accumulated": lambda: jaxmpi.accumulate(jaxmpi.distributed(sgd()), 2),
    "accumulated and sharded": lambda: jaxmpi.accumulate(jaxmpi.sharded(sgd()), 2),
    "local": lambda: jaxmpi.local_sgd(sgd(), 2),
    "local, outer": lambda: jaxmpi.local_sgd(sgd(), 2, optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "local, codec": lambda: jaxmpi.local_sgd(sgd(), 2, codec=jaxmpi.codecs.int8()),
    "local, fragments": lambda: jaxmpi.local_sgd(sgd(), 2, fragments=2),
    "local, delay": lambda: jaxmpi.local_sgd(sgd(), 3, delay=1),
    "int8": lambda: jaxmpi.distributed(sgd(), codec=jaxmpi.codecs.int8()),
    "topk": lambda: jaxmpi.distributed(sgd(), codec=jaxmpi.codecs.topk(0.5)),
    "low rank": lambda: jaxmpi.distributed(sgd(), codec=jaxmpi.codecs.powersgd(1)),
    "guarded": lambda: jaxmpi.skip_nonfinite(jaxmpi.sharded(sgd())),
    "scaled": lambda: jaxmpi.dynamic_loss_scale(jaxmpi.sharded(sgd()), initial=1.0),
    "measured": lambda: optax.chain(jaxmpi.measure_noise_scale(), sgd()),
    "masked": lambda: jaxmpi.sharded(
        optax.masked(sgd(), lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    ),
}
EVERY = {"accumulated": 2, "accumulated and sharded": 2}  # calls for one step
MEANS = ("sharded", "fully sharded", "guarded", "scaled", "measured", *EVERY)  # that are exact


def numbers(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def batch(rank, step):
    rng = np.random.default_rng((rank, step))
    return rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(6, 3)).astype(np.float32)


def loss(kernel, bias, x, y):
    return jnp.mean((x @ kernel + bias - y) ** 2)


def expected(ranks, steps, every):
    """Return the parameters after SGD with momentum on all ranks' mean gradient, in NumPy."""
    p = {name: x.astype(np.float64) for name, x in numbers(0).items()}
    velocity = {name: np.zeros_like(x) for name, x in p.items()}
    sums = {name: np.zeros_like(x) for name, x in p.items()}
    for step in range(steps):
        for rank in range(ranks):
            x, y = batch(rank, step)
            error = 2 * (x @ p["kernel"] + p["bias"] - y) / y.size
            sums["kernel"] += x.T @ error / ranks / every
            sums["bias"] += error.sum(0) / ranks / every
        if (step + 1) % every == 0:
            for name in p:
                velocity[name] = MOMENTUM * velocity[name] + sums[name]
                p[name] -= RATE * velocity[name]
                sums[name][...] = 0
    return p


class Linear(eqx.Module):
    bias: jax.Array
    kernel: jax.Array


class Run(eqx.Module):
    model: Linear
    state: object


class Plain:
    """Parameters in a dict, and an optax state."""

    def __init__(self, tx, sharded, replicated=False):
        self.tx, params = tx, jax.tree.map(jnp.asarray, numbers(0))
        params = jaxmpi.fully_shard(params) if sharded else params
        self.tree = {"params": params, "state": tx.init(params)}
        options = {"replicated_argnums": 0, "replicated_outnums": 0} if replicated else {}
        self.jitted = jaxmpi.jit(self.update, **options)

    def update(self, tree, x, y):
        grads = jax.grad(lambda p: loss(**jaxmpi.unshard(p), x=x, y=y))(tree["params"])
        updates, state = self.tx.update(grads, tree["state"], tree["params"])
        return {"params": optax.apply_updates(tree["params"], updates), "state": state}

    def step(self, x, y):
        self.tree = self.jitted(self.tree, x, y)

    def load(self, tree):
        self.tree = tree

    @property
    def params(self):
        return self.tree["params"]


class InTrainState(Plain):
    def __init__(self, tx, sharded, replicated=False):
        super().__init__(tx, sharded, replicated)
        self.tree = TrainState.create(apply_fn=None, params=self.params, tx=tx)

    def update(self, tree, x, y):
        grads = jax.grad(lambda p: loss(**jaxmpi.unshard(p), x=x, y=y))(tree.params)
        return tree.apply_gradients(grads=grads)

    @property
    def params(self):
        return self.tree.params if isinstance(self.tree, TrainState) else self.tree["params"]


class InEquinox(Plain):
    def __init__(self, tx, sharded, replicated=False):
        super().__init__(tx, sharded, replicated)
        model = Linear(**jax.tree.map(jnp.asarray, numbers(0)))
        model = jaxmpi.fully_shard(model) if sharded else model
        self.tree = Run(model, tx.init(model))

    def update(self, tree, x, y):
        def loss_of(model):
            whole = jaxmpi.unshard(model)
            return loss(whole.kernel, whole.bias, x, y)

        grads = eqx.filter_grad(loss_of)(tree.model)
        updates, state = self.tx.update(grads, tree.state, tree.model)
        return Run(eqx.apply_updates(tree.model, updates), state)

    @property
    def params(self):
        if not isinstance(self.tree, Run):
            return self.tree["params"]
        return {"bias": self.tree.model.bias, "kernel": self.tree.model.kernel}


def nnx_model(sharded):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(jnp.asarray, numbers(0)))
    if sharded:
        nnx.update(model, jaxmpi.fully_shard(nnx.state(model, nnx.Param)))
    return model


def nnx_loss(model, x, y):
    whole = jaxmpi.unshard(model)
    return loss(whole.kernel.get_value(), whole.bias.get_value(), x, y)


class InOptimizer:
    def __init__(self, tx, sharded, replicated=False):
        self.model = nnx_model(sharded)
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

        @jaxmpi.nn.jit(replicated_argnums=(0, 1) if replicated else ())
        def step(model, optimizer, x, y):
            optimizer.update(model, nnx.grad(nnx_loss)(model, x, y))

        self.jitted = step

    def step(self, x, y):
        self.jitted(self.model, self.optimizer, x, y)

    @property
    def tree(self):
        return {"model": nnx.state(self.model), "optimizer": nnx.state(self.optimizer)}

    def load(self, tree):
        nnx.update(self.model, tree["model"])
        nnx.update(self.optimizer, tree["optimizer"])

    @property
    def params(self):
        return nnx.to_pure_dict(nnx.state(self.model, nnx.Param))


class InModelAndOptimizer:
    def __init__(self, tx, sharded, replicated=False):
        self.optimizer = nnx.ModelAndOptimizer(nnx_model(sharded), tx)

        @jaxmpi.nn.jit(replicated_argnums=0 if replicated else ())
        def step(optimizer, x, y):
            optimizer.update(nnx.grad(nnx_loss)(optimizer.model, x, y))

        self.jitted = step

    def step(self, x, y):
        self.jitted(self.optimizer, x, y)

    @property
    def tree(self):
        return nnx.state(self.optimizer)

    def load(self, tree):
        nnx.update(self.optimizer, tree)

    @property
    def params(self):
        return nnx.to_pure_dict(nnx.state(self.optimizer.model, nnx.Param))


OBJECTS = {
    "nnx.Optimizer": InOptimizer,
    "nnx.ModelAndOptimizer": InModelAndOptimizer,
    "TrainState": InTrainState,
    "Equinox": InEquinox,
}


class Outcome(NamedTuple):
    """Result of a transform in an object, in terms that do not depend on the object."""

    trained: list  # the parameters after each step
    kept: int  # numbers that `synchronize` leaves each rank's own
    restored: list  # the parameters after a restore and another step
    watched: list  # what `check_replicas` says of replicas that are equal, and of some that differ
    replicated: str  # the parameters after steps whose state is declared replicated, or the error


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same(got, want, what):
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    for (path, _), x, y in zip(
        jax.tree_util.tree_leaves_with_path(got), arrays(got), arrays(want), strict=True
    ):
        np.testing.assert_array_equal(x, y, err_msg=f"{what}: {jax.tree_util.keystr(path)}")


def train(holder, steps, start=0):
    """The whole parameters of this rank after each step."""
    out = []
    for step in range(start, start + steps):
        holder.step(*batch(jaxmpi.rank(), step))
        out.append(jax.tree.map(np.asarray, dict(jaxmpi.unshard(holder.params))))
    return out


def failure(call):
    """Return a call's result as text, or its error's type and function.

    The text names `jaxmpi.jit` where the call names `jaxmpi.nn.jit`.
    """
    try:
        return str(call())
    except (ValueError, jaxmpi.RankMismatchError) as error:
        return f"{type(error).__name__} {str(error).split(':')[0].replace('.nn.', '.')}"


def synchronized(tree):
    """Count the numbers that `synchronize` leaves per rank, of a state that differs everywhere."""
    rank = jaxmpi.rank()
    moved = jax.tree.map(
        lambda x: x ^ bool(rank) if x.dtype == bool else x + jnp.asarray(rank, x.dtype), tree
    )
    kept, root = 0, jaxmpi.broadcast_object(arrays(moved))
    for x, mine, theirs in zip(arrays(jaxmpi.synchronize(moved)), arrays(moved), root, strict=True):
        if rank and np.array_equal(x, mine):
            kept += x.size
        else:
            np.testing.assert_array_equal(x, theirs)
    return jaxmpi.broadcast_object(kept, jaxmpi.size() - 1)


def outcome(make, transform):
    sharded, local = transform == "fully sharded", transform.startswith("local")
    tx = jaxmpi.watch_replicas(TRANSFORMS[transform](), every=2)
    holder = make(tx, sharded)
    fresh = jax.tree.map(jnp.copy, holder.tree)
    trained = train(holder, STEPS)
    kept = synchronized(holder.tree)
    if local:  # the parameters differ between meetings, and the state does not mark them
        holder.load(jaxmpi.synchronize(holder.tree))
    else:
        assert_same(jaxmpi.synchronize(holder.tree), holder.tree, "synchronize")
    folder, tree = jaxmpi.broadcast_object(tempfile.mkdtemp()), jax.tree.map(jnp.copy, holder.tree)
    jaxmpi.save(folder, 1, tree, background=False)
    got = jaxmpi.restore(folder, fresh)
    assert_same(got, tree, "restore")
    if holds_sharded(transform):
        assert_same(jaxmpi.reshard(jaxmpi.unshard(tree)), tree, "reshard")
        got = jaxmpi.reshard(jaxmpi.unshard(tree))
    holder.load(got)
    restored = train(holder, 1, STEPS)
    check = lambda: failure(lambda: jaxmpi.check_replicas(holder.tree, holder.params))
    watched = [check()]
    if jaxmpi.rank() == jaxmpi.size() - 1 and not sharded:
        holder.load(jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, holder.tree))
    train(holder, 2, STEPS + 1)
    watched.append(check())
    twin = make(tx, sharded, True)
    return Outcome(
        trained,
        kept,
        restored,
        watched,
        failure(lambda: [x.tobytes() for x in arrays(train(twin, 2))]),
    )


def holds_sharded(transform):
    return transform in ("guarded", "scaled", "masked") or (
        "sharded" in transform and transform != "fully sharded"
    )


def check(transform, objects=tuple(OBJECTS)):
    want = outcome(Plain, transform)
    if transform in MEANS:
        for steps, params in enumerate(want.trained, 1):
            exact = expected(jaxmpi.size(), steps, EVERY.get(transform, 1))
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), params, exact
            )
    if jaxmpi.size() > 1 and not transform.startswith("local"):
        # a step with masters ends at the masters' values, wherever a replica was
        heals = transform in ("fully sharded", "sharded with masters")
        differs = "None" if heals else "RankMismatchError check_replicas"
        assert want.watched == ["None", differs] and want.replicated[0] == "[", want
    for name in objects:
        got = outcome(OBJECTS[name], transform)
        for what, x, y in zip(Outcome._fields, got, want, strict=True):
            if isinstance(x, list) and what != "watched":
                assert_same(x, y, f"{name}, {what}")
            else:
                assert x == y, f"{name}, {what}: {x}, and {y} in a plain state"


@pytest.mark.parametrize("transform", ["sharded", "int8"])
@run_ranks(1, 2)
def test_a_state_in_an_nnx_optimizer_does_what_a_plain_one_does(transform):
    check(transform, ["nnx.Optimizer"])


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@run_ranks(2, timeout_seconds=400.0)
def test_a_state_in_an_object_does_what_a_plain_one_does(transform):
    check(transform)


# on any number of ranks
RESTORED = [
    "sharded",
    "sharded with masters",
    "fully sharded",
    "accumulated and sharded",
    "guarded",
]


STATELESS_OR_NOT = {
    "sgd": optax.sgd(RATE),
    "schedule": optax.sgd(lambda _: RATE),
    "momentum": sgd(),
    "adam": optax.adam(RATE),
}


@run_ranks(1, 2)
@pytest.mark.parametrize("name", STATELESS_OR_NOT)
@pytest.mark.parametrize("kind", ["nnx.Optimizer", "nnx.ModelAndOptimizer"])
def test_reshard_takes_the_nnx_state_of_any_sharded_optimizer(name, kind):
    holder = OBJECTS[kind](jaxmpi.sharded(STATELESS_OR_NOT[name]), False)
    train(holder, 2)
    state = nnx.state(holder.optimizer)
    assert_same(jaxmpi.reshard(jaxmpi.unshard(state)), state, name)
    together = {"optimizer": nnx.state(holder.optimizer), "other": jnp.ones(3)}
    assert_same(jaxmpi.reshard(jaxmpi.unshard(together)), together, name)


@run_ranks(1, 2)
def test_reshard_refuses_what_has_no_sharded_state():
    model = nnx_model(False)
    adam = nnx.Optimizer(model, jaxmpi.distributed(optax.adam(RATE)), wrt=nnx.Param)
    for tree in (nnx.state(model), nnx.state(adam), {"a": jnp.ones(3)}):
        with pytest.raises(
            TypeError, match=r"reshard: there is no state of jaxmpi\.sharded in the"
        ):
            jaxmpi.reshard(tree)


def holders():
    for name, make in {"plain": Plain, **OBJECTS}.items():
        for transform in RESTORED:
            yield (
                f"{name} {transform}",
                transform,
                make(TRANSFORMS[transform](), transform == "fully sharded"),
            )


def save_all(directory):
    for name, _, holder in holders():
        train(holder, 2)
        whole = jaxmpi.unshard(holder.tree)
        jaxmpi.save(f"{directory}/{name}/shards", 1, holder.tree, background=False)
        jaxmpi.save(f"{directory}/{name}/whole", 1, whole, background=False)
        if jaxmpi.rank() == 0:
            np.savez(f"{directory}/{name}/numbers.npz", *arrays(whole))


def restore_all(directory):
    for name, transform, holder in holders():
        want = [*np.load(f"{directory}/{name}/numbers.npz").values()]
        got = jaxmpi.restore(f"{directory}/{name}/shards", holder.tree)
        for x, y in zip(arrays(jaxmpi.unshard(got)), want, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
        if holds_sharded(transform):
            whole = jaxmpi.restore(f"{directory}/{name}/whole", jaxmpi.unshard(holder.tree))
            assert_same(jaxmpi.reshard(whole), got, name)
        holder.load(got)
        train(holder, 1)


@pytest.mark.slow
def test_a_state_in_an_object_is_restored_on_another_number_of_ranks(tmp_path):
    """Restoring cuts shards again, as for a plain state; `reshard` cuts a whole state."""
    for ranks, function in ((2, save_all), (3, restore_all), (1, restore_all)):
        pool(ranks, "auto").run(
            Task(__file__, function.__name__, {"directory": str(tmp_path)}, 400.0)
        )
