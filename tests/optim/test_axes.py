"""`sharded` and `fully_shard` over an axis: the numbers of `distributed`, and refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmpi
from jaxmpi._job.launch.pool import Task, pool
from jaxmpi.testing import IDLE_RANKS_SECONDS

GRID = {"island": 2, "member": 2, "solo": 1}
SHAPES = {"w": (5, 3), "b": (7,), "scale": (), "one": (1,)}  # no number of ranks divides them all
STEPS = 4
QUICKLY = {"xla_backend_optimization_level": 0}  # is what these programs are to be compiled
quickly = partial(jaxmpi.jit, compiler_options=QUICKLY)


def parameters():
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def loss(params, x):
    """Return a loss whose gradients depend on the parameters and on a rank's samples."""
    out = jnp.tanh(x @ params["w"]) * params["scale"]
    return (
        jnp.mean(out**2)
        + jnp.sum(jnp.sin(params["b"] * x[0, 0]))
        + jnp.sum(params["one"] * x[1, 1]) ** 2
    )


def gradients_of(params, x):
    return jax.grad(loss)(params, x)


def samples():
    """Return the samples of this rank, in a step."""
    rank = jax.lax.axis_index(jaxmpi.AXIS)
    return jnp.asarray(np.random.default_rng(2).normal(size=(6, 4, 5)))[rank]


def clipped_adam():
    return optax.chain(jaxmpi.clip_by_global_norm(0.3), optax.adamw(0.1))


def train(tx, gradients=gradients_of, start=lambda params: params, end=lambda params: params):
    """The parameters after some steps, whole, of each rank: `[size, ...]`."""

    @quickly
    def step(params, state):
        updates, state = tx.update(gradients(params, samples()), state, params)
        return optax.apply_updates(params, updates), state

    params = start(parameters())
    state = quickly(tx.init)(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return quickly(lambda params: jaxmpi.tree_allgather(end(params)))(params)


def close(got, want):
    leaves = zip(jax.tree.leaves(want), jax.tree.leaves(parameters()), strict=True)
    assert not all(np.allclose(x, start[None]) for x, start in leaves)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12),
        jaxmpi.local(got),
        jaxmpi.local(want),
    )


def fully(tx, axis):
    return train(
        tx,
        lambda shards, x: jax.grad(lambda shards: loss(jaxmpi.unshard(shards), x))(shards),
        lambda params: jaxmpi.fully_shard(params, axis=axis),
        jaxmpi.unshard,
    )


def check_sharded(axis, masters=None):
    with jax.enable_x64(True):
        want = train(jaxmpi.distributed(clipped_adam(), axis=axis))
        close(train(jaxmpi.sharded(clipped_adam(), axis=axis, master_dtype=masters)), want)


def check_rare_steps():
    with jax.enable_x64(True):
        axis = "member"
        skip = lambda inner: jaxmpi.accumulate(jaxmpi.skip_nonfinite(inner), 2)
        close(
            train(skip(jaxmpi.sharded(optax.adam(0.1), axis=axis))),
            train(skip(jaxmpi.distributed(optax.adam(0.1), axis=axis))),
        )


def check_hybrid(axis, other):
    """A mean along the other axis as well makes it that of all ranks."""
    with jax.enable_x64(True):
        want = train(jaxmpi.distributed(clipped_adam()))
        before = jaxmpi.average_gradients(axis=other)
        close(train(optax.chain(before, jaxmpi.sharded(clipped_adam(), axis=axis))), want)
        close(fully(optax.chain(before, clipped_adam()), axis), want)
        close(fully(jaxmpi.distributed(clipped_adam(), axis=other), axis), want)
        close(fully(clipped_adam(), (axis, other)), want)


def check_islands():
    """Check that each island trains alone, as with `distributed` over the axis."""
    with jax.enable_x64(True):
        close(
            fully(clipped_adam(), "member"),
            train(jaxmpi.distributed(clipped_adam(), axis="member")),
        )


