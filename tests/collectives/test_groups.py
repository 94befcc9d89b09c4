"""Collectives over named axes and groups of ranks, on every backend, beside NumPy and `vmap`."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from other_transport import mpi4jax_pool

import jaxmpi
from jaxmpi._backends.base import Collective
from jaxmpi._backends.wire import through_all
from jaxmpi._job.launch.pool import Pool, Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS

R = jaxmpi.AXIS
AXES = {"island": 2, "member": 2}
QUICKLY = {"xla_backend_optimization_level": 0}  # is what these programs are to be compiled


def partitions(axes):
    """List ways to name a group: the arguments of lax, and the groups that they mean."""
    rows, columns = axes.values()
    grid = np.arange(rows * columns).reshape(rows, columns)
    backwards = grid.ravel()[::-1].reshape(grid.shape).tolist()
    return {
        "rows": ({"axis_name": "member"}, grid.tolist()),
        "columns": ({"axis_name": "island"}, grid.T.tolist()),
        "all": ({"axis_name": ("island", "member")}, [grid.ravel().tolist()]),
        "all, column by column": ({"axis_name": ("member", "island")}, [grid.T.ravel().tolist()]),
        "rows, as numbers": ({"axis_name": R, "axis_index_groups": grid.tolist()}, grid.tolist()),
        "no axis": ({"axis_name": R, "axis_index_groups": backwards}, backwards),
    }


# For x [n, 2 n, 3] of n ranks in a group: JAX's function of one rank's array, and NumPy's function
# of the stack `[n, ...]` in the order of the group.

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
        lambda xs: [
            jnp.concatenate([jnp.split(x, len(xs))[i] for x in xs], 1) for i in range(len(xs))
        ],
    ),
    "ppermute": (
        lambda x, axis_name: lax.ppermute(
            x, axis_name, [(i, i + 1) for i in range(lax.axis_size(axis_name) - 1)]
        ),
        lambda xs: [xs[0] * 0, *xs[:-1]],
    ),
    "axis_index": (
        lambda x, axis_name: x[0] + lax.axis_index(axis_name),
        lambda xs: [x[0] + i for i, x in enumerate(xs)],
    ),
}
NONLINEAR = ("pmax", "pmin")


def cases(axes):
    """(title, of one rank's array, of the stack of all ranks')."""
    for partition, (of, groups) in partitions(axes).items():
        for name, (operation, expected) in OPERATIONS.items():
            if "axis_index_groups" in of and name in ("ppermute", "axis_index"):
                continue  # which take none
            yield (
                f"{name} over {partition}",
                name,
                partial(operation, **of),
                partial(whole, groups, expected),
            )


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
    outs["scan"] = lax.scan(
        lambda c, y: (c + operation(y).sum(), operation(y - c)), 0.0, jnp.stack([x, 3 * x])
    )
    return outs


def everywhere(function, name, xs, weights):
    """Compute the result on the stack of all ranks' arrays, without collectives."""
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
        weights = {title: weights_of(function, xs) for title, _, _, function in cases(axes)}

        def program(xs, weights):
            out = {}
            for title, name, _, function in cases(axes):
                out[title] = everywhere(function, name, xs, weights[title])
            return out

        return weights, jax.device_get(jax.jit(program, compiler_options=QUICKLY)(xs, weights))


def run_cases(axes, x, weights):
    """All of them in one program."""

    def program(x, weights):
        out = {}
        for title, name, operation, _ in cases(axes):
            out[title] = here(operation, name, x, weights[title])
        return out

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"island": 2, "member": 2},
        pytest.param({"island": 2, "member": 3}, marks=pytest.mark.exhaustive),
    ],
    ids=["2x2", "2x3"],
)
def test_all_collectives_simulated(axes):
    weights, want = expectations(axes)
    with jax.enable_x64(True), jaxmpi.simulate(len(values(axes)), axes=axes):
        got = run_cases(axes, jaxmpi.PerRank(values(axes)), jax.tree.map(jaxmpi.PerRank, weights))
    is_stack = lambda x: isinstance(x, jaxmpi.PerRank)
    n = len(values(axes))
    got = jax.tree.map(
        lambda x: x.stack if is_stack(x) else np.stack([np.asarray(x)] * n), got, is_leaf=is_stack
    )
    compare(got, want)


