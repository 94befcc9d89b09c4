"""Random small training programs in which one rank breaks an assumption, or none does.

A program is a form (how the step is written), an optimizer, and what one rank does wrong at which
step. `expected` tells by which names the finding may go; a right program has none.

    jaxmpi run -n 2 tests/assumptions.py broken 0 50
    jaxmpi run -n 2 tests/assumptions.py right 0 50

Rank 0 prints a line for each program: its seed, its parts, and the error that all ranks raised. A
warning comes from the monitor, with the title of the step, which has the seed.
"""

import re
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import jaxmpi

STEPS = 110  # a program is longer than the 100 steps within which a rank is named
WIDTH, ROWS, SAMPLES = 3, 4, 64


class Program:
    """One program, as all ranks make it from its seed.

    Attributes:
      rank: which breaks the assumption; None in a right program.
      at: the step at which it does.
    """

    def __init__(self, seed, size, *, right):
        self.rng = np.random.default_rng([seed, right])
        self.title = f"program_{seed}"
        self.form = str(self.rng.choice(list(FORMS)))
        self.breaks, self.rank = "nothing", None
        self.at = int(self.rng.integers(1, 10))
        if right:
            self.form = str(self.rng.choice([*FORMS, *RIGHT, *RIGHT]))
        else:
            self.breaks = str(self.rng.choice(IN_FORM.get(self.form, list(BREAKS))))
            self.rank = int(self.rng.integers(size))
        self.rate = float(self.rng.choice([0.01, 0.1]))
        self.optimizer = str(self.rng.choice(list(OPTIMIZERS)))
        self.forgotten = str(self.rng.choice(list(FORGOTTEN)))

    def __str__(self):
        detail = f" ({self.forgotten})" if self.breaks == "forgotten mean" else ""
        return f"{self.form} {self.optimizer}, {self.breaks}{detail}"

    def is_wrong(self, what, step=None):
        """Return whether this rank breaks this assumption now."""
        now = step is None or step >= self.at
        return self.breaks == what and self.rank == jaxmpi.rank() and now

    def named(self, step):
        """Return the step function with the name of the program."""
        step.__name__ = self.title
        return step

    def params(self):
        """Return parameters that are equal on all ranks, but for a broken start."""
        key = jax.random.key(int(self.is_wrong("start")))
        return {"w": jax.random.normal(key, (WIDTH,)), "b": jnp.zeros(())}

    def optimizer_of(self, rate=None):
        """Return the optimizer without jaxmpi."""
        make = OPTIMIZERS[self.optimizer]
        if self.breaks == "rate":
            return optax.inject_hyperparams(make)(learning_rate=self.rate)
        return make(rate or self.rate)

    def transform(self, wrap=jaxmpi.distributed):
        """Return the optimizer with what makes it one of all ranks."""
        tx = self.optimizer_of()
        if self.breaks == "doubled mean":
            return optax.chain(jaxmpi.average_gradients(), wrap(tx))
        return wrap(tx)

    def batches(self):
        """Return a batch of this rank for each step."""
        rng = np.random.default_rng(7)
        x = rng.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
        if self.is_wrong("order"):
            x = x[::-1].copy()
        batches = jaxmpi.batches(x, ROWS * jaxmpi.size(), seed=1, epoch=0)
        if self.breaks == "order":
            return batches
        return [jnp.asarray(batch) for batch in batches]

    def rate_of(self, state, step):
        """Return the optimizer's state, with another rate where one rank changes it."""
        if self.is_wrong("rate", step) and step == self.at:
            return optax.tree.set(state, learning_rate=jnp.float32(self.rate / 7))
        return state

    def decay(self, step):
        """Return a number that the user passes to the step, which one rank changes."""
        return 0.01 if self.is_wrong("flag", step) else 0.0


OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda learning_rate: optax.sgd(learning_rate, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
}

