"""`jaxmpi.pmap`, programs written for `jax.pmap`, and the note about a leftover `jax.pmap`."""

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import jax_utils, nnx
from flax.training import common_utils
from jax import lax

import jaxmpi
from jaxmpi._jit import pmap as pmap_file
from jaxmpi._per_rank_state import flatten_with_path
from jaxmpi._world import session
from jaxmpi.testing import run_ranks

PROGRAMS = Path(__file__).parents[1] / "pmap_programs"
NEW_LINES = {"import jaxmpi", "from jaxmpi import pmap", "jaxmpi.init()"}

# programs as their users write them


def on_virtual_devices(name, count):
    """Return the output of a program in one process with `count` devices."""
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{name}.py"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


def on_this_rank(path, rows_at):
    """Run a program here; return its result and the rows that its pmaps got in each call."""
    called, pmap = [], jaxmpi.pmap

    def recorded(fun, *args, **kwargs):
        mapped = pmap(fun, *args, **kwargs)

        def call(*args):
            if len(args) > 1:  # a mean of statistics gets no rows
                (x, *_) = jax.tree.leaves(args[rows_at])
                assert x.shape[0] == 1
                called.append([row.tobytes() for row in np.asarray(x)[0]])
            return mapped(*args)

        return call

    jaxmpi.pmap = recorded
    try:
        spec = importlib.util.spec_from_file_location("program", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main(), called
    finally:
        jaxmpi.pmap = pmap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows_at", "ranks"),
    [
        *[("imagenet", 1, ranks) for ranks in (2, 3)],
        *[("static_and_donated", 2, ranks) for ranks in (2, 3)],
        *[("islands", 1, ranks) for ranks in (2, 3, 4)],
    ],
)
def test_programs_of_users(name, rows_at, ranks):
    """Losses equal those of the program on as many devices; each row is on one rank."""
    want = on_virtual_devices(name, ranks)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks do not have this module
    try:
        results = jaxmpi.launch(
            on_this_rank, ranks, PROGRAMS / f"{name}_on_ranks.py", rows_at, timeout_seconds=300
        )
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for got, _ in results:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    size = int(re.search(r"^BATCH.* = (\d+)", (PROGRAMS / f"{name}.py").read_text(), re.M)[1])
    for of_ranks in zip(*(called for _, called in results), strict=True):
        rows = [row for of_rank in of_ranks for row in of_rank]
        assert len(rows) == len(set(rows)) == size


@pytest.mark.parametrize("name", ["imagenet", "static_and_donated", "islands"])
def test_two_lines_of_a_program_change(name):
    before, after = (
        (PROGRAMS / f"{name}{end}.py").read_text().splitlines() for end in ("", "_on_ranks")
    )
    changes = []
    for line in difflib.ndiff(before, after):
        if line[0] in "-+" and line[2:].strip():
            changes.append(line)
    gone = [line[2:] for line in changes if line[0] == "-"]
    new = [line[2:] for line in changes if line[0] == "+" and line[2:] not in NEW_LINES]
    assert len(gone) == len(new) == 2


# what a pmap is, on every backend


def all_of_it():
    """Results against closed forms; rank r passes r + 1."""
    n, r = jaxmpi.size(), jaxmpi.rank()
    mine = np.asarray([r + 1.0], np.float32)

    def f(x, y, k, *, z):
        others = lax.all_gather(x, "i")
        return (
            lax.psum(x, "i") + y * k,
            lax.axis_index("i"),
            others,
            {"size": lax.psum(1, "i"), "z": lax.pmax(z, "i")},
        )

    mapped = jaxmpi.pmap(
        f,
        "i",
        in_axes=(0, None, None),
        out_axes=(0, 0, 1, {"size": None, "z": 0}),
        static_broadcasted_argnums=2,
    )
    total, index, others, rest = mapped(mine, np.float32(10), 3, z=2 * mine)
    np.testing.assert_array_equal(total, [n * (n + 1) / 2 + 30])
    np.testing.assert_array_equal(index, [r])
    np.testing.assert_array_equal(others, 1 + np.arange(n)[:, None])
    assert rest["size"] == n
    np.testing.assert_array_equal(rest["z"], [2 * n])


