"""`jaxmpi.jit` as a `jax.jit`, and what it refuses."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmpi
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
X = np.arange(4, dtype=np.float32)


# what jax.jit takes


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_static_arguments_by_position_and_name():
    @partial(jaxmpi.jit, static_argnames=("scale", "names"))
    def step(x, scale, names=("a",)):
        assert isinstance(scale, int) and isinstance(names, tuple)
        return {name: lax.psum(x, R) * scale for name in names}

    n = jaxmpi.size()
    np.testing.assert_array_equal(step(X, 2)["a"], X * n * 2)
    np.testing.assert_array_equal(step(X, 3)["a"], X * n * 3)
    assert sorted(step(X, scale=2, names=("b", "c"))) == ["b", "c"]
    by_number = jaxmpi.jit(lambda scale, x: lax.psum(x, R) * scale, static_argnums=0)
    np.testing.assert_array_equal(by_number(5, X), X * n * 5)


@pytest.mark.slow
@run_ranks(1, 2)
def test_keywords_of_any_name():
    step = jaxmpi.jit(lambda x, *, hide, program=1: lax.psum(x, R) * hide * program)
    np.testing.assert_array_equal(step(X, hide=2, program=3), X * 6 * jaxmpi.size())


def scaled(scale, x):
    return lax.psum(x, R) * scale


@run_ranks(2)
def test_a_partial_is_called_by_its_functions_name():
    twice = jaxmpi.jit(partial(partial(scaled), 2))
    np.testing.assert_array_equal(twice(X), X * 4)
    assert repr(jaxmpi.explain(twice, X)).startswith("scaled on 2 ranks")
    with pytest.raises(TypeError, match=r"argument 0 of scaled is a str"):
        twice("text")
    with pytest.raises(jaxmpi.RankMismatchError, match=r"scaled: rank 0 and rank 1 do not agree"):
        jaxmpi.jit(partial(scaled, 2))(X if jaxmpi.rank() else X[:2])


class Model:
    scale = 2

    @partial(jaxmpi.jit, static_argnums=0)
    def total(self, x):
        return lax.psum(x, R) * self.scale


@run_ranks(1, 2)
def test_methods():
    np.testing.assert_array_equal(Model().total(X), X * 2 * jaxmpi.size())


@run_ranks(1, 2)
def test_donated_arguments_are_gone():
    step = jaxmpi.jit(lambda state, x: (state + lax.pmean(x, R), lax.psum(x, R)), donate_argnums=0)
    state = jnp.zeros(4)
    for _ in range(3):
        before = state
        state, _ = step(state, X)
        assert before.is_deleted()
    np.testing.assert_array_equal(state, 3 * X)


@run_ranks(1, 2, 3)
def test_a_second_call_compiles_nothing():
    traced = []

    @jaxmpi.jit
    def step(state, x):
        traced.append(1)
        return state + lax.pmean(x, R), lax.pmax(x, R)

    state = jnp.zeros(4)
    for _ in range(5):
        state, _ = step(state, X)
    assert len(traced) <= 2  # once for each, the zeros and what came out
    with jax.log_compiles(False):
        count = len(traced)
        for _ in range(3):
            state, _ = step(state, X)
        assert len(traced) == count


@run_ranks(1, 2)
def test_arguments_of_every_kind():
    """NumPy arrays, Python numbers, keys, None and static structure."""
    n = jaxmpi.size()

    @jaxmpi.jit
    def step(tree, lr, *, key, flag):
        assert tree["none"] is None
        return {
            "w": tree["w"] - lr * lax.pmean(tree["w"], R),
            "key": key,
            "flag": lax.pmax(flag.astype(jnp.int32), R),
        }

    out = step({"w": np.ones(3), "none": None}, 0.5, key=jax.random.key(1), flag=True)
    np.testing.assert_array_equal(out["w"], np.full(3, 0.5))
    assert out["key"] == jax.random.key(1) and int(out["flag"]) == 1
    out = step({"w": np.float32(2.0), "none": None}, 1, key=jax.random.key(1), flag=False)
    assert float(out["w"]) == 0.0
    assert n == jaxmpi.size()


@run_ranks(2)
def test_captured_arrays_may_differ_between_ranks():
    mine = jnp.full(3, jaxmpi.rank() + 1.0)
    np.testing.assert_array_equal(
        jaxmpi.jit(lambda: jaxmpi.tree_allreduce(mine, "sum"))(), np.full(3, 3.0)
    )
    np.testing.assert_array_equal(jaxmpi.jit(lambda: lax.psum(mine * 2, R))(), np.full(3, 6.0))


@run_ranks(2, 3)
def test_captured_arrays_are_compared_where_they_must_be_equal():
    """Captured arrays are compared if a replicated output or a branch needs them equal.

    The branch has a collective, and its condition depends on them.
    """
    table = jnp.arange(4.0)

    def scaled(p, x):
        return lax.cond(table[1] > 0, lambda: p * table + lax.pmean(x, R), lambda: p)

    options = {"replicated_argnums": 0, "replicated_outnums": 0}
    mean = (jaxmpi.size() - 1) / 2
    np.testing.assert_allclose(
        jaxmpi.jit(scaled, **options)(X, X * jaxmpi.rank()), X * np.arange(4.0) + X * mean
    )
    table = jnp.arange(4.0) + (jaxmpi.rank() == 1)
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"an array from outside: float32\[4\] with digest"
    ):
        jaxmpi.jit(scaled, **options)(X, X)
    with pytest.raises(ValueError, match=r"output .* may differ"):  # which they cannot mend
        jaxmpi.jit(lambda p, x: p * table + lax.pmean(x, R) + x, **options)(X, X)
    with pytest.raises(
        ValueError, match=r"output .* may differ .* make it an argument"
    ):  # nothing is sent to compare them with
        jaxmpi.jit(lambda p: p * table, **options)(X)


@run_ranks(2, 3)
def test_arrays_that_an_inner_jit_has_captured_are_compared_as_well():
    table = jnp.arange(4.0) + (jaxmpi.rank() == 1)
    inner = jax.jit(lambda p: p * table)
    options = {"replicated_argnums": 0, "replicated_outnums": 0}
    with pytest.raises(
        jaxmpi.RankMismatchError, match=r"an array from outside: float32\[4\] with digest"
    ):
        jaxmpi.jit(lambda p, x: inner(p) + lax.pmean(x, R), **options)(X, X)
    with pytest.raises(ValueError, match=r"output .* may differ .* make it an argument"):
        jaxmpi.jit(lambda p: inner(p), **options)(X)


@run_ranks(2)
def test_an_argument_that_is_named_by_its_position_may_be_passed_by_name():
    def step(x, p):
        return p - lax.pmean(x, R)

    jitted = jaxmpi.jit(step, replicated_argnums=1, replicated_outnums=0)
    np.testing.assert_allclose(jitted(X * jaxmpi.rank(), p=X), X / 2)
    with pytest.raises(ValueError, match=r"has 1, and the arguments of .* are 1"):
        jaxmpi.jit(lambda x: x, replicated_argnums=1).lower(X)


@pytest.mark.slow
@run_ranks(1, 2, 3)
def test_a_jit_inside_of_a_jit():
    inner = jaxmpi.jit(lambda x: lax.psum(x, R))
    np.testing.assert_array_equal(jaxmpi.jit(inner)(X), X * jaxmpi.size())
    outer = jaxmpi.jit(lambda x: inner(x) + jax.jit(inner)(2 * x))
    np.testing.assert_array_equal(outer(X), 3 * X * jaxmpi.size())


@run_ranks(1, 2, 3)
def test_transformations_around_it():
    """The effect stays outside, so the order is kept; derivatives follow the same convention."""
    n = jaxmpi.size()
    step = jaxmpi.jit(lambda x: jnp.sum(lax.psum(x, R) ** 2))
    total = n * X
    np.testing.assert_allclose(jax.grad(step)(X), 2 * n * total)
    np.testing.assert_allclose(jax.jit(jax.grad(step))(X), 2 * n * total)
    np.testing.assert_allclose(
        jax.vmap(step)(np.stack([X, 2 * X])), [np.sum(total**2), 4 * np.sum(total**2)]
    )
    np.testing.assert_allclose(jax.jit(lambda x: step(x) + step(2 * x))(X), 5 * np.sum(total**2))


@run_ranks(2, 3)
def test_a_function_without_outputs_still_communicates():
    """The module must contain the call, in order, though nothing shows it outside."""
    step = jaxmpi.jit(lambda x: jax.debug.callback(lambda _: None, lax.psum(x, R)))
    assert step(X) is None
    silent = jaxmpi.jit(lambda x: (lax.psum(x, R), None)[1])
    assert silent(X) is None
    np.testing.assert_array_equal(jaxmpi.jit(lambda x: lax.psum(x, R))(X), X * jaxmpi.size())


@run_ranks(1, 2, 3)
def test_callbacks_inside_keep_their_order():
    seen = []

    @jaxmpi.jit
    def step(x):
        for k in range(4):
            total = lax.psum(x * (k + 1), R)
            jax.experimental.io_callback(
                lambda y: seen.append(float(y[1])), None, total, ordered=True
            )
        return total

    for _ in range(3):
        jax.block_until_ready(step(X))
    jax.effects_barrier()
    assert seen == [float(jaxmpi.size() * (k + 1)) for k in range(4)] * 3


@run_ranks(2, 3)
def test_pure_callbacks_and_prints(capfd=None):
    @jaxmpi.jit
    def step(x):
        y = jax.pure_callback(
            lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((4,), np.float32), lax.psum(x, R)
        )
        jax.debug.print("{}", y[0])
        return lax.pmean(y, R)

    np.testing.assert_array_equal(step(X), 2 * X * jaxmpi.size())


@run_ranks(2)
def test_all_of_a_tree_travels_together():
    """161 gradients and a loss: one call, and as many messages as explain says."""
    tree = {str(i): np.ones(3 + i % 5, np.float32) for i in range(161)}
    step = jaxmpi.jit(
        lambda tree, loss: (jax.tree.map(lambda x: lax.pmean(x, R), tree), lax.pmean(loss, R))
    )
    plan = jaxmpi.explain(step, tree, 1.0)
    assert len(plan.entries) == 1 and len(plan.entries[0].arrays) == 162
    text = step.lower(tree, 1.0).as_text()
    assert text.count("custom_call @") == plan.messages == 1


@run_ranks(2, 3)
def test_the_messages_of_every_collective_are_those_of_explain():
    x = np.ones((jaxmpi.size(), 3), np.float32)

    @jaxmpi.jit
    def step(x):
        parts = (
            lax.psum(x, R),
            lax.pmax(x, R),
            lax.all_gather(x, R),
            lax.psum_scatter(x, R),
            lax.all_to_all(x, R, 0, 0),
        )
        return (
            *parts,
            lax.ppermute(x, R, [(0, 1)]),
            lax.psum(x.astype(jnp.bfloat16), R),
            lax.psum(np.ones(50_000), R),
        )

    plan = jaxmpi.explain(step, x)
    assert len(re.findall("custom_call @(?!jaxmpi_rank)", step.lower(x).as_text())) == plan.messages


@run_ranks(1, 2)
def test_explain_counts_bytes_and_loops():
    def body(c, row):
        return c + lax.psum(row, R), None

    plan = jaxmpi.explain(
        lambda x: lax.scan(body, jnp.zeros(10), x)[0], np.ones((7, 10), np.float32)
    )
    if jaxmpi.size() == 1:
        assert plan.entries == [] and plan.messages == 0 and "nothing is sent" in plan.text
        return
    (entry,) = plan.entries
    assert entry.path == "scan[7]" and entry.times == 7 and plan.messages == 7
    assert plan.sent_bytes == 7 * 40 and entry.source[0].startswith("test_jit_features.py:")
    assert "allreduce sum" in plan.text and "seconds" in plan.text


@run_ranks(2)
def test_explain_of_a_branch_is_open():
    plan = jaxmpi.explain(
        lambda x: lax.cond(lax.psum(x, R) > 0, lambda: lax.pmax(x, R), lambda: x), 1.0
    )
    assert plan.messages is None and [entry.path for entry in plan.entries] == ["", "cond:1"]


@pytest.mark.slow
def test_explain_at_first_compile_on_request(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, jaxmpi\njaxmpi.init()\nstep = jaxmpi.jit(lambda x: jax.lax.psum(x, "
        "'ranks'))\nstep(1.0)\nstep(2.0)"
    )
    command = [sys.executable, "-m", "jaxmpi", "run", "-n", "2", str(script)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "JAXMPI_EXPLAIN": "1"},
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr.count("<lambda> on 2 ranks (mpi):") == 1, (
        done.stderr
    )


# size 1


def optax_step(optimizer):
    def step(params, state, x):
        def loss(p):
            return jnp.mean((x @ p["w"] + p["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def test_at_size_1_the_jaxpr_is_that_of_plain_optax():
    jaxmpi.init()
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    plain, ours = optax.adamw(1e-3), jaxmpi.distributed(optax.adamw(1e-3))
    state, x = plain.init(params), jnp.ones((4, 3))
    want = jax.make_jaxpr(jax.jit(optax_step(plain)))(params, state, x)
    got = jax.make_jaxpr(jaxmpi.jit(optax_step(ours)))(params, ours.init(params), x)
    assert str(got) == str(want)
    assert "psum" not in str(jax.make_jaxpr(jaxmpi.jit(lambda x: lax.pmean(x, R)))(x))


# what is refused, and what is warned of


def simulated(fun, *args, n=2, **kwargs):
    with jaxmpi.simulate(n):
        return jaxmpi.jit(fun, **kwargs)(*args)


def test_a_collective_in_a_branch_that_not_all_ranks_take():
    def fun(x):
        return lax.cond(jnp.sum(x) > 0, lambda: lax.psum(x, R), lambda: x)

    with pytest.raises(
        ValueError,
        match=r"cond at test_jit_features.py:\d+ contains a collective "
        r"\(psum at test_jit_features.py",
    ):
        simulated(fun, X)
    simulated(
        lambda p, x: lax.cond(p > 0, lambda: lax.psum(x, R), lambda: x),
        1.0,
        X,
        replicated_argnums=0,
    )
    with pytest.raises(ValueError, match="which branch is taken may differ"):
        simulated(
            lambda x: lax.switch(lax.axis_index(R), [lambda: lax.psum(x, R), lambda: x]),
            X,
            replicated_argnums=0,
        )
    simulated(lambda x: lax.cond(lax.pmax(jnp.sum(x), R) > 0, lambda: lax.psum(x, R), lambda: x), X)


def test_a_collective_in_a_loop_of_different_lengths():
    def fun(x):
        return lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y + lax.pmean(x, R) + y, x)

    with pytest.raises(
        ValueError,
        match=r"while_loop at test_jit_features.py:\d+ .* whether the loop goes on may differ",
    ):
        simulated(fun, X)


SOLVER = """
from jax import lax