# by what a rank breaks: names of findings of which one must come
BREAKS = {
    "start": {"unequal_start"},
    "order": {"data_order"},
    "rate": {"unequal_number"},
    "flag": {"unequal_number"},
    "doubled mean": {"repeated_mean"},
}
IN_FORM = {  # what can be broken in a form, if it is not BREAKS
    "plain": [*BREAKS, *["forgotten mean"] * 3, "skipped update"],
    "ema": [*BREAKS, "forgotten mean"],
    "codebook": [*BREAKS, "forgotten mean"],
    "fully_shard": ["start", "order", "rate", "flag"],  # it takes the mean by itself
    "local_sgd": ["order"],  # models that start apart are equal after the first mean
}
NAMES = {**BREAKS, "forgotten mean": {"forgotten_mean"}, "skipped update": {"skipped_update"}}
# what a step makes of a parameter p with a gradient g of its own rank
FORGOTTEN = {
    "update": lambda p, g: p - 0.1 * g,
    "decay": lambda p, g: 0.999 * p - 0.1 * g,
    "average": lambda p, g: 0.99 * p + 0.01 * g,
    "lerp": lambda p, g: p + 0.01 * (g - p),
    "incremental": lambda p, g: optax.incremental_update(g, p, 0.01),
    "product": lambda p, g: p * jnp.exp(-0.1 * g),
    "normalized": lambda p, g: (p - 0.1 * g) / jnp.linalg.norm(p - 0.1 * g),
    "projected": lambda p, g: jnp.maximum(p - 0.1 * g, 0) * (1 - 1e-4),
    "maximum": lambda p, g: jnp.maximum(p, jnp.abs(g)),
    "history": lambda p, g: jnp.roll(p, 1).at[0].set(jnp.abs(g).max()),
}


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def applied(params, updates, decay):
    """Apply updates, and a weight decay that the user passes as a number."""
    params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda p: p * (1 - decay), params)


# forms: each trains for STEPS steps, and raises what jaxmpi raises


def plain(program):
    if program.breaks == "skipped update":
        return skipped(program)
    params = program.params()
    tx = program.transform()
    state = tx.init(params)

    @jaxmpi.jit
    @program.named
    def step(params, state, x, decay):
        grads = jax.grad(loss_of)(params, x)
        if program.breaks == "forgotten mean":
            w = FORGOTTEN[program.forgotten](params["w"], grads["w"])
            return {**params, "w": w}, state, jaxmpi.tree_allreduce(loss_of(params, x))
        updates, state = tx.update(grads, state, params)
        return applied(params, updates, decay), state, None

    def one(i, x):
        nonlocal params, state
        params, state, _ = step(params, program.rate_of(state, i), x, program.decay(i))

    return one


def skipped(program):
    """Skip an update around `distributed` where a batch has a NaN, under plain `jax.jit`."""
    params = program.params()
    tx = optax.apply_if_finite(program.transform(), 5)
    state = tx.init(params)

    @jax.jit
    @program.named
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss_of)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    def one(i, x):
        nonlocal params, state
        if program.is_wrong("skipped update", i) and i == program.at:
            x = x.at[0, 0].set(jnp.nan)
        params, state = step(params, state, x)

    return one


def in_nnx(program):
    model = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(int(program.is_wrong("start"))))
    optimizer = nnx.Optimizer(model, program.transform(), wrt=nnx.Param)

    @jaxmpi.nn.jit
    @program.named
    def step(model, optimizer, x, decay):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        model.kernel[...] = model.kernel[...] * (1 - decay)

    def one(i, x):
        if program.is_wrong("rate", i) and i == program.at:
            state = optimizer.opt_state.hyperparams["learning_rate"]
            state.set_value(state.get_value() / 7)
        step(model, optimizer, x, program.decay(i))

    return one


def in_train_state(program):
    state = TrainState.create(apply_fn=None, params=program.params(), tx=program.transform())

    @jaxmpi.jit
    @program.named
    def step(state, x, decay):
        loss, grads = jax.value_and_grad(loss_of)(state.params, x)
        state = state.apply_gradients(grads=grads)
        params = jax.tree.map(lambda p: p * (1 - decay), state.params)
        return state.replace(params=params), jaxmpi.tree_allreduce(loss)

    def one(i, x):
        nonlocal state
        state = state.replace(opt_state=program.rate_of(state.opt_state, i))
        state, _ = step(state, x, program.decay(i))

    return one