@run_ranks(1, 2, 3)
def test_pmap():
    all_of_it()


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_pmap_on_xla():
    all_of_it()
    x = jaxmpi.pmap(lambda x: x + 1)(jnp.asarray([1.0 * jaxmpi.rank()]))
    # arrays of this rank alone
    np.testing.assert_array_equal(jax.jit(lambda x: 2 * x)(x), [2.0 * jaxmpi.rank() + 2])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pmap_on_simulated_ranks(ranks):
    step = jaxmpi.pmap(lambda w, x: (w - lax.pmean(w * x, "i"), lax.psum(x, "i"), x), axis_name="i")
    x = 1.0 + np.arange(ranks)
    with jaxmpi.simulate(ranks):
        w, total, mine = step(np.ones(1), jaxmpi.PerRank(x[:, None]))
    np.testing.assert_allclose(w, [1 - x.mean()], rtol=1e-6)
    np.testing.assert_array_equal(total, [x.sum()])
    np.testing.assert_array_equal(np.asarray(mine).reshape(-1), x)


@run_ranks(1, 3)
def test_donated_state_in_a_loop():
    n, r = jaxmpi.size(), jaxmpi.rank()

    @partial(jaxmpi.pmap, axis_name="batch", donate_argnums=0)
    def step(state, x):
        return {"w": state["w"] + lax.pmean(x, "batch"), "count": state["count"] + 1}

    state = {"w": jnp.zeros((1, 4)), "count": jnp.zeros(1, jnp.int32)}
    for i in range(3):
        before = state
        state = step(state, jnp.full((1, 4), r + 1.0 + i))
        assert before["w"].is_deleted()
    np.testing.assert_allclose(state["w"], np.full((1, 4), 3 * (n + 1) / 2 + 3))
    np.testing.assert_array_equal(state["count"], [3])


@run_ranks(1, 2, 3)
def test_names_of_the_ranks():
    """AXIS, pmap's own name, jaxmpi's functions and modules with an axis name work inside.

    Also in loops, branches, grad and vmap.
    """
    n, r = jaxmpi.size(), jaxmpi.rank()

    def f(x):
        mean = lax.pmean(x, "batch")
        same = (
            jaxmpi.tree_allreduce(x)
            - lax.pmean(x, jaxmpi.AXIS)
            + jaxmpi.tree_allreduce(x, axis="batch")
            - mean
        )
        looped = lax.scan(lambda c, _: (c + lax.psum(x, "batch"), None), jnp.zeros(()), None, 2)[0]
        taken = lax.cond(lax.pmax(x, "batch") > 0, lambda x: lax.pmin(x, "batch"), lambda x: x, x)
        grad = jax.grad(lambda x: lax.psum(x, "batch") ** 2)(x)
        lanes = jax.vmap(lambda k: lax.psum(k * x, "batch"))(jnp.arange(2.0))
        rows = jax.vmap(lambda k: lax.psum(k * x, ("batch", "lanes")), axis_name="lanes")(
            jnp.arange(3.0)
        )
        return same, looped, taken, grad, lanes, rows

    same, looped, taken, grad, lanes, rows = jaxmpi.pmap(f, axis_name="batch")(
        jnp.asarray([r + 1.0])
    )
    total = n * (n + 1) / 2
    np.testing.assert_allclose(same, [0], atol=1e-6)
    np.testing.assert_allclose(looped, [2 * total])
    np.testing.assert_allclose(taken, [1])
    np.testing.assert_allclose(grad, [2 * total * n])  # psum transposes to psum, as in jax.pmap
    np.testing.assert_allclose(lanes, [[0, total]])
    np.testing.assert_allclose(rows, [[3 * total] * 3])


@run_ranks(2, 4)
def test_groups_and_permutes():
    n, r = jaxmpi.size(), jaxmpi.rank()
    pairs = np.arange(n).reshape(-1, 2).tolist()

    def f(x):
        ring = lax.ppermute(x, "i", [(p, (p + 1) % n) for p in range(n)])
        return (
            lax.psum(x, "i", axis_index_groups=pairs),
            ring,
            lax.psum_scatter(jnp.arange(n) * x, "i"),
        )

    got = jaxmpi.pmap(f, "i")(jnp.asarray([r + 1.0]))
    first = r // 2 * 2
    np.testing.assert_allclose(got, [[2 * first + 3], [(r - 1) % n + 1], [r * n * (n + 1) / 2]])