def solve(fun, x):
    return lax.while_loop(lambda y: y.sum() < 100, fun, x)

def solve_together(x):
    return solve(lambda y: lax.pmean(y, "ranks") + 1, x)

def solve_each(xs):
    return lax.map(solve_together, xs)
"""


def test_a_refused_loop_of_a_library_names_the_users_line_beside_it(tmp_path, monkeypatch):
    library = tmp_path / "site-packages" / "some_solver.py"
    library.parent.mkdir()
    library.write_text(SOLVER)
    monkeypatch.syspath_prepend(library.parent)
    solver, frame = importlib.import_module("some_solver"), inspect.currentframe()
    line = frame.f_lineno
    cases = {
        line + 2: lambda x: solver.solve(lambda y: lax.pmean(y, R) + 1, x),
        line + 3: lambda x: solver.solve_together(x),
    }
    for number, fun in cases.items():
        loop = (
            f"while_loop at some_solver.py:5 called from test_jit_features.py:{number} "
            r"contains a collective \(psum at "
        )
        with pytest.raises(ValueError, match=loop):
            simulated(fun, X)
    # JAX does not know what calls the loop around this one.
    with pytest.raises(
        ValueError,
        match=r"while_loop at some_solver.py:5 called from test_jit_features.py:\d+ contains",
    ):
        simulated(lambda xs: solver.solve_each(xs), jnp.stack([X, X]))


@run_ranks(2)
def test_refusals_are_raised_on_every_rank():
    with pytest.raises(ValueError, match="which branch is taken may differ"):
        jaxmpi.jit(lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, R), lambda: x))(X)
    jaxmpi.barrier()


def sgd(average):
    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean((x * p["w"] + p["b"]) ** 2))(params)
        if average:
            grads["w"] = lax.pmean(grads["w"], R)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jnp.mean(x)

    return step


def test_a_forgotten_mean_is_found():
    params = {"w": jnp.ones(4), "b": jnp.ones(4)}
    with pytest.raises(
        ValueError,
        match=r"^jaxmpi\.jit: output \[0\]\['b'\] of step is declared replicated "
        "but may differ across ranks",
    ):
        simulated(sgd(average=True), params, X, replicated_argnums=0, replicated_outnums=0)
    with pytest.raises(ValueError, match=r"output \[0\]\['"):
        # nobody said that the parameters are equal
        simulated(sgd(average=True), params, X, replicated_outnums=(0,))
    assert simulated(sgd(average=False), params, X)  # nobody asked
    optimizer = jaxmpi.distributed(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    step, both = optax_step(optimizer), {"replicated_argnums": (0, 1), "replicated_outnums": (0, 1)}
    simulated(step, params, optimizer.init(params), X[None], **both)


def test_a_mean_too_many_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"averaged at test_jit_features.py:\d+ is equal on all ranks already"
    ):
        simulated(lambda x: lax.pmean(lax.pmean(x, R), R), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulated(lambda x: lax.pmean(x, R) / lax.psum(1.0, R), X)
        simulated(jax.grad(lambda x: lax.pmean(jnp.sum(jnp.tanh(lax.pmean(x, R)) * x), R)), X)


def test_what_is_not_known_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"psum at test_jit_features.py:\d+ has axis_index_groups \[\[0\]\] on \d ranks",
    ):
        simulated(lambda x: lax.psum(x, R, axis_index_groups=[[0]]), X)

    def ragged(x):
        counts = jnp.ones(lax.axis_size(R), jnp.int32)
        return lax.ragged_all_to_all(x, x, counts, counts, counts, counts, axis_name=R)

    with pytest.raises(
        NotImplementedError,
        match=r"ragged_all_to_all at test_jit_features.py:\d+ communicates over 'ranks'"
        r"(.|\n)*Move the",
    ):
        simulated(ragged, X)


@run_ranks(2)
def test_what_is_no_array_is_refused_by_name():
    with pytest.raises(
        TypeError,
        match=r"argument 0\['name'\] of <lambda> is a str, and no array or number. "
        "Name the argument",
    ):
        jaxmpi.jit(lambda batch: batch)({"x": X, "name": "a"})


def test_before_init():
    code = "import jaxmpi; jaxmpi.jit(lambda x: x)(1.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NotInitializedError: jaxmpi.jit was called before jaxmpi.init()" in done.stderr


@run_ranks(2, backend="xla")
def test_xla_under_plain_jit_says_what_to_use():
    with pytest.raises(RuntimeError, match=r"Use jaxmpi\.jit instead of jax\.jit"):
        jax.jit(jaxmpi.tree_allreduce)(X)
    with pytest.raises(RuntimeError, match=r"Put the transformation inside of the jaxmpi\.jit"):
        jax.grad(jaxmpi.jit(lambda x: jnp.sum(lax.psum(x, R))))(X)
    # eager calls are programs of their own
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(X, "sum"), X * 2)


def global_array(spec):
    """An array of [4, 3] ones over the devices of all processes, as a library would make it."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    return jax.jit(lambda: jnp.ones((4, 3)), out_shardings=NamedSharding(mesh, spec))()


