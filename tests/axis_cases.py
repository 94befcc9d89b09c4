"""Functions over the named axis, with their expected results: the one table for every backend.

Each case makes, for n ranks, a function of one rank's arrays, the stacked arguments `[n, ...]`, and
the stacked results in float64, from formulas that know nothing of ranks. Where a derivative is
taken, its formula is that of the sum of all ranks' outputs with respect to this rank's argument:
the convention of `lax.psum`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmpi

R = jaxmpi.AXIS
BATCH, FEATURES, HIDDEN = 4, 6, 5
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def values(n, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape))


def repeat(x, n):
    return np.stack([np.asarray(x)] * n)


def differentiated(n, loss, whole, x=None, seed=1):
    """Return each rank's loss, its gradient on each rank, and the mean of the gradients."""
    w = np.random.default_rng(seed).normal(size=(FEATURES, HIDDEN))
    x = values(n, BATCH, FEATURES) if x is None else x

    def fun(w, x):
        out, grad = jax.value_and_grad(loss)(w, x)
        return out, grad, lax.pmean(grad, R)

    ws = jnp.asarray(repeat(w, n))
    losses = np.asarray(whole(ws, x))
    grads = np.asarray(jax.grad(lambda ws: whole(ws, x).sum())(ws))
    return fun, (np.asarray(ws), x), (losses, grads, repeat(grads.mean(0), n))


# collectives by themselves


@case
def reductions_of_arguments(n):
    x = values(n, 3, 2)
    return (
        lambda x: (lax.psum(x, R), lax.pmean(x, R), lax.pmax(x, R), lax.pmin(x, R), x),
        (x,),
        (*(repeat(f(0), n) for f in (x.sum, x.mean, x.max, x.min)), x),
    )


@case
def moves_of_what_is_equal_on_all_ranks(n):
    c = np.random.default_rng(0).normal(size=(n, 3))

    def fun(x):
        moved = lax.ppermute(c, R, [(p, (p + 1) % n) for p in range(n)])
        parts = jaxmpi.tree_reduce_scatter(c, "sum"), jaxmpi.tree_reduce_scatter(c, "max")
        return (
            x,
            jaxmpi.tree_alltoall(c),
            *parts,
            jaxmpi.tree_allgather(c),
            jaxmpi.tree_bcast(c, n - 1),
            moved,
        )

    x, rows, whole = np.ones(n), np.repeat(c[:, None], n, 1), repeat(c, n)
    return fun, (x,), (x, rows, n * c, c, repeat(whole, n), whole, whole)


@case
def rank_and_size(n):
    def fun(x):
        return (
            x * lax.axis_index(R),
            x * jaxmpi.rank(),
            x * lax.axis_size(R),
            x * jaxmpi.size(),
            lax.psum(1.0, R),
        )

    ones = np.ones(n)
    return fun, (ones,), (np.arange(n), np.arange(n), ones * n, ones * n, ones * n)


@case
def integers_and_short_floats(n):
    i = np.arange(n * 3, dtype=np.int32).reshape(n, 3) - 4
    b = (np.arange(n * 3).reshape(n, 3) % 2).astype(bool)

    def fun(i, b):
        half = i.astype(jnp.bfloat16)
        return (
            lax.psum(i, R),
            lax.pmax(i.astype(jnp.int8), R),
            lax.psum(b, R),
            lax.psum(half, R).astype(jnp.float64),
        )

    return (
        fun,
        (i, b),
        (repeat(i.sum(0), n), repeat(i.max(0), n), repeat(b.sum(0), n), repeat(i.sum(0), n)),
    )


@case
def gathers(n):
    x = values(n, 2, 3)
    return (
        lambda x: (
            lax.all_gather(x, R),
            lax.all_gather(x, R, axis=1),
            lax.all_gather(x, R, axis=1, tiled=True),
        ),
        (x,),
        (
            repeat(x, n),
            repeat(x.transpose(1, 0, 2), n),
            repeat(x.transpose(1, 0, 2).reshape(2, 3 * n), n),
        ),
    )


@case
def scatters(n):
    x, y = values(n, 2 * n, 3), values(n, 2, n, seed=1)
    return (
        lambda x, y: (
            lax.psum_scatter(x, R, tiled=True),
            lax.psum_scatter(y, R, scatter_dimension=1),
        ),
        (x, y),
        (x.sum(0).reshape(n, 2, 3), y.sum(0).T),
    )


@case
def all_to_alls(n):
    x = values(n, n, 3)
    y = values(n, 2 * n, 3, seed=1)
    return (
        lambda x, y: (
            lax.all_to_all(x, R, 0, 0),
            lax.all_to_all(x, R, 0, 1),
            lax.all_to_all(y, R, 0, 1, tiled=True),
        ),
        (x, y),
        (
            x.swapaxes(0, 1),
            x.transpose(1, 2, 0),
            y.reshape(n, n, 2, 3).transpose(1, 2, 0, 3).reshape(n, 2, 3 * n),
        ),
    )


