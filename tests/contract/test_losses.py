"""Losses, their reductions and metrics equal one process's on every worker."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.cases.assigned_cases import BY_PLACE, GIVEN, HIDDEN, IN_PLACE, OF_EXAMPLES, OF_WEIGHTS
from tests.cases.common import BATCH
from tests.cases.loss_cases import BY_FEATURE, BY_OUTPUT, DOUBTFUL, LOSSES, MIXED, PAIRS
from tests.contract.conftest import TOLERANCE, Agree, assert_same
from tests.harness import TARGETS, CallError, Pool

CASES = "contract_cases"

#: Targets on which a process sees a whole batch, parameter servers where a step asks for it.
_WHOLE = ("single", "mesh", "parameter_server")


def seldom(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.seldom)


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    [
        ("sum", False),
        ("sum", True),
        ("sum_over_batch_size", True),
        ("mean_with_sample_weight", True),
        # Without weights both are the mean that most tests train with.
        seldom("sum_over_batch_size", False),
        seldom("mean_with_sample_weight", False),
    ],
)
def test_reductions(agree: Agree, reduction: str, weighted: bool) -> None:
    loss = "huber" if reduction == "sum" else "mse"
    agree(f"{CASES}:regression", loss=loss, reduction=reduction, weighted=weighted)


def test_class_weights(agree: Agree) -> None:
    agree(f"{CASES}:class_weights")


@pytest.mark.parametrize(
    "per_token",
    [pytest.param(False, marks=pytest.mark.needs("any model")), True],
    ids=["per_sequence", "per_token"],
)
def test_masks(agree: Agree, per_token: bool) -> None:
    agree(f"{CASES}:masked", per_token=per_token)


@pytest.mark.needs("collectives")
def test_a_mask_that_keeps_zeros_beside_replicas_without_examples(agree: Agree) -> None:
    agree(f"{CASES}:masked_but_for_zeros")


def test_several_outputs(agree: Agree) -> None:
    agree(f"{CASES}:several_outputs")


def test_regularizers_and_added_losses(agree: Agree) -> None:
    agree(f"{CASES}:added_losses")


def test_metrics_that_are_no_means(agree: Agree) -> None:
    agree(f"{CASES}:metrics")


@pytest.mark.parametrize(
    "own_step", [False, pytest.param(True, marks=pytest.mark.needs("own steps"))]
)
def test_metrics_whose_results_are_vectors(agree: Agree, own_step: bool) -> None:
    agree(f"{CASES}:metrics_of_classes", own_step=own_step)


#: Forms that are others in the graph, but whose numbers come about in the same way.
ALIKE = ("keras sum", "sum of means", "norm", "over own batch", "average")


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("name", [*(n for n in LOSSES if n not in ALIKE), "Dice", "Tversky"])
def test_a_loss_that_reduces_the_batch_by_itself(agree: Agree, name: str) -> None:
    agree("loss_cases:compiled", name=name)


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", seldom("sum"), seldom("none")])
@pytest.mark.parametrize("name", BY_FEATURE)
def test_a_loss_that_has_a_number_for_each_feature(agree: Agree, name: str, reduction: str) -> None:
    agree("loss_cases:by_feature", name=name, reduction=reduction)


def test_a_loss_with_a_call_of_its_own(agree: Agree) -> None:
    agree("loss_cases:own_call")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs("inner gradients") if name == "by hand" else ())
        for name in BY_OUTPUT
    ],
)
def test_gradients_that_a_step_takes_with_output_gradients(agree: Agree, name: str) -> None:
    agree("loss_cases:by_output", name=name)


#: Losses with a number of examples, or of the batch, in them.
SIZED = ("over global batch", "over own batch", "divided first", "plus a count", "determinant")


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("name", SIZED)
def test_numbers_of_examples_in_a_loss_of_batches_of_one_size(agree: Agree, name: str) -> None:
    agree("loss_cases:compiled", name=name, even=True)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("name", SIZED)
def test_numbers_of_examples_in_a_train_step_of_batches_of_one_size(
    agree: Agree, name: str
) -> None:
    agree("loss_cases:by_hand", name=name, even=True)


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("name", ["mean", "root"])
def test_sample_weights_of_a_loss_that_is_a_number(agree: Agree, name: str) -> None:
    agree("loss_cases:compiled", name=name, weighted=True)


@pytest.mark.needs("whole batch")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum_over_batch_size", "sum"])
def test_a_loss_that_is_a_number_where_a_replica_has_no_weight(
    agree: Agree, reduction: str, masked: bool
) -> None:
    agree("loss_cases:weighted_numbers", reduction=reduction, masked=masked)


@pytest.mark.parametrize(
    "how",
    [
        *("sum", "by example", "mean", "regularizer", "weights"),
        pytest.param("root", marks=pytest.mark.needs("whole batch")),
    ],
)
def test_losses_that_layers_add(agree: Agree, how: str) -> None:
    agree("loss_cases:added", how=how)


@pytest.mark.needs("whole batch")
def test_losses_of_two_types(agree: Agree) -> None:
    agree("loss_cases:added_in_double")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    "name",
    # The seldom ones are sums of the others, and compiled losses have them too.
    [
        *("sum", "root", "ratio", "average", "average of global", "by example", "correlated"),
        "root in a function",
        *map(seldom, ("sum and mean", "over global batch")),
    ],
)
def test_a_train_step_that_reduces_by_hand(agree: Agree, name: str) -> None:
    agree("loss_cases:by_hand", name=name)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    "name", ["sum", *map(seldom, ("mean", "root", "ratio", "average of global"))]
)
def test_a_train_step_that_reduces_by_hand_and_scales(agree: Agree, name: str) -> None:
    agree("loss_cases:by_hand", name=name, change="scale")


@pytest.mark.needs("own steps")
@pytest.mark.parametrize("name", ["mean", "sum", "root"])
@pytest.mark.parametrize("change", ["decay", "temperature"])
def test_a_train_step_whose_loss_reads_weights(agree: Agree, name: str, change: str) -> None:
    agree("loss_cases:by_hand", name=name, change=change)


@pytest.mark.needs("own steps")
@pytest.mark.needs("whole gradients")
@pytest.mark.parametrize("change", ["clip", "normalize"])
def test_gradients_that_a_train_step_changes(agree: Agree, change: str) -> None:
    agree("loss_cases:by_hand", name="mean", change=change)


@pytest.mark.needs("any model")
def test_activations_that_are_computed_again(agree: Agree, run: Agree, target: str) -> None:
    if target != "parameter_server":
        agree("gradient_cases:recomputed")
        return
    with pytest.raises(CallError, match=r"tf.recompute_grad.*the weights as arguments"):
        run("gradient_cases:recomputed")


@pytest.mark.parametrize(
    "change", ["clipped", *map(seldom, ("shortened_by_row", "rounded", "product"))]
)
def test_gradients_that_a_function_of_the_program_changes(agree: Agree, change: str) -> None:
    for result in agree("gradient_cases:between_layers", change=change):
        assert result["warned"] == []


@pytest.mark.parametrize("change", ["centered", *map(seldom, ("averaged", "shortened", "bounded"))])
def test_gradient_functions_in_which_examples_meet(
    agree: Agree, run: Agree, target: str, change: str
) -> None:
    case = functools.partial(agree if target in _WHOLE else run, "gradient_cases:between_layers")
    for result in case(change=change):
        named = set(result["warned"])
        assert len(named) == (target not in _WHOLE)
        for message in named:
            assert re.search(rf"of a batch meet .*of '{change}'", message)


def test_layers_in_float8(agree: Agree, run: Agree, target: str) -> None:
    if target in _WHOLE:
        agree("gradient_cases:float8")
        return
    for result in run("gradient_cases:float8"):
        assert "of a layer in float8 conflicts with" in result["refused"]


@pytest.mark.needs("whole batch")
def test_weights_that_count(agree: Agree) -> None:
    results = agree("loss_cases:counters")
    assert {result["examples"] for result in results} == {2 * 77}


@pytest.mark.needs("whole batch")
def test_weights_that_hold_examples_are_refused(run: Agree, target: str) -> None:
    for message in run("loss_cases:memory_bank"):
        alone = target in ("single", "mesh")
        assert ("rows of the batch" in message) is not alone
        assert ("queue" in message) is not alone


@pytest.mark.needs("own steps", "collectives")
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("put", ["first", "at a place"])
def test_weights_that_hold_gathered_examples(agree: Agree, put: str, even: bool) -> None:
    agree("assigned_cases:queue_of_all", put=put, even=even)


@pytest.mark.needs("any model", "whole batch")
def test_weights_that_are_assigned_from_assigned_weights(agree: Agree) -> None:
    agree("assigned_cases:codebook")


@pytest.mark.parametrize(
    ("name", "given"),
    [*(("multi_worker", given) for given in GIVEN), ("parameter_server", "the batch itself")],
)
def test_rows_of_batches_of_a_static_size(cluster: Pool, name: str, given: str) -> None:
    expected = cluster.plain("tests.cases.assigned_cases:given_rows", given=given)
    for result in cluster(name).call("tests.cases.assigned_cases:given_rows", given=given):
        if given in ("a mean", "products"):
            assert_same(expected, result, 1e-5, given)
        else:
            assert "'sequential/given_rows/queue' is given rows of the batch" in result["refused"]


@pytest.mark.needs("any model", "whole batch")
@pytest.mark.parametrize("how", IN_PLACE)
def test_variables_that_are_changed_in_place(agree: Agree, how: str) -> None:
    agree("assigned_cases:in_place", how=how)


@pytest.mark.needs("any model", "whole batch")
@pytest.mark.parametrize("how", OF_WEIGHTS)
def test_weights_of_keras_that_are_changed_in_place(agree: Agree, how: str) -> None:
    agree("assigned_cases:in_place", how=how, of_keras=True)


@pytest.mark.parametrize("how", OF_EXAMPLES)
@pytest.mark.parametrize("of_keras", [False, True])
def test_examples_that_are_put_in_place_are_refused(
    cluster: Pool, how: str, of_keras: bool
) -> None:
    for result in cluster("mirrored").call(
        "tests.cases.assigned_cases:in_place", how=how, of_keras=of_keras
    ):
        assert re.search("given rows of the batch|is changed in place", result["refused"])


@pytest.mark.needs("any model", "whole batch")
def test_weights_of_booleans(agree: Agree) -> None:
    agree("assigned_cases:flags")


@pytest.mark.parametrize("kind", HIDDEN)
def test_weights_that_are_neither_means_nor_sums_are_named(cluster: Pool, kind: str) -> None:
    for messages in cluster("mirrored").call("tests.cases.assigned_cases:hidden", kind=kind):
        told = f"'sequential/tracks/kept' is given a value that {HIDDEN[kind][1]}"
        assert any(told in message for message in messages), messages


@pytest.mark.needs("any model")
@pytest.mark.parametrize("kind", BY_PLACE)
def test_weights_and_metrics_of_examples_by_their_places(
    agree: Agree, run: Agree, target: str, kind: str
) -> None:
    case = functools.partial(agree if target in _WHOLE else run, "assigned_cases:by_place")
    for result in case(kind=kind):
        named = {place for place in ("weight", "metric") if result["named"][place]}
        assert named == (set() if target in _WHOLE else {"weight", "metric"})


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        *((name, False) for name in PAIRS),
        *((name, True) for name in ("contrast", "einsum", "softmax of the batch", "first rows")),
        *((name, True) for name in ("from class means", "largest by class")),
        # A step shows a loss of its own as `compile` does: these are found by the same lines.
        *(
            pytest.param(name, True, marks=pytest.mark.seldom)
            for name in (
                *("variance", "largest", "neighbours", "backwards", "groups", "by class counts"),
                *("from class sums", "by repeats", "singular values", "weighed by place"),
                "first half",
            )
        ),
    ],
)
def test_examples_that_meet_in_a_loss(
    cluster: Pool, run: Agree, target: str, name: str, by_hand: bool
) -> None:
    """Compiled losses see the whole batch; of a loss by hand what is not named is equal."""
    alone = cluster.plain("tests.cases.loss_cases:pairs", name=name, by_hand=by_hand)
    for result in run("loss_cases:pairs", plain=True, name=name, by_hand=by_hand):
        if target == "pipeline":
            assert ("train_step" if by_hand else "microbatches=4") in result["refused"]
        elif result["named"]:
            assert by_hand
            reduced = ("The loss is reduced to a number by", "A log of the step is reduced")
            told = ("The examples of a batch meet", *reduced)
            assert all(text.startswith(told) for text in result["named"])
        else:
            assert not by_hand or target in _WHOLE
            assert_same(alone, result, TOLERANCE, target)


def test_examples_that_meet_in_a_loss_that_is_scaled(cluster: Pool) -> None:
    [named] = cluster("mirrored").call("tests.cases.loss_cases:scaled_pairs")
    assert any(text.startswith("The examples of a batch meet in the loss") for text in named)


@pytest.mark.needs("own steps")
@pytest.mark.parametrize(
    ("case", "loss"),
    [*(("mixed", loss) for loss in MIXED), ("faded", "mse"), ("faded", "contrast")],
)
def test_examples_that_a_step_mixes(
    run: Agree, cluster: Pool, target: str, case: str, loss: str
) -> None:
    """They are named, also behind a loop, and a loss that is called with the whole batch."""
    alone = cluster.plain(f"tests.cases.loss_cases:{case}", loss=loss)
    for result in run(f"loss_cases:{case}", plain=True, loss=loss):
        if target in _WHOLE:
            assert_same(alone, result, TOLERANCE, target)
        else:
            assert any("as in MixUp" in text for text in result["named"]), result["named"]


@pytest.mark.needs("collectives")
def test_examples_that_meet_those_of_all_replicas(agree: Agree) -> None:
    agree("loss_cases:gathered")


@pytest.mark.needs("any model")
def test_examples_that_meet_in_batches_that_are_alike(agree: Agree) -> None:
    agree("loss_cases:pairs", name="circle", by_hand=False, examples=2 * BATCH)


@pytest.mark.needs("any model")
@pytest.mark.parametrize("scaled", [False, True])
def test_examples_that_meet_after_a_normalization_of_the_whole_batch(
    agree: Agree, scaled: bool
) -> None:
    agree("loss_cases:normalized_pairs", scaled=scaled)


@pytest.mark.needs("replicas", "any model")
@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_loss_that_may_not_equal_one_process_is_named(run: Agree, target: str, name: str) -> None:
    *_, expected = DOUBTFUL[name]
    for said in run("loss_cases:doubtful", name=name):
        assert any(expected in text for text in said) is (TARGETS[target].replicas > 1), said


def test_layers_that_keep_examples_apart_are_not_named(run: Agree) -> None:
    assert all(run("loss_cases:without_pairs"))


@pytest.mark.needs("whole batch")
@pytest.mark.seldom
@pytest.mark.parametrize("name", ALIKE)
def test_other_forms_of_losses(agree: Agree, name: str) -> None:
    agree("loss_cases:compiled", name=name)