def check_local_sgd():
    with jax.enable_x64(True):
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        wrapped = lambda wrap, *rest, **options: train(
            jaxmpi.local_sgd(wrap(clipped_adam(), axis="member"), *rest, axis="island", **options)
        )
        for rest, options in [
            ((1,), {}),
            ((3, outer), {}),
            ((3, outer), {"fragments": 2, "delay": 1}),
        ]:
            want = wrapped(jaxmpi.distributed, *rest, **options)
            close(wrapped(jaxmpi.sharded, *rest, **options), want)
        coded = wrapped(
            jaxmpi.distributed,
            3,
            outer,
            fragments=2,
            delay=1,
            codec=jaxmpi.codecs.topk(1.0, axis="island"),
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), coded, want
        )
        assert np.ptp(want["w"], axis=0).max() > 1e-6  # the islands go their own ways


CODECS = {
    "bf16": (jaxmpi.codecs.bf16, 0.02),
    "f16": (jaxmpi.codecs.f16, 0.002),
    "int8": (partial(jaxmpi.codecs.int8, 16), 0.02),
    "topk": (partial(jaxmpi.codecs.topk, 1.0), 1e-5),
    "powersgd": (partial(jaxmpi.codecs.powersgd, 8), 1e-5),
}


def check_codecs():
    """About the means of each group, equal to the bit within it."""
    for transform in (jaxmpi.distributed, partial(jaxmpi.local_sgd, every=1)):
        for name, (codec, tolerance) in CODECS.items():
            got = train(transform(optax.sgd(0.1), codec=codec(axis="member"), axis="member"))
            want = train(transform(optax.sgd(0.1), axis="member"))
            for key, x in jax.device_get(got).items():
                grid = x.reshape(*GRID.values(), -1)
                np.testing.assert_array_equal(grid[:, 0], grid[:, 1], err_msg=name)
                np.testing.assert_allclose(
                    x, want[key], rtol=tolerance, atol=tolerance, err_msg=f"{name} {key}"
                )


def check_micro_batches():
    """The bits of one rank with the batch of all ranks of its group."""
    of_islands = jnp.asarray(
        np.random.default_rng(4).normal(size=(GRID["island"], 8, 5)), jnp.float32
    )

    def trained(axis):
        tx = jaxmpi.distributed(clipped_adam(), micro_batches=4, axis=axis)

        def gradients(params, _):
            batch, member = of_islands[jax.lax.axis_index("island")], jax.lax.axis_index("member")
            mine = batch if axis == "solo" else jax.lax.dynamic_slice_in_dim(batch, 4 * member, 4)
            return jaxmpi.micro_batch_grads(jax.grad(loss), 4, axis=axis)(params, mine)

        return jax.device_get(train(tx, gradients))

    for got, want in zip(
        *(jax.tree.leaves(trained(axis)) for axis in ("member", "solo")), strict=True
    ):
        np.testing.assert_array_equal(got, want)
        assert np.ptp(got, axis=0).max() > 0  # the islands have batches of their own


def check_branches():
    """The islands take different branches, with and without a norm in them."""
    norm = optax.conditionally_transform(optax.clip_by_global_norm(0.1), lambda step: step > 1)
    once = optax.apply_if_finite(optax.adam(0.1), 5)
    bad_island = lambda params, x: jax.tree.map(
        lambda g: jnp.where(jax.lax.axis_index("island") == 0, jnp.nan, g),
        jax.grad(loss)(params, x),
    )
    with jax.enable_x64(True):
        for inner, gradients in (
            (optax.chain(norm, optax.sgd(0.1)), jax.grad(loss)),
            (once, bad_island),
        ):
            got, want = (
                train(wrap(inner, axis="member"), gradients)
                for wrap in (jaxmpi.sharded, jaxmpi.distributed)
            )
            close(got, want)


def check_average_loss():
    def newton(params, x):
        return jax.grad(jaxmpi.average_loss(loss, axis="member"))(params, x)

    with jax.enable_x64(True):
        close(
            train(optax.sgd(0.1), newton), train(jaxmpi.distributed(optax.sgd(0.1), axis="member"))
        )


