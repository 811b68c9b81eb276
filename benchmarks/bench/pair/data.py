"""Data and initial weights in NumPy, the same for every peer; imports no framework."""

from __future__ import annotations

import itertools

import numpy as np

from bench.pair.job import BATCH, Workload

__all__ = ["CLASSES", "LEARNING_RATES", "batches", "examples", "initial_weights", "judged"]

CLASSES = 10
LEARNING_RATES = {"adam": 1e-3, "sgd": 1e-2}
_WIDTHS = (1024, 1536, 1536, CLASSES)
#: Kernels as Keras has them: height, width, channels, filters; the dense one follows 5 x 5 x 64.
_KERNELS = ((3, 3, 1, 32), (3, 3, 32, 64), (1600, CLASSES))
_JUDGED = 512


def examples(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """One block's examples: normal; the label is the place of the greatest of the first ones."""
    numbers = np.random.default_rng(1)
    features = numbers.standard_normal((workload.steps * BATCH, *workload.shape), np.float32)
    labels = features.reshape(len(features), -1)[:, :CLASSES].argmax(axis=1)
    return features, labels.astype(np.int64)


def batches(workload: Workload, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The halves of all batches that are a rank's, one after the other."""
    return tuple(
        np.ascontiguousarray(
            part.reshape(workload.steps, 2, BATCH // 2, *part.shape[1:])[:, rank]
        ).reshape(-1, *part.shape[1:])
        for part in examples(workload)
    )  # type: ignore[return-value]


def judged(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The examples that the loss after training is computed on."""
    features, labels = examples(workload)
    return features[:_JUDGED], labels[:_JUDGED]


def initial_weights(workload: Workload) -> list[np.ndarray]:
    """Kernels in Keras's layout and zero biases, in turns."""
    kernels = _KERNELS if len(workload.shape) > 1 else itertools.pairwise(_WIDTHS)
    numbers = np.random.default_rng(2)
    weights = []
    for shape in kernels:
        bound = np.sqrt(6.0 / (np.prod(shape[:-1]) + shape[-1] * np.prod(shape[:-2])))
        weights.append(numbers.uniform(-bound, bound, shape).astype(np.float32))
        weights.append(np.zeros(shape[-1], np.float32))
    return weights
