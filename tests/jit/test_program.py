"""Differences between ranks that are no arguments, effects, and other corners of `jaxmpi.jit`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi import RankMismatchError, _jaxcompat
from jaxmpi.testing import assert_equivalent, run_ranks

R = jaxmpi.AXIS
X = np.float32(1.0)


def of_python(number):
    """Return a number of the host, which each rank has its own of, as the program runs."""
    return jax.pure_callback(lambda: np.float32(number), jax.ShapeDtypeStruct((), np.float32))


@run_ranks(2, 3)
def test_python_numbers_of_each_rank_are_sent():
    n, mine = jaxmpi.size(), float(jaxmpi.rank() + 1)
    total = n * (n + 1) / 2
    step = jaxmpi.jit(
        lambda x: jaxmpi.tree_allreduce(x * mine, "sum") / jaxmpi.tree_allreduce(mine, "sum")
    )
    assert float(step(np.float32(7))) == 7.0
    assert float(jaxmpi.jit(lambda: jaxmpi.tree_allreduce(mine, "sum"))()) == total
    np.testing.assert_array_equal(
        jaxmpi.jit(lambda: lax.psum(jnp.full(2, mine), R))(), [total, total]
    )
    assert float(jaxmpi.jit(lambda: jaxmpi.tree_allreduce(jnp.full((), mine), "max"))()) == n
    assert float(jaxmpi.jit(lambda x: lax.psum(of_python(mine), R) + 0 * x)(X)) == total


@run_ranks(2)
def test_python_numbers_that_decide_are_compared():
    """Ranks compare Python numbers that decide on loops, branches and sums.

    With different numbers they would hang, or be wrong.
    """
    mine = jaxmpi.rank() + 3

    def turns(x):
        return lax.while_loop(
            lambda c: c[0] < mine, lambda c: (c[0] + 1, c[1] + lax.psum(x, R)), (0, 0.0)
        )

    def branch(x, k):
        return lax.cond(k < mine, lambda: lax.psum(x, R), lambda: x)

    def nested(x, k):
        return lax.scan(lambda c, _: (branch(c, k), None), x, None, length=2)

    def folded(x):
        return jax.grad(lambda x: lax.pmean(x, R) * mine)(x)

    for step in (jaxmpi.jit(turns), jaxmpi.jit(folded)):
        with pytest.raises(RankMismatchError, match="do not agree"):
            step(X)
    for fun in (branch, nested):
        with pytest.raises(RankMismatchError, match="do not agree"):
            jaxmpi.jit(fun, replicated_argnums=1)(X, 4)
    mine = 4
    assert float(jaxmpi.jit(turns)(X)[1]) == 8.0
    assert float(jaxmpi.jit(branch, replicated_argnums=1)(X, 3)) == 2.0
    assert float(jaxmpi.jit(folded)(X)) == 4.0


@run_ranks(1, 2)
def test_a_branch_that_only_prints_the_mean():
    seen = []

    def step(i, x):
        lax.cond(i % 2 == 0, lambda: jax.debug.callback(seen.append, lax.pmean(x, R)), lambda: None)
        return x * 2

    jitted = jaxmpi.jit(step, replicated_argnums=0)
    for i in range(4):
        jax.block_until_ready(jitted(i, np.float32(jaxmpi.rank() + i)))
    jax.effects_barrier()
    mean = (jaxmpi.size() - 1) / 2
    assert [float(v) for v in seen] == [mean, mean + 2]
    if jaxmpi.size() > 1:
        assert [entry.path for entry in jitted.program(0, X).entries] == ["cond:1"]


@run_ranks(1, 2)
def test_effects_stay_behind_those_of_a_loop_before_them():
    log = []

    def step(x):
        def body(c, _):
            c = lax.pmean(c, R)
            jax.debug.callback(lambda v: log.append("in"), c, ordered=True)
            return c, None

        y, _ = lax.scan(body, x, None, length=2)
        jax.debug.callback(lambda v: log.append("after"), x, ordered=True)
        return y

    jax.block_until_ready(jaxmpi.jit(step)(X))
    jax.effects_barrier()
    assert log == ["in", "in", "after"]


@run_ranks(2)
def test_traced_lowered_and_compiled_programs_are_compared():
    step = jaxmpi.jit((lambda x: lax.psum(x, R)) if jaxmpi.rank() else (lambda x: lax.pmax(x, R)))
    with pytest.raises(RankMismatchError):
        step.trace(X).lower().compile()(X)


def test_a_callback_in_a_nested_jit_varies():
    with jaxmpi.simulate(2), pytest.raises(ValueError, match="may differ across ranks"):
        jaxmpi.jit(
            lambda x: jax.jit(lambda: jax.pure_callback(lambda: np.float32(1), X))(),
            replicated_outnums=0,
        )(X)


def test_a_nested_jit_keeps_apart_what_varies_and_what_does_not():
    with jaxmpi.simulate(2):
        both = jax.jit(lambda a, b: (a * 2, b * 2))
        jaxmpi.jit(lambda p, x: both(p, x), replicated_argnums=0, replicated_outnums=0)(X, X)


class Out(NamedTuple):
    params: jax.Array
    loss: jax.Array


@pytest.mark.parametrize(
    "make", [lambda *xs: xs, lambda *xs: list(xs), Out], ids=["tuple", "list", "NamedTuple"]
)
def test_outputs_by_position(make):
    def step(p, x):
        return make(p, p - x)

    with jaxmpi.simulate(2):
        jaxmpi.jit(step, replicated_argnums=0, replicated_outnums=0)(X, X)
        for outnums in (1, -1, (0, 1)):
            with pytest.raises(
                ValueError,
                match=r"^jaxmpi\.jit: (the )?output.* is declared replicated but may differ",
            ):
                jaxmpi.jit(step, replicated_argnums=0, replicated_outnums=outnums)(X, X)
        with pytest.raises(ValueError, match="replicated_outnums has 7, and step returns 2"):
            jaxmpi.jit(step, replicated_outnums=7)(X, X)
        with pytest.raises(
            ValueError, match="replicated_argnums has 5, and the arguments of step are 2"
        ):
            jaxmpi.jit(step, replicated_argnums=5)(X, X)


def test_the_rank_may_be_asked_for_anywhere():
    x = jaxmpi.PerRank(np.arange(1.0, 3.0, dtype=np.float32))
    with jaxmpi.simulate(2):
        branch = jaxmpi.jit(
            lambda x: lax.cond(x > 1.5, lambda: lax.axis_index(R) * 1.0, lambda: 0.0)
        )
        np.testing.assert_array_equal(np.asarray(branch(x)), [0.0, 1.0])
        loop = jaxmpi.jit(
            lambda x: lax.while_loop(lambda c: c < 5, lambda c: c + 1 + jaxmpi.rank(), x)
        )
        np.testing.assert_array_equal(np.asarray(loop(x)), [5.0, 6.0])


def test_assert_equivalent_tests_something():
    x = np.arange(24.0).reshape(8, 3)
    with pytest.raises(AssertionError, match="differs between the ranks"):
        assert_equivalent(lambda w, x: (x @ w).sum(), [1, 2, 4], np.ones(3), x, batch_argnums=-1)
    with pytest.raises(ValueError, match="there are 2 arguments"):
        assert_equivalent(lambda w, x: w, [1, 2], np.ones(3), x, batch_argnums=5)
    with pytest.raises(ValueError, match="sizes is empty"):
        assert_equivalent(lambda w: w, [], np.ones(3))


@run_ranks(2)
def test_static_arguments_are_told_apart_as_in_jax():
    step = jaxmpi.jit(lambda x, n: lax.psum(x, R) * n, static_argnums=1)
    assert [step(np.int32(1), n).dtype.name for n in (1, 1.0, True)] == [
        "int32",
        "float32",
        "int32",
    ]
    with pytest.raises(
        ValueError, match=r"static argument 1 of <lambda> is a list, which is not hashable"
    ):
        step(X, [2])

    def last(x, n, *, flag=False):
        return lax.psum(x, R) * n if isinstance(n, int) and not isinstance(flag, bool) else flag

    assert float(jaxmpi.jit(last, static_argnums=-1)(X, 3, flag=True)) == 6.0


@run_ranks(2)
def test_another_precision_is_another_program():
    step = jaxmpi.jit(lambda x: lax.psum(x, R))
    assert step(np.ones(2)).dtype == np.float32
    with jax.enable_x64(True):
        assert step(np.ones(2)).dtype == np.float64
    assert step(np.ones(2)).dtype == np.float32


def check_configuration():
    traced = []

    def local(x):
        traced.append(jax.config.jax_default_matmul_precision)
        return x @ x

    for fun in (local, lambda x: lax.psum(local(x), R)):
        step, x = jaxmpi.jit(fun), np.ones((2, 2), np.float32)
        traced.clear()
        for _ in range(2):
            step(x)
            with jax.default_matmul_precision("highest"):
                step(x)
        assert traced == [None, "highest"]


@run_ranks(1, 2)
def test_another_configuration_is_another_program():
    check_configuration()


@run_ranks(2, backend="xla")
def test_another_configuration_is_another_program_on_xla():
    check_configuration()


def others(step, *, replicated_outnums=()):
    """Return the errors that Python shows above that of a call of a step on two ranks."""
    with jaxmpi.simulate(2), pytest.raises(ValueError, match="may differ") as raised:
        jaxmpi.jit(step, replicated_outnums=replicated_outnums)(jnp.ones(3))
    found, error = [], raised.value
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
        found.append(error)
    return found


@pytest.mark.parametrize(
    "from_outside", [[], [np.ones(3, np.float32)]], ids=["", "an array from outside"]
)
def test_an_error_of_the_analysis_is_shown_once(from_outside):
    assert others(lambda x: sum(from_outside, x), replicated_outnums=0) == []

    def mixed(x):
        return sum(from_outside, x), lax.psum(x, R)

    assert others(mixed, replicated_outnums=0) == []
    assert others(lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, R), lambda: x)) == []


@run_ranks(1, 2)
def test_positions_that_are_not_there_are_refused():
    message = "has {}, and .* 2. Name positions from 0 to 1"
    for fun in (lambda a, b: (a, b), lambda a, b: (lax.psum(a, R), b)):
        for call in (lambda step: step(X, X), lambda step: step.lower(X, X)):
            with pytest.raises(ValueError, match="replicated_outnums " + message.format(5)):
                call(jaxmpi.jit(fun, replicated_outnums=5))
            with pytest.raises(ValueError, match="replicated_argnums " + message.format(2)):
                call(jaxmpi.jit(fun, replicated_argnums=2))


@run_ranks(1, 2)
def test_a_negative_position_counts_from_the_end_of_a_call_with_any_number_of_arguments():
    def last(first, *rest):
        return rest[-1] * 2

    for args in ((X, X), (X, X, X)):
        step = jaxmpi.jit(last, replicated_argnums=-1, replicated_outnums=0)
        assert float(step(*args)) == 2.0
    scaled = jaxmpi.jit(lambda x, *rest: lax.psum(x, R) * len(rest[-1]), static_argnums=-1)
    assert float(scaled(X, X, "ab")) == 2.0 * jaxmpi.size()


@run_ranks(1, 2)
def test_without_jit():
    step = jaxmpi.jit(lambda x: lax.psum(x, R) + 1)
    np.testing.assert_array_equal(step(np.ones(5, np.float32)), jaxmpi.size() + 1)
    jaxmpi.tree_allreduce(np.ones(5, np.float32), "sum")
    with jax.disable_jit():
        for _ in range(2):
            assert float(jaxmpi.tree_allreduce(np.float32(2), "sum")) == 2 * jaxmpi.size()
            assert float(step(X)) == jaxmpi.size() + 1
            assert float(jaxmpi.jit(lambda x: lax.psum(x, R) + 1)(X)) == jaxmpi.size() + 1


@run_ranks(2)
def test_a_gradient_around_it_is_traced_once():
    traced = []

    @jaxmpi.jit
    def loss(x):
        traced.append(1)
        return jnp.sum(lax.psum(x, R) ** 2)

    for _ in range(5):
        jax.grad(loss)(np.ones(3, np.float32))
    assert len(traced) <= 2


def test_a_captured_per_rank_value_is_refused():
    x = jaxmpi.PerRank(np.arange(2.0))
    with jaxmpi.simulate(2), pytest.raises(TypeError, match="Make it an argument"):
        jaxmpi.jit(lambda: jaxmpi.tree_allreduce(x))()


def gathered_keys():
    n, r = jaxmpi.size(), jaxmpi.rank()
    keys = jax.random.split(jax.random.key(3), n)
    return (
        jaxmpi.jit(
            lambda k: (
                lax.all_gather(k, R),
                lax.ppermute(k, R, [(p, (p + 1) % n) for p in range(n)]),
            )
        ),
        keys,
        r,
    )


def check_keys():
    step, keys, rank = gathered_keys()
    everyone, before = step(keys[rank])
    np.testing.assert_array_equal(jax.random.key_data(everyone), jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.key_data(before), jax.random.key_data(keys[rank - 1]))


@run_ranks(1, 2, 3)
def test_keys_move():
    check_keys()


@run_ranks(2, backend="xla")
def test_keys_move_on_xla():
    check_keys()


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 0)], [(0, 7)], [(0, 1), (1, 1)]])
def test_pairs_of_a_permutation_are_checked(pairs):
    with (
        jaxmpi.simulate(2),
        pytest.raises(ValueError, match=r"ppermute at test_program.py:\d+ has pairs .* on 2 ranks"),
    ):
        jaxmpi.jit(lambda x: lax.ppermute(x, R, pairs))(X)


@run_ranks(2)
def test_a_program_without_outputs_sends_all_the_same():
    step = jaxmpi.jit(lambda x: (lax.psum(x, R), None)[1])
    assert len(step.program(X).entries) == 1
    assert "custom_call @" in step.lower(X).as_text()
    assert step(X) is None


def test_testing_is_found():
    assert jaxmpi.testing.run_ranks is run_ranks


@run_ranks(2)
def test_arguments_of_another_structure_are_another_program():
    step = jaxmpi.jit(lambda tree: jax.tree.map(lambda x: lax.psum(x, R), tree))
    trees = [
        {"a": X},
        {"a": (X, X)},
        {"a": None},
        {"a": X, "b": X},
        [X],
        {"a": {"a": X}},
        X,
        {"a": np.ones(2, np.float32)},
    ]
    for tree in trees * 2:
        want = jax.tree.map(lambda x: x * 2, tree)
        got = step(tree)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@run_ranks(2, backend="xla")
def test_arguments_of_another_structure_on_xla():
    test_arguments_of_another_structure_are_another_program.__wrapped__()


@run_ranks(2)
def test_checkpoint_recomputes_behind_a_barrier():
    @jax.checkpoint
    def block(x):
        return jnp.sin(lax.pmean(jnp.sin(x), R))

    text = jaxmpi.jit(jax.grad(lambda x: block(x).sum())).lower(jnp.ones(4)).as_text()
    # without it XLA would merge the second computation with the first
    assert "optimization_barrier" in text


# lower() and trace() on one rank


def traces_of(step, *args, **options):
    """Return how often `lower` and its program trace, the program's text, and its result."""
    count = []

    def counted(*args):
        count.append(1)
        return step(*args)

    jaxmpi.init()
    lowered = jaxmpi.jit(counted, **options).lower(*args)
    return len(count), lowered.as_text(), lowered.compile()(*args)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: 2 * x,
        lambda x: lax.pmean(x, R),
        lambda x: jax.jit(lambda x: lax.psum(x, R))(x) * 2 / jnp.ones(3),
        lambda x: lax.scan(lambda c, _: (lax.pmean(c, R), None), x, None, length=2)[0],
        lambda x: x + lax.axis_index(R) + jaxmpi.rank(),
        lambda x: jaxmpi.tree_allreduce({"x": x})["x"] * lax.axis_size(R),
    ],
    ids=["local", "pmean", "nested", "scan", "index", "tree"],
)
def test_lower_on_one_rank_traces_once(step):
    traced, text, out = traces_of(step, X)
    assert traced == 1
    assert "custom_call" not in text and "all_reduce" not in text
    jaxmpi.init()
    np.testing.assert_array_equal(out, jaxmpi.jit(step)(X))