@case
def permutes(n):
    x = values(n, 3)
    ring, line = [(r, (r + 1) % n) for r in range(n)], [(r, r + 1) for r in range(n - 1)]
    return (
        lambda x: (lax.ppermute(x, R, ring), lax.ppermute(x, R, line)),
        (x,),
        (np.roll(x, 1, 0), np.concatenate([np.zeros((1, 3)), x[:-1]])),
    )


@case
def tree_functions(n):
    x = values(n, n, 3)

    def fun(x):
        t = {"x": x}
        return (
            [jaxmpi.tree_allreduce(t, op)["x"] for op in ("mean", "sum", "max", "min", "prod")],
            jaxmpi.tree_bcast(t, root=n - 1)["x"],
            jaxmpi.tree_reduce(t, "sum", root=n - 1)["x"],
            jaxmpi.tree_allgather(t)["x"],
            jaxmpi.tree_reduce_scatter(t)["x"],
            jaxmpi.tree_reduce_scatter(t, "max")["x"],
            jaxmpi.tree_alltoall(t)["x"],
        )

    reduced = x.copy()
    reduced[n - 1] = x.sum(0)
    want = (
        [repeat(f(0), n) for f in (x.mean, x.sum, x.max, x.min, x.prod)],
        repeat(x[n - 1], n),
        reduced,
        repeat(x, n),
        x.mean(0),
        x.max(0),
        x.swapaxes(0, 1),
    )
    return fun, (x,), want


@case
def keys_and_bits(n):
    """Cases that only move data, which keeps its bits: the sign of zero, keys, booleans."""
    zero = np.where(np.arange(n) % 2, 0.0, -0.0)
    seeds = np.arange(n)

    def fun(zero, seed):
        key = jax.random.fold_in(jax.random.key(7), seed)
        return (
            [jnp.signbit(jaxmpi.tree_bcast(zero, root=r)) for r in range(n)],
            jax.random.key_data(jaxmpi.tree_bcast(key, root=n - 1)),
            jax.random.key_data(jaxmpi.tree_allgather(key)),
            jaxmpi.tree_bcast(seed == 0),
            jaxmpi.tree_allreduce(seed == 0, "max"),
        )

    keys = np.stack(
        [jax.random.key_data(jax.random.fold_in(jax.random.key(7), r)) for r in range(n)]
    )
    true = np.ones(n, bool)
    return (
        fun,
        (zero, seeds),
        (
            [repeat(np.signbit(zero[r]), n) for r in range(n)],
            repeat(keys[-1], n),
            repeat(keys, n),
            true,
            true,
        ),
    )


@case
def zero_size_and_none(n):
    x = np.zeros((n, 0, 3))
    return (
        lambda x: (lax.pmean({"a": x, "b": None}, R)["a"], jaxmpi.tree_allgather(x)),
        (x,),
        (x, np.zeros((n, n, 0, 3))),
    )


# derivatives


@case
def gradient_of_a_mean_loss_is_local(n):
    def whole(ws, x):
        return jnp.broadcast_to(jnp.mean((x @ ws) ** 2), (n,))

    return differentiated(n, lambda w, x: lax.pmean(jnp.mean((x @ w) ** 2), R), whole)


@case
def gradient_through_every_collective(n):
    x = values(n, n, FEATURES)
    weight = values(1, n, n, HIDDEN, seed=2)[0]

    def loss(w, x):
        z, r = x @ w, lax.axis_index(R)
        gathered = jnp.sum(lax.all_gather(jnp.tanh(z), R) * weight * (r + 1))
        scattered = jnp.sum(jnp.sin(lax.psum_scatter(z, R)) * (r + 1))
        swapped = jnp.sum(jnp.cos(lax.all_to_all(z, R, 0, 0)) * weight[0] * (r + 1))
        moved = jnp.sum(jnp.sin(lax.ppermute(z, R, [(p, (p + 1) % n) for p in range(n)])) * z)
        given = jnp.sum(jnp.sin(jaxmpi.tree_bcast(z, root=n - 1)) * z)
        return gathered + scattered + swapped + moved + given

    def whole(ws, x):
        z = jnp.einsum("rbf,rfh->rbh", x, ws)
        rank = jnp.arange(n) + 1.0
        gathered = jnp.einsum("pbh,pbh->", jnp.tanh(z), weight) * rank
        scattered = jnp.sum(jnp.sin(z.sum(0)), 1) * rank
        swapped = jnp.einsum("pqh,ph->q", jnp.cos(z), weight[0]) * rank
        moved = jnp.sum(jnp.sin(jnp.roll(z, 1, 0)) * z, (1, 2))
        given = jnp.sum(jnp.sin(z[n - 1]) * z, (1, 2))
        return gathered + scattered + swapped + moved + given

    return differentiated(n, loss, whole, x)


