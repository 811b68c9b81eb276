"""Canned estimators against NumPy, Keras and scikit-learn."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

CASES = "tests.cases.estimator_canned_cases"
BATCH = 24


def batches(*arrays, steps):
    """The batches of so many steps, over all examples again and again."""
    starts = list(range(0, len(arrays[0]), BATCH))
    for step in range(steps):
        start = starts[step % len(starts)]
        yield tuple(array[start : start + BATCH] for array in arrays)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_hot(colours):
    return np.stack([colours == name for name in ("red", "green", "blue")], 1).astype("float32")


def test_a_linear_regressor_trains_as_numpy_does(run):
    from tests.cases.estimator_canned_cases import data

    result = run("linear_regressor")
    features, _ = data()
    x = np.hstack([one_hot(features["colour"]), features["x"]])
    labels, weights = features["age"] / 30, features["weight"]
    w, b = np.zeros(5), 0.0
    for xs, ys, ws in batches(x, labels, weights, steps=5):
        slope = 2 * ws * (xs @ w + b - ys) / len(xs)
        w, b = w - 0.2 * slope @ xs, b - 0.2 * slope.sum()
    scope = "linear/linear_model"
    values = result["values"]
    assert set(values) == {
        "global_step",
        f"{scope}/bias_weights",
        f"{scope}/colour/weights",
        f"{scope}/x/weights",
    }
    np.testing.assert_allclose(values[f"{scope}/colour/weights"][:, 0], w[:3], rtol=1e-5)
    np.testing.assert_allclose(values[f"{scope}/x/weights"][:, 0], w[3:], rtol=1e-5)
    np.testing.assert_allclose(values[f"{scope}/bias_weights"], [b], rtol=1e-5)
    found, predicted = result["metrics"], x @ w + b
    losses = weights * (predicted - labels) ** 2
    by_batch = [losses[i : i + BATCH].mean() for i in range(0, len(x), BATCH)]
    assert found["loss"] == pytest.approx(np.mean(by_batch), rel=1e-5)
    assert found["average_loss"] == pytest.approx(losses.sum() / weights.sum(), rel=1e-5)
    assert found["prediction/mean"] == pytest.approx(np.average(predicted, weights=weights), 1e-5)
    assert found["label/mean"] == pytest.approx(np.average(labels, weights=weights), rel=1e-5)
    assert found["global_step"] == 5


def test_a_deep_classifier_trains_as_keras_does(run):
    from tests.cases.estimator_canned_cases import data

    steps = 6
    result = run("deep_classifier", steps=steps)
    features, labels = data(kinds=3)
    before, after = result["before"], result["after"]
    table = "dnn/input_from_feature_columns/input_layer/colour_embedding/embedding_weights"
    parts = ("gamma", "beta", "moving_mean", "moving_variance")
    names = [[table]]
    for i in range(2):
        layer = f"dnn/hiddenlayer_{i}"
        names += [[f"{layer}/kernel", f"{layer}/bias"]]
        names += [[f"{layer}/batchnorm_{i}/{part}" for part in parts]]
    names += [["dnn/logits/kernel", "dnn/logits/bias"]]
    assert {*itertools.chain(*names), "global_step"} == set(before)

    colour, x = keras.Input((3,)), keras.Input((2,))
    net = keras.layers.concatenate([keras.layers.Dense(3, use_bias=False)(colour), x])
    for units in (6, 4):
        net = keras.layers.Dense(units, activation="relu")(net)
        net = keras.layers.BatchNormalization(momentum=0.999)(net)
    model = keras.Model([colour, x], keras.layers.Dense(3)(net))
    layers = [layer for layer in model.layers if layer.weights]
    for layer, named in zip(layers, names, strict=True):
        layer.set_weights([before[name] for name in named])
    model.compile(
        keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.1)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    hot = one_hot(features["colour"])
    for colours, xs, ys in batches(hot, features["x"], labels, steps=steps):
        model.train_on_batch([colours, xs], ys)
    for layer, named in zip(layers, names, strict=True):
        for name, value in zip(named, layer.get_weights(), strict=True):
            np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    logits = model.predict([hot, features["x"]], verbose=0)
    found = result["predictions"]
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-4, atol=1e-5)
    assert list(found["class_ids"][:, 0]) == list(logits.argmax(1))
    assert found["classes"][0, 0] == b"%d" % logits[0].argmax()
    assert found["all_classes"][0].tolist() == [b"0", b"1", b"2"]


def area_under_roc(labels, scores, weights):
    """The weight of the pairs of a positive and a negative example in order; ties count half."""
    positive, negative = labels == 1, labels == 0
    difference = scores[positive][:, None] - scores[negative]
    weight = weights[positive][:, None] * weights[negative]
    return np.average(np.heaviside(difference, 0.5), weights=weight)


def average_precision(labels, scores, weights):
    """The mean over the positive examples of the precision at each one's score."""
    above = scores >= scores[:, None]
    precision = (above * weights * labels).sum(1) / (above * weights).sum(1)
    return np.average(precision, weights=weights * labels)


