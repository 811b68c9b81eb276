"""Exports within jobs: called in the worker processes of the harness."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import estimator_cases
from tests.cases.common import scope
from tests.cases.estimator_numbers import data
from tfdist import estimator
from tfdist.keras import saving


def exported(strategy: Any, path: str) -> dict[str, Any]:
    """A model that was trained a little, as ONNX and as SavedModel, written by all workers."""
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="gelu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
    model.compile("adam", "mse", metrics=["mae"])
    random = np.random.default_rng(0)
    x = random.standard_normal((40, 4)).astype("float32")
    model.fit(x, x[:, :2], 20, 2, shuffle=False, verbose=0)
    written = []
    original = saving.replace_file

    def replace_file(place: Any, write: Any) -> None:
        written.append(os.path.basename(place))
        original(place, write)

    saving.replace_file = replace_file
    try:
        reports = [tfdist.export(model, os.path.join(path, name)) for name in ("m.onnx", "saved")]
    finally:
        saving.replace_file = original
    return {
        "written": [name for name in written if name in ("m.onnx", "saved")],
        "relative": [report.comparison.worst.relative for report in reports],
        "x": x,
        "expected": np.asarray(model.predict(x, verbose=0)),
    }


def exported_estimator(strategy: Any, *, path: str) -> dict[str, Any]:
    """Two exports of a model, for plain tensors and for serialised examples."""
    model = estimator_cases.made(path)
    model.train(estimator_cases.batches(16), steps=5)
    x, _ = data()
    columns = {"x": tf.io.FixedLenFeature([3], tf.float32)}
    build = estimator.export.build_raw_serving_input_receiver_fn
    raw = build({"x": tf.TensorSpec([None, 3], tf.float32)})
    parsing = estimator.export.build_parsing_serving_input_receiver_fn(columns)
    (batch,) = model.predict(estimator_cases.batches(len(x), 1), yield_single_examples=False)
    places = {
        name: model.export_saved_model(f"{path}/{name}", receiver).decode()
        for name, receiver in (("raw", raw), ("parsing", parsing))
    }
    return {**places, "x": x, "value": batch["value"]}
