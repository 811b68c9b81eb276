"""Canned estimators and Keras models as Estimators: called in a worker process of the harness."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import estimator
from tfdist.errors import ConfigError

tf1 = tf.compat.v1
column = tf.feature_column

#: The last of four batches of 24 has 8 examples.
EXAMPLES, BATCH = 80, 24


def data(kinds: int = 2) -> tuple[dict[str, Any], Any]:
    """Two numbers, a colour and a weight for each example; classes that depend on them."""
    rng = np.random.default_rng(3)
    features = {
        "x": rng.normal(size=(EXAMPLES, 2)).astype("float32"),
        "age": rng.uniform(0, 60, EXAMPLES).astype("float32"),
        "colour": rng.choice(["red", "green", "blue"], EXAMPLES),
        "weight": rng.uniform(0.5, 2, EXAMPLES).astype("float32"),
    }
    score = features["x"][:, 0] + (features["colour"] == "red") + rng.normal(size=EXAMPLES)
    return features, np.digitize(score, np.linspace(0, 1, kinds + 1)[1:-1]).astype("int64")


def fed(features: Any, labels: Any = None, repeat: int | None = 1) -> Callable[[], Any]:
    """An `input_fn` that goes through data in order."""

    def input_fn() -> Any:
        parts = features if labels is None else (features, labels)
        return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH).repeat(repeat)

    return input_fn


def colours() -> Any:
    return column.categorical_column_with_vocabulary_list("colour", ["red", "green", "blue"])


def values_of(made: Any, checkpoint: str | None = None) -> dict[str, Any]:
    """All variables of a checkpoint."""
    path = checkpoint or made.latest_checkpoint()
    return {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)}


def _saved(predicted: Any) -> dict[str, Any]:
    every = list(predicted)
    return {key: np.stack([each[key] for each in every]) for key in every[0]}


def linear_regressor(_: Any, path: str) -> dict[str, Any]:
    """Weighted least squares by five steps of gradient descent, and its evaluation."""
    features, _ = data()
    labels = features["age"] / 30
    made = estimator.LinearRegressor(
        [column.numeric_column("x", shape=2), colours()],
        model_dir=path,
        weight_column="weight",
        optimizer="SGD",
    )
    made.train(fed(features, labels, repeat=None), steps=5)
    return {"values": values_of(made), "metrics": made.evaluate(fed(features, labels))}


def deep_classifier(_: Any, path: str, steps: int) -> dict[str, Any]:
    """A network with embedding and batch normalization, before and after some steps."""
    features, labels = data(kinds=3)
    made = estimator.DNNClassifier(
        [6, 4],
        [column.numeric_column("x", shape=2), column.embedding_column(colours(), 3)],
        model_dir=path,
        n_classes=3,
        optimizer=lambda: tf1.train.GradientDescentOptimizer(
            tf1.train.inverse_time_decay(0.5, tf1.train.get_global_step(), 1, 0.1)
        ),
        batch_norm=True,
        config=estimator.RunConfig(tf_random_seed=1),
    )
    made.train(fed(features, labels, repeat=None), steps=steps)
    return {
        "before": values_of(made, f"{path}/model.ckpt-0"),
        "after": values_of(made),
        "predictions": _saved(made.predict(fed(features))),
    }


def binary_metrics(_: Any, path: str) -> dict[str, Any]:
    """The weighted metrics of a classifier with names for classes, and what it predicts."""
    features, labels = data()
    names = np.array(["no", "yes"])[labels]
    made = estimator.LinearClassifier(
        [column.numeric_column("x", shape=2), colours()],
        model_dir=path,
        weight_column="weight",
        label_vocabulary=["no", "yes"],
    )
    made.train(fed(features, names, repeat=None), steps=20)
    return {
        "labels": labels,
        "weights": features["weight"],
        "metrics": made.evaluate(fed(features, names)),
        "predictions": _saved(made.predict(fed(features))),
    }


def wide_and_deep(path: str, **arguments: Any) -> Any:
    """An estimator as in the retired package's tutorial."""
    ages = column.bucketized_column(column.numeric_column("age"), [20, 40])
    crossed = column.crossed_column([ages, "colour"], 7)
    return estimator.DNNLinearCombinedClassifier(
        path,
        linear_feature_columns=[colours(), ages, crossed],
        dnn_feature_columns=[
            column.numeric_column("x", shape=2),
            column.embedding_column(colours(), 2),
        ],
        dnn_hidden_units=[3],
        **arguments,
    )


