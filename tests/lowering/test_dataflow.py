"""Dataflow: facts and slices are right for every construct of a jaxpr that a value passes through.

Each function of DIFFERENT and SAME has one construct. The replication analysis must tell whether
the function's result may differ between the ranks; `jax.vmap` tells whether it does.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmpi
from jaxmpi._analysis.control_slice import control_equations
from jaxmpi._analysis.dataflow import Analysis, propagate
from jaxmpi._analysis.inner_jaxprs import equations
from jaxmpi._analysis.primitives import Op
from jaxmpi._analysis.slices import slice_of
from jaxmpi._lowering.trace import trace
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
RANKS = 3


# --- results that differ between the ranks --------------------------------------------------------
# Each function takes this rank's x, and a y that is equal on all ranks, both float32 [2], and
# returns an array like x.


def plain(x, y):
    return x * 2 + y


def by_rank(x, y):
    return y + lax.axis_index(R)


def scan_carry(x, y):
    return lax.scan(lambda c, _: (c + y, None), x, None, length=3)[0]


def scan_carry_at_the_end(x, y):
    """The second carry differs only after two iterations."""
    return lax.scan(lambda c, _: ((x, c[0]), None), (y, y), None, length=3)[0][1]


def scan_of_no_iteration(x, y):
    """The result is the initial carry, not the sum."""
    return lax.scan(lambda c, _: (lax.psum(c, R), None), x, None, length=0)[0]


def scan_rows(x, y):
    return lax.scan(lambda c, row: (c, row + c.sum()), y, x)[1]


def scan_constant(x, y):
    return lax.scan(lambda c, _: (c + x, None), y, None, length=2)[0]


def while_state(x, y):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, y))[1]


def while_of_no_iteration(x, y):
    """The result is the initial state, not the sum."""
    never = lambda c: c[0] > 100
    return lax.while_loop(never, lambda c: (c[0] + 1, lax.psum(c[1], R)), (0, x))[1]


def while_count(x, y):
    """The initial state and the body are equal on all ranks; the number of iterations differs."""
    n = jnp.int32(x[0])
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + 1), (0, y))[1]


def fori_swaps(x, y):
    return lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (x, y))[1]


def branch(x, y):
    return lax.cond(y[0] < 100, lambda x: x * 2, lambda x: y, x)


def other_branch(x, y):
    """All ranks take the same branch, whose result differs; that of the other branch is equal."""
    return lax.cond(y[0] < 100, lambda x: x, lambda x: y, x)


def predicate(x, y):
    """The result of each branch is equal on all ranks; which branch is taken differs."""
    return lax.cond(x[0] < 2, lambda y: y, lambda y: y * 2, y)


def switch(x, y):
    return lax.switch(jnp.int32(x[0]), [lambda y: y, lambda y: y + 1, lambda y: y + 2], y)


def called(x, y):
    return jax.jit(lambda x: jax.checkpoint(lambda x: jax.nn.relu(x) + y)(x))(x)


def custom_derivative(x, y):
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return f(x)


def linear_solve(x, y):
    return lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: b / 2)


def linear_solve_constant(x, y):
    """The right-hand side is equal on all ranks, and the matrix differs."""
    return lax.custom_linear_solve(lambda v: v * x, y, lambda _, b: b / x)


def reference(x, y):
    ref = jax.new_ref(y)
    ref[...] = x
    return ref[...]


def reference_written_in_part(x, y):
    """Element 1 keeps its initial value, which differs."""
    ref = jax.new_ref(x)
    ref[0] = y[0]
    return ref[...]


def reference_added(x, y):
    ref = jax.new_ref(y)
    ref[...] += x
    return jax.freeze(ref)


def reference_at_an_index(x, y):
    """The contents and the number are equal on all ranks, and the index differs."""
    ref = jax.new_ref(y)
    ref[jnp.int32(x[0]) % 2] = 7.0
    return ref[...]


def reference_in_a_loop(x, y):
    ref = jax.new_ref(y)
    lax.fori_loop(0, 2, lambda i, c: (ref.__setitem__(i, x[i]), c)[1], 0)
    return ref[...]


def reference_read_before_it_is_written(x, y):
    """The first iteration reads an equal value; the second reads what the first has written."""
    ref = jax.new_ref(y)

    def body(c, _):
        before = ref[...]
        ref[...] = x
        return before, None

    return lax.scan(body, y, None, length=2)[0]


def reference_in_a_called_function(x, y):
    ref = jax.new_ref(y)
    jax.jit(lambda ref, x: ref.__setitem__(..., x))(ref, x)
    return ref[...]


def reference_at_repeated_indices(x, y):
    """As many elements are written as there are, and not all of them."""
    ref = jax.new_ref(x)
    ref[jnp.array([0, 0])] = y
    return ref[...]


def reference_written_by_a_predicate(x, y):
    ref = jax.new_ref(jnp.zeros_like(y))

    def goes_on(n):
        ref[...] += 1
        return n < x[0]

    lax.while_loop(goes_on, lambda n: n + 1, 0.0)
    return ref[...]


def barrier(x, y):
    return lax.optimization_barrier((y, x))[1]


DIFFERENT = [
    plain,
    barrier,
    by_rank,
    scan_carry,
    scan_carry_at_the_end,
    scan_of_no_iteration,
    scan_rows,
    scan_constant,
    while_state,
    while_of_no_iteration,
    while_count,
    fori_swaps,
    branch,
    other_branch,
    predicate,
    switch,
    called,
    custom_derivative,
    linear_solve,
    linear_solve_constant,
    reference,
    reference_written_in_part,
    reference_added,
    reference_at_an_index,
    reference_in_a_loop,
    reference_read_before_it_is_written,
    reference_in_a_called_function,
    reference_at_repeated_indices,
    reference_written_by_a_predicate,
]


# --- results that are equal on all ranks, though x is not -----------------------------------------


def mean(x, y):
    return lax.pmean(x, R)


def scan_of_means(x, y):
    """After at least one iteration the carry is a mean; the initial carry differs."""
    return lax.scan(lambda c, _: (lax.pmean(c, R), None), x, None, length=2)[0]


def gathered(x, y):
    return lax.all_gather(x, R).sum(0)


def beside_another_in_a_barrier(x, y):
    return lax.optimization_barrier((x, y))[1]


def branch_of_means(x, y):
    return lax.cond(y[0] < 100, lambda m: m, lambda m: y, lax.pmean(x, R))


def overwritten_reference(x, y):
    ref = jax.new_ref(x)
    ref[...] = lax.pmean(ref[...], R)
    return ref[...]


def reference_before_it_is_written(x, y):
    ref = jax.new_ref(y)
    before = ref[...]
    ref[...] = x
    return before


def another_reference(x, y):
    ref, other = jax.new_ref(y), jax.new_ref(y)
    other[...] = x
    return ref[...]


SAME = [
    mean,
    scan_of_means,
    gathered,
    beside_another_in_a_barrier,
    branch_of_means,
    overwritten_reference,
    reference_before_it_is_written,
    another_reference,
]

X = np.arange(2.0 * RANKS, dtype=np.float32).reshape(RANKS, 2) / 2
Y = np.array([1.0, 5.0], np.float32)


@pytest.mark.parametrize("function", [*DIFFERENT, *SAME], ids=lambda f: f.__name__)
def test_jit_returns_a_per_rank_output_where_it_may_differ(function):
    want = jax.vmap(function, (0, None), axis_name=R)(X, Y)
    with jaxmpi.simulate(RANKS):
        got = jaxmpi.jit(function)(jaxmpi.PerRank(X), Y)
    if function in SAME:
        np.testing.assert_array_equal(got, want[0])
    else:
        assert not np.array_equal(want, np.broadcast_to(want[:1], want.shape))
        np.testing.assert_array_equal(got.stack, want)


def _branch_on(function):
    """Return a step with a collective in a branch, whose predicate is computed by a function."""

    def step(x, y):
        value = function(x, y).sum()
        return lax.cond(value > 1.25, lambda x: lax.psum(x, R), lambda x: x * 10, x)

    return step


@run_ranks(2, 3)
def test_jit_refuses_a_collective_in_a_branch_whose_predicate_may_differ_and_no_other():
    x = X[jaxmpi.rank()]
    for function in [*DIFFERENT, *SAME]:
        step = jaxmpi.jit(_branch_on(function), replicated_argnums=1)
        declared = jaxmpi.jit(function, replicated_argnums=1, replicated_outnums=0)
        if function in SAME:
            step(x, Y)
            declared(x, Y)
            continue
        with pytest.raises(ValueError, match="which branch is taken may differ between the ranks"):
            step(x, Y)
        with pytest.raises(ValueError, match="declared replicated but may differ"):
            declared(x, Y)


@run_ranks(2)
def test_the_gradient_of_a_checkpoint_may_have_the_branch_that_its_value_has():
    """A barrier is around all operands of the backward pass, and the predicate is one of them."""

    def loss(block, p, flag, x):
        return block(lambda p, flag, x: branch_on(flag, jnp.sin(p * x)))(p, flag, x).sum()

    def branch_on(flag, h):
        return lax.cond(flag, lambda h: lax.pmean(h, R), lambda h: h, h)

    p, x = jnp.ones(2), X[jaxmpi.rank()]
    plain, saving = (
        jaxmpi.jit(jax.grad(partial(loss, block)), replicated_argnums=(0, 1))(p, True, x)
        for block in (lambda fun: fun, jax.checkpoint)
    )
    np.testing.assert_allclose(plain, saving, rtol=1e-6)


# --- the engine -----------------------------------------------------------------------------------


# The fact of a value is the set of the inputs that it depends on.
SOURCES = Analysis(frozenset(), lambda facts: frozenset().union(*facts), constants=frozenset())


def _sources(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return propagate(SOURCES, jaxpr, [frozenset({i}) for i in range(len(jaxpr.jaxpr.invars))])


def test_propagate_joins_the_operands_of_any_arithmetic():
    p, g = jnp.ones(3), jnp.ones(3)
    assert _sources(lambda p, g: 0.999 * p - 0.1 * g, p, g) == [{0, 1}]
    assert _sources(lambda p, g: (p - g) / jnp.linalg.norm(p - g), p, g) == [{0, 1}]
    assert _sources(lambda p, g: (p, 2 * g, 1.0), p, g) == [{0}, {1}, set()]


def test_an_empty_reference_has_what_is_written_into_it():
    def program(x):
        ref = jax.empty_ref(jax.typeof(x))
        ref[...] = x
        return ref[...]

    assert _sources(program, jnp.ones(3)) == [{0}]


def test_propagate_visits_every_equation_once_with_its_final_facts():
    def program(x, y):
        inner = lambda c: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * y), c)
        return lax.scan(lambda c, _: (inner((0, c))[1], None), x, None, length=3)

    jaxpr, seen = jax.make_jaxpr(program)(1.0, 2.0), []
    visit = lambda eqn, operands, results, control: seen.append((eqn, results, control))
    propagate(SOURCES, jaxpr, [frozenset({0}), frozenset({1})], visit)
    assert len({id(eqn) for eqn, _, _ in seen}) == len(seen)
    # c * y: in the first iteration c is the input 0, later it depends on y, too
    (product,) = [results for eqn, results, _ in seen if eqn.primitive is lax.mul_p]
    assert product == [{0, 1}]


def test_a_jaxpr_that_calls_share_is_visited_once():
    """Else the time is exponential in the depth of functions that call the next one twice."""
    fun, depth = jax.jit(lambda x: jnp.sin(x) * 2), 12
    for _ in range(depth):
        fun = jax.jit(lambda x, fun=fun: fun(fun(x)) + 1.0)
    jaxpr, visited = jax.make_jaxpr(fun)(1.0), []
    visit = lambda eqn, operands, results, control: visited.append(eqn)
    assert propagate(SOURCES, jaxpr, [frozenset({0})], visit) == [{0}]
    assert len(visited) <= 3 * depth + 3
    assert len([*equations(jaxpr)]) == len(visited)


def test_propagate_visits_with_the_predicates_around_an_equation():
    def program(p, q, x):
        inner = lambda x: lax.cond(q, lambda x: x * 2, lambda x: x, x)
        return lax.cond(p, inner, lambda x: x + 1, x)

    jaxpr, control = jax.make_jaxpr(program)(True, True, 1.0), {}

    def visit(eqn, operands, results, around):
        control[eqn.primitive] = around

    propagate(SOURCES, jaxpr, [frozenset({i}) for i in range(3)], visit)
    assert control[lax.mul_p] == {0, 1} and control[lax.add_p] == {0}


def test_propagate_applies_a_rule_instead_of_the_join():
    rules = {Op.DIVIDE: lambda eqn, xs: [frozenset()]}
    forget = Analysis(frozenset(), SOURCES.join, rules, constants=frozenset())
    jaxpr = jax.make_jaxpr(lambda x: (x / 2, x * 2))(1.0)
    assert propagate(forget, jaxpr, [frozenset({0})]) == [set(), {0}]


def _slice(function, *args, output=0):
    """Return (slice of an output, primitives of its equations)."""
    jaxpr = jax.make_jaxpr(function)(*args)
    found = slice_of(jaxpr, [jaxpr.jaxpr.outvars[output]], lambda jaxpr, eqn: False)
    return found, [needed.eqn.primitive for needed in found.equations]


def test_slice_of_has_what_an_output_depends_on_and_nothing_else():
    found, primitives = _slice(lambda x, y: (lax.sin(x) * 2, lax.cos(y)), 1.0, 2.0)
    assert primitives == [lax.sin_p, lax.mul_p] and found.ins == [True, False]


def test_slice_of_follows_a_carry_into_the_iterations_before():
    # Carries 0 and 1 are made of the carry to their right; carries 2 and 3 keep their values.
    body = lambda s, _: ((s[1] * 1, s[2] * 1, s[2], s[3]), None)

    def program(times, *state):
        return lax.scan(body, state, None, length=times)[0][0]

    def found(program):
        return _slice(program, 1.0, 2.0, 3.0, 4.0)[0].ins

    # The initial value of carry 0 is overwritten by the first iteration, if there is one.
    assert found(partial(program, 3)) == [False, True, True, False]
    assert found(partial(program, 0)) == [True, True, True, False]
    loop = lambda *state: lax.while_loop(lambda s: s[2] < 3, lambda s: body(s, None)[0], state)[0]
    assert found(loop) == [True, True, True, False]


def test_slice_of_has_what_is_written_into_a_reference():
    def program(x, y, z):
        ref, other = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.zeros(2))
        ref[0] = x
        other[0] = z
        lax.fori_loop(0, 2, lambda i, c: (ref.__setitem__(1, y), c)[1], 0)
        return ref[...]

    assert _slice(program, 1.0, 2.0, 3.0)[0].ins == [True, True, False]


@pytest.mark.parametrize("layers", [10, 400])
def test_control_equations_of_a_long_chain_do_not_recurse(layers):
    """A chain of 4,000 equations is longer than Python's recursion limit."""

    def program(x):
        for _ in range(5 * layers):
            x = lax.sin(x) * 2
        return lax.cond(lax.psum(x, R) > 1, lambda x: lax.psum(x, R), lambda x: x, x)

    jaxpr, *_ = trace(lambda x: [program(x)], {R: 2}, [jax.ShapeDtypeStruct((), jnp.float32)])
    assert control_equations(jaxpr)


