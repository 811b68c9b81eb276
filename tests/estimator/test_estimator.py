"""Estimators in one process, against NumPy, and on several devices and workers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.cases.estimator_numbers import RATE, data, sparse_batches

CASES = "tests.cases.estimator_cases"


def descended(steps, batch=16):
    """The weights after so many steps of gradient descent, the bias last."""
    x, y = data()
    x = np.concatenate([x, np.ones((len(x), 1), "float32")], 1)
    weights = np.zeros((4, 1), "float32")
    for step in range(steps):
        rows = slice(step * batch % len(x), step * batch % len(x) + batch)
        weights -= RATE * 2 / batch * x[rows].T @ (x[rows] @ weights - y[rows])
    return weights.ravel()


def predicted(weights, rows=64):
    x, y = data(rows)
    return x @ weights[:3, None] + weights[3], y


@pytest.mark.core
def test_a_model_is_trained_evaluated_and_used(run, tmp_path):
    found = run("used")
    assert found["same"]
    assert found["saved"] == [0, 10, 12]
    np.testing.assert_allclose(found["middle"], descended(12), atol=1e-6)
    weights = found["weights"]
    np.testing.assert_allclose(weights, descended(20), atol=1e-6)
    value, y = predicted(weights)
    metrics = found["metrics"]
    assert metrics["global_step"] == 20
    np.testing.assert_allclose(metrics["loss"], ((value - y) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["error"], abs(value - y).mean(), rtol=1e-5)
    part = ((value - y) ** 2)[:32].mean()
    np.testing.assert_allclose(found["part"]["loss"], part, rtol=1e-5)
    assert [set(each) for each in found["predicted"]] == [{"value"}] * 64
    np.testing.assert_allclose([p["value"] for p in found["predicted"]], value, atol=1e-5)
    assert found["batch"] == {"value": (16, 1), "twice": (16, 1)}
    assert found["names"] == ["b", "global_step", "w"]
    assert found["latest"] == str(tmp_path / "model.ckpt-20")
    assert found["train tags"] == ["global_step/sec", "loss"]
    assert found["eval tags"] == found["part tags"] == ["error", "loss"]


def test_exports_are_those_of_tensorflow_serving(run):
    found = run("exported")
    value, _ = predicted(found["weights"])
    assert re.fullmatch(r"\d{10}", found["name"])
    assert found["extra"] == "more"
    assert found["files"] == ["saved_model.pbtxt", "variables"]
    assert found["signatures"] == (["serving_default"], ["regression", "serving_default"])
    np.testing.assert_allclose(found["raw"], 2 * value[:2], atol=1e-5)
    np.testing.assert_allclose(found["parsed"], value[:1], atol=1e-5)


def test_a_checkpoint_of_the_retired_estimator_loads(run):
    found = run("retired")
    value, y = predicted(np.array([1.0, 2, 3, 1]))
    np.testing.assert_allclose(found["before"]["loss"], ((value - y) ** 2).mean(), rtol=1e-5)
    assert found["before"]["global_step"] == 7
    assert found["step"] == 8


def test_models_start_from_others(run):
    found = run("warmed")
    np.testing.assert_array_equal(found["all"][:3], found["first"][:3])
    np.testing.assert_array_equal(found["renamed"], [*found["first"][:3], 0])


def test_training_and_evaluation_alone(run):
    found = run("evaluated_alone")
    value, y = predicted(descended(12))
    np.testing.assert_allclose(found["metrics"]["loss"], ((value - y) ** 2).mean(), rtol=1e-4)
    assert [bool(path) for path in found["exports"]] == [True, True, True]
    assert found["again"]["global_step"] == 16
    # Evaluated at 5, 10, 12; the second job learns the best of these from the event files.
    assert found["compared"] == [10, 12, 10, 12, 16]
    assert found["kept"]["final"] == 2
    assert found["kept"]["latest"] == 2


def test_trainings_stop_early(run):
    assert run("stopped") == {
        "no decrease": 1,
        "still decreasing": 4,
        "no increase": 1,
        "higher": 1,
        "never higher": 4,
        "lower": 1,
        "resumed": 3,
    }


def test_metrics_are_added(run):
    found = run("with_more_metrics")
    assert set(found) == {"error", "global_step", "loss", "squared"}
    np.testing.assert_allclose(found["squared"], found["loss"], rtol=1e-5)


def test_hooks_of_the_model(run):
    called = run("hooks_of_the_model")
    assert called[0] == "init"
    assert sorted(called[1:]) == ["chief", "eval", "own", "predict", "train"]


def test_mistakes_are_explained(run):
    found = run("mistakes")
    said = {
        "no train_op": "has no train_op, which that mode needs",
        "mode": "mode='training'.*has no known mode",
        "vector loss": r"has shape \(2,\), but a loss is one number",
        "keras metric": "metrics of Keras do not work here",
        "hook": "is not a tf.compat.v1.train.SessionRunHook",
        "model_fn": "model_fn takes 'label'. It must take features",
        "both steps": "steps=1 conflicts with max_steps=1",
        "no steps": "steps=0 is not a whole number of 1 or more",
        "both saves": "save_checkpoints_steps=1 conflicts with save_checkpoints_secs=1",
        "both dirs": "model_dir='a' conflicts with the configuration",
        "replace": "Did you mean 'model_dir'",
        "no checkpoint": "has no checkpoint to export. Train first",
        "no variable": "has no checkpoint. Train first",
        "strategy": "train_distribute.*mirored.*Choose one of mirrored, multi_worker",
        "servers": "tfdist run --strategy parameter_server",
        "input_fn": "takes 'feature'. It may take",
        "three": "gives 3 elements",
        "export mode": "experimental_mode='train' is not supported",
        "warm start": "has no checkpoint. Give a checkpoint's prefix",
        "served chief": "strategy of this job, 'parameter_server'.*`--every-task` where its own",
        "gone": "tensorflow_decision_forests",
        "no saving": "saves nothing",
        "empty dir": "model_dir='' is no path",
        "each alone": "lists 2 tasks that train.*train_distribute=None: each would train a model",
    }
    assert set(found) == set(said)
    for name, text in said.items():
        assert re.search(text, found[name]), (name, found[name])


def test_two_devices_equal_one(cluster, tmp_path):
    """Per-replica batches of 8 on two devices, and 15 batches to evaluate."""
    call = cluster("devices").call
    two, one = (
        call(f"{CASES}:mirrored", path=str(tmp_path / str(n)), replicas=n)[0] for n in (2, 1)
    )
    assert two["names"] == one["names"]
    for name in ("middle", "weights"):
        np.testing.assert_allclose(two[name], one[name], atol=1e-6)
    np.testing.assert_allclose(two["weights"], descended(16), atol=1e-5)
    for name, value in one["metrics"].items():
        np.testing.assert_allclose(two["metrics"][name], value, rtol=1e-5)


def test_two_workers_equal_one(cluster, tmp_path):
    """They also stop together, where the input of one ends or a hook of one asks for it."""
    found = cluster("multi_worker").call(f"{CASES}:multi_worker", path=str(tmp_path))
    assert [each["chief"] for each in found] == [each["index"] == 0 for each in found]
    for each in found:
        np.testing.assert_allclose(each["weights"], descended(12), atol=1e-5)
        assert each["after uneven"] == 15
        assert each["after wish"] == 17
    assert found[0]["metrics"] == found[1]["metrics"]


@pytest.mark.parametrize("same", [True, False], ids=["one strategy", "two strategies"])
def test_replicas_evaluate_while_replicas_train(cluster, tmp_path, same):
    """Each evaluation is in the middle of the training, and does not change it."""
    call = cluster("devices").call
    two, one = (
        call(f"{CASES}:mirrored_alone", path=str(tmp_path / str(n)), replicas=n, same=same)[0]
        for n in (2, 1)
    )
    np.testing.assert_allclose(two["weights"], descended(12), atol=1e-5)
    assert list(two["evaluations"]) == list(one["evaluations"]) == [5, 10, 12]
    for step, metrics in one["evaluations"].items():
        for name, value in metrics.items():
            np.testing.assert_allclose(two["evaluations"][step][name], value, rtol=1e-4)
    value, y = predicted(descended(12))
    np.testing.assert_allclose(two["metrics"]["loss"], ((value - y) ** 2).mean(), rtol=1e-4)


def test_one_strategy_after_another_and_scaled_losses(cluster, tmp_path):
    found = cluster("devices").call(f"{CASES}:trained_in_turns", path=str(tmp_path))[0]
    assert set(found) == {"as they are", "dynamic", "fixed"}
    for trained in found.values():
        np.testing.assert_allclose(trained, descended(12), atol=1e-5)


def descended_table():
    expected = np.full((50, 4), 0.1, "float32")
    batches = sparse_batches()
    for first in range(0, len(batches), 2):
        step = np.zeros_like(expected)
        for ids, labels in batches[first : first + 2]:
            error = expected[ids].sum((1, 2))[:, None] - labels
            np.add.at(step, ids, np.broadcast_to(error[..., None] / len(ids), (*ids.shape, 4)))
        expected -= RATE * step  # Twice the error, and the mean of two replicas.
    return expected


@pytest.mark.parametrize("case", ["trained", "trained_twice"])
@pytest.mark.parametrize("target", ["devices", "multi_worker"])
def test_sparse_gradients_of_any_number_of_rows(cluster, tmp_path, target, case):
    found = cluster(target).call(
        f"tests.cases.estimator_sparse_cases:{case}", path=str(tmp_path / "model")
    )
    for each in found:
        np.testing.assert_allclose(each, descended_table(), atol=1e-5)


def test_sparse_gradients_with_evaluations_meanwhile(cluster, tmp_path):
    ((table, steps),) = cluster("devices").call(
        "tests.cases.estimator_sparse_cases:evaluated_meanwhile", path=str(tmp_path / "model")
    )
    assert steps == [2, 4, 6]
    np.testing.assert_allclose(table, descended_table(), atol=1e-5)
