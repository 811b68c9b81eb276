"""What a program makes, and where it trains, inside and outside of a strategy's scope."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Agree, assert_same
from tests.harness import TARGETS, Pool


@pytest.mark.core("sessions")
def test_a_cleared_session_stays_in_the_scope(agree: Agree) -> None:
    for result in agree("scope_cases:cleared"):
        assert result["kept"] == [True]
        assert result["left"] == [True, "ResourceVariable"]


def test_variables_are_read_as_numbers_and_arrays(agree: Agree) -> None:
    agree("scope_cases:read_as_numbers", tolerance=0.0)


@pytest.mark.parametrize("what", ["functions", "data"])
def test_functions_that_run_eagerly(run: Agree, cluster: Pool, target: str, what: str) -> None:
    plain = cluster.plain("tests.cases.scope_cases:debugged", what=what)
    for result in run("scope_cases:debugged", plain=True, what=what):
        if "error" in result:
            assert "eager" in TARGETS[target].lacks
            assert "conflicts with a step that runs eagerly" in result["error"]
        else:
            assert_same(plain, result, 1e-5, target)


def test_training_on_a_thread_without_the_scope_is_named(run: Agree) -> None:
    for errors in run("scope_cases:on_a_thread", opened=False):
        assert len(errors) == 1
        assert "with tfdist.strategy().scope():" in errors[0]


def test_a_thread_may_open_the_scope(run: Agree) -> None:
    for errors in run("scope_cases:on_a_thread", opened=True):
        assert errors == []


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("what", ["optimizer", "metric", "layer"])
def test_what_was_made_outside_of_the_scope_is_refused_by_name(run: Agree, what: str) -> None:
    for message in run("scope_cases:made_outside", what=what):
        assert "was made outside of strategy.scope()" in message


@pytest.mark.needs("replicas")
def test_a_frozen_layer_may_be_made_outside_of_the_scope(run: Agree) -> None:
    assert set(run("scope_cases:made_outside", what="frozen layer")) == {""}
