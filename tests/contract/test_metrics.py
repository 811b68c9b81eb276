"""Metrics of a program's own show what one process shows, or are named."""

from __future__ import annotations

import pytest

from tests.cases.metric_cases import CONSTANTS, HIDDEN, METRICS
from tests.contract.conftest import Agree
from tests.harness import TARGETS


@pytest.mark.needs("any model")
@pytest.mark.parametrize("kind", METRICS)
def test_metrics(agree: Agree, kind: str) -> None:
    agree("metric_cases:metric", kind=kind)


@pytest.mark.needs("any model")
@pytest.mark.parametrize(
    "kind",
    [*("counts batches", "deviations", "smoothed", "elements", "plain variables"), "of a function"],
)
def test_metrics_of_batches_of_one_size(agree: Agree, kind: str) -> None:
    agree("metric_cases:metric", kind=kind, even=True)


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_that_may_belong_to_the_examples_is_named(
    run: Agree, target: str, kind: str
) -> None:
    doubtful = kind in ("smoothed", "elements") and TARGETS[target].replicas > 1
    for warned in run("metric_cases:named", kind=kind, options={}, needs_size=True):
        assert any("is added a constant" in text for text in warned) is doubtful, warned


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("kind", ["batches", "keras"])
def test_a_constant_in_batches_of_one_example_a_replica(run: Agree, target: str, kind: str) -> None:
    """There 1 may be a number of batches or of examples."""
    doubtful = kind == "batches" and TARGETS[target].replicas > 1
    for warned in run("metric_cases:named", kind=kind, options={}, batch=2, needs_size=True):
        assert any("is added a constant" in text for text in warned) is doubtful, warned


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_a_metric_adds_by_an_op_that_hides_it_is_named(
    run: Agree, target: str, kind: str
) -> None:
    told = HIDDEN[kind][1]
    for warned in run("metric_cases:named", kind=kind, options={}):
        assert any(told in text for text in warned) is (TARGETS[target].replicas > 1), warned


@pytest.mark.needs("replicas", "eager")
@pytest.mark.parametrize("kind", ["centred", "deviation", "batches", "", "keras"])
def test_what_a_program_computes_eagerly_is_named(run: Agree, target: str, kind: str) -> None:
    doubtful = kind not in ("", "keras") and TARGETS[target].replicas > 1
    for warned in run("metric_cases:named", kind=kind, options={"run_eagerly": True}):
        assert any("does not show what" in text for text in warned) is doubtful, warned


@pytest.mark.needs("any model")
def test_results_in_a_dictionary_in_the_logs_of_batches(agree: Agree) -> None:
    agree("metric_cases:metric", kind="dictionary", batches=True)


@pytest.mark.needs("own steps")
def test_results_in_a_dictionary_that_a_step_returns(agree: Agree) -> None:
    agree("metric_cases:metric", kind="dictionary", batches=True, where="step")


@pytest.mark.needs("any model")
def test_metrics_that_are_no_sums_are_named(run: Agree, target: str) -> None:
    for messages in run("metric_cases:largest"):
        assert messages or target in ("single", "mesh")
        assert all("largest" in message for message in messages)


@pytest.mark.needs("any model")
def test_metrics_whose_states_depend_on_each_other_are_named(run: Agree, target: str) -> None:
    for messages in run("metric_cases:largest", running=True):
        assert messages or target in ("single", "mesh")
        assert all("computed from the metric's state" in message for message in messages)


@pytest.mark.needs("any model")
def test_batches_of_an_evaluation_that_change_variables_come_in_order(agree: Agree) -> None:
    agree("metric_cases:evaluated")