@run_ranks(1, 2, 3)
def test_custom_derivatives_and_remat():
    n, r = jaxmpi.size(), jaxmpi.rank()

    @jax.custom_vjp
    def synced(x):
        return x

    synced.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "i"),))

    @jax.custom_jvp
    def halved(x):
        return x

    halved.defjvp(lambda primals, tangents: (primals[0], lax.pmean(tangents[0], "i") / 2))

    def f(x):
        loss = lambda x: synced(x) * (r0 := lax.axis_index("i") + 1.0) + 0 * r0
        return jax.grad(jax.checkpoint(loss))(x), jax.jvp(halved, (x,), (x,))[1]

    grad, tangent = jaxmpi.pmap(f, "i")(jnp.asarray([r + 1.0]))
    np.testing.assert_allclose(grad, [n * (n + 1) / 2])
    np.testing.assert_allclose(tangent, [(n + 1) / 4])


@run_ranks(1, 2, 3)
def test_inside_of_other_functions():
    """A pmap in jaxmpi.jit is over the ranks, and one in another pmap over this rank's device.

    It has derivatives in both.
    """
    n, r = jaxmpi.size(), jaxmpi.rank()
    x, total = jnp.asarray([r + 1.0]), n * (n + 1) / 2
    summed = jaxmpi.pmap(lambda x: lax.psum(x, "i"), "i")
    np.testing.assert_allclose(jaxmpi.jit(lambda x: summed(x) + summed(x))(x), [2 * total])
    inner = jaxmpi.pmap(
        lambda y: lax.psum(y, "j") + lax.psum(y, ("i", "j")) + lax.axis_index("j"), "j", out_axes=1
    )
    outer = jaxmpi.pmap(lambda x: inner(x), "i")
    np.testing.assert_allclose(
        outer(x[:, None, None] * jnp.ones(3)), np.full((1, 3, 1), r + 1 + total)
    )
    loss = jaxmpi.pmap(lambda w, x: lax.pmean(w * x, "i"), "i")
    # the local gradient
    np.testing.assert_allclose(jaxmpi.jit(jax.grad(lambda w: loss(w, x)[0]))(jnp.ones(1)), x)
    assert jaxmpi.pmap(jaxmpi.jit(lambda x: lax.psum(x, "i")), "i")(x) == total
    assert summed.lower(x).compile()(x) == total


class Trainer:
    """A class whose pmap is of a bound method."""

    def __init__(self):
        self.rate = 0.5
        self.update = jaxmpi.pmap(self._update, "i", static_broadcasted_argnums=(1,))

    def _update(self, w, scale):
        return w - self.rate * scale * lax.pmean(w, "i")

    @partial(jaxmpi.pmap, axis_name="i", static_broadcasted_argnums=0)
    def twice(self, w):
        return 2 * lax.pmean(w, "i")


@run_ranks(1, 2)
def test_methods_and_partials():
    trainer, n, r = Trainer(), jaxmpi.size(), jaxmpi.rank()
    w, mean = jnp.asarray([r + 1.0]), (n + 1) / 2
    np.testing.assert_allclose(trainer.update(w, 2), [r + 1 - mean])
    np.testing.assert_allclose(trainer.twice(w), [2 * mean])
    np.testing.assert_allclose(
        jaxmpi.pmap(partial(trainer._update, scale=4), "i")(w), [r + 1 - 2 * mean]
    )
    assert trainer.update.__name__ == "_update"


