"""Statistics that a program computes by itself are those of the whole batch, or are named."""

from __future__ import annotations

import pytest

from tests.cases.statistic_cases import (
    CENTERS,
    CONSTANTS,
    GIVEN,
    GIVEN_APART,
    HIDDEN,
    METRICS,
    MOMENTS,
)
from tests.contract.conftest import Agree, assert_same
from tests.harness import TARGETS, CallError, Pool


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", CENTERS)
def test_centers_of_classes(agree: Agree, kind: str) -> None:
    agree("statistic_cases:centers", kind=kind)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", ["segments", "scattered"])
def test_centers_of_classes_from_batches_of_one_size(agree: Agree, kind: str) -> None:
    agree("statistic_cases:centers", kind=kind, even=True)


@pytest.mark.needs("any model")
@pytest.mark.parametrize("kind", MOMENTS)
def test_running_moments(agree: Agree, kind: str) -> None:
    agree("statistic_cases:running", kind=kind)


@pytest.mark.needs("replicas")
@pytest.mark.parametrize(
    "kind", ["deviation", "tiled", "centred", "pairs", "mixed up", "grouped", "generated"]
)
def test_a_layer_that_mixes_examples_is_named(run: Agree, target: str, kind: str) -> None:
    for result in run("statistic_cases:mixing", kind=kind):
        assert bool(result["named"]) is (TARGETS[target].replicas > 1)


@pytest.mark.parametrize("kind", ["centred", "mixed up", "by operations"])
def test_a_pipeline_refuses_a_layer_that_mixes_a_batch(cluster: Pool, kind: str) -> None:
    with pytest.raises(CallError, match=r"microbatches=4 conflicts with .* or a layer"):
        cluster.results("pipeline", "tests.cases.statistic_cases:mixing", kind=kind)


@pytest.mark.needs("any model")
def test_a_layer_that_mixes_tokens_is_not(agree: Agree) -> None:
    for result in agree("statistic_cases:mixing", kind="tokens"):
        assert not result["named"]


@pytest.mark.parametrize("kind", ["deviation", "pairs", "mixed up", "grouped"])
def test_servers_leave_a_batch_that_a_layer_mixes_to_one_worker(cluster: Pool, kind: str) -> None:
    expected = cluster.plain("tests.cases.statistic_cases:mixing", kind=kind)
    [result] = cluster.results("parameter_server", "tests.cases.statistic_cases:mixing", kind=kind)
    assert_same(expected, result, 1e-5, "parameter_server")


@pytest.mark.needs("own steps", "replicas")
@pytest.mark.parametrize("kind", GIVEN)
def test_statistics_in_what_a_step_gives_to_a_model_or_loss_are_named(
    run: Agree, target: str, kind: str
) -> None:
    for result in run("statistic_cases:given", kind=kind):
        assert result["named"] is (TARGETS[target].replicas > 1)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", GIVEN_APART)
def test_a_step_may_change_each_example_by_itself(agree: Agree, kind: str) -> None:
    for result in agree("statistic_cases:given", kind=kind, apart=True):
        assert not result["named"]


@pytest.mark.parametrize("kind", ["inputs", "labels", "weights"])
def test_servers_leave_a_step_with_such_statistics_to_one_worker(cluster: Pool, kind: str) -> None:
    expected = cluster.plain("tests.cases.statistic_cases:given", kind=kind)
    [result] = cluster.results("parameter_server", "tests.cases.statistic_cases:given", kind=kind)
    assert_same(expected, result, 1e-5, "parameter_server")


@pytest.mark.needs("any model")
@pytest.mark.parametrize("kind", METRICS)
def test_metrics(agree: Agree, kind: str) -> None:
    agree("statistic_cases:metric", kind=kind)


@pytest.mark.needs("any model")
@pytest.mark.parametrize("kind", ["counts batches", "deviations"])
def test_metrics_of_batches_of_one_size(agree: Agree, kind: str) -> None:
    agree("statistic_cases:metric", kind=kind, even=True)


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_that_may_belong_to_the_examples_is_named(
    run: Agree, target: str, kind: str
) -> None:
    doubtful = kind in ("smoothed", "elements") and TARGETS[target].replicas > 1
    for warned in run("statistic_cases:named", kind=kind, options={}):
        assert any("is added a constant" in text for text in warned) is doubtful, warned


@pytest.mark.needs("replicas")
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_a_metric_adds_by_an_op_that_hides_it_is_named(
    run: Agree, target: str, kind: str
) -> None:
    told = f"is added what {HIDDEN[kind][1]} computes from the examples"
    for warned in run("statistic_cases:named", kind=kind, options={}):
        assert any(told in text for text in warned) is (TARGETS[target].replicas > 1), warned


@pytest.mark.needs("replicas", "eager")
@pytest.mark.parametrize("kind", ["centred", "deviation", "batches", "", "keras"])
def test_what_a_program_computes_eagerly_is_named(run: Agree, target: str, kind: str) -> None:
    doubtful = kind not in ("", "keras") and TARGETS[target].replicas > 1
    for warned in run("statistic_cases:named", kind=kind, options={"run_eagerly": True}):
        assert any("does not show what" in text for text in warned) is doubtful, warned


@pytest.mark.needs("any model")
def test_results_in_a_dictionary_in_the_logs_of_batches(agree: Agree) -> None:
    agree("statistic_cases:metric", kind="dictionary", batches=True)


@pytest.mark.needs("own steps")
def test_results_in_a_dictionary_that_a_step_returns(agree: Agree) -> None:
    agree("statistic_cases:metric", kind="dictionary", batches=True, where="step")


@pytest.mark.needs("own steps")
def test_the_mean_of_the_values_of_a_ragged_batch(agree: Agree) -> None:
    agree("statistic_cases:flat")