@run_ranks(2, backend="xla")
def test_xla_takes_a_librarys_global_array_where_each_rank_has_the_whole():
    total = jaxmpi.jit(lambda x: lax.psum(x["field"].sum(), R))
    assert float(total({"field": global_array(PartitionSpec())})) == 24
    for call in (total, total.lower, lambda x: jaxmpi.explain(total, x)):
        with pytest.raises(
            ValueError,
            match=r"argument 0\['field'\] of <lambda> is a global array of shape \[4, 3\]",
        ):
            call({"field": global_array(PartitionSpec("x"))})
    with pytest.raises(ValueError, match=r"argument 0\['w'\] of tree_allreduce is a global array"):
        jaxmpi.tree_allreduce({"w": global_array(PartitionSpec("x"))})
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(X, "sum"), X * 2)


@run_ranks(1, 2)
def test_shapes_stand_for_arrays_where_nothing_runs():
    shapes_stand_for_arrays()


@run_ranks(2, backend="xla")
def test_shapes_stand_for_arrays_where_nothing_runs_on_xla():
    shapes_stand_for_arrays()


def shapes_stand_for_arrays():
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    step = jaxmpi.jit(lambda x, how: lax.psum(x, R) if how == "sum" else x, static_argnums=1)
    assert step.eval_shape(struct, "sum") == struct
    np.testing.assert_array_equal(step.lower(struct, "sum").compile()(X), X * jaxmpi.size())
    np.testing.assert_array_equal(step.trace(struct, "sum").lower().compile()(X), X * jaxmpi.size())
    plan = jaxmpi.explain(jaxmpi.jit(lambda x: lax.psum(x, R)), struct)
    assert plan.messages == (jaxmpi.size() > 1)