@run_ranks(1, 2)
def test_helpers_of_flax():
    n, r = jaxmpi.size(), jaxmpi.rank()
    assert jax.local_device_count() == 1
    state = jax_utils.replicate({"w": jnp.ones(3)})
    batches = [
        {"x": (1.0 + np.arange(6 * n, dtype=np.float32)).reshape(-1, 3)[r::n]} for _ in range(2)
    ]
    step = jaxmpi.pmap(
        lambda s, b: (
            {"w": s["w"] + lax.pmean(b["x"].mean(0), "batch")},
            lax.psum(b["x"].sum(), "batch"),
        ),
        "batch",
    )
    metrics = []
    for batch in jax_utils.prefetch_to_device(map(common_utils.shard, batches), 2):
        state, total = step(state, batch)
        metrics.append({"total": total})
    got = jax_utils.unreplicate(state)["w"]
    everything = (1.0 + np.arange(6 * n)).reshape(-1, 3)
    np.testing.assert_allclose(got, 1 + 2 * everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(common_utils.get_metrics(metrics)["total"], [everything.sum()] * 2)
    keys = common_utils.shard_prng_key(jaxmpi.rank_key(jax.random.key(0)))
    data = jaxmpi.pmap(lambda k: lax.all_gather(jax.random.key_data(k), "i"), "i")(keys)
    assert len(np.unique(np.asarray(data)[0], axis=0)) == n


@run_ranks(1, 2)
def test_branches_on_equal_arguments():
    """A branch with a collective may depend on arguments without an axis.

    Also on those that `replicated_argnums` names.
    """

    def f(x, often, state):
        x = lax.cond(often, lambda x: lax.pmean(x, "i"), lambda x: x, x)
        return lax.cond(state > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)

    n, x = jaxmpi.size(), jnp.asarray([jaxmpi.rank() + 1.0])
    mapped = jaxmpi.pmap(f, "i", in_axes=(0, None, 0), replicated_argnums=2)
    np.testing.assert_allclose(mapped(x, True, jnp.ones(1)), [n * (n + 1) / 2])
    if n > 1:
        with pytest.raises(ValueError, match=r"cond at .* contains a collective"):
            jaxmpi.pmap(f, "i", in_axes=(0, None, 0))(x, True, jnp.ones(1))
        with pytest.raises(jaxmpi.RankMismatchError, match="argument 1"):
            jaxmpi.pmap(lambda x, y: lax.psum(x * y, "i"), "i", in_axes=(0, None))(
                x, np.float32(jaxmpi.rank())
            )


@run_ranks(1, 2)
@pytest.mark.parametrize(
    "in_axes", [(0, {"often": None, "y": 0}), (0, [None, 0]), (0, jaxmpi.PerRankState(0), None)]
)
def test_pmap_in_axes_none_below_the_top_is_replicated(in_axes):
    """A branch with a collective may depend on a leaf without an axis, which is compared.

    Its neighbor with an axis is per rank.
    """
    n, x = jaxmpi.size(), jnp.asarray([jaxmpi.rank() + 1.0])

    def f(x, *flags):
        often, y = jax.tree.leaves(flags)[::-1] if len(flags) == 2 else jax.tree.leaves(flags[0])
        return y + lax.cond(often > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)

    def arguments(often):
        tree = in_axes[1]
        if len(in_axes) == 3:
            return jaxmpi.PerRankState(10 * x), often
        return (
            jax.tree.map(
                lambda axis: often if axis is None else 10 * x,
                tree,
                is_leaf=lambda axis: axis is None,
            ),
        )

    mapped = jaxmpi.pmap(f, "i", in_axes=in_axes)
    np.testing.assert_allclose(mapped(x, *arguments(np.float32(1))), n * (n + 1) / 2 + 10 * x)
    if n > 1:
        added = jaxmpi.pmap(lambda x, *flags: lax.psum(x, "i") + f(x, *flags), "i", in_axes=in_axes)
        with pytest.raises(
            jaxmpi.RankMismatchError,
            match=r"argument [12].* is named in replicated_argnums, and rank 1",
        ):
            added(x, *arguments(np.float32(1 + jaxmpi.rank())))


def test_the_axes_of_a_pmap_are_looked_through_once(monkeypatch):
    """Else its time is quadratic in the number of arrays."""
    looked = []

    def flatten(tree, **options):
        looked.append(tree)
        return flatten_with_path(tree, **options)

    monkeypatch.setattr(pmap_file, "flatten_with_path", flatten)
    tree = {f"w{i}": jnp.full((1, 2), i) for i in range(20)}
    ins, outs = dict.fromkeys(tree, 0), dict.fromkeys(tree, 0)
    ins["w3"] = outs["w3"] = None
    with jaxmpi.simulate(2):
        jaxmpi.pmap(lambda t: t, in_axes=(ins,), out_axes=outs).lower(tree)
    assert 1 <= len(looked) <= 2


@run_ranks(1, 2)
def test_pmap_in_axes_none_for_all_arguments_is_replicated():
    def f(often, x):
        return lax.cond(often > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)[None]

    n = jaxmpi.size()
    np.testing.assert_allclose(
        jaxmpi.pmap(f, "i", in_axes=None, out_axes=None)(np.float32(1), np.float32(3)), [3.0 * n]
    )
    if n > 1:  # an argument by name has an axis
        with pytest.raises(ValueError, match=r"cond at .* contains a collective"):
            jaxmpi.pmap(f, "i", in_axes=None)(x=np.float32([3]), often=np.float32([1]))


def test_an_error_of_the_analysis_names_pmap():
    def f(x):
        return lax.cond(x.sum() > 0, lambda x: lax.psum(x, jaxmpi.AXIS), lambda x: x, x)

    with (
        jaxmpi.simulate(2),
        pytest.raises(ValueError, match=r"^jaxmpi\.pmap: cond at .* contains a collective"),
    ):
        jaxmpi.pmap(f)(jnp.ones((1, 3)))


OUT_AXES_WITH_NONE = {
    "all": (lambda x: x, None, "the output"),
    "in a tuple": (lambda x: (x, x), (0, None), r"output \[1\]"),
    "in a dict": (lambda x: {"x": x, "y": x}, {"x": None, "y": 0}, r"output \['x'\]"),
    "in a dict in a tuple": (lambda x: (x, {"x": x}), (0, {"x": None}), r"output \[1\]\['x'\]"),
    "above a dict": (lambda x: (x, {"x": x}), (0, None), r"output \[1\]\['x'\]"),
    "in a list": (lambda x: [x, x], [0, None], r"output \[1\]"),
}


@run_ranks(1, 2)
@pytest.mark.parametrize("name", OUT_AXES_WITH_NONE)
def test_pmap_out_axes_none_is_equal_on_all_ranks(name):
    make, out_axes, output = OUT_AXES_WITH_NONE[name]
    n, x = jaxmpi.size(), jnp.asarray([jaxmpi.rank() + 1.0])
    equal = jaxmpi.pmap(lambda x: make(lax.psum(x, "i")), "i", out_axes=out_axes)(x)
    for leaf in jax.tree.leaves(equal):
        np.testing.assert_array_equal(leaf.reshape(-1), [n * (n + 1) / 2])
    if n > 1:
        with pytest.raises(
            ValueError,
            match=rf"^jaxmpi\.pmap: {output} of <lambda> is declared replicated but may differ",
        ):
            jaxmpi.pmap(lambda x: make(x), "i", out_axes=out_axes)(x)


# errors


def refused(error, match, call):
    with pytest.raises(error, match=match) as raised:
        call()
    assert len(re.findall(r"[.?] [A-Z]", str(raised.value))) <= 1, raised.value  # two sentences


@run_ranks(1, 2)
def test_errors():
    n, x = jaxmpi.size(), jnp.ones((1, 3))

    def update(x, y=0.0):
        return x

    def of(*args, **options):
        return lambda: jaxmpi.pmap(update, **options)(*args)

    rows = r"pmap: argument 0\['image'\] of update has shape \[{}\], and axis 0 must be 1.*{}"
    refused(
        ValueError,
        rows.format("7, 3", r"jaxmpi\.shard\(x\)\[:\]\[None\]"),
        of({"image": jnp.ones((7, 3))}),
    )
    refused(ValueError, rows.format("", "replicate"), of({"image": 1.0}))
    if n > 1:
        refused(
            ValueError,
            rows.format("2, 3", r"x\[jaxmpi\.rank\(\)\]\[None\]"),
            of({"image": jnp.ones((2, 3))}),
        )
        text = (
            r"^jaxmpi\.pmap: the output of update is declared replicated but may differ across "
            r"ranks\. .* axis in out_axes"
        )
        refused(ValueError, text, of(x, out_axes=None))
        refused(TypeError, r"^jaxmpi\.pmap: argument 0 of update is a str, and no array", of("x"))
    refused(
        ValueError,
        r"argument 0 of update has shape \[1, 3\], and axis 1 must be 1",
        of(x, in_axes=1),
    )
    refused(
        ValueError, "in_axes .* are 3 axes, and update got 1 positional", of(x, in_axes=(0, 0, 0))
    )
    refused(
        ValueError,
        "in_axes of argument 0 of update, .* do not have the structure",
        of(x, in_axes=({"a": 0},)),
    )
    refused(TypeError, "in_axes of argument 0 of update has 'x'", of(x, in_axes="x"))
    refused(ValueError, "out_axes of update, .* do not have the structure", of(x, out_axes=(0, 0)))
    refused(
        ValueError, r"out_axes of update is 3 for the output, of shape \[3\]", of(x, out_axes=3)
    )
    refused(ValueError, f"axis_size is 7, and the number of ranks is {n}", of(x, axis_size=7))
    refused(ValueError, "devices are", of(x, devices=[]))
    refused(TypeError, "axis_name is 3, of type int", of(x, axis_name=3))
    refused(TypeError, "fun is a int", lambda: jaxmpi.pmap(3))
    for name, has in (("i", "has axis_name 'i'"), (None, "has no axis_name")):
        with pytest.raises(
            NameError, match=f"psum at .* is over the axis 'k', and the pmap of <lambda> {has}"
        ):
            jaxmpi.pmap(lambda x: lax.psum(x, "k"), name)(x)
    for options in (
        {"axis_size": n},
        {"devices": jax.devices()},
        {"devices": jax.local_devices()},
        {"backend": "cpu"},
    ):
        np.testing.assert_array_equal(jaxmpi.pmap(update, **options)(x), x)


@run_ranks(2, axes={"island": 2})
def test_names_of_axes_are_taken():
    with pytest.raises(
        ValueError,
        match=r"axis_name 'island' is an axis of jaxmpi.init\(axes=...\), of 2 of 2 ranks",
    ):
        jaxmpi.pmap(lambda x: x, "island")(jnp.ones(1))
    over_both = jaxmpi.pmap(lambda x: lax.psum(x, "i") + lax.psum(x, "island"), "i")
    np.testing.assert_allclose(over_both(jnp.asarray([jaxmpi.rank() + 1.0])), [6.0])


@run_ranks(1, 2)
def test_changes_of_nnx_objects_are_not_lost():
    model = jax.tree.map(lambda x: x[None], nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"jaxmpi\.pmap: <lambda> changes argument 0.*in place"):
        jaxmpi.pmap(lambda model, x: model(x), "i")(model, jnp.ones((1, 2, 3)))


def test_devices_that_a_flag_makes():
    """A rank that has several devices is told why."""
    code = """
import jax, jaxmpi
jaxmpi.init()
jaxmpi.pmap(lambda x: x)(jax.numpy.ones((jax.local_device_count(), 2)))
"""
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert (
        "JAX has 3 devices here: start without --xla_force_host_platform_device_count"
        in done.stderr
    )


# a jax.pmap that was left


made_before = jax.pmap(lambda x: lax.pmean(x, "i"), "i")  # as in a library, or as a decorator


@run_ranks(1, 2)
def test_a_leftover_pmap_is_noticed():
    """A leftover `jax.pmap` gives one note for each calling line, on rank 0.

    The pmap may be made before init or after. One rank alone gets no note.
    """
    x = jnp.asarray([jaxmpi.rank() + 1.0])
    functions = {
        "before": made_before,
        "after": jax.pmap(lambda x: x),
        "nnx": nnx.pmap(lambda x: x),
    }
    for name, function in functions.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                function(x)
        texts = [str(warning.message) for warning in said if "pmap" in str(warning.message)]
        first_line = name == "before"  # it is the same line for all three
        if jaxmpi.size() > 1 and jaxmpi.rank() == 0 and first_line:
            (text,) = texts
            assert re.match(
                r"jax.pmap, called at test_pmap.py:\d+, maps over the device of this rank alone: "
                r".* 2 ranks",
                text,
            )
            assert "jaxmpi.pmap" in text
            assert said[0].filename == __file__
        else:
            assert not texts


@run_ranks(2)
def test_a_leftover_pmap_is_noticed_wherever_it_was_made():
    said = []
    for make in (lambda: made_before, lambda: jax.pmap(lambda x: x), lambda: nnx.pmap(lambda x: x)):
        function = make()
        session._session.pmaps.clear()
        with warnings.catch_warnings(record=True) as of_this:
            warnings.simplefilter("always")
            function(jnp.ones(1))
        said.append(len([warning for warning in of_this if "jax.pmap" in str(warning.message)]))
    assert said == [1 - jaxmpi.rank()] * 3


@run_ranks(2)
def test_a_leftover_pmap_may_be_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "jax.pmap")
        jax.pmap(lambda x: x)(jnp.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "jax.pmap", module=re.escape(__name__))
        jax.pmap(lambda x: x)(jnp.ones(1))


