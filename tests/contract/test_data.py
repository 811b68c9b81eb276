"""Every example once an epoch, in the order of one process, from every kind of input."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.contract.conftest import Agree, assert_same

#: Kinds of input whose order one process draws anew each time; only the coverage is compared.
RANDOM = ("dataset_shuffled", "sequence_two_workers")


@pytest.mark.turns("all")
@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "arrays_shuffled",
        "arrays_batch_shuffled",
        "tensors",
        "dataset",
        "dataset_cached",
        "dataset_repeated",
        "dataset_data_policy",
        "generator",
        "sequence",
        "sequence_shuffled",
        "sequence_validation",
        "split",
    ],
)
def test_every_example_as_on_one_process(agree: Agree, kind: str) -> None:
    results = agree("data_cases:coverage", kind=kind)
    if kind not in ("dataset_repeated", "split"):
        assert results[0]["history"]["once"] == [1.0, 1.0]


def test_a_data_set_of_unknown_length_trains_as_one_of_known_length(run: Agree) -> None:
    """Not compared with stock Keras, whose optimizer counts one step too many in each epoch."""
    known = run("data_cases:coverage", kind="dataset")
    unknown = run("data_cases:coverage", kind="dataset_unknown_length")
    for one, other in zip(known, unknown, strict=True):
        assert_same(one, other, 1e-6, "the data set of unknown length")


@pytest.mark.parametrize("kind", RANDOM)
def test_every_example_once_in_any_order(run: Agree, kind: str) -> None:
    results = run("data_cases:coverage", kind=kind)
    for result in results:
        assert result["history"]["once"] == [1.0, 1.0]
        assert_same(results[0], result, 1e-6, "another worker")


@pytest.mark.needs("passes")
@pytest.mark.parametrize("seed", [None, 3])
def test_passes_that_go_on_in_the_next_fit(agree: Agree, seed: int | None) -> None:
    agree("data_cases:passes_that_go_on", seed=seed)


@pytest.mark.needs("any model")
def test_a_generator_validates_every_epoch_with_the_same_steps(run: Agree) -> None:
    """In plain Keras the second epoch's batches depend on how far it has read ahead."""
    for values in run("data_cases:validating_generator"):
        # Keras begins with the two batches that it looked at, and goes on where the last one ended.
        assert values == pytest.approx([(0 + 1 + 2) / 3, (0 + 1 + 3) / 3, (0 + 1 + 4) / 3])


@pytest.mark.parametrize("seed", [None, 3])
def test_shuffles_go_on_in_the_next_fit(agree: Agree, seed: int | None) -> None:
    agree("data_cases:shuffles_that_go_on", seed=seed)


@pytest.mark.parametrize("how", ["steps", "split", "looked at"])
def test_passes_over_a_shuffle_that_others_begin_too(agree: Agree, how: str) -> None:
    agree("data_cases:passes_shared", how=how)


def test_a_second_pass_over_a_repeated_shuffle_is_named(run: Agree, target: str) -> None:
    for named in run("data_cases:repeated_shuffle"):
        if target == "parameter_server":
            assert len(named) == 1
            assert "repeats a shuffle (shuffle(…).repeat())" in named[0]
        else:
            assert named == []


def test_remainder_dropped(agree: Agree) -> None:
    agree("data_cases:remainder_dropped")


@pytest.mark.parametrize("lengths", [(13, 5, 8), (2, 20)], ids=["three", "two"])
@pytest.mark.parametrize(
    "policy", ["FILE", "DATA", pytest.param("OFF", marks=pytest.mark.needs("own data"))]
)
def test_files_of_unequal_lengths(
    run: Agree, shared_directory: pathlib.Path, policy: str, lengths: tuple[int, ...]
) -> None:
    _write_ids(shared_directory, lengths)
    results = run("data_cases:files", directory=str(shared_directory), policy=policy)
    for result in results:
        assert_same(results[0], result, 1e-6, "another worker")
        once = [*result["history"]["once"], result["evaluate"]["once"]]
        # Without slices each process reads all examples, so several see each several times.
        alone = policy != "OFF" or len(results) == 1
        np.testing.assert_allclose(once, 1.0 if alone else 0.0)


@pytest.mark.parametrize("kind", ["generator", "dataset", "arrays"])
def test_unequal_lengths_end_before_step_1_or_are_equalised(
    run: Agree, target: str, kind: str
) -> None:
    """Even workers have 5 batches, odd ones 3. A generator's length is not known before its end."""
    results = run("data_cases:unequal_lengths", kind=kind)
    if "mesh" in target and kind == "generator":
        assert all("have different numbers of batches" in each["error"] for each in results)
        return
    if len(results) == 1 or kind == "generator":
        assert results == [{"steps": 5}] * len(results)
        return
    assert results == [results[0]] * len(results)
    assert "ConfigError: The workers' data sets have different numbers" in results[0]["error"]
    lengths = ", ".join(f"worker {rank}: {(5, 3)[rank % 2]}" for rank in range(len(results)))
    assert f"({lengths})" in results[0]["error"]


def test_string_features(agree: Agree) -> None:
    agree("data_cases:strings")


def test_batches_that_are_namedtuples(agree: Agree) -> None:
    agree("data_cases:namedtuples")


@pytest.mark.needs("any model")
def test_sparse_matrices_of_a_model_without_an_input(agree: Agree) -> None:
    agree("data_cases:sparse_matrices")


@pytest.mark.needs("any model")
def test_rows_that_sparse_batches_look_up_come_once(agree: Agree) -> None:
    agree("data_cases:sparse_rows")


@pytest.mark.needs("any model")
def test_a_table_that_is_looked_up_in_both_ways(agree: Agree) -> None:
    agree("data_cases:looked_up_twice")


@pytest.mark.needs("any model")
@pytest.mark.parametrize("optimizer", ["Adagrad", pytest.param("Adam", marks=pytest.mark.seldom)])
def test_bags_of_ids(agree: Agree, optimizer: str) -> None:
    agree("data_cases:bags", optimizer=optimizer)


def _write_ids(directory: pathlib.Path, lengths: tuple[int, ...]) -> None:
    start = 0
    for number, length in enumerate(lengths):
        lines = "".join(f"{i}\n" for i in range(start, start + length))
        (directory / f"{number}.txt").write_text(lines)
        start += length