@pytest.fixture(scope="module")
def mpi4jax_ranks():
    ranks = mpi4jax_pool(4, AXES)
    yield ranks
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["native", "mpi4jax", pytest.param("xla", marks=pytest.mark.exhaustive)]
)
def test_all_collectives(row, request):
    weights, want = expectations(AXES)
    ranks = (
        request.getfixturevalue("mpi4jax_ranks")
        if row == "mpi4jax"
        else pool(4, "xla" if row == "xla" else "auto", IDLE_RANKS_SECONDS, AXES)
    )
    ranks.run(
        Task(__file__, "check_on_ranks", {"axes": AXES, "weights": weights, "want": want}, 120.0)
    )


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
        np.testing.assert_allclose(
            np.asarray(x) if isinstance(x, jaxmpi.PerRank) else np.stack([x] * 4), y, 1e-5, 1e-6
        )


# jaxmpi's own functions


def along_axes(x, kinds=("island", "member", ("member",), ("member", "island"))):
    """Pytrees of one rank's array over each kind of axis."""
    trees = {}
    for axis in kinds:
        n = int(np.prod([AXES[name] for name in jaxmpi._axis.names(axis)]))
        rows = jnp.stack([x + q for q in range(n)])
        trees[axis] = {
            **{
                op: jaxmpi.tree_allreduce(x, op, axis=axis)
                for op in ("mean", "sum", "max", "min", "prod")
            },
            "bcast": jaxmpi.tree_bcast(x, n - 1, axis=axis),
            "reduce": jaxmpi.tree_reduce(x, "sum", 1, axis=axis),
            "allgather": jaxmpi.tree_allgather(x, axis=axis),
            "tiled": jaxmpi.tree_allgather(x, axis=axis, tiled=True),
            "reduce_scatter": jaxmpi.tree_reduce_scatter(rows, axis=axis),
            "alltoall": jaxmpi.tree_alltoall(rows, axis=axis),
        }
    return [*trees.values()]


def along_axes_in_numpy(xs):
    grid = np.arange(4).reshape(2, 2)
    trees = []
    for groups in (grid.T, grid, grid, grid.T.reshape(1, 4)):
        of_rank = {}
        for group in groups:
            x, n = xs[group], len(group)
            rows = np.stack([x + q for q in range(n)], 1)  # [rank, row, ...]
            for i, rank in enumerate(group):
                of_rank[rank] = {
                    "mean": x.mean(0),
                    "sum": x.sum(0),
                    "max": x.max(0),
                    "min": x.min(0),
                    "prod": x.prod(0),
                    "bcast": x[-1],
                    "reduce": x.sum(0) if i == 1 else x[i],
                    "allgather": x,
                    "tiled": np.concatenate(x) if x.ndim > 1 else x,
                    "reduce_scatter": rows[:, i].mean(0),
                    "alltoall": rows[:, i],
                }
        trees.append([of_rank[rank] for rank in range(4)])
    return [*map(list, zip(*trees, strict=True))]  # by rank


XS = np.arange(1.0, 13.0).reshape(4, 3)


def compare_trees(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6), got, want)


def check_trees():
    rank = jaxmpi.rank()
    x, want = XS[rank].astype(np.float32), along_axes_in_numpy(XS)[rank]
    compare_trees(along_axes(x, ["island"]), want[:1])  # eagerly
    compare_trees(jaxmpi.jit(along_axes)(x), want)
    if jaxmpi.init().backend == "mpi":  # where the ranks are known under plain jax.jit
        compare_trees(jax.jit(along_axes)(x), want)
        root = jax.jit(jax.grad(lambda x: jnp.sum(jaxmpi.tree_bcast(x, 1, axis="member") ** 2)))(x)
        np.testing.assert_allclose(root, 4 * x if rank % 2 else 0 * x)


