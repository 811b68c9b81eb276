"""Own training steps and loops, several models, and options that strategies find hard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.conftest import Agree, assert_same
from tests.harness import TARGETS, Pool

# Loops by hand meet code of each strategy.
TWICE = pytest.mark.turns("test", "all")

#: Strategies whose workers or stages run graphs.
ON_GRAPHS = ("parameter_server", "pipeline")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    "kind",
    [
        *("hand_written_mean", "checked_updates", "looked_up_again", "lagging"),
        *("adversarial", "of_graph", "running_targets"),
    ],
)
def test_own_train_step(agree: Agree, kind: str) -> None:
    agree("step_cases:own_step", kind=kind)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    "options",
    [{}, {"jit_compile": True}, {"reduce_retracing": True}, {"autograph": False}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_steps_that_are_functions_by_themselves(agree: Agree, options: dict[str, Any]) -> None:
    agree("step_cases:compiled_steps", options=options)


@pytest.mark.needs("own steps")
def test_a_step_that_xla_cannot_compile_is_named(run: Agree, target: str) -> None:
    for named in run("step_cases:named_by_xla"):
        assert len(named) == len(set(named))
        assert bool(named) is (target != "single")
        assert target == "single" or "'train_step' is made with" in named[0]


@pytest.mark.needs("own steps", "collectives")
def test_layers_that_are_built_after_a_gathering(agree: Agree) -> None:
    agree("step_cases:gathered_first")


@pytest.mark.parametrize(
    "replicas", ["mirrored", pytest.param("multi_worker", marks=pytest.mark.seldom)]
)
def test_such_steps_of_a_model_that_runs_eagerly(cluster: Pool, replicas: str) -> None:
    """Replicas of one process take turns: a collective would wait for one whose has not come."""
    case, given = "tests.cases.step_cases:compiled_steps", {"options": {}, "run_eagerly": True}
    expected = cluster.plain(case, **given)
    for result in cluster(replicas).call(case, **given):
        assert_same(expected, result, 1e-5, replicas)


@pytest.mark.needs("own steps", "whole gradients")
@pytest.mark.parametrize(
    "kind",
    [
        *("own_update", "own_normalized_update", "adversarial_clipped", "in_functions"),
        *("taken_back", "by_loss", "plain_variables", "gradients_by_hand", "lookups_clipped"),
        *("curvature_along", "clipped_by_example"),
    ],
)
def test_own_train_step_that_computes_with_gradients(agree: Agree, kind: str) -> None:
    agree("step_cases:own_step", kind=kind)


@pytest.mark.needs("own steps", "whole gradients")
@pytest.mark.parametrize("where", ["condition", "loop"])
def test_gradients_that_are_applied_in_a_branch(
    run: Agree, cluster: Pool, target: str, where: str
) -> None:
    alone = cluster.plain("tests.cases.step_cases:accumulated", where=where)
    for result in run("step_cases:accumulated", plain=True, where=where):
        if target == "parameter_server":
            assert "applies gradients within a condition or a loop" in result["error"]
        else:
            assert_same(alone, result, 1e-5, target)


@pytest.mark.needs("any model", "replicas")
def test_a_weight_that_starts_by_data_is_named(run: Agree, target: str) -> None:
    for warned in run("step_cases:started_by_data"):
        named = any("initializations by data" in text for text in warned)
        assert named is (TARGETS[target].replicas > 1)


@pytest.mark.needs("whole batch")
def test_a_generator_of_seeds_goes_on_as_in_one_process(agree: Agree) -> None:
    agree("step_cases:drawn")


@pytest.mark.needs("any model")
def test_outputs_without_a_loss(agree: Agree) -> None:
    agree("step_cases:outputs_without_a_loss")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gan_with_two_optimizers(agree: Agree, optimizer: str) -> None:
    agree("step_cases:adversaries", optimizer=optimizer)


def test_several_models_and_fits(agree: Agree) -> None:
    agree("step_cases:several_models")


def test_fine_tuning_with_recompile(agree: Agree) -> None:
    agree("step_cases:fine_tuning")


@pytest.mark.needs("any model")
def test_kernels_that_a_layer_assigns(agree: Agree) -> None:
    agree("step_cases:normalized_kernels")


@pytest.mark.needs("any model")
def test_layers_that_are_made_in_the_first_step(run: Agree, cluster: Pool) -> None:
    alone = cluster.plain("tests.cases.step_cases:made_in_the_first_step")
    for result in run("step_cases:made_in_the_first_step", plain=True):
        assert result["types"] == alone["types"]


@TWICE
@pytest.mark.needs("loops")
@pytest.mark.parametrize("kind", ["eager", "outer", "inner"])
def test_layers_that_are_made_in_the_first_run(run: Agree, kind: str) -> None:
    for result in run("step_cases:made_in_the_first_run", kind=kind):
        assert result["types"] == ["bfloat16"]


@TWICE
@pytest.mark.needs("loops")
def test_loop_written_for_tf_distribute(agree: Agree) -> None:
    agree("step_cases:distribute_loop")


@TWICE
@pytest.mark.needs("loops")
@pytest.mark.parametrize("inside", [False, True])
def test_loop_that_checks_its_values(agree: Agree, inside: bool) -> None:
    agree("step_cases:checked_loop", inside=inside)


@TWICE
@pytest.mark.needs("loops")
@pytest.mark.parametrize(
    ("form", "start"),
    [
        *(("replicas", 10), ("function", 10), ("function", 127)),
        pytest.param("eager", 127, marks=pytest.mark.needs("eager")),
    ],
)
def test_loop_that_scales_its_losses(agree: Agree, form: str, start: int) -> None:
    """The scale grows, or a gradient of a replica or of the whole batch is too large at first."""
    for result in agree("step_cases:scaled_loop", form=form, start=start):
        assert (result["iterations"] < 12) is (start > 100)


@TWICE
@pytest.mark.needs("loops")
def test_statistics_of_the_whole_batch_in_a_loop_for_tf_distribute(agree: Agree) -> None:
    agree("step_cases:distribute_loop", synchronized=True)


@TWICE
@pytest.mark.needs("loops")
def test_own_statistics_in_a_loop_for_tf_distribute_are_named(run: Agree, target: str) -> None:
    for result in run("step_cases:distribute_loop", synchronized=False):
        named = " ".join(result["named"])
        assert ("moving_mean" in named and "keeps its own" in named) is (target != "single")


@TWICE
@pytest.mark.needs("loops")
def test_gather_and_reduce(agree: Agree) -> None:
    agree("step_cases:gathered")


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"run_eagerly": True}, {"jit_compile": True, "run_eagerly": True}],
    ids=lambda options: "-".join(options),
)
def test_options_that_may_not_work(
    run: Agree, cluster: Pool, target: str, options: dict[str, Any]
) -> None:
    """The result of one process, or an error that says what does not go."""
    results = run("step_cases:compiled_with", plain=True, options=options)
    reference = cluster.plain("tests.cases.step_cases:compiled_with", options=options)
    for result in results:
        if target in ON_GRAPHS and "run_eagerly" in options:
            assert f"run_eagerly=True conflicts with strategy={target!r}" in result["error"]
        elif "eager" in TARGETS[target].lacks and "run_eagerly" in options:
            assert "conflicts with a step that runs eagerly" in result["error"]
        else:
            assert_same(reference, result, 1e-5, target)


@pytest.mark.needs("any model")
def test_a_model_of_8_bit_weights_that_is_tuned(agree: Agree) -> None:
    agree("step_cases:quantized")