@pytest.mark.slow
@run_ranks(2, backend="xla")
def test_a_pmap_on_xla_is_over_the_ranks():
    """JAX knows of all processes there: nothing is said, and its collectives reach them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = made_before(jnp.asarray([jaxmpi.rank() + 1.0]))
    np.testing.assert_allclose(got, [1.5])


def test_a_leftover_pmap_beside_simulated_ranks():
    with jaxmpi.simulate(1):
        made_before(jnp.ones(1))
    with jaxmpi.simulate(3), pytest.warns(UserWarning, match="jax.pmap, called at test_pmap.py"):
        made_before(jnp.ones(1))
    made_before(jnp.ones(1))  # outside of it nothing is said


# the same rows on all ranks


def said_of(step, *args):
    """Return the notes of rank 0 on a first call, once all ranks' messages have come."""
    monitor, lines = session.monitor(), []
    said, monitor.say = monitor.say, lines.append
    try:
        step(*args)
        jaxmpi.barrier()
        deadline = time.monotonic() + 5
        while monitor.gathering._messages and time.monotonic() < deadline:
            time.sleep(0.02)
        jaxmpi.barrier()
    finally:
        monitor.say = said
    return lines


@run_ranks(2, 3)
def test_the_same_rows_on_all_ranks_are_noticed():
    """Equal train-step arguments on all ranks give a note.

    There is none where rows, keys or state differ, or rows are taken by rank.
    """
    n, r = jaxmpi.size(), jaxmpi.rank()

    def train(state, batch):
        g = lax.pmean(jax.grad(lambda w: jnp.mean((batch["x"] * w) ** 2))(state["w"]), "i")
        return {"w": state["w"] - 0.1 * g}, lax.pmean(batch["x"].sum(), "i")

    def by_number(state, batch):
        return train(state, {"x": batch["x"] * lax.axis_index("i")})

    def evaluate(state, batch):
        return lax.pmean((batch["x"] * state["w"]).sum(), "i")

    state = {"w": jnp.ones((1, 2))}
    same, mine = {"x": jnp.ones((1, 4, 2))}, {"x": jnp.full((1, 4, 2), r + 1.0)}
    each = {"w": jnp.full((1, 2), r + 1.0)}
    found = said_of(jaxmpi.pmap(train, "i"), state, same)
    if r == 0:
        (text,) = found
        assert (
            f"train: all {n} ranks have called this pmap with equal arguments, "
            "such as argument 1['x']: float32[1, 4, 2]" in text
        )
    for fun, *args in (
        (train, state, mine),
        (by_number, state, same),
        (evaluate, state, same),
    ):
        assert not said_of(jaxmpi.pmap(fun, "i"), *args)
    # which is an error otherwise
    assert not said_of(jaxmpi.pmap(train, "i", allow="unequal_start"), each, same)
    assert not said_of(jaxmpi.pmap(lambda x: lax.pmean(x, "i"), "i"), state)
    # jaxmpi.jit is no pmap
    assert not said_of(jaxmpi.jit(lambda s, b: (s, lax.pmean(b, jaxmpi.AXIS))), state, same)
