"""A function of whole arrays gives the same on their shards, with a known number of bytes sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi._optim.partition import on_shards
from jaxmpi._optim.shards import gathered, is_shard, own, shard
from jaxmpi.testing import run_ranks

SHAPE = (5, 3)  # no number of ranks divides it


def inputs():
    rng = np.random.default_rng(3)
    x, y = (jnp.asarray(rng.normal(size=SHAPE)) for _ in range(2))
    return x, y, jnp.asarray(rng.normal(size=7)), jnp.float64(0.3)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, t: (2 * t,))


def branch(x, y, v, s):
    return lax.cond(s > 0, lambda x, y: (x, y, 0.0), lambda x, y: (y, jnp.ones(SHAPE), 1.0), x, y)


def branches_in_branches(x, y, v, s):
    inner = lambda x: lax.cond(s > 1, jnp.sin, jnp.cos, x)
    return lax.switch(2, [lambda x: x, lambda x: -x, inner], x)


def loops(x, y, v, s):
    products = lax.fori_loop(0, 3, lambda i, x: x * y, x)
    return products, lax.scan(lambda c, r: (c + r, c), v[:3], x)


# functions of two matrices, a vector and a number, with what each sends: how many numbers are
# reduced, and how many are in arrays that are gathered
FUNCTIONS = {
    "elementwise": (
        lambda x, y, v, s: jnp.where(x > 0, jnp.tanh(x) * y / s, s) + jnp.clip(y, -s, 1) ** 3,
        (0, 0),
    ),
    "dtypes": (
        lambda x, y, v, s: (x.astype(jnp.int32) // 2, x > y, x + 1j * y, x.astype(jnp.bfloat16)),
        (0, 0),
    ),
    "constants": (lambda x, y, v, s: x * jnp.ones(SHAPE) + jnp.arange(15.0).reshape(SHAPE), (0, 0)),
    "sizes": (lambda x, y, v, s: x * x.size + (y if x.ndim > v.ndim else v.sum()), (0, 0)),
    "random numbers": (lambda x, y, v, s: x + jax.random.normal(jax.random.key(1), SHAPE), (0, 0)),
    "reshaped": (lambda x, y, v, s: (x.reshape(3, 5) * y.reshape(3, 5)).ravel()[:, None], (0, 0)),
    "custom derivatives": (
        lambda x, y, v, s: doubled(jax.nn.relu(x)) + optax.safe_increment(s),
        (0, 0),
    ),
    "checkpoint and barrier": (
        lambda x, y, v, s: jax.checkpoint(lambda x: lax.optimization_barrier((x, s))[0] * 2)(x),
        (0, 0),
    ),
    "sum": (lambda x, y, v, s: (x + 1).sum() * y, (1, 0)),
    "mean of each": (lambda x, y, v, s: [jnp.exp(z).mean() for z in (x, y, v)], (3, 0)),
    "norm and division by it": (lambda x, y, v, s: x / jnp.linalg.norm(x), (1, 0)),
    "product": (lambda x, y, v, s: jnp.prod(x + 2), (0, 3)),
    "extremes": (
        lambda x, y, v, s: (x.max(), (-1 - jnp.abs(y)).max(), (1 + jnp.abs(y)).min()),
        (3, 0),
    ),
    "extremes of integers": (
        lambda x, y, v, s: ((9 * v).astype(jnp.int32) - 99).max(keepdims=True),
        (1, 0),
    ),
    "flags": (
        lambda x, y, v, s: (jnp.isfinite(v).all(), (jnp.abs(v) > 9).any(), (jnp.exp(v) > 0).all()),
        (3, 0),
    ),
    "inner products": (
        lambda x, y, v, s: (jnp.vdot(x + 1, y + 1), jnp.vdot(jnp.exp(v), jnp.ones(7))),
        (2, 0),
    ),
    "branch": (branch, (0, 0)),
    "branch with a sum": (
        lambda x, y, v, s: lax.cond(s > 0, lambda x: x / x.sum(), lambda x: x, x),
        (1, 0),
    ),
    "branches in branches": (branches_in_branches, (0, 0)),
    "sums of rows": (lambda x, y, v, s: x - x.mean(axis=0), (0, 15)),
    "matrices": (lambda x, y, v, s: (x @ y.T) @ x, (0, 30)),
    "order": (lambda x, y, v, s: (jnp.sort(v), jnp.argmax(v), jnp.cumsum(v), v[::-1]), (0, 7)),
    "joined": (lambda x, y, v, s: jnp.concatenate([x.ravel(), v]), (0, 22)),
    "part": (lambda x, y, v, s: (x[1:3], x.at[0].set(s), x[:1, :1]), (0, 15)),
    "loops": (loops, (0, 37)),
    "derivatives": (lambda x, y, v, s: jax.grad(lambda x: jnp.sum(jnp.sin(x) * y) ** 2)(x), (1, 0)),
    "nothing": (lambda x, y, v, s: (x, None, 3.0, jnp.zeros(SHAPE)), (0, 0)),
}


def on_ranks(function):
    """Run the function on shards and gather its results; two operands are known whole, too."""

    def run(x, y, v, s):
        parts = [shard(own(x), x.shape), shard(own(y), y.shape), shard(own(v), v.shape), s]
        leaves, treedef = jax.tree.flatten(on_shards(function, *parts), is_leaf=is_shard)
        wholes = iter(gathered([x for x in leaves if is_shard(x)]))
        return treedef.unflatten([next(wholes) if is_shard(x) else x for x in leaves])

    return run


def check(names):
    with jax.enable_x64(True):
        functions = {name: FUNCTIONS[name][0] for name in names}
        want = jax.jit(lambda *args: {name: f(*args) for name, f in functions.items()})(*inputs())
        got = jaxmpi.jit(lambda *args: {name: on_ranks(f)(*args) for name, f in functions.items()})(
            *inputs()
        )
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
        ):
            assert a.shape == b.shape and a.dtype == b.dtype, jax.tree_util.keystr(path)
            wide = np.complex128 if b.dtype != np.bool_ else np.bool_
            np.testing.assert_allclose(
                np.asarray(a, wide),
                np.asarray(b, wide),
                1e-12,
                1e-12,
                err_msg=jax.tree_util.keystr(path),
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_functions_of_simulated_ranks(ranks):
    with jaxmpi.simulate(ranks):
        check(FUNCTIONS)


@pytest.mark.slow
@run_ranks(3)
def test_functions():
    check(FUNCTIONS)


@pytest.mark.exhaustive
@run_ranks(2, backend="xla")
def test_functions_of_xla():
    check(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_sent(name):
    """Numbers that are summed, and those of arrays that are gathered."""
    function, (numbers, arrays) = FUNCTIONS[name]
    with jax.enable_x64(True), jaxmpi.simulate(3):
        args = inputs()

        def parts(x, y, v, s):
            outs = on_shards(function, *(shard(own(a), a.shape) for a in (x, y, v)), s)
            return jax.tree.map(lambda x: x.value if is_shard(x) else x, outs, is_leaf=is_shard)

        jaxpr = jax.make_jaxpr(parts, axis_env=[(jaxmpi.AXIS, 3)])(*args)
        assert collectives(jaxpr) == (numbers, arrays)


def collectives(jaxpr):
    """Count the numbers that are reduced in a jaxpr, and those in gathered arrays, unpadded."""
    padded = {3 * 5: 15, 3 * 3: 7}
    reduced = arrays = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("psum", "pmax", "pmin"):
            reduced += sum(v.aval.size for v in eqn.outvars)
        elif eqn.primitive.name == "all_gather":
            arrays += sum(padded.get(v.aval.size, v.aval.size) for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    more = collectives(inner)
                    reduced, arrays = reduced + more[0], arrays + more[1]
    return reduced, arrays


# what decides by sizes, names or steps in `sharded`


def big(tree):
    return jax.tree.map(lambda x: x.size > 10, tree)


def by_path(tree):
    return jax.tree_util.tree_map_with_path(lambda path, x: path[0].key.startswith("m"), tree)


def once_large(updates, step, params):
    norm = optax.tree.norm(updates)
    return norm > 1.1, {"norm": norm}


def clip_from(first):
    """A clip by the global norm that starts late."""
    clip = optax.clip_by_global_norm(0.1)

    def update(updates, count, params=None):
        clipped, _ = clip.update(updates, optax.EmptyState())
        return jax.tree.map(
            lambda a, b: jnp.where(count >= first, a, b), clipped, updates
        ), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def scaled_by_mean():
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: u / (1 + jnp.abs(jnp.mean(u))), updates)
    )


DECIDING = {
    "decay by size": lambda: optax.masked(optax.add_decayed_weights(0.5), big),
    "decay of matrices": lambda: optax.adamw(
        0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "labels by path": lambda: optax.partition(
        {True: optax.lamb(0.1), False: optax.adam(0.1)}, by_path
    ),
    "a factor of the shape": lambda: optax.stateless(
        lambda u, p: jax.tree.map(lambda x: x / np.sqrt(max(x.shape, default=1)), u)
    ),
    "by the mean": scaled_by_mean,
    "clips late": lambda: clip_from(3),
    "lamb late": lambda: optax.lamb(optax.piecewise_constant_schedule(0.0, {3: 1.0})),
    "lamb after warm-up": lambda: optax.conditionally_transform(
        optax.lamb(0.1), lambda step: step >= 3
    ),
    "skips large": lambda: optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=once_large
    ).gradient_transformation(),
    "norm in the state": lambda: optax.monitor(
        {"norm": optax.measure_with_ema(optax.tree.norm, 0.5)}
    ),
    "skips NaN": lambda: optax.apply_if_finite(optax.sgd(0.1), 1),
    "clips": lambda: jaxmpi.clip_by_global_norm(0.1),
    "scalar by the norm of all": lambda: optax.normalize_by_update_norm(),
}


def train(wrap, bad):
    tx = {name: wrap(optax.chain(make(), optax.scale(-0.1))) for name, make in DECIDING.items()}
    rng = np.random.default_rng(4)
    start = {
        "matrix": rng.normal(size=SHAPE),
        "bias": rng.normal(size=3),
        "mean": rng.normal(size=()),
    }

    @jaxmpi.jit
    def step(params, states, scale, spoilt):
        out = {}
        for name, t in tx.items():
            grads = jax.tree.map(lambda x: jnp.cos(x * scale) * (1 + jaxmpi.rank()), params[name])
            grads["bias"] = grads["bias"].at[1].add(jnp.where(spoilt, jnp.nan, 0))
            updates, state = t.update(grads, states[name], params[name])
            out[name] = (
                jax.tree.map(jnp.nan_to_num, optax.apply_updates(params[name], updates)),
                state,
            )
        return {name: x for name, (x, _) in out.items()}, {name: x for name, (_, x) in out.items()}

    params = {name: jax.tree.map(jnp.asarray, start) for name in tx}
    states = jaxmpi.jit(lambda params: {name: t.init(params[name]) for name, t in tx.items()})(
        params
    )
    for i in range(7):
        params, states = step(params, states, 1.0 + i, i == bad)
    whole = lambda state: jaxmpi.unshard(state).inner if hasattr(state, "layout") else state
    return params, jaxmpi.jit(
        lambda states: {name: whole(state) for name, state in states.items()}
    )(states)


def equal_to_distributed():
    with jax.enable_x64(True):
        got, want = train(jaxmpi.sharded, 2), train(jaxmpi.distributed, 2)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
        ):
            np.testing.assert_allclose(a, b, 1e-12, 1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_what_decides_by_whole_arrays_is_right_on_shards(ranks):
    with jaxmpi.simulate(ranks):
        equal_to_distributed()


@pytest.mark.exhaustive
@run_ranks(3)
def test_what_decides_by_whole_arrays_is_right_on_shards_of_mpi():
    equal_to_distributed()