# --- control equations ----------------------------------------------------------------------------


def _text(program, *shapes):
    """Return the text of the control slice of a program of float32 arrays of these shapes."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr, *_ = trace(lambda *xs: [program(*xs)], {R: 2}, avals)
    return [line.text for line in control_equations(jaxpr)]


def _control(order, factor=1.0, replace=None):
    """Return the text of the control slice of a program that sums independent terms.

    Args:
      order: the terms, 0 to n - 1, in the order in which they are traced.
      factor: a number in each term.
      replace: a term with one more equation, if any.
    """

    def program(x, k):
        terms = {n: jnp.sin(k * (n + factor)) for n in order}
        if replace is not None:
            terms[replace] = terms[replace] + 1
        total = sum(terms[n] for n in range(len(order)))
        return lax.cond(total > 0, lambda x: lax.psum(x, R), lambda x: x, x)

    return _text(program, (3,), ())


def test_control_equations_ignore_the_order_of_independent_equations():
    assert _control([0, 1, 2, 3]) == _control([2, 0, 3, 1])


def test_control_equations_differ_by_another_number_or_equation():
    right = _control([0, 1, 2])
    assert right != _control([0, 1, 2], factor=2.0)
    assert right != _control([0, 1, 2], replace=1)


def _sum_if(flag, x):
    return lax.cond(flag, lambda x: lax.psum(x, R), lambda x: x, x)


def in_the_carry_of_a_scan(n):
    def body(carry, _):
        x, k = carry
        return (_sum_if(k > 3, x), k + n), None

    return lambda x, k: lax.scan(body, (x, k), None, length=4)[0][0]


def in_a_carry_of_a_carry(n):
    def body(carry, _):
        x, k, step = carry
        return (_sum_if(k > 3, x), k + step, step * n), None

    return lambda x, k: lax.scan(body, (x, k, k), None, length=4)[0][0]


def in_a_branch_whose_result_is_not_used(n):
    def body(carry):
        i, x, k = carry
        _sum_if(k > n, x)
        return i + 1, x, k

    return lambda x, k: lax.while_loop(lambda c: c[0] < 3, body, (0, x, k))[1]


def at_an_index(n):
    return lambda x, k: _sum_if(lax.slice_in_dim(x, n, n + 1)[0] > 0, x * k)


@pytest.mark.parametrize(
    "program",
    [
        in_the_carry_of_a_scan,
        in_a_carry_of_a_carry,
        in_a_branch_whose_result_is_not_used,
        at_an_index,
    ],
)
def test_control_equations_have_every_number_that_controls_a_message(program):
    assert _text(program(1), (3,), ()) == _text(program(1), (3,), ())
    assert _text(program(1), (3,), ()) != _text(program(2), (3,), ())


def test_control_equations_leave_out_numbers_that_control_nothing():
    def program(n):
        def body(carry, x):
            total, k = carry
            return (total + n * x, k + 1), _sum_if(k > 3, x)

        return lambda x, k: lax.scan(body, (x[0], k), x)[1]

    assert _text(program(1), (3,), ()) == _text(program(2), (3,), ())


@run_ranks(2, 3)
def test_update_takes_the_length_of_an_uneven_batch_as_weight():
    ranks = jaxmpi.size()
    x = np.random.default_rng(0).normal(size=(6 * ranks - 1, 5)).astype(np.float32)
    mine = np.array_split(x, ranks)[jaxmpi.rank()]
    loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    w = jnp.zeros(5)
    want = w - 0.1 * jax.grad(loss)(w, x)
    for transform in (jaxmpi.distributed, jaxmpi.sharded):
        tx = transform(optax.sgd(0.1))

        @partial(jaxmpi.jit, replicated_argnums=(0, 1), replicated_outnums=(0, 1))
        def step(w, state, x, tx=tx):
            updates, state = tx.update(jax.grad(loss)(w, x), state, w, weight=len(x))
            return optax.apply_updates(w, updates), state

        got, _ = step(w, tx.init(w), mine)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@run_ranks(2)
def test_jit_runs_if_ranks_trace_independent_equations_in_different_orders():
    order = sorted(range(50), key=lambda n: n * (7 + 6 * int(jaxmpi.rank())) % 53)

    @partial(jaxmpi.jit, replicated_argnums=1)
    def step(x, k):
        terms = {n: x * (n + 1) for n in order}
        total = sum(terms[n] for n in range(50))
        update = lambda t: lax.cond(k > 1, lambda t: lax.psum(t, R), lambda t: t, t)
        return lax.cond(k > 0, update, lambda t: t, total)

    got = step(jnp.ones(3) + jaxmpi.rank(), jnp.int32(2))
    np.testing.assert_array_equal(got, np.full(3, 3 * 1275.0))
