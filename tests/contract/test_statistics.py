"""Statistics that a program computes by itself are those of the whole batch, or are named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.cases.common import BATCH
from tests.cases.given_cases import ACTIVITIES, GIVEN, GIVEN_APART, LOGGED, PREDICTED, UPDATES
from tests.cases.statistic_cases import CENTERS, EXAMPLES, MOMENTS
from tests.contract.conftest import Agree, assert_same
from tests.harness import TARGETS, CallError, Pool


def seldom(kinds: Iterable[str], *often: str) -> list[Any]:
    """Kinds of which all but some run in `make test-everything` only: unit tests have them too."""
    rare = pytest.mark.seldom
    return [kind if kind in often else pytest.param(kind, marks=rare) for kind in kinds]


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
    "kind",
    [
        *("deviation", "tiled", "centred", "pairs", "mixed up", "grouped", "generated"),
        *("in a loop", "until converged", "in a branch", "python"),
        *seldom(["pairs in a loop", "until near", "from one to the next"]),
    ],
)
def test_a_layer_that_mixes_examples_is_named(run: Agree, target: str, kind: str) -> None:
    for result in run("statistic_cases:mixing", kind=kind):
        assert bool(result["named"]) is (TARGETS[target].replicas > 1)


@pytest.mark.parametrize("kind", ["centred", "mixed up", "by operations", "last operations"])
def test_a_pipeline_refuses_a_layer_that_mixes_a_batch(cluster: Pool, kind: str) -> None:
    with pytest.raises(CallError, match=r"microbatches=4 conflicts with .* a layer or a gradient"):
        cluster.results("pipeline", "tests.cases.statistic_cases:mixing", kind=kind)


@pytest.mark.needs("any model")
@pytest.mark.parametrize(
    "kind",
    [
        *("tokens", "codebook", "rows in a loop"),
        *seldom(["rows in a branch", "until all are done", "each row"]),
    ],
)
def test_a_layer_that_keeps_examples_apart_is_not(agree: Agree, kind: str) -> None:
    for result in agree("statistic_cases:mixing", kind=kind):
        assert not result["named"]


@pytest.mark.parametrize("kind", ["deviation", "pairs", "mixed up", "grouped"])
def test_servers_leave_a_batch_that_a_layer_mixes_to_one_worker(cluster: Pool, kind: str) -> None:
    expected = cluster.plain("tests.cases.statistic_cases:mixing", kind=kind)
    [result] = cluster.results("parameter_server", "tests.cases.statistic_cases:mixing", kind=kind)
    assert_same(expected, result, 1e-5, "parameter_server")


@pytest.mark.needs("own steps", "replicas")
@pytest.mark.parametrize("kind", seldom(GIVEN, "inputs", "attacked", "labels", "weights", "hard"))
def test_statistics_in_what_a_step_gives_to_a_model_or_loss_are_named(
    run: Agree, target: str, kind: str
) -> None:
    for result in run("given_cases:given", kind=kind):
        assert result["named"] is (TARGETS[target].replicas > 1)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("kind", seldom(GIVEN_APART, "inputs", "chosen"))
def test_a_step_may_change_each_example_by_itself(agree: Agree, kind: str) -> None:
    for result in agree("given_cases:given", kind=kind, apart=True):
        assert not result["named"]


@pytest.mark.parametrize("kind", ["inputs", "labels", "weights"])
def test_servers_leave_a_step_with_such_statistics_to_one_worker(cluster: Pool, kind: str) -> None:
    expected = cluster.plain("tests.cases.given_cases:given", kind=kind)
    [result] = cluster.results("parameter_server", "tests.cases.given_cases:given", kind=kind)
    assert_same(expected, result, 1e-5, "parameter_server")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    ("update", "even"),
    [
        *((name, False) for name in UPDATES if name != "weighted"),
        ("deviation", True),
    ],
)
def test_metrics_of_a_step_with_statistics(agree: Agree, update: str, even: bool) -> None:
    for result in agree("given_cases:reported", update=update, even=even):
        assert not result["named"]


@pytest.mark.needs("own steps", "replicas")
def test_weights_of_a_metric_that_are_shares_of_the_batch_are_named(
    run: Agree, target: str
) -> None:
    for result in run("given_cases:reported", update="weighted", even=False):
        assert bool(result["named"]) is (TARGETS[target].replicas > 1)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("logged", seldom(LOGGED, "deviation", "covariance"))
def test_statistics_in_the_logs_of_a_step(agree: Agree, logged: str) -> None:
    for result in agree("given_cases:reported", logged=logged, even=True):
        assert not result["named"]


@pytest.mark.parametrize("name", ["multi_worker", "mirrored"])
def test_tensors_in_the_logs_of_a_step(cluster: Pool, name: str) -> None:
    expected = cluster.plain("tests.cases.given_cases:tensors", first=False)
    for result in cluster(name).call("tests.cases.given_cases:tensors", first=False):
        assert_same(expected, result, 1e-5, name)
    for result in cluster(name).call("tests.cases.given_cases:tensors", first=True):
        [named] = result["named"]
        assert "has numbers of single examples" in named


def test_tensors_in_the_logs_of_workers_of_servers_are_named(cluster: Pool) -> None:
    for result in cluster("parameter_server").call("tests.cases.given_cases:tensors", first=True):
        [named] = result["named"]
        assert "A log is a tensor of shape (2,)" in named


@pytest.mark.needs("own steps", "replicas")
@pytest.mark.parametrize("predicted", [name for name in PREDICTED if name != "by row"])
def test_predictions_that_relate_examples_are_named(
    run: Agree, target: str, predicted: str
) -> None:
    for result in run("given_cases:reported", predicted=predicted, even=True):
        assert bool(result["named"]) is (TARGETS[target].replicas > 1)


@pytest.mark.needs("own steps")
def test_predictions_by_example(agree: Agree) -> None:
    for result in agree("given_cases:reported", predicted="by row", even=False):
        assert not result["named"]


@pytest.mark.needs("any model", "whole batch")
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("kind", [name for name in ACTIVITIES if name != "deviation"])
def test_activity_regularizers(agree: Agree, kind: str, even: bool) -> None:
    for result in agree("given_cases:active", kind=kind, even=even):
        assert not result["named"]


@pytest.mark.parametrize("even", [False, True])
def test_a_layer_that_regularizes_activities(agree: Agree, even: bool) -> None:
    agree("given_cases:active", kind="", even=even, layer=True)


@pytest.mark.needs("replicas", "whole batch")
@pytest.mark.parametrize("even", [False, True])
def test_an_activity_regularizer_of_a_statistic_is_named(
    run: Agree, target: str, even: bool
) -> None:
    for result in run("given_cases:active", kind="deviation", even=even):
        assert result["named"] is (TARGETS[target].replicas > 1)


@pytest.mark.needs("own steps")
def test_the_mean_of_the_values_of_a_ragged_batch(agree: Agree) -> None:
    agree("statistic_cases:flat")


@pytest.mark.needs("any model")
def test_weights_that_predictions_change_are_named(run: Agree, target: str) -> None:
    for result in run("statistic_cases:counted"):
        assert result["before"] == 2 * EXAMPLES
        assert not result["unnamed"]
        named = [text for text in result["named"] if "predict" in text and "seen/count" in text]
        assert named or result["after"] == 3 * EXAMPLES
        assert bool(named) is (TARGETS[target].replicas > 1 or target == "parameter_server")


@pytest.mark.needs("any model")
@pytest.mark.parametrize("batch", [BATCH, 2])
@pytest.mark.parametrize("variable", [False, True])
def test_examples_are_counted_in_batches_of_one_size(
    run: Agree, variable: bool, batch: int
) -> None:
    options = {"variable": variable, "needs_size": False, "batch": batch}
    for result in run("statistic_cases:counted_evenly", **options):
        assert result == (4 * batch, [])


@pytest.mark.needs("any model")
@pytest.mark.parametrize("variable", [False, True])
def test_examples_that_are_counted_by_a_number_of_python_are_named(
    run: Agree, target: str, variable: bool
) -> None:
    options = {"variable": variable, "needs_size": True, "batch": BATCH}
    if target == "parameter_server":
        with pytest.raises(CallError, match=r"Write tf\.shape"):
            run("statistic_cases:counted_evenly", **options)
        return
    for count, named in run("statistic_cases:counted_evenly", **options):
        assert any("is added a constant" in text for text in named) or count == 4 * BATCH


@pytest.mark.needs("any model")
def test_sums_that_a_layer_in_half_precision_reads(agree: Agree) -> None:
    agree("statistic_cases:averaged", tolerance=1e-3)


@pytest.mark.needs("any model")
def test_variables_that_a_layer_makes_in_its_build(agree: Agree) -> None:
    agree("statistic_cases:made_in_build")