@case
def gradient_through_extremes_and_products(n):
    def loss(w, x):
        z = x @ w
        high, low, prod = (jaxmpi.tree_allreduce(z, op) for op in ("max", "min", "prod"))
        reduced = jaxmpi.tree_reduce(z, "sum", root=n - 1)
        return jnp.sum(jnp.sin(high) + low * z + prod + jnp.cos(reduced))

    def whole(ws, x):
        z = jnp.einsum("rbf,rfh->rbh", x, ws)
        reduced = z.at[n - 1].set(z.sum(0))
        return jnp.sum(jnp.sin(z.max(0)) + z.min(0) * z + z.prod(0) + jnp.cos(reduced), (1, 2))

    return differentiated(n, loss, whole)


@case
def linear_transpose_of_tree_functions(n):
    """y ↦ x̄ of the table in docs/concepts.md, without a function that is differentiated."""
    x, y, stacks = values(n, n, 3), values(n, n, 3, seed=1), values(n, n, n, 3, seed=2)

    def fun(x, y, stacks):
        cotangents = (
            (lambda x: jaxmpi.tree_bcast(x, n - 1), y),
            (jaxmpi.tree_allreduce, y),
            (jaxmpi.tree_allgather, stacks),
        )
        more = ((lambda x: jaxmpi.tree_reduce_scatter(x, "sum"), y[0]), (jaxmpi.tree_alltoall, y))
        transposed = [jax.linear_transpose(f, x)(ct)[0] for f, ct in (*cotangents, *more)]
        transpose = jax.linear_transpose(lambda z: jaxmpi.tree_bcast(z, 0), x * 1j)
        return *transposed, transpose(y * 1j)[0]

    from_last = np.where(np.arange(n)[:, None, None] == n - 1, y.sum(0), 0)
    from_first = np.where(np.arange(n)[:, None, None] == 0, y.sum(0), 0)
    want = (
        from_last,
        repeat(y.mean(0), n),
        stacks.sum(0),
        repeat(y[:, 0], n),
        y.swapaxes(0, 1),
        from_first * 1j,
    )
    return fun, (x, y, stacks), want


