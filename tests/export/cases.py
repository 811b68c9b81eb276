"""Exports within jobs: called in the worker processes of the harness."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

import tfdist
from tests.cases.common import scope
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
