"""Law 1 for optax's public namespace, in `distributed` and `sharded`.

Makes the table of docs/tables/optax.md.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from optax_cases import CASES, RATE, SINGLE_SAMPLES, WRAPPERS, check, groups, names, sends_more

import jaxmpi
from jaxmpi.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "optax.md"
# one of each kind: elementwise, with norms, on whole arrays, with branches, loops and functions
ON_MPI = (
    (
        "adamw",
        "lamb",
        "apply_if_finite",
        "MultiSteps",
        "add_noise",
        "monitor",
        "contrib.prodigy",
        "contrib.reduce_on_plateau",
    ),
    (
        "lbfgs",
        "scale_by_backtracking_linesearch",
        "polyak_sgd",
        "adafactor",
        "contrib.muon",
        "contrib.sam",
        "contrib.sophia",
    ),
)


def test_every_transform_of_optax_is_listed():
    assert names() == {*CASES, *SINGLE_SAMPLES}


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", groups(6), ids=lambda group: group[0])
def test_simulated_ranks_do_what_plain_optax_does(group):
    with jaxmpi.simulate(3):
        check(group)


@pytest.mark.exhaustive
@run_ranks(2, timeout_seconds=400)
@pytest.mark.parametrize("group", ON_MPI, ids=lambda group: group[0])
def test_ranks_do_what_plain_optax_does(group):
    check(group)


@pytest.mark.matrix
@run_ranks(2, 3, 4, timeout_seconds=900)
@pytest.mark.parametrize("group", groups(6), ids=lambda group: group[0])
def test_matrix(group):
    check(group)


@pytest.mark.matrix
@run_ranks(2, 3, backend="xla", timeout_seconds=900)
@pytest.mark.parametrize("group", groups(6), ids=lambda group: group[0])
def test_matrix_of_xla(group):
    check(group)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("group", groups(6), ids=lambda group: group[0])
def test_matrix_of_simulated_ranks(group, ranks):
    with jaxmpi.simulate(ranks):
        check(group)


# gradients of single samples


def aggregate(noise):
    return optax.contrib.differentially_private_aggregate(0.5, noise, key=jax.random.key(0))


@pytest.mark.parametrize("make", ["distributed", "sharded", "average_gradients"])
def test_gradients_of_single_samples_are_refused(make):
    inner = optax.chain(aggregate(0.1), optax.sgd(RATE))
    tx = (
        optax.chain(jaxmpi.average_gradients(), inner)
        if make == "average_gradients"
        else getattr(jaxmpi, make)(inner)
    )
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(())}
    with (
        jaxmpi.simulate(2),
        pytest.raises(ValueError, match=rf"{make}: leaf \['b'\] of the gradients has shape \[8\]"),
    ):
        jaxmpi.jit(lambda g, p: tx.update(g, tx.init(p), p))(
            jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params), params
        )


def test_aggregates_of_single_samples_are_averaged():
    """Each rank adds size times less noise of one key, so that the mean of the sums is the sum.

    The error recommends this.
    """
    params, grads = (
        jnp.ones(3),
        jnp.asarray(np.random.default_rng(2).normal(size=(12, 3)), jnp.float32),
    )
    plain = optax.chain(aggregate(0.1), optax.sgd(RATE))
    want, _ = plain.update(grads, plain.init(params), params)
    with jaxmpi.simulate(3):
        tx = optax.chain(
            aggregate(0.1 / jaxmpi.size()), jaxmpi.average_gradients(), optax.sgd(RATE)
        )
        mine = lambda x: x.reshape(3, 4, 3)[jaxmpi.rank()]
        got = jaxmpi.jit(lambda g, p: tx.update(mine(g), tx.init(p), p)[0])(grads, params)
    np.testing.assert_allclose(got, want, rtol=1e-5)


# documentation


def table():
    """Return the rows of docs/tables/optax.md."""
    sent = {name: sends_more(name) for name in CASES if name not in WRAPPERS}
    rows = [
        ("nothing more", [name for name in sent if sent[name] == "nothing"]),
        (
            "one number for each norm, sum or flag",
            [name for name in sent if sent[name] == "numbers"],
        ),
        ("arrays that `inner` needs whole", [name for name in sent if sent[name] == "arrays"]),
        ("what the transforms and functions in it need", WRAPPERS),
        (
            "refused, in `distributed`, too: it takes the gradients of single samples",
            SINGLE_SAMPLES,
        ),
    ]
    lines = ["| `sharded` sends | transforms |", "|---|---|"]
    for text, found in rows:
        lines.append(
            f"| {text} | {', '.join(f'`{name}`' for name in sorted(found, key=str.lower))} |"
        )
    return "\n".join(lines)


@pytest.mark.slow
def test_the_table_of_the_documentation_is_made_by_this_test():
    """The table of docs/tables/optax.md is up to date; `pytest --tables` writes it."""
    text = PAGE.read_text()
    made = re.sub(
        r"(?s)(<!-- optax -->\n\n).*(\n\n<!-- /optax -->)", lambda m: m[1] + table() + m[2], text
    )
    if tables.wanted():
        PAGE.write_text(made)
    else:
        assert text == made, "docs/tables/optax.md is not up to date: run this test with --tables"