@case
def custom_vjp_that_averages(n):
    @jax.custom_vjp
    def averaged(w):
        return w

    averaged.defvjp(lambda w: (w, None), lambda _, g: (jax.jit(lambda g: lax.pmean(g, R))(g),))
    w, x = values(1, FEATURES, HIDDEN)[0], values(n, BATCH, FEATURES)
    full = np.asarray(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    fun = jax.grad(lambda w, x: jnp.mean((x @ averaged(w)) ** 2))
    return fun, (repeat(w, n), x), repeat(full, n)


@case
def second_derivative(n):
    x = values(n, 3)
    total = np.sum(x**2)
    return (
        lambda x: jax.hessian(lambda x: lax.psum(jnp.sum(x**2), R) ** 2)(x),
        (x,),
        # d/dx_r of Σ_s S² is 4 n S x_r; its forward derivative, with the same dx on all ranks:
        4 * n * total * repeat(np.eye(3), n) + 8 * n * x[:, :, None] * x.sum(0)[None, None, :],
    )


# control flow


@case
def in_scan(n):
    def loss(w, x):
        def body(c, row):
            return jnp.tanh(c + lax.pmean(row @ w, R)), lax.psum(jnp.sum(c * (row @ w)), R)

        c, sums = lax.scan(body, jnp.zeros(HIDDEN), x)
        return jnp.sum(c**2) + sums.sum()

    def whole(ws, x):
        c, total = jnp.zeros(HIDDEN), 0.0
        for i in range(BATCH):
            z = jnp.einsum("rf,rfh->rh", x[:, i], ws)
            total += jnp.sum(c * z)
            c = jnp.tanh(c + z.mean(0))
        return jnp.broadcast_to(jnp.sum(c**2) + total, (n,))

    return differentiated(n, loss, whole)


@case
def in_a_checkpointed_scan(n):
    def loss(w, x):
        @jax.checkpoint
        @jax.jit
        def body(c, row):
            return jnp.tanh(c + lax.pmean(row @ w, R)), None

        return jnp.sum(lax.scan(body, jnp.zeros(HIDDEN), x)[0] ** 2)

    def whole(ws, x):
        c = jnp.zeros(HIDDEN)
        for i in range(BATCH):
            c = jnp.tanh(c + jnp.einsum("rf,rfh->rh", x[:, i], ws).mean(0))
        return jnp.broadcast_to(jnp.sum(c**2), (n,))

    return differentiated(n, loss, whole)


def _branches(n, positive):
    x = values(n, BATCH, FEATURES)
    sign = np.sign(x.sum()) * (1 if positive else -1)

    def loss(w, x):
        z, total = x @ w, lax.psum(jnp.sum(x), R)
        return lax.cond(
            sign * total > 0,
            lambda z: jnp.sum(jnp.sin(lax.psum(z, R)) * z),
            lambda z: jnp.mean(z) * lax.pmean(jnp.mean(z), R),
            z,
        )

    def whole(ws, x):
        z = jnp.einsum("rbf,rfh->rbh", x, ws)
        return jnp.sum(jnp.sin(z.sum(0)) * z, (1, 2)) if positive else z.mean((1, 2)) * z.mean()

    return differentiated(n, loss, whole, x)


@case
def in_the_branch_taken(n):
    return _branches(n, True)


@case
def in_the_other_branch(n):
    return _branches(n, False)


@case
def in_a_switch(n):
    x = values(n, 3)

    def fun(x):
        which = lax.psum(1, R) % 3
        return lax.switch(
            jnp.int32(which),
            [lambda x: lax.psum(x, R), lambda x: lax.pmax(x, R), lambda x: 2 * lax.pmin(x, R)],
            x,
        )

    return fun, (x,), repeat([x.sum(0), x.max(0), 2 * x.min(0)][n % 3], n)


@case
def in_a_while_loop_and_its_predicate(n):
    x = values(n, BATCH, FEATURES)

    def fun(x):
        def more(state):
            v, k = state
            return (lax.pmax(jnp.sum(v) * 0 + k, R) < 5) & (jnp.abs(v[0]) > 1e-9)

        def body(state):
            v, k = state
            v = lax.psum(x.T @ (x @ v), R)
            return v / jnp.linalg.norm(v), k + 1

        return lax.while_loop(more, body, (jnp.ones(FEATURES), 0.0))

    v, rows = np.ones(FEATURES), x.reshape(-1, FEATURES)
    for _ in range(5):
        v = rows.T @ (rows @ v)
        v /= np.linalg.norm(v)
    return fun, (x,), (repeat(v, n), np.full(n, 5.0))


@case
def in_vmap(n):
    def loss(w, x):
        return jnp.sum(jax.vmap(lambda row: jnp.cos(lax.psum(row @ w, R)) * row[0])(x))

    def whole(ws, x):
        z = jnp.einsum("rbf,rfh->rbh", x, ws).sum(0)
        return jnp.sum(jnp.cos(z)[None] * x[:, :, :1], (1, 2))

    return differentiated(n, loss, whole)


@case
def every_collective_in_vmap(n):
    x = values(n, BATCH, n, 3)

    def fun(x):
        return (
            lax.pmax(x, R),
            lax.all_gather(x, R),
            lax.psum_scatter(x, R),
            lax.all_to_all(x, R, 0, 0),
            lax.ppermute(x, R, [(r, (r + 1) % n) for r in range(n)]),
            jaxmpi.tree_bcast(x, root=n - 1),
            jaxmpi.tree_reduce_scatter(x, "min"),
        )

    want = (
        repeat(x.max(0), n),
        repeat(x.swapaxes(0, 1), n),
        x.sum(0).swapaxes(0, 1),
        x.transpose(2, 1, 0, 3),
        np.roll(x, 1, 0),
        repeat(x[n - 1], n),
        x.min(0).swapaxes(0, 1),
    )
    return jax.vmap(fun), (x,), want


@case
def over_ranks_and_an_axis_of_vmap(n):
    x = values(n, BATCH, 3)
    fun = jax.vmap(
        lambda row: (lax.psum(row, ("rows", R)), lax.pmax(row, ("rows", R))), axis_name="rows"
    )
    return (
        fun,
        (x,),
        (repeat(repeat(x.sum((0, 1)), BATCH), n), repeat(repeat(x.max((0, 1)), BATCH), n)),
    )


@case
def chains_of_rounds(n):
    """Collectives that depend on each other, beside independent ones."""
    x = values(n, 4)

    def fun(x):
        a = lax.psum(x, R)
        b = lax.pmean(x * a, R)
        c = lax.pmax(jnp.sin(b) * x, R)
        return a, b, c, lax.psum(x**2, R), lax.psum(c * x, R)

    a = x.sum(0)
    b = (x * a).mean(0)
    c = (np.sin(b) * x).max(0)
    return fun, (x,), tuple(repeat(y, n) for y in (a, b, c, (x**2).sum(0), (c * x).sum(0)))
