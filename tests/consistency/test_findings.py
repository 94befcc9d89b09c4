"""Findings: the words of a broken assumption, and how a check is turned off."""

import jax.numpy as jnp
import pytest

import jaxmpi
from jaxmpi._consistency.findings import ASSUMPTIONS, Finding, is_checked


@pytest.mark.parametrize("name", ASSUMPTIONS)
def test_a_finding_names_the_function_and_how_to_allow_it(name):
    finding = Finding(name, "step", ["['w']", "['b']"], [1], "some detail")
    text = finding.warning()
    assert text.startswith("step: ") and "{" not in text
    assert f'allow="{name}"' in text and "JAXMPI_CHECK" not in text
    error = finding.error()
    assert str(error) == text
    assert (error.function, error.leaf, error.ranks) == ("step", "['w']", (1,))


def test_a_finding_of_many_leaves_names_the_first_three():
    text = Finding("unequal_start", "step", [f"['{i}']" for i in range(5)], [0, 2]).warning()
    assert "['0'], ['1'], ['2'] and 2 more differ" in text and "ranks 0, 2 have" in text


@pytest.mark.parametrize("jit", [jaxmpi.jit, jaxmpi.nn.jit, jaxmpi.pmap])
@pytest.mark.parametrize("allow", ["forgotten", ["data_order", "forgotten"]])
def test_a_name_that_no_assumption_has_is_refused(jit, allow):
    with pytest.raises(ValueError, match="allow has 'forgotten', which is none of unequal_start"):
        jit(lambda x: x, allow=allow)


def test_allow_is_no_option_of_jax():
    jaxmpi.init()
    assert jaxmpi.jit(lambda x: x + 1, allow="forgotten_mean")(jnp.zeros(())) == 1


def test_the_variable_turns_off_all_checks(monkeypatch):
    assert is_checked("forgotten_mean") and not is_checked("forgotten_mean", {"forgotten_mean"})
    assert is_checked("forgotten_mean", {"data_order"})
    monkeypatch.setenv("JAXMPI_CHECK", "0")
    assert not is_checked("forgotten_mean")
    monkeypatch.setenv("JAXMPI_CHECK", "1")
    assert is_checked("forgotten_mean")


def test_a_function_without_allow_does_not_advise_it():
    error = Finding("skipped_update", "step", ranks=[1], detail="x", has_allow=False).error()
    assert "rank 1 has skipped an update" in str(error) and "allow=" not in str(error)