def check_distributed():
    """Islands take their members' gradients; the mean of their parameters is right."""
    rank = jaxmpi.rank()
    gradient, params = jnp.asarray(XS[rank], jnp.float32), jnp.zeros(3)

    def step(tx, gradient, **extra):
        return tx.update(gradient, tx.init(params), params, **extra)[0]

    of_island = jaxmpi.distributed(optax.sgd(1.0), axis="member")
    between = optax.chain(jaxmpi.average_gradients(axis="island"), optax.sgd(1.0))
    both = jaxmpi.local_sgd(of_island, 1, axis="island")
    weighted = lambda gradient: step(of_island, gradient, weight=1.0 + lax.axis_index("member"))
    island = XS.reshape(2, 2, 3)[rank // 2]
    program = lambda g: [step(of_island, g), step(between, g), step(both, g), weighted(g)]
    mean, between_islands, of_all, weighted_mean = jaxmpi.jit(program)(gradient)
    np.testing.assert_allclose(mean, -island.mean(0), 1e-6)
    np.testing.assert_allclose(between_islands, -XS[[rank % 2, rank % 2 + 2]].mean(0), 1e-6)
    np.testing.assert_allclose(of_all, -XS.mean(0), 1e-6)
    np.testing.assert_allclose(weighted_mean, -(island[0] + 2 * island[1]) / 3, 1e-6)
    # eagerly
    np.testing.assert_allclose(step(of_island, gradient, weight=1 + rank % 2), weighted_mean, 1e-6)


def check_bad_weight():
    gradient = jnp.ones(3)
    tx = jaxmpi.distributed(optax.sgd(1.0), axis="member")
    with pytest.raises(ValueError, match=r"distributed: weight is -1.0. .*; rank 3 did not"):
        tx.update(gradient, tx.init(gradient), gradient, weight=-1.0 if jaxmpi.rank() == 3 else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_trees", "check_distributed", "check_bad_weight"])
@pytest.mark.parametrize("row", ["native", "mpi4jax", "xla"])
def test_functions_with_an_axis(row, check, request):
    ranks = (
        request.getfixturevalue("mpi4jax_ranks")
        if row == "mpi4jax"
        else pool(4, "xla" if row == "xla" else "auto", IDLE_RANKS_SECONDS, AXES)
    )
    ranks.run(Task(__file__, check, {}, 120.0))


def test_functions_with_an_axis_simulated():
    with jaxmpi.simulate(4, axes=AXES):
        got = jaxmpi.jit(along_axes)(jaxmpi.PerRank(XS.astype(np.float32)))
    is_stack = lambda x: isinstance(x, jaxmpi.PerRank)
    for rank, want in enumerate(along_axes_in_numpy(XS)):
        of_rank = lambda x, rank=rank: x[rank] if is_stack(x) else x
        compare_trees(jax.tree.map(of_rank, got, is_leaf=is_stack), want)


# what is refused


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"ranks": 2, "m": 2}, ValueError, "the name 'ranks', which is the name of all ranks"),
        ({"a b": 4}, ValueError, "the name 'a b', which is no identifier"),
        ({1: 4}, TypeError, "the name 1, of type int"),
        ([4], TypeError, "axes is a list"),
        ({"i": 2.0}, TypeError, "the size of axis 'i' is 2.0"),
        ({"i": 0}, ValueError, "the size of axis 'i' is 0"),
        ({"i": -1, "j": -1}, ValueError, "the sizes of axes 'i', 'j' are -1, and only one may be"),
        (
            {"i": 2},
            ValueError,
            "axes are {'i': 2}, which are 2 ranks together, and there are 4 ranks",
        ),
        (
            {"i": 3, "j": -1},
            ValueError,
            "which are a multiple of 3 ranks together, and there are 4 ranks",
        ),
    ],
)
def test_axes_that_the_ranks_cannot_have(axes, error, text):
    with pytest.raises(error, match=re.escape(text)), jaxmpi.simulate(4, axes=axes):
        pass


@pytest.mark.parametrize(
    ("fun", "error", "text"),
    [
        (
            lambda x: lax.psum(x, "nobody"),
            NameError,
            "the axis 'nobody', which nothing binds.* or one of 'island', 'member'",
        ),
        (
            lambda x: lax.psum(x, (R, "member")),
            ValueError,
            "is over 'ranks', 'member', and names some of the ranks twice",
        ),
        (
            lambda x: lax.ppermute(x, "member", [(0, 2)]),
            ValueError,
            r"has pairs \[\(0, 2\)\] on 2 ranks",
        ),
        (
            lambda x: lax.psum(x, R, axis_index_groups=[[0], [1, 2, 3]]),
            ValueError,
            "all groups equally large",
        ),
        (lambda x: lax.psum(x, R, axis_index_groups=[[0, 1]]), ValueError, "in one group"),
        (
            jax.vmap(lambda x: lax.all_to_all(x, R, 0, 0, axis_index_groups=[[*range(3)]])),
            NotImplementedError,
            r"all_to_all at test_groups.py:\d+ is not supported.* Use an axis of jaxmpi.init",
        ),
        (lambda x: jaxmpi.tree_allreduce(x, axis="nobody"), ValueError, "axis 'nobody' is unknown"),
        (lambda x: jaxmpi.tree_allreduce(x, axis=["member"]), TypeError, r"axis is \['member'\]"),
        (
            lambda x: jaxmpi.tree_allreduce(x, axis=(R, "member")),
            ValueError,
            "names some of the ranks twice",
        ),
        (
            lambda x: jaxmpi.tree_bcast(x, 2, axis="member"),
            ValueError,
            "root is 2, and the ranks are 0 to 1",
        ),
        (
            lambda x: jaxmpi.tree_alltoall(x, axis="member"),
            ValueError,
            "its first axis must be the 2 ranks",
        ),
    ],
)
def test_collectives_over_axes_that_the_ranks_do_not_have(fun, error, text):
    with jaxmpi.simulate(4, axes=AXES), pytest.raises(error, match=text):
        jaxmpi.jit(fun)(XS)


