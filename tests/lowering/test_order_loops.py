"""Loops that communicate and other collectives have one order in XLA's CPU programs.

The order comes from dependencies between them.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmpi
from jaxmpi.testing import run_ranks

R = jaxmpi.AXIS
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


def scan(x, times=3):
    return lax.scan(
        lambda c, y: (jnp.sin(c) + lax.psum(c, R), lax.pmax(c * y, R)),
        x,
        jnp.arange(1.0, times + 1),
    )


def only_in_condition(x):
    return lax.while_loop(
        lambda c: lax.psum(c[0], R) < 50, lambda c: (c[0] + 1, c[1] * 1.5), (x[0], x)
    )


def only_in_body(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.pmax(c[1], R) * 1.5), (0, x))


def of_lanes(x):
    """Each lane ends on its own."""
    one = lambda y: lax.while_loop(
        lambda c: c[0] < 50, lambda c: (c[0] * 2, c[1] + lax.psum(c[1], R)), (lax.pmax(y, R), y)
    )
    return jax.vmap(one)(x)


def branches(x):
    return lax.cond(lax.pmax(x[0], R) > 1, lambda x: lax.psum(jnp.sin(x), R), lambda x: x * 2, x)


def nested(x):
    return lax.scan(
        lambda c, _: ((c + scan(jnp.cos(c))[0] + lax.psum(jnp.tan(c), R)) / 9, lax.pmin(c, R)),
        x,
        None,
        length=2,
    )


def in_branch(x):
    return lax.cond(
        lax.pmax(x[0], R) > 1, lambda x: scan(x)[0] + lax.pmin(jnp.tan(x), R), lambda x: x, x
    )


def gradient(x):
    summed = jax.checkpoint(
        lambda x: lax.scan(lambda c, _: (jnp.sin(c) + lax.psum(c, R), None), x, None, length=3)[0]
    )
    return jax.grad(lambda y: jnp.sum(summed(y)) + jnp.sum(lax.psum(y**2, R)))(x)


def of_integers(x):
    return lax.scan(lambda c, _: (lax.psum(c, R), None), x.astype(jnp.int8), None, length=3)


def of_complex(x):
    return lax.psum(x + 2j * x, R), lax.scan(
        lambda c, _: (lax.psum(c, R), None), x * 1j, None, length=3
    )


LOOPS = [scan, branches, gradient]
MORE = [only_in_condition, only_in_body, of_lanes, nested, in_branch, of_integers, of_complex]
LOOPS += [pytest.param(loop, marks=pytest.mark.slow) for loop in MORE]


def beside(loop):
    """Return a function with a loop among independent collectives of every kind.

    They need nothing of it, and another loop comes behind them.
    """

    def function(x):
        before = lax.all_gather(x + 1, R), lax.psum(jnp.cos(x) > 0, R)
        first = loop(x)
        after = (
            lax.psum(x * 2, R),
            lax.pmax(x, R),
            lax.ppermute(x, R, [(0, 1), (1, 0)]),
            jaxmpi.tree_bcast(x, 1),
        )
        shares = jaxmpi.tree_reduce_scatter(jnp.stack([x] * jaxmpi.size()), "sum")
        return before, first, after, shares, scan(x + 3, 2), jnp.zeros(())

    return function


def unordered(module):
    """List the pairs of a communicating loop and another collective without a dependency.

    Both are in one computation.
    """
    computations = {}
    for line in module.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            inside = computations.setdefault(header[1], {})
        elif equation := re.match(r" +(?:ROOT )?%([\w.-]+) = (.*)", line):
            inside[equation[1]] = equation[2]
    names = {}
    for inside in computations.values():
        for line in inside.values():
            names[line] = re.findall(r"%([\w.-]+)", line)

    def sends(line):
        return bool(COLLECTIVE.search(line)) or loops(line)

    def loops(line):
        for name in names[line]:
            if any(sends(inner) for inner in computations.get(name, {}).values()):
                return True
        return False

    pairs = []
    for inside in computations.values():
        needs = {}  # all that an instruction depends on
        for name, line in inside.items():
            of = {other for other in names[line] if other in inside}
            needs[name] = of.union(*(needs[other] for other in of))
        remote = [name for name, line in inside.items() if sends(line)]
        for a, b in itertools.combinations(remote, 2):
            if a not in needs[b] and (loops(inside[a]) or loops(inside[b])):
                pairs.append((a, b))
    return pairs


def check_order(loop):
    x = jnp.asarray([1.0, 2, 3, 4]) + jaxmpi.rank()
    assert unordered(jaxmpi.jit(beside(loop)).lower(x).compile().as_text()) == []


def check_numbers(loop, wanted):
    got = jaxmpi.jit(beside(loop))(jnp.asarray([1.0, 2, 3, 4]) + jaxmpi.rank())
    jax.tree.map(
        lambda y, want: np.testing.assert_allclose(y, want[jaxmpi.rank()], rtol=1e-5), got, wanted
    )


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@run_ranks(2, 3, backend="xla")
def test_loops_have_one_order(loop):
    check_order(loop)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@run_ranks(2, 3, backend="xla")
def test_loops_in_order_have_the_same_numbers(loop):
    xs = jnp.asarray([1.0, 2, 3, 4]) + jnp.arange(jaxmpi.size())[:, None]
    check_numbers(loop, jax.device_get(jax.vmap(beside_by_vmap(loop), axis_name=R)(xs)))


def beside_by_vmap(loop):
    """Return the function of `beside` in JAX's own collectives, for vmap."""

    def function(x):
        size = lax.axis_size(R)
        before = lax.all_gather(x + 1, R), lax.psum(jnp.cos(x) > 0, R)
        moved = lax.ppermute(x, R, [(0, 1), (1, 0), *((r, r) for r in range(2, size))])
        after = (
            lax.psum(x * 2, R),
            lax.pmax(x, R),
            jnp.where(lax.axis_index(R) < 2, moved, 0),
            lax.all_gather(x, R)[1],
        )
        return before, loop(x), after, lax.psum(x, R), scan(x + 3, 2), jnp.zeros(())

    return function