def check_whole_states():
    with jax.enable_x64(True):
        for axis in ("member", "island"):
            tx = jaxmpi.sharded(optax.adam(0.1), axis=axis, master_dtype=jnp.float64)
            state = tx.init(parameters())
            n = jaxmpi.init().axes[axis]
            assert state.layout.ranks == n and state.layout.axis == axis
            whole = jaxmpi.unshard(state)
            for name, x in parameters().items():
                np.testing.assert_array_equal(whole.master[name], x)
            for x, y in zip(
                jax.tree.leaves(jaxmpi.reshard(whole)), jax.tree.leaves(state), strict=True
            ):
                np.testing.assert_array_equal(x, y)
            shards = jaxmpi.fully_shard(parameters(), axis=axis)
            assert shards["w"].shard.shape == (-(-15 // n), 1)
            for x, y in zip(
                jax.tree.leaves(jaxmpi.unshard(shards)), jax.tree.leaves(parameters()), strict=True
            ):
                np.testing.assert_array_equal(x, y)


CHECKS = {
    "sharded": lambda: check_sharded("member"),
    "sharded over the columns": lambda: check_sharded("island"),
    "sharded over both": lambda: check_sharded(("member", "island"), jnp.float64),
    "rare steps": check_rare_steps,
    "hybrid": lambda: check_hybrid("member", "island"),
    "islands": check_islands,
    "local_sgd": check_local_sgd,
    "branches": check_branches,
    "codecs": check_codecs,
    "micro-batches": check_micro_batches,
    "average_loss": check_average_loss,
}


def simulated(axes):
    return jaxmpi.simulate(int(np.prod([*axes.values()])), axes=axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_as_distributed_simulated(name):
    with simulated(GRID):
        CHECKS[name]()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"island": 2, "member": 3}, ["sharded", "hybrid", "local_sgd"]),
        ({"island": 4, "member": 1}, ["sharded", "hybrid", "islands"]),
        ({"island": 1, "member": 3}, ["sharded", "islands"]),
    ],
    ids=["2x3", "4x1", "1x3"],
)
def test_as_distributed_on_other_axes(axes, names):
    with simulated(axes):
        for name in names:
            CHECKS[name]()


def check_named(names):
    for name in names:
        check_whole_states() if name == "whole states" else CHECKS[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("auto", ["hybrid", "local_sgd"]),
        pytest.param(
            "auto",
            ["sharded", "sharded over the columns", "whole states"],
            marks=pytest.mark.exhaustive,
        ),
        ("auto", ["codecs", "micro-batches"]),
        pytest.param("xla", ["hybrid"], marks=pytest.mark.exhaustive),
        pytest.param("xla", ["codecs"], marks=pytest.mark.exhaustive),
    ],
    ids=["hybrid", "sharded", "codecs", "xla", "codecs on xla"],
)
def test_as_distributed(backend, names):
    pool(4, backend, IDLE_RANKS_SECONDS, GRID).run(
        Task(__file__, "check_named", {"names": names}, 240.0)
    )


# what is refused


def shards(axis="member"):
    return jaxmpi.fully_shard(parameters(), axis=axis)


def of_shards(tx, axis="member"):
    """One step on shards, with gradients by `unshard`."""
    grads = lambda cut: jax.grad(lambda cut: loss(jaxmpi.unshard(cut), samples()))(cut)
    cut = shards(axis)
    return jaxmpi.jit(lambda cut, state: tx.update(grads(cut), state, cut))(
        cut, jaxmpi.jit(tx.init)(cut)
    )


def of_state(made, used):
    state = jaxmpi.sharded(optax.adam(0.1), axis=made).init(parameters())
    tx = jaxmpi.sharded(optax.adam(0.1), axis=used)
    return jaxmpi.jit(tx.update)(parameters(), state, parameters())


def with_function():
    tx = jaxmpi.sharded(optax.adam(0.1), axis="member")
    step = jaxmpi.jit(lambda s, p: tx.update(p, s, p, value_fn=lambda p: 0.0))
    return step(tx.init(parameters()), parameters())


