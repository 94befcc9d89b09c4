"""Collectives over named axes and within groups of ranks, on every way to run, beside what NumPy and `vmap` make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi._run.pool import Pool, pool
from jaxmpi._run.task import Task
from jaxmpi.testing import IDLE_SECONDS

R = jaxmpi.AXIS
AXES = {"island": 2, "member": 2}
QUICKLY = {"xla_backend_optimization_level": 0}  # is what these programs are to be compiled


def partitions(axes):
    """What to name a group by: the arguments of lax, and the groups."""
    rows, columns = axes.values()
    grid = np.arange(rows * columns).reshape(rows, columns)
    return {
        "rows": ({"axis_name": "member"}, grid.tolist()),
        "columns": ({"axis_name": "island"}, grid.T.tolist()),
        "all": ({"axis_name": ("island", "member")}, [grid.ravel().tolist()]),
        "all, column by column": ({"axis_name": ("member", "island")}, [grid.T.ravel().tolist()]),
        "rows, as numbers": ({"axis_name": R, "axis_index_groups": grid.tolist()}, grid.tolist()),
        "no axis": ({"axis_name": R, "axis_index_groups": grid.ravel()[::-1].reshape(grid.shape).tolist()},
                    grid.ravel()[::-1].reshape(grid.shape).tolist()),
    }  # fmt: skip


# of x [n, 2 n, 3] of n ranks in a group: what JAX makes of one rank's, and NumPy of `[n, ...]`, in the order of the group

OPERATIONS = {
    "psum": (lambda x, **of: lax.psum(x, **of), lambda xs: [xs.sum(0)] * len(xs)),
    "pmean": (lambda x, **of: lax.pmean(x, **of), lambda xs: [xs.sum(0) / len(xs)] * len(xs)),
    "pmax": (lambda x, **of: lax.pmax(x, **of), lambda xs: [xs.max(0)] * len(xs)),
    "pmin": (lambda x, **of: lax.pmin(x, **of), lambda xs: [xs.min(0)] * len(xs)),
    "all_gather": (lambda x, **of: lax.all_gather(x, **of), lambda xs: [xs] * len(xs)),
    "all_gather, tiled": (
        lambda x, **of: lax.all_gather(x, axis=1, tiled=True, **of),
        lambda xs: [jnp.concatenate(list(xs), 1)] * len(xs),
    ),
    "psum_scatter": (
        lambda x, **of: lax.psum_scatter(x, tiled=True, **of),
        lambda xs: list(xs.sum(0).reshape(len(xs), -1, *xs.shape[2:])),
    ),
    "all_to_all": (
        lambda x, **of: lax.all_to_all(x, split_axis=0, concat_axis=1, tiled=True, **of),
        lambda xs: [jnp.concatenate([jnp.split(x, len(xs))[i] for x in xs], 1) for i in range(len(xs))],
    ),
    "ppermute": (
        lambda x, axis_name: lax.ppermute(x, axis_name, [(i, i + 1) for i in range(lax.axis_size(axis_name) - 1)]),
        lambda xs: [xs[0] * 0, *xs[:-1]],
    ),
    "axis_index": (lambda x, axis_name: x[0] + lax.axis_index(axis_name), lambda xs: [x[0] + i for i, x in enumerate(xs)]),
}
NONLINEAR = ("pmax", "pmin")


def cases(axes):
    """(title, of one rank's array, of the stack of all ranks')."""
    for partition, (of, groups) in partitions(axes).items():
        for name, (operation, expected) in OPERATIONS.items():
            if "axis_index_groups" in of and name in ("ppermute", "axis_index"):
                continue  # which take none
            yield f"{name} over {partition}", name, partial_(operation, of), partial_(whole, groups, expected)


def partial_(function, *args):
    if isinstance(args[0], dict):
        return lambda x: function(x, **args[0])
    return lambda xs: function(*args, xs)


def whole(groups, expected, xs):
    outs = {}
    for group in groups:
        outs.update(zip(group, expected(xs[np.array(group)]), strict=True))
    return jnp.stack([outs[r] for r in range(len(xs))])


def here(operation, name, x, weight):
    """Forward, gradient, under vmap and in a scan, of one rank's array."""
    outs = {"forward": operation(x)}
    if name not in NONLINEAR:
        outs["grad"] = jax.grad(lambda x: jnp.vdot(operation(x), weight))(x)
    if not name.startswith("all_to_all"):  # JAX has no rule for one in groups
        outs["vmap"] = jax.vmap(operation, in_axes=2, out_axes=-1)(jnp.stack([x, -2 * x], 2))
    outs["scan"] = lax.scan(lambda c, y: (c + operation(y).sum(), operation(y - c)), 0.0, jnp.stack([x, 3 * x]))
    return outs