def in_equinox(program):
    class Model(eqx.Module):
        w: jax.Array
        b: jax.Array

        def __call__(self, x):
            return x @ self.w + self.b

    model = Model(**program.params())
    tx = program.transform()
    state = tx.init(model)

    @jaxmpi.jit
    @program.named
    def step(model, state, x, decay):
        grads = jax.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        updates, state = tx.update(grads, state, model)
        return applied(model, updates, decay), state

    def one(i, x):
        nonlocal model, state
        model, state = step(model, program.rate_of(state, i), x, program.decay(i))

    return one


def wrapped(wrap):
    """Make a form like `plain` in which another transform makes the optimizer one of all ranks."""

    def form(program):
        params = program.params()
        tx = program.transform(wrap)
        state = tx.init(params)

        @jaxmpi.jit
        @program.named
        def step(params, state, x, decay):
            updates, state = tx.update(jax.grad(loss_of)(params, x), state, params)
            return applied(params, updates, decay), state

        def one(i, x):
            nonlocal params, state
            params, state = step(params, program.rate_of(state, i), x, program.decay(i))

        return one

    return form


def fully_sharded(program):
    shards = jaxmpi.fully_shard(program.params())
    tx = program.optimizer_of()
    state = jaxmpi.jit(tx.init)(shards)

    @jaxmpi.jit
    @program.named
    def step(shards, state, x, decay):
        grads = jax.grad(lambda shards: loss_of(jaxmpi.unshard(shards), x))(shards)
        updates, state = tx.update(grads, state, shards)
        return applied(shards, updates, decay), state

    def one(i, x):
        nonlocal shards, state
        shards, state = step(shards, program.rate_of(state, i), x, program.decay(i))

    return one


def with_average(program):
    """Keep an exponential average of the parameters, as EMA weights are."""
    params = program.params()
    average = params
    tx = program.transform()
    state = tx.init(params)

    @jaxmpi.jit
    @program.named
    def step(params, average, state, x, decay):
        grads = jax.grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        params = applied(params, updates, decay)
        average = optax.incremental_update(params, average, 0.01)
        if program.breaks == "forgotten mean":
            average = {**average, "w": FORGOTTEN[program.forgotten](average["w"], x.mean(0))}
        return params, average, state

    def one(i, x):
        nonlocal params, average, state
        params, average, state = step(
            params, average, program.rate_of(state, i), x, program.decay(i)
        )

    return one