#: The names and shapes of a checkpoint of TensorFlow 1's `DNNLinearCombinedClassifier`.
RETIRED = {
    "dnn/input_from_feature_columns/input_layer/colour_embedding/embedding_weights": (3, 2),
    "dnn/hiddenlayer_0/kernel": (4, 3),
    "dnn/hiddenlayer_0/bias": (3,),
    "dnn/logits/kernel": (3, 1),
    "dnn/logits/bias": (1,),
    "linear/linear_model/age_bucketized/weights": (3, 1),
    "linear/linear_model/age_bucketized_X_colour/weights": (7, 1),
    "linear/linear_model/colour/weights": (3, 1),
    "linear/linear_model/bias_weights": (1,),
}


def retired_checkpoint(_: Any, path: str) -> dict[str, Any]:
    """Predicts from, and goes on with, a checkpoint under the retired names."""
    rng = np.random.default_rng(5)
    values: dict[str, Any] = {"global_step": np.int64(7)}
    for name, shape in RETIRED.items():
        values[name] = rng.normal(size=shape).astype("float32")
        slots = ["t_0/Adagrad"] if name.startswith("dnn") else ["part_0/Ftrl", "part_0/Ftrl_1"]
        for slot in slots:
            filled = 0.0 if slot.endswith("_1") else 3.0
            values[f"{name}/{slot}"] = np.full(shape, filled, "float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        for name, value in values.items():
            tf1.get_variable(name, initializer=tf.constant(value))
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, f"{path}/model.ckpt", global_step=7)
    features, labels = data()
    made = wide_and_deep(path)
    predictions = _saved(made.predict(fed(features)))
    made.train(fed(features, labels, repeat=None), steps=3)
    return {
        "features": features,
        "values": values,
        "predictions": predictions,
        "after": values_of(made),
    }


def signatures(_: Any, path: str) -> dict[str, Any]:
    """What serving sees of a classifier and of a regressor, and the estimators' own predictions."""
    features, labels = data()
    names = np.array(["no", "yes"])[labels]
    classifier = wide_and_deep(f"{path}/c", label_vocabulary=["no", "yes"])
    classifier.train(fed(features, names), steps=2)
    regressor = estimator.DNNRegressor([2], [column.numeric_column("x", 2)], f"{path}/r")
    regressor.train(fed(features, features["age"]), steps=2)
    spec = {
        "x": tf.io.FixedLenFeature([2], tf.float32),
        "age": tf.io.FixedLenFeature([1], tf.float32),
        "colour": tf.io.FixedLenFeature([1], tf.string),
    }
    receiver = estimator.export.build_parsing_serving_input_receiver_fn(spec)
    first = {key: features[key][:5] for key in spec}
    return {
        kind: _served(made, f"{path}/{kind}", receiver, first)
        for kind, made in (("classifier", classifier), ("regressor", regressor))
    }


def _served(made: Any, path: str, receiver: Any, features: dict[str, Any]) -> dict[str, Any]:
    written = made.export_saved_model(path, receiver).decode()
    examples = [_example({key: value[i] for key, value in features.items()}) for i in range(5)]
    with tf.Graph().as_default(), tf1.Session() as session:
        loaded = tf1.saved_model.load(session, ["serve"], written)
        answers = {}
        for name, signature in loaded.signature_def.items():
            (fed_with,) = signature.inputs.values()
            outputs = {key: info.name for key, info in signature.outputs.items()}
            method = signature.method_name.rpartition("/")[2]
            answers[name] = (method, session.run(outputs, {fed_with.name: examples}))
    return {"answers": answers, "predictions": _saved(made.predict(fed(features)))}


