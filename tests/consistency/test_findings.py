"""Findings: the words of a broken assumption, and how a check is turned off."""

import pytest

import jaxmpi
from jaxmpi._consistency.findings import ASSUMPTIONS, Finding, is_checked


@pytest.mark.parametrize("name", ASSUMPTIONS)
def test_a_finding_names_the_function_and_how_to_allow_it(name):
    text = Finding(name, "step", ["['w']", "['b']"]).warning()
    assert text.startswith("step: ") and "['w'], ['b']" in text and "{" not in text
    assert f'allow="{name}"' in text


def test_a_finding_of_many_leaves_names_the_first_three():
    text = Finding("forgotten_mean", "step", [f"['{i}']" for i in range(5)]).warning()
    assert "output ['0'], ['1'], ['2'] and 2 more may differ" in text


@pytest.mark.parametrize("jit", [jaxmpi.jit, jaxmpi.nn.jit, jaxmpi.pmap])
@pytest.mark.parametrize("allow", ["forgotten", ["forgotten_mean", "forgotten"]])
def test_a_name_that_no_assumption_has_is_refused(jit, allow):
    with pytest.raises(ValueError, match=r"allow has 'forgotten'[.] It takes 'forgotten_mean'"):
        jit(lambda x: x, allow=allow)


def test_the_variable_turns_off_all_checks(monkeypatch):
    assert is_checked("forgotten_mean") and not is_checked("forgotten_mean", {"forgotten_mean"})
    monkeypatch.setenv("JAXMPI_CHECK", "0")
    assert not is_checked("forgotten_mean")
    monkeypatch.setenv("JAXMPI_CHECK", "1")
    assert is_checked("forgotten_mean")