def with_target(program):
    """Keep a target network, which is copied from the online one now and then."""
    params = program.params()
    target, tx = params, program.transform()
    state = tx.init(params)

    @jaxmpi.jit
    @program.named
    def step(params, target, state, x, count, decay):
        def loss(params):
            aim = lax.stop_gradient(x @ target["w"]) * 0.9 + 1
            return jnp.mean((x @ params["w"] + params["b"] - aim) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = applied(params, updates, decay)
        target = optax.periodic_update(params, target, count, 5)
        return params, target, state, count + 1

    count = jnp.zeros((), jnp.int32)

    def one(i, x):
        nonlocal params, target, state, count
        params, target, state, count = step(
            params, target, program.rate_of(state, i), x, count, program.decay(i)
        )

    return one


def with_two_optimizers(program):
    """Train a generator and a discriminator, each with its optimizer."""
    params = {"g": program.params(), "d": {"w": jnp.ones(WIDTH), "b": jnp.zeros(())}}
    txs = {name: program.transform() for name in params}
    state = {name: txs[name].init(params[name]) for name in params}

    @jaxmpi.jit
    @program.named
    def step(params, state, x, decay):
        def made(g):
            return x * g["w"] + g["b"]

        losses = {
            "g": lambda g: jnp.mean((made(g) @ params["d"]["w"] - 1) ** 2),
            "d": lambda d: jnp.mean(jnp.tanh(made(params["g"]) @ d["w"] + d["b"])),
        }
        params, state = dict(params), dict(state)
        for name, loss in losses.items():
            grads = jax.grad(loss)(params[name])
            updates, state[name] = txs[name].update(grads, state[name], params[name])
            params[name] = applied(params[name], updates, decay)
        return params, state

    def one(i, x):
        nonlocal params, state
        state = {**state, "g": program.rate_of(state["g"], i)}
        params, state = step(params, state, x, program.decay(i))

    return one


def with_codebook(program):
    """Keep a codebook by exponential averages of its members, as VQ-VAE does."""
    params = program.params()
    book = jnp.eye(WIDTH)
    tx = program.transform()
    state = tx.init(params)

    @jaxmpi.jit
    @program.named
    def step(params, book, state, x, decay):
        near = jax.nn.one_hot(jnp.argmax(x @ book.T, 1), WIDTH)
        sums, counts = near.T @ x, near.sum(0)
        if program.breaks != "forgotten mean":
            sums, counts = lax.psum((sums, counts), jaxmpi.AXIS)
        book = 0.99 * book + 0.01 * sums / (counts[:, None] + 1)
        updates, state = tx.update(jax.grad(loss_of)(params, x), state, params)
        return applied(params, updates, decay), book, state

    def one(i, x):
        nonlocal params, book, state
        params, book, state = step(params, book, program.rate_of(state, i), x, program.decay(i))

    return one


FORMS = {
    "plain": plain,
    "nnx": in_nnx,
    "TrainState": in_train_state,
    "Equinox": in_equinox,
    "sharded": wrapped(jaxmpi.sharded),
    "fully_shard": fully_sharded,
    "accumulate": wrapped(lambda tx: jaxmpi.accumulate(jaxmpi.distributed(tx), 2)),
    "local_sgd": wrapped(lambda tx: jaxmpi.local_sgd(tx, every=4)),
    "ema": with_average,
    "target": with_target,
    "two optimizers": with_two_optimizers,
    "codebook": with_codebook,
}


# right programs in which something differs between the ranks on purpose


def exploring(program):
    """Explore at a rate of each rank's own, which is an argument of the step."""
    params, tx = program.params(), program.transform()
    state = tx.init(params)
    rate = 0.1 * (jaxmpi.rank() + 1)
    key = jaxmpi.rank_key(jax.random.key(3))

    @jaxmpi.jit
    @program.named
    def step(params, state, x, rate, key):
        key, of_step = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(of_step, rate, (len(x), 1)), x, 0.0)
        updates, state = tx.update(jax.grad(loss_of)(params, x), state, params)
        return optax.apply_updates(params, updates), state, key

    def one(i, x):
        nonlocal params, state, key
        params, state, key = step(params, state, x, rate, key)

    return one


def chains(program):
    """Sample with a chain on each rank, and average what is measured: variational Monte Carlo."""
    params, tx = program.params(), program.transform()
    state = tx.init(params)
    walkers = jaxmpi.PerRankState(
        {"at": jnp.ones((ROWS, WIDTH)) * jaxmpi.rank(), "key": jaxmpi.rank_key(jax.random.key(5))}
    )

    @jaxmpi.jit
    @program.named
    def step(params, state, walkers):
        at, key = walkers.per_rank["at"], walkers.per_rank["key"]
        key, of_step = jax.random.split(key)
        at = 0.9 * at + jax.random.normal(of_step, at.shape)
        updates, state = tx.update(jax.grad(loss_of)(params, at), state, params)
        walkers = jaxmpi.PerRankState({"at": at, "key": key})
        return optax.apply_updates(params, updates), state, walkers

    def one(i, x):
        nonlocal params, state, walkers
        params, state, walkers = step(params, state, walkers)

    return one


def federated(program):
    """Train a model on each rank, and average the models now and then: FedAvg."""
    params = jaxmpi.PerRankState(program.params())
    tx = program.optimizer_of()
    state = jaxmpi.PerRankState(tx.init(params.per_rank))

    @jaxmpi.jit
    @program.named
    def local_step(params, state, x):
        grads = jax.grad(loss_of)(params.per_rank, x)
        updates, inner = tx.update(grads, state.per_rank, params.per_rank)
        params = jaxmpi.PerRankState(optax.apply_updates(params.per_rank, updates))
        return params, jaxmpi.PerRankState(inner)

    @jaxmpi.jit
    @program.named
    def average(params):
        return jaxmpi.PerRankState(jaxmpi.tree_allreduce(params.per_rank, "mean"))

    def one(i, x):
        nonlocal params, state
        params, state = local_step(params, state, x)
        if i % 4 == 3:
            params = average(params)

    return one