def test_a_branch_that_only_some_ranks_of_a_group_take_is_refused():
    def step(x, axis):
        return lax.cond(
            lax.psum(x, axis).sum() > 0, lambda x: lax.psum(x, "member"), lambda x: x, x
        )

    with jaxmpi.simulate(4, axes=AXES):
        with pytest.raises(ValueError, match=r"cond at .* contains a collective"):
            jaxmpi.jit(step, static_argnums=1)(jaxmpi.PerRank(XS), "member")
        jaxmpi.jit(step, static_argnums=1)(jaxmpi.PerRank(XS), ("island", "member"))


def test_what_is_equal_within_groups_is_equal_after_the_other_axis():
    with jaxmpi.simulate(4, axes=AXES):
        step = jaxmpi.jit(lambda x: lax.psum(lax.psum(x, "member"), "island"), replicated_outnums=0)
        np.testing.assert_allclose(step(jaxmpi.PerRank(XS)), XS.sum(0))
        with pytest.raises(ValueError, match="is declared replicated but may differ across ranks"):
            jaxmpi.jit(lambda x: lax.psum(x, "member"), replicated_outnums=0)(jaxmpi.PerRank(XS))


def test_explain_names_the_axis():
    with jaxmpi.simulate(4, axes=AXES):
        text = str(
            jaxmpi.explain(
                jaxmpi.jit(lambda x: (lax.psum(x, "member"), lax.all_gather(x, "island"))), XS
            )
        )
    assert "allreduce sum over member" in text and "allgather over island" in text


def check_data():
    data, rank = np.arange(8.0), jaxmpi.rank()
    np.testing.assert_array_equal(
        jaxmpi.shard(data, axis="island")[:], np.split(data, 2)[rank // 2]
    )
    first, second = jaxmpi.batches(data, 4, axis="member")
    np.testing.assert_array_equal(np.stack([first, second]), data.reshape(2, 2, 2)[:, rank % 2])
    with pytest.raises(ValueError, match="batches: axis 'nobody' is unknown"):
        jaxmpi.batches(data, 4, axis="nobody")


def check_costs():
    def sent(groups):
        step = jaxmpi.jit(lambda x: lax.psum(x, R, axis_index_groups=groups))
        return re.findall(r"\d+ KB", str(jaxmpi.explain(step, np.ones(1000, np.float32))))

    assert sent([[0, 1], [2, 3]]) == ["4 KB", "4 KB"]  # the collective, and the total
    assert sent([[0, 3], [1, 2]]) == ["12 KB", "12 KB"]  # that of an allgather of all ranks


def check_mismatch():
    """Ranks of one group differ in a program that not all ranks compare."""
    rank = jaxmpi.rank()
    program = jax.jit(lambda x: jaxmpi.tree_allreduce(x, "sum", axis="member"))
    if rank < 2:
        np.testing.assert_array_equal(program(jnp.ones(2)), [2.0, 2.0])
    else:
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"rank 2 called .* over member of .*, and rank 3 called",
        ):
            program(jnp.ones(rank))
    assert jaxmpi.tree_allreduce(1.0, "sum") == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_data", "check_costs", "check_mismatch"])
def test_on_the_native_transport(check):
    pool(4, "auto", IDLE_RANKS_SECONDS, AXES).run(Task(__file__, check, {}, 120.0))


def test_batches_along_an_axis_simulated():
    with jaxmpi.simulate(4, axes=AXES):
        first, second = jaxmpi.batches(np.arange(8.0), 4, axis="member")
    np.testing.assert_array_equal(first, [[0, 1], [2, 3], [0, 1], [2, 3]])
    np.testing.assert_array_equal(second, [[4, 5], [6, 7], [4, 5], [6, 7]])


