"""The data of the tests of Estimators; without TensorFlow, so that tests can compute on it too."""

from __future__ import annotations

import numpy as np

RATE = 0.1


def data(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.random((rows, 3), "float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25


def sparse_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and labels; two batches in a row go to the two replicas of a step."""
    random = np.random.default_rng(1)
    rows = [2, 5, 3, 3, 4, 1, 6, 2, 3, 4, 5, 5]
    return [
        (random.integers(0, 50, (n, 3)).astype("int32"), random.random((n, 1), "float32"))
        for n in rows
    ]