def test_metrics_of_two_classes_are_their_definitions(run):
    result = run("binary_metrics")
    labels, weights, found = result["labels"], result["weights"], result["metrics"]
    probability = result["predictions"]["logistic"][:, 0]
    classes = result["predictions"]["class_ids"][:, 0]
    mean = np.average(labels, weights=weights)
    likelihood = np.where(labels == 1, probability, 1 - probability)
    hits = weights * (labels == 1) * (classes == 1)
    exact = {
        "accuracy": np.average(labels == classes, weights=weights),
        "accuracy_baseline": max(mean, 1 - mean),
        "average_loss": -np.average(np.log(likelihood), weights=weights),
        "label/mean": mean,
        "precision": hits.sum() / weights[classes == 1].sum(),
        "prediction/mean": np.average(probability, weights=weights),
        "recall": hits.sum() / weights[labels == 1].sum(),
    }
    near = {  # By 200 thresholds.
        "auc": area_under_roc(labels, probability, weights),
        "auc_precision_recall": average_precision(labels, probability, weights),
    }
    assert set(found) == {*exact, *near, "loss", "global_step"}
    for name, value in exact.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    for name, value in near.items():
        assert found[name] == pytest.approx(value, abs=0.01), name
    assert {*result["predictions"]["classes"].ravel()} == {b"no", b"yes"}
    assert result["predictions"]["all_classes"][0].tolist() == [b"no", b"yes"]


def test_a_retired_checkpoint_predicts_and_trains_on(run):
    result = run("retired_checkpoint")
    features, values, after = result["features"], result["values"], result["after"]
    table = "dnn/input_from_feature_columns/input_layer/colour_embedding/embedding_weights"
    hot = one_hot(features["colour"])
    net = np.hstack([hot @ values[table], features["x"]])
    net = np.maximum(net @ values["dnn/hiddenlayer_0/kernel"] + values["dnn/hiddenlayer_0/bias"], 0)
    deep = net @ values["dnn/logits/kernel"] + values["dnn/logits/bias"]
    ages = np.eye(3)[np.digitize(features["age"], [20, 40])]
    wide = ages @ values["linear/linear_model/age_bucketized/weights"]
    wide += hot @ values["linear/linear_model/colour/weights"]
    wide += values["linear/linear_model/bias_weights"]
    crossed = values["linear/linear_model/age_bucketized_X_colour/weights"][:, 0]
    # TensorFlow's hash decides which weight of the cross is whose; the rest is exact.
    logits = result["predictions"]["logits"]
    rest = (logits - deep - wide)[:, 0]
    distance = np.abs(rest[:, None] - crossed[None]).min(1)
    assert distance.max() < 1e-5
    assert len({*np.abs(rest[:, None] - crossed[None]).argmin(1)}) > 2
    np.testing.assert_allclose(result["predictions"]["logistic"], sigmoid(logits), rtol=1e-5)
    assert set(after) == set(values)
    assert after["global_step"] == 10
    for name in ("dnn/logits/bias/t_0/Adagrad", "linear/linear_model/bias_weights/part_0/Ftrl"):
        assert after[name].min() >= 3 < after[name].max(), name


def test_what_is_served_is_what_is_predicted(run):
    result = run("signatures")
    answers, own = result["classifier"]["answers"], result["classifier"]["predictions"]
    assert {name: method for name, (method, _) in answers.items()} == {
        "serving_default": "classify",
        "classification": "classify",
        "regression": "regress",
        "predict": "predict",
    }
    np.testing.assert_allclose(answers["classification"][1]["scores"], own["probabilities"], 1e-6)
    assert answers["serving_default"][1]["classes"].tolist() == [[b"no", b"yes"]] * 5
    np.testing.assert_allclose(answers["regression"][1]["outputs"], own["logistic"], 1e-6)
    assert (
        set(answers["predict"][1])
        == set(own)
        == {
            "all_class_ids",
            "all_classes",
            "class_ids",
            "classes",
            "logistic",
            "logits",
            "probabilities",
        }
    )
    answers, own = result["regressor"]["answers"], result["regressor"]["predictions"]
    assert set(answers) == {"serving_default", "regression", "predict"}
    np.testing.assert_allclose(answers["serving_default"][1]["outputs"], own["predictions"], 1e-6)
    assert set(own) == {"predictions"}