def _example(values: dict[str, Any]) -> bytes:
    feature = {}
    for key, value in values.items():
        if isinstance(value, str):
            feature[key] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
        else:
            listed = np.ravel(value).tolist()
            feature[key] = tf.train.Feature(float_list=tf.train.FloatList(value=listed))
    return bytes(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def heads(_: Any) -> dict[str, Any]:
    """Losses and predictions of heads on given logits."""
    logits = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], "float32")
    weights = {"w": np.array([1.0, 3.0], "float32")}
    reductions = ("sum", "sum_over_batch_size", "weighted_mean")
    found: dict[str, Any] = {"logits": logits}
    with tf.Graph().as_default(), tf1.Session() as session:
        multi = {
            name: estimator.MultiClassHead(3, "w", loss_reduction=name).loss(
                [2, 1], logits, weights
            )
            for name in reductions
        }
        labelled = estimator.MultiLabelHead(
            3, label_vocabulary=["a", "b", "c"], classes_for_class_based_metrics=["c"]
        )
        sparse = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], ["a", "c", "b"], [2, 2])
        regression = estimator.RegressionHead(3, "w", inverse_link_fn=tf.exp, name="big")
        metrics = regression.eval_metric_ops(weights, tf.constant(logits), np.ones((2, 3)))
        own = estimator.BinaryClassHead(
            thresholds=[0.3], loss_fn=lambda labels, logits, features: features["w"] * logits
        )
        found["fetched"] = {
            "multi": multi,
            "labels": labelled._processed(sparse),
            "label_loss": labelled.loss(sparse, logits),
            "label_metrics": labelled.eval_metric_ops({}, tf.constant(logits), sparse),
            "regression": regression.predictions(logits),
            "own": own.loss([0, 1], logits[:, :1], {"w": weights["w"][:, None]}),
            "binary": own.eval_metric_ops(
                {"w": weights["w"][:, None]}, tf.constant(logits[:, :1]), [0, 1]
            ),
        }
        session.run([tf1.tables_initializer(), tf1.local_variables_initializer()])
        updates = [update for _, update in metrics.values()]
        session.run(updates)
        found["regression_metrics"] = session.run({k: v for k, (v, _) in metrics.items()})
        found["fetched"] = session.run(found["fetched"])
    return found


def wrong_labels(_: Any) -> list[str]:
    """The messages of labels that are wrong only when they come."""
    cases: list[tuple[Any, Any]] = [
        (estimator.BinaryClassHead(), [2, 0]),
        (estimator.MultiClassHead(3), [3, 0]),
        (estimator.BinaryClassHead(label_vocabulary=["a", "b"]), ["a", "z"]),
    ]
    messages = []
    for head, labels in cases:
        with tf.Graph().as_default(), tf1.Session() as session:
            loss = head.loss(labels, np.zeros((2, head.logits_dimension), "float32"))
            session.run(tf1.tables_initializer())
            try:
                session.run(loss)
                messages.append("nothing")
            except tf.errors.InvalidArgumentError as error:
                messages.append(str(error))
    return messages


