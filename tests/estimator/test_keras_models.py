"""Keras models as Estimators against the models themselves."""

from __future__ import annotations

import pytest

CASES = "tests.cases.estimator_keras_cases"


@pytest.mark.parametrize(("optimizer", "times"), [("adam", 2), ("adamw", 1), ("accumulating", 1)])
def test_an_estimator_trains_as_the_model_does(run, optimizer, times):
    result = run("fitted", optimizer=optimizer, times=times)
    assert result["kept"]
    assert result["saved"] == result["variables"]
    assert len(result["differences"]) >= 10
    assert max(result["differences"].values()) < 1e-5, result["differences"]
    assert result["predictions"] < 1e-5
    expected, found = result["expected"], result["metrics"]
    assert found["global_step"] == 6 * times
    assert set(found) == {"accuracy", "average_loss", "global_step", "loss", "top2"}
    assert found["average_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for name in ("accuracy", "top2"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_saved_model_with_several_inputs_and_outputs(run):
    result = run("several")
    assert max(result["differences"].values()) < 1e-5
    assert max(result["served"].values()) < 1e-5
    expected, found = result["expected"], result["metrics"]
    assert found["average_loss"] == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert found["error"] == pytest.approx(expected.pop("size_mae"), rel=1e-5)
    assert {"kind_loss", "size_loss"} == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5)


def test_a_model_that_was_not_built(run):
    differences = run("lazy")["differences"]
    assert len(differences) >= 4
    assert max(differences.values()) < 1e-5


def test_updates_happen_on_the_servers(cluster):
    result = cluster("plain").call(f"{CASES}:on_servers")[0]
    places = result["places"]
    assert set(places.values()) == {f"/job:ps/task:{i}" for i in range(2)}
    for name, device in places.items():
        if name.endswith("_momentum"):
            weight = name.removeprefix("sgd/").removesuffix("_momentum")
            (owner,) = [each for each in places if each.replace("/", "_") == weight]
            assert places[owner] == device
    added = [each for each in result["updates"] if each[0] == "AssignAddVariableOp"]
    assert len(added) >= 14
    assert all(device == variable for _, device, variable in added)
    assert result["together"] == 1 + 5 + 2


def test_two_replicas_train_as_one_does(cluster, tmp_path):
    result = cluster("devices").call(f"{CASES}:mirrored", path=str(tmp_path))[0]
    for differences in result.values():
        assert len(differences) >= 10
        assert max(differences.values()) < 1e-5, differences


def test_what_cannot_be_an_estimator_is_refused(cluster):
    messages = cluster("plain").call(f"{CASES}:refused")[0]
    expected = {
        "neither": "Neither of keras_model and keras_model_path",
        "no model": "keras_model='model' is no keras.Model",
        "uncompiled": "is not compiled",
        "own": "has a train_step of its own",
        "eagerly": "run_eagerly=True",
        "format": "checkpoint_format='checkpoint' is not supported",
        "labels": "got no labels",
        "inputs": "has one input",
        "assigned": "with a layer that assigns 'sequential",
        "scaling": "LossScaleOptimizer is not supported",
    }
    assert messages.keys() == expected.keys()
    for name, text in expected.items():
        assert text in messages[name], (name, messages[name])