def batch_norm(program):
    """Normalize by statistics of each rank's batches."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.drop(self.norm(x)))

    model = Model(nnx.Rngs(0, dropout=jaxmpi.rank()))
    optimizer = nnx.Optimizer(model, program.transform(), wrt=nnx.Param)

    @jaxmpi.nn.jit
    @program.named
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model))

    return lambda i, x: step(model, optimizer, x)


def uneven(program):
    """Weight the mean by the number of rows, of which each rank has another one."""
    params, tx = program.params(), program.transform()
    state = tx.init(params)
    rows = 1 + jaxmpi.rank() % ROWS

    @jaxmpi.jit
    @program.named
    def step(params, state, x, n):
        total = lax.psum(n, jaxmpi.AXIS)

        def loss(params):
            each = (x @ params["w"] + params["b"] - 1) ** 2
            used = jnp.arange(len(x)) < n
            return jaxmpi.size() * jnp.sum(jnp.where(used, each, 0.0)) / total

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def one(i, x):
        nonlocal params, state
        params, state = step(params, state, x, float(rows))

    return one


def by_hand(program):
    """Average by a sum and a division, as one would write it without jaxmpi."""
    params, tx = program.params(), program.optimizer_of()
    state = tx.init(params)

    @jaxmpi.jit
    @program.named
    def step(params, state, x, count):
        grads = lax.psum(jax.grad(loss_of)(params, x), jaxmpi.AXIS)
        grads = jax.tree.map(lambda g: g / jaxmpi.size(), grads)
        updates, state = tx.update(grads, state, params)
        loss = lax.pmean(loss_of(params, x), jaxmpi.AXIS)
        return optax.apply_updates(params, updates), state, count + 1, loss

    count = 0

    def one(i, x):
        nonlocal params, state, count
        params, state, count, _ = step(params, state, x, count)

    return one


RIGHT = {
    "exploring": exploring,
    "chains": chains,
    "federated": federated,
    "batch norm": batch_norm,
    "uneven": uneven,
    "by hand": by_hand,
}


def name_in(text):
    """Return the name of the finding in the text of an error or a warning; None if it has none."""
    if "would keep its part of another array" in text:  # `fully_shard`
        return "unequal_start"
    # plain `jax.jit` has no `allow`, and xla refuses it
    if "has skipped an update" in text or "Use jaxmpi.jit instead of jax.jit" in text:
        return "skipped_update"
    found = re.search(r'allow="(\w+)" turns this check off', text)
    return found and found[1]


def run(program):
    """Train; return the name of the finding that all ranks raised and the step, or None."""
    i = -1
    try:
        one = {**FORMS, **RIGHT}[program.form](program)
        while i < STEPS:
            for x in program.batches():
                i += 1
                one(i, jnp.asarray(x))
    # plain `jax.jit` raises an error of JAX with this text
    except (jaxmpi.RankMismatchError, RuntimeError) as error:
        return name_in(str(error)) or f"another error: {error}", i
    return None


def main(which, first, last):
    """Run the programs of these seeds; print a line for each."""
    jaxmpi.init()
    for seed in range(int(first), int(last)):
        program = Program(seed, jaxmpi.size(), right=which == "right")
        found = jaxmpi.allgather_object(run(program))
        # the steps may differ: under plain `jax.jit`, ranks wait for one that has skipped a step
        assert len({one and one[0] for one in found}) == 1, f"{seed} {program}: {found}"
        expected = ",".join(NAMES.get(program.breaks, ()))
        late = "" if found[0] is None else f" {found[0][1]} {program.at}"
        name = "nothing" if found[0] is None else found[0][0]
        jaxmpi.print(f"{program.title} | {program} | {expected} | {name}{late}")
    time.sleep(2)  # for warnings that are on their way
    jaxmpi.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