def test_lower_on_one_rank_where_jax_has_changed(monkeypatch):
    monkeypatch.setattr(_jaxcompat, "closed", lambda traced: None)
    assert traces_of(lambda x: lax.psum(x, R) * 2, X)[2] == 2
    monkeypatch.setattr(_jaxcompat, "binding_axes", lambda axes: None)
    assert traces_of(lambda x: x * 2, X)[0] == 1


def test_lower_on_one_rank_keeps_what_a_function_has_from_outside_its_names_and_its_options():
    table = jnp.arange(3.0)
    for step in (
        lambda x, n, *, y: x * table[n] + y,
        lambda x, n, *, y: lax.psum(x * table[n] + y, R),
    ):
        lowered = jaxmpi.jit(step, static_argnums=1, donate_argnames="y").lower(X, 2, y=jnp.ones(3))
        assert lowered.as_text().count("tf.aliasing_output") == 1
        np.testing.assert_array_equal(lowered.compile()(X, y=jnp.ones(3)), [3, 3, 3])


def test_lower_on_one_rank_refuses_what_a_call_refuses():
    with pytest.raises(TypeError, match=r"argument 0 of .* is a str"):
        jaxmpi.jit(lambda x: x).lower("one")
    with pytest.raises(ValueError, match="replicated_argnums has 3"):
        jaxmpi.jit(lambda x: x, replicated_argnums=3).lower(X)
    with pytest.raises(TypeError, match="is a PerRank"):
        jaxmpi.jit(lambda x: x).lower(jaxmpi.PerRank(jnp.ones(2)))
    with pytest.raises(NameError, match="over the axis 'other', which nothing binds"):
        jaxmpi.jit(lambda x: lax.psum(x, "other")).lower(X)