OUTSIDE = X + 1


def uses_a_reference(reference, x):
    reference[...] = reference[...] + 1
    return lax.psum(x, R)


def prints_in_order(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return lax.psum(x, R)


def prints_in_a_loop(x):
    return lax.fori_loop(0, 2, lambda _, x: prints_in_order(x), x)


@run_ranks(2, backend="xla")
def test_xla_refuses_what_jax_does_on_one_device_only():
    reference = jax.new_ref(jnp.asarray(OUTSIDE))
    with pytest.raises(
        NotImplementedError,
        match=r"reference from outside is used at test_jit_features\.py:\d+, which the xla",
    ):
        jaxmpi.jit(partial(uses_a_reference, reference))(X)
    with pytest.raises(TypeError, match=r"argument 0 of uses_a_reference is a reference"):
        jaxmpi.jit(uses_a_reference)(reference, X)
    for function in (prints_in_order, prints_in_a_loop):
        with pytest.raises(
            NotImplementedError,
            match=r"ordered=True at test_jit_features\.py:\d+.*Pass ordered=False",
        ):
            jaxmpi.jit(function)(X)
    np.testing.assert_array_equal(jaxmpi.tree_allreduce(X, "sum"), X * 2)


@run_ranks(2, backend="xla")
def test_xla_gives_back_what_can_be_printed_saved_and_fed_back(tmp=None):
    rank = jaxmpi.rank()
    step = jaxmpi.jit(lambda state, x: ({"w": state["w"] + lax.pmean(x, R)}, x * 2))
    state = {"w": jnp.zeros(4)}
    for _ in range(3):
        state, mine = step(state, X + rank)
    np.testing.assert_array_equal(state["w"], 3 * (X + 0.5))
    np.testing.assert_array_equal(mine, 2 * (X + rank))  # each rank its own
    assert f"{2.0 * rank:g}" in str(mine) and float(mine[0]) == 2 * rank
    local = jaxmpi.local(state)
    assert len(local["w"].devices()) == 1
    np.testing.assert_array_equal(
        local["w"] + jax.device_put(X, jax.local_devices()[0]), 3 * (X + 0.5) + X
    )
    np.testing.assert_array_equal(step(local, X)[0]["w"], 3 * (X + 0.5) + X)
    wrapped = jaxmpi._world.session.current("test").transport.arrays.wrap([state["w"]])
    assert wrapped[0] is state["w"]  # the state of a step passes as it is


@run_ranks(1, 2, 3)
def test_without_the_internals_it_is_slower_and_right():
    from jaxmpi._jaxcompat import ordered

    token_set, ordered.TokenSet = ordered.TokenSet, None
    try:
        step = jaxmpi.jit(lambda x: lax.psum(x, R))
        if jaxmpi.size() > 1:
            with pytest.warns(UserWarning, match="calls of programs are dispatched more slowly"):
                step(X)
            assert step.trace(X).jaxpr.effects
        np.testing.assert_array_equal(step(X), X * jaxmpi.size())
    finally:
        ordered.TokenSet = token_set


# simulated ranks


def test_simulated_ranks_share_what_is_equal():
    with jaxmpi.simulate(4) as world:
        assert (world.rank, world.size, world.backend) == (0, 4, "simulate")
        assert jaxmpi.init() is world
        params = jnp.ones(3)
        (batch,) = jaxmpi.batches(np.arange(8.0), 8)
        assert isinstance(batch, jaxmpi.PerRank) and np.asarray(batch).shape == (4, 2)
        step = jaxmpi.jit(lambda p, x: (p - lax.pmean(jnp.mean(x), R), jnp.mean(x)))
        params, loss = step(params, batch)
        assert params.shape == (3,)
        np.testing.assert_array_equal(np.asarray(loss), [0.5, 2.5, 4.5, 6.5])
        assert float(jaxmpi.average_metrics(loss)) == 3.5
        np.testing.assert_array_equal(jaxmpi.tree_allreduce(batch, "sum"), [12.0, 16.0])
        assert jaxmpi.allgather_object("a") == ["a"] * 4
        keys = jaxmpi.rank_key(jax.random.key(0))
        assert bool(keys[3] == jax.random.fold_in(jax.random.key(0), 3))
    with pytest.raises(ValueError, match="n is 0"), jaxmpi.simulate(0):
        pass


@run_ranks(2)
def test_simulation_needs_a_process_of_its_own():
    with pytest.raises(RuntimeError, match="one of 2 real ranks"), jaxmpi.simulate(2):
        pass


@run_ranks(2)
def test_shardings_are_refused_at_every_call():
    step = jaxmpi.jit(
        lambda x: x, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    for _ in range(2):
        with pytest.raises(
            NotImplementedError,
            match=r"jaxmpi.jit: out_shardings is not supported on several ranks",
        ):
            step(1.0)


DEBUG_NANS = """
import sys
import jax, jax.numpy as jnp, pytest
import jaxmpi
world = jaxmpi.init(sys.argv[1])
rank, size = world.rank, world.size
if size == 1:
    said = r"invalid value \\(nan\\) encountered in log"
else:
    said = r"^logs: an output on this rank has a NaN"
jax.config.update("jax_debug_nans", True)
for send in (lambda x: x, jaxmpi.tree_allreduce):

    def logs(x, send=send):
        return jnp.log(x), send(jnp.abs(x))

    step = jaxmpi.jit(logs)
    for _ in range(3):
        step(jnp.float32(1))
        if rank == size - 1:
            with pytest.raises(FloatingPointError, match=said):
                step(jnp.float32(-1))
        else:
            step(jnp.float32(1))
print("found", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks"), [("auto", 1), ("mpi", 2), ("mpi", 3), ("xla", 2)])
def test_debug_nans(tmp_path, backend, ranks):
    """A NaN in one rank's output is found in first and later calls, for any program.

    In processes of its own: after JAX has turned the search off for a while, as in `jnp.var`, the
    thread stays without it.
    """
    (tmp_path / "script.py").write_text(DEBUG_NANS)
    command = [
        os.path.join(os.path.dirname(sys.executable), "jaxmpi"),
        "run",
        "-n",
        str(ranks),
        str(tmp_path / "script.py"),
    ]
    done = subprocess.run([*command, backend], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("found") == ranks, done.stdout + done.stderr


@run_ranks(1, 2)
def test_values_of_simulated_ranks_are_refused_elsewhere():
    stacked = jaxmpi.PerRank(np.ones((2, 3)))
    for call in (jaxmpi.jit(lambda x: x), jaxmpi.tree_allreduce, jaxmpi.tree_bcast):
        with pytest.raises(
            TypeError,
            match=r"is a PerRank, .*values of simulated ranks.*`with jaxmpi.simul",
        ):
            call(stacked)


def python_calls(call):
    """Count the Python functions that a call enters."""
    entered = 0

    def count(frame, event, argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@run_ranks(1, 2, 3)
def test_what_a_call_does_in_python_does_not_grow_with_the_arrays():
    """The Python work of a call does not grow with its arrays, for every kind of argument.

    JAX dispatches them in C++, also the second kind, which stands here for a last batch.
    """

    @jaxmpi.jit
    def step(state, x):
        mean = jaxmpi.tree_allreduce(x).mean()
        return {name: value - mean for name, value in state.items()}

    entered = {}
    for size in (16, 8, 16, 4):
        for count in (1, 200):
            state, x = {str(i): jnp.full(size, float(i)) for i in range(count)}, jnp.arange(4.0)
            for _ in range(3):
                state = step(state, x)
            entered[size, count] = python_calls(lambda state=state, x=x: step(state, x))
    assert all(entered[size, 200] <= entered[size, 1] + 5 for size, _ in entered), entered