def normalized_over(axis):
    def update(updates, state, params=None):
        norm = jaxmpi.tree_allreduce(jnp.sum(updates["w"].shard ** 2), "sum", axis=axis)
        return jax.tree.map(lambda x: x / norm, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


MIXES = r"is a shard, and depends on .* which combines several elements"
UNSHARDED = r"is a ShardedArray, of which each rank has another part"


def chained(*names):
    """One step on shards with the named transforms, in order, before SGD."""
    norm, mean = optax.clip_by_global_norm(1.0), jaxmpi.average_gradients(axis="island")
    transforms = {"norm": norm, "mean": mean}
    return of_shards(optax.chain(*(transforms[name] for name in names), optax.sgd(1.0)))


REFUSED = {
    "unknown axis": (
        lambda: jaxmpi.sharded(optax.sgd(1.0), axis="nobody").init(parameters()),
        "sharded: axis 'nobody' is unk",
    ),
    "unknown axis of shards": (lambda: shards("nobody"), "fully_shard: axis 'nobody' is unknown"),
    "ranks twice": (
        lambda: shards(("ranks", "member")),
        "fully_shard: .* names some of the ranks twice",
    ),
    "axis of a vmap": (
        lambda: jax.vmap(lambda x: jaxmpi.fully_shard(x, axis="samples"), axis_name="samples")(
            jnp.ones((2, 3))
        ),
        "axis 'samples' is no axis of the ranks",
    ),
    "state of another axis": (
        lambda: of_state("member", "island"),
        "sharded: the state was made for axis 'member', and this",
    ),
    "state of all ranks": (
        lambda: of_state("ranks", "member"),
        "sharded: the state was made for axis 'ranks', and this",
    ),
    "function": (with_function, "sharded: value_fn does not go together with axis 'member'"),
    "mean over the axis": (lambda: of_shards(jaxmpi.average_gradients(axis="member")), UNSHARDED),
    "mean over both": (
        lambda: of_shards(jaxmpi.average_gradients(axis=("island", "member"))),
        UNSHARDED,
    ),
    "mean over all": (lambda: of_shards(jaxmpi.average_gradients()), UNSHARDED),
    "mean of shards of all": (
        lambda: of_shards(jaxmpi.average_gradients(axis="island"), "ranks"),
        UNSHARDED,
    ),
    "adasum": (
        lambda: jaxmpi.distributed(optax.sgd(1.0), op="adasum", axis="island").init(shards()),
        UNSHARDED,
    ),
    "rows": (lambda: jaxmpi.tree_reduce_scatter(shards(), axis="island"), UNSHARDED),
    "sharded shards": (
        lambda: jaxmpi.sharded(optax.sgd(1.0), axis="island").init(shards()),
        UNSHARDED,
    ),
    "norm before the mean": (lambda: chained("norm", "mean"), MIXES),
    "norm after the mean": (lambda: chained("mean", "norm"), MIXES),
    "sum of squares over the other axis": (lambda: of_shards(normalized_over("island")), MIXES),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, text = REFUSED[name]
    with simulated(GRID), jax.enable_x64(True), pytest.raises(ValueError, match=text):
        call()


def test_sums_of_squares_over_the_axis_are_right():
    with simulated(GRID), jax.enable_x64(True):
        of_shards(normalized_over("member"))
        of_shards(normalized_over(("island", "member")))


def check_refused_on_all_ranks():
    for name in (
        "unknown axis",
        "state of another axis",
        "mean over the axis",
        "norm after the mean",
    ):
        call, text = REFUSED[name]
        with pytest.raises(ValueError, match=text):
            call()
    assert jaxmpi.tree_allreduce(1.0, "sum") == 4.0


@pytest.mark.slow
def test_refused_on_all_ranks():
    pool(4, "auto", IDLE_RANKS_SECONDS, GRID).run(
        Task(__file__, "check_refused_on_all_ranks", {}, 120.0)
    )


def test_shards_and_states_of_other_axes_are_refused():
    with simulated(GRID):
        cut, state = shards(), jaxmpi.sharded(optax.adam(0.1), axis="member").init(parameters())
    with simulated({"island": 2, "member": 3}):
        with pytest.raises(
            ValueError,
            match=r"leaf \['b'\] is one of 2 shards, and there are 3 ranks along axis 'member'",
        ):
            jaxmpi.unshard(cut)
        with pytest.raises(
            ValueError, match=r"made for 2 ranks, and there are 3 along axis 'member'"
        ):
            jaxmpi.unshard(state)
    with jaxmpi.simulate(4):
        with pytest.raises(
            ValueError,
            match=r"leaf \['b'\] is a shard over axis 'member', and the ranks have 'ranks'",
        ):
            jaxmpi.unshard(cut)
        with pytest.raises(ValueError, match=r"unshard: axis 'member' is unknown"):
            jaxmpi.unshard(state)