def everywhere(function, name, xs, weights):
    """The same of the stack of all ranks' arrays, without collectives."""
    outs = {"forward": function(xs)}
    if name not in NONLINEAR:
        outs["grad"] = jax.vjp(function, xs)[1](weights)[0]
    if not name.startswith("all_to_all"):
        outs["vmap"] = jnp.stack([function(xs), function(-2 * xs)], -1)
    sums = lambda ys: ys.reshape(len(ys), -1).sum(1)
    first = function(xs)
    carry = sums(first)
    second = function(3 * xs - carry[:, None, None])
    outs["scan"] = (carry + sums(function(3 * xs)), jnp.stack([first, second], 1))
    return outs


def values(axes):
    n = int(np.prod([*axes.values()]))
    return np.random.default_rng(0).normal(size=(n, 2 * n, 3))


def weights_of(function, xs):
    return np.random.default_rng(1).normal(size=jax.eval_shape(function, xs).shape)


def expectations(axes):
    with jax.enable_x64(True):
        xs = values(axes)
        both = {title: (name, function, weights_of(function, xs)) for title, name, _, function in cases(axes)}
        program = lambda xs, weights: {
            title: everywhere(function, name, xs, weights[title]) for title, (name, function, _) in both.items()
        }
        weights = {title: w for title, (_, _, w) in both.items()}
        return weights, jax.device_get(jax.jit(program, compiler_options=QUICKLY)(xs, weights))


def run_cases(axes, x, weights):
    """All of them in one program."""
    program = lambda x, weights: {title: here(operation, name, x, weights[title]) for title, name, operation, _ in cases(axes)}
    return jaxmpi.jit(program, compiler_options=QUICKLY)(x, weights)


def check_on_ranks(axes, weights, want):
    assert jaxmpi.init().axes == axes
    rank = jaxmpi.rank()
    with jax.enable_x64(True):
        got = run_cases(axes, values(axes)[rank], {title: w[rank] for title, w in weights.items()})
    compare(got, jax.tree.map(lambda y: y[rank], want))


def compare(got, want):
    paths, _ = jax.tree_util.tree_flatten_with_path(want)
    for (path, y), x in zip(paths, jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(x, y, 1e-12, 1e-12, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("axes", [{"island": 2, "member": 2}, {"island": 2, "member": 3}], ids=["2x2", "2x3"])
def test_all_collectives_simulated(axes):
    weights, want = expectations(axes)
    with jax.enable_x64(True), jaxmpi.simulate(len(values(axes)), axes=axes):
        got = run_cases(axes, jaxmpi.PerRank(values(axes)), jax.tree.map(jaxmpi.PerRank, weights))
    is_stack = lambda x: isinstance(x, jaxmpi.PerRank)
    n = len(values(axes))
    got = jax.tree.map(lambda x: x.stack if is_stack(x) else np.stack([np.asarray(x)] * n), got, is_leaf=is_stack)
    compare(got, want)


@pytest.fixture(scope="module")
def mpi4jax_ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_TRANSPORT", "mpi4jax")
        ranks = Pool(4, "mpi", AXES)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("row", ["native", "mpi4jax", "xla"])
def test_all_collectives(row, request):
    weights, want = expectations(AXES)
    ranks = (
        request.getfixturevalue("mpi4jax_ranks")
        if row == "mpi4jax"
        else pool(4, "xla" if row == "xla" else "auto", IDLE_SECONDS, AXES)
    )
    ranks.run(Task(__file__, "check_on_ranks", {"axes": AXES, "weights": weights, "want": want}, 120.0))


def test_named_axes_are_those_of_vmap():
    xs = values(AXES)

    def step(x):
        inside = lax.pmean(x, "member") * lax.axis_index("island")
        return (
            lax.psum(inside, "island"),
            lax.all_gather(x, "island"),
            lax.psum(x, ("island", "member")),
            lax.axis_size("member"),
        )

    grid = xs.reshape(2, 2, *xs.shape[1:])
    want = jax.vmap(jax.vmap(step, axis_name="member"), axis_name="island")(grid)
    with jaxmpi.simulate(4, axes=AXES):
        got = jaxmpi.jit(step)(jaxmpi.PerRank(xs))
    for x, y in zip(got, want, strict=True):
        y = np.asarray(y).reshape(4, *np.shape(y)[2:])
        np.testing.assert_allclose(np.asarray(x) if isinstance(x, jaxmpi.PerRank) else np.stack([x] * 4), y, 1e-5, 1e-6)