@pytest.mark.slow
def test_groups_within_and_between_nodes(monkeypatch):
    monkeypatch.setenv("JAXMPI_NODE_RANKS", "2")
    ranks = Pool(4, "mpi", AXES)
    ranks.run(Task(__file__, "check_trees", {}, 120.0))
    ranks.end()


def check_programs_are_compared_by_all():
    """Programs with collectives only within groups are compared across groups, too."""
    axis = "island" if jaxmpi.rank() == 3 else "member"
    with pytest.raises(
        jaxmpi.RankMismatchError,
        match=r"ranks 0, 1, 2 and rank 3 do not agree(.|\n)*over member(.|\n)*over island",
    ):
        jaxmpi.jit(lambda x: lax.psum(x, axis))(XS[jaxmpi.rank()])
    assert jaxmpi.tree_allreduce(1.0, "sum", axis="member") == 2.0


def check_later_calls_are_compared_by_all():
    """Later calls are compared, too: a rank would wait for its group, and another for all ranks."""
    x = XS[jaxmpi.rank()]
    over = {axis: jaxmpi.jit(partial(lax.psum, axis_name=axis)) for axis in AXES}
    branch = jaxmpi.jit(
        lambda x, k: lax.cond(k > 0, lambda: lax.psum(x, "member"), lambda: x), replicated_argnums=1
    )
    calls = [*(partial(f, x) for f in over.values()), partial(branch, x, 0), jaxmpi.barrier]
    for mine, others in itertools.permutations(calls, 2):
        for call in calls:
            call()
        with pytest.raises(
            (jaxmpi.RankMismatchError, jax.errors.JaxRuntimeError), match=r"do not agree|called"
        ):
            jax.block_until_ready(others() if jaxmpi.rank() == 3 else mine())
        assert jaxmpi.tree_allreduce(1.0, "sum", axis="member") == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["check_programs_are_compared_by_all", "check_later_calls_are_compared_by_all"]
)
@pytest.mark.parametrize("row", ["auto", "xla"])
def test_programs_are_compared_by_all(row, check):
    pool(4, row, IDLE_RANKS_SECONDS, AXES).run(Task(__file__, check, {}, 120.0))


def test_batch_norm_over_an_axis():
    norm = linen.BatchNorm(use_running_average=False, axis_name="member")
    batches = np.arange(48.0).reshape(4, 4, 3) ** 2

    def step(x):
        variables = norm.init(jax.random.key(0), x)  # which forms no means
        return norm.apply(variables, x, mutable=["batch_stats"])[0]

    with jaxmpi.simulate(4, axes=AXES):
        got = jaxmpi.jit(step)(jaxmpi.PerRank(batches))
    islands = batches.reshape(2, 8, 3)
    want = (islands - islands.mean(1, keepdims=True)) / np.sqrt(
        islands.var(1, keepdims=True) + 1e-5
    )
    np.testing.assert_allclose(got, want.reshape(4, 4, 3), 1e-3, 1e-3)


@pytest.mark.parametrize("transform", [jaxmpi.distributed, partial(jaxmpi.local_sgd, every=2)])
def test_a_codec_for_another_axis_is_refused(transform):
    for axis, other in (("member", jaxmpi.AXIS), (jaxmpi.AXIS, "member")):
        with pytest.raises(
            ValueError, match=f"the mean is along axis '{axis}', and the codec's along '{other}'"
        ):
            transform(optax.sgd(1.0), codec=jaxmpi.codecs.int8(axis=other), axis=axis)


def test_functions_of_update_do_not_go_together_with_an_axis():
    tx = jaxmpi.distributed(optax.lbfgs(), axis="member")
    update = lambda x: tx.update(x, tx.init(x), x, value=x.sum(), grad=x, value_fn=jnp.sum)[0]
    with (
        jaxmpi.simulate(4, axes=AXES),
        pytest.raises(ValueError, match="value_fn does not go together with axis 'member'"),
    ):
        jaxmpi.jit(update)(np.ones(3))


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter"])
def test_a_collective_that_goes_through_all_ranks_is_the_same_message_of_its_program(kind):
    sent = []

    def run(call, xs):
        sent.append(call)
        return [jnp.zeros((4, *x.shape[call.kind == "alltoall" :])) for x in xs]

    call = Collective(kind, "sum", fingerprint=7, groups=((0, 3), (1, 2)), message_index=5)
    through_all(run, call, [jnp.ones((2, 3))], np.int32(1))
    (message,) = sent
    assert (message.fingerprint, message.message_index, message.groups) == (7, 5, ())