def columns_of_all_kinds(_: Any, path: str) -> dict[str, Any]:
    """Trains twice on old and new shared columns with optimizers of Keras; tells what is logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    features, labels = data()
    features |= dict.fromkeys(("first", "second", "third", "fourth"), features["colour"])
    kinds = {
        key: column.categorical_column_with_vocabulary_list(key, ["red", "green", "blue"])
        for key in ("first", "second", "third", "fourth")
    }
    with tf.Graph().as_default():  # TensorFlow makes these in graphs only.
        shared = column.shared_embeddings([kinds["first"], kinds["second"]], 2)
        old = tf1.feature_column.shared_embedding_columns([kinds["third"], kinds["fourth"]], 2)
    wide = [column.weighted_categorical_column(colours(), "weight"), column.numeric_column("age")]
    made = estimator.DNNLinearCombinedClassifier(
        path,
        linear_feature_columns=wide,
        dnn_feature_columns=[*shared, *old, column.indicator_column(colours())],
        dnn_hidden_units=[2],
        dnn_dropout=0.1,
        dnn_optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        ),
        linear_optimizer=keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    )
    logger = tf.get_logger()
    logger.addHandler(handler)
    try:
        made.train(fed(features, labels), steps=2)
        made.train(fed(features, labels), steps=1)
        metrics = made.evaluate(fed(features, labels))
    finally:
        logger.removeHandler(handler)
    own = str(pathlib.Path(estimator.__file__).parent)
    return {
        "values": values_of(made),
        "metrics": metrics,
        "logged": [line for line in logged if "deprecated" in line and own in line],
        "columns": [line for line in logged if "FeatureColumn" in line],
    }


def baselines(_: Any, path: str) -> dict[str, Any]:
    """What a baseline learns in ten steps."""
    features, labels = data()
    made = estimator.BaselineClassifier(path, optimizer="SGD")
    made.train(fed(features, labels, repeat=None), steps=10)
    return {
        "labels": labels,
        "values": values_of(made),
        "metrics": made.evaluate(fed(features, labels)),
    }


def refused(_: Any) -> dict[str, str]:
    """The messages of arguments that mean nothing."""
    number = column.numeric_column("x")
    binary = estimator.BinaryClassHead
    cases: dict[str, Callable[[], Any]] = {
        "columns": lambda: estimator.LinearRegressor([]),
        "twice": lambda: estimator.LinearRegressor([number, column.numeric_column("x", 2)]),
        "no column": lambda: estimator.LinearRegressor(["x"]),
        "name": lambda: estimator.LinearRegressor([number], optimizer="Adagard"),
        "optimizer": lambda: estimator.LinearRegressor([number], optimizer=0.1),
        "combiner": lambda: estimator.LinearRegressor([number], sparse_combiner="max"),
        "units": lambda: estimator.DNNRegressor([0], [number]),
        "no units": lambda: estimator.DNNLinearCombinedRegressor(dnn_feature_columns=[number]),
        "nothing": estimator.DNNLinearCombinedRegressor,
        "dropout": lambda: estimator.DNNRegressor([1], [number], dropout=1.0),
        "activation": lambda: estimator.DNNRegressor([1], [number], activation_fn="relu"),
        "classes": lambda: estimator.LinearClassifier([number], n_classes=1),
        "vocabulary": lambda: estimator.LinearClassifier([number], label_vocabulary=["a"]),
        "reduction": lambda: binary(loss_reduction="none"),
        "thresholds": lambda: binary(thresholds=[0.0]),
        "loss_fn": lambda: binary(loss_fn=lambda labels: labels),
        "head": lambda: estimator.LinearEstimator("binary", [number]),
        "labels": lambda: binary().loss(None, np.zeros((2, 1), "float32")),
        "shape": lambda: binary().loss(np.zeros((2, 2)), np.zeros((2, 1), "float32")),
        "weights": lambda: binary("w").loss([1], np.zeros((1, 1), "float32"), {"x": 1}),
        "key": lambda: binary().predictions(np.zeros((1, 1), "float32"), ["classs"]),
        "categorical": lambda: _trained_once(
            estimator.DNNRegressor([1], [colours()], "never-made"), {"colour": ["red"]}
        ),
    }
    messages = {}
    for name, case in cases.items():
        try:
            case()
            messages[name] = "nothing"
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def _trained_once(made: Any, features: dict[str, Any]) -> None:
    made.train(fed(features, [1.0]), steps=1)