def test_heads_on_given_logits(cluster):
    found = cluster("plain").call(f"{CASES}:heads")[0]
    logits, fetched = found["logits"].astype("float64"), found["fetched"]
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses = np.array([1, 3]) * -log[[0, 1], [2, 1]]
    assert fetched["multi"]["sum"] == pytest.approx(losses.sum(), rel=1e-5)
    assert fetched["multi"]["sum_over_batch_size"] == pytest.approx(losses.mean(), rel=1e-5)
    assert fetched["multi"]["weighted_mean"] == pytest.approx(losses.sum() / 4, rel=1e-5)
    assert fetched["labels"].tolist() == [[1, 0, 1], [0, 1, 0]]
    cross = np.log1p(np.exp(logits)) - fetched["labels"] * logits
    assert fetched["label_loss"] == pytest.approx(cross.mean(), rel=1e-5)
    assert set(fetched["label_metrics"]) == {
        "average_loss",
        "auc",
        "auc_precision_recall",
        "auc/c",
        "auc_precision_recall/c",
        "probability_mean/c",
    }
    np.testing.assert_allclose(fetched["regression"]["predictions"], np.exp(logits), rtol=1e-5)
    squares = (logits - 1) ** 2
    weighed = np.average(squares.mean(1), weights=[1, 3])
    assert found["regression_metrics"]["average_loss/big"] == pytest.approx(weighed, rel=1e-5)
    mean = np.average(np.exp(logits).mean(1), weights=[1, 3])
    assert found["regression_metrics"]["prediction/mean/big"] == pytest.approx(mean, rel=1e-5)
    assert fetched["own"] == pytest.approx((1 * 1.0 + 3 * 0.0) / 2)
    which = "positive_threshold_0.3"
    assert {f"accuracy/{which}", f"precision/{which}", f"recall/{which}"} <= set(fetched["binary"])


def test_wrong_labels_say_so(cluster):
    messages = cluster("plain").call(f"{CASES}:wrong_labels")[0]
    assert "Labels must be numbers from 0 to 1." in messages[0]
    assert "Labels must be numbers from 0 to 2." in messages[1]
    assert "A label is not in label_vocabulary (a, b):" in messages[2]


def test_shared_columns_and_optimizers_of_keras(run):
    result = run("columns_of_all_kinds")
    values = result["values"]
    layer = "dnn/input_from_feature_columns/input_layer"
    assert values[f"{layer}/first_second_shared_embedding"].shape == (3, 2)
    assert values[f"{layer}/fourth_third_shared_embedding/embedding_weights"].shape == (3, 2)
    assert values["linear/linear_model/colour_weighted_by_weight/weights"].shape == (3, 1)
    assert values["dnn/adam/iteration"] == values["linear/ftrl/iteration"] == 3
    assert values["global_step"] == result["metrics"]["global_step"] == 3
    assert result["logged"] == result["columns"] == []


def test_a_baseline_learns_the_share(run):
    result, bias = run("baselines"), 0.0
    for (labels,) in batches(result["labels"], steps=10):
        bias -= 0.3 * (sigmoid(bias) - labels).mean()
    assert set(result["values"]) == {"baseline/bias", "global_step"}
    assert result["values"]["baseline/bias"] == pytest.approx([bias], rel=1e-5)
    assert result["metrics"]["prediction/mean"] == pytest.approx(sigmoid(bias), rel=1e-5)


def test_what_means_nothing_is_refused(cluster):
    messages = cluster("plain").call(f"{CASES}:refused")[0]
    expected = {
        "columns": "feature_columns is empty",
        "twice": "two columns named 'x'",
        "no column": "'x', which is not a feature column",
        "name": "Did you mean 'Adagrad'?",
        "optimizer": "optimizer=0.1 is no optimizer",
        "combiner": "Unknown sparse_combiner 'max'",
        "units": "hidden_units=0",
        "no units": "dnn_hidden_units=None conflicts with dnn_feature_columns",
        "nothing": "Neither linear_feature_columns nor dnn_feature_columns",
        "dropout": "dropout=1.0 is not a number",
        "activation": "activation_fn='relu' is no function",
        "classes": "n_classes=1",
        "vocabulary": "label_vocabulary has 1 names, which conflicts with n_classes=2",
        "reduction": "Unknown loss_reduction 'none'",
        "thresholds": "thresholds=0.0",
        "loss_fn": "does not take 'logits'",
        "head": "head='binary' is no head",
        "labels": "got no labels",
        "shape": "The labels have shape (2, 2), not (batch, 1)",
        "weights": "weight_column='w' is no feature. There are ['x']",
        "key": "Did you mean 'classes'?",
        "categorical": "'colour' is categorical",
    }
    assert messages.keys() == expected.keys()
    for name, text in expected.items():
        assert text in messages[name], (name, messages[name])
