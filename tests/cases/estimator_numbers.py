"""The data of the tests of Estimators; without TensorFlow, so that tests can compute on it too."""

from __future__ import annotations

import numpy as np

RATE = 0.1


def data(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.random((rows, 3), "float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25
