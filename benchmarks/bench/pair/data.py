"""Data and initial weights in NumPy, the same for every peer; imports no framework."""

from __future__ import annotations

import itertools

import numpy as np

from bench.pair.job import BATCH, CLASSES, Workload

__all__ = [
    *("BLOCKS", "HEADS", "LEARNING_RATES", "TOKENS", "WIDTH"),
    *("batches", "examples", "initial_weights", "judged"),
]

LEARNING_RATES = {"adam": 1e-3, "sgd": 1e-2}
#: Of the transformer.
TOKENS, WIDTH, HEADS, BLOCKS = 96, 64, 4, 2
#: Kernels as Keras has them: height, width, channels, filters; the dense one follows 5 x 5 x 64.
_KERNELS = ((3, 3, 1, 32), (3, 3, 32, 64), (1600, CLASSES))
_JUDGED = 512


def examples(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """One block's examples: normal; the label is the place of the greatest of the first ones.

    Sequences are of random tokens; their label is the first token's rest by the number of classes.
    """
    numbers = np.random.default_rng(1)
    shape = (workload.steps * BATCH, *workload.shape)
    if workload.kind == "transformer":
        tokens = numbers.integers(0, TOKENS, shape).astype(np.int32)
        return tokens, (tokens[:, 0] % CLASSES).astype(np.int64)
    features = numbers.standard_normal(shape, np.float32)
    labels = features.reshape(len(features), -1)[:, :CLASSES].argmax(axis=1)
    return features, labels.astype(np.int64)


def batches(workload: Workload, rank: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """The shares of all batches that are a rank's, one after the other."""
    return tuple(
        np.ascontiguousarray(
            part.reshape(workload.steps, processes, BATCH // processes, *part.shape[1:])[:, rank]
        ).reshape(-1, *part.shape[1:])
        for part in examples(workload)
    )  # type: ignore[return-value]


def judged(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The examples that the loss after training is computed on."""
    features, labels = examples(workload)
    return features[:_JUDGED], labels[:_JUDGED]


def initial_weights(workload: Workload) -> list[np.ndarray]:
    """Weights in Keras's order and layout, the same for each call."""
    numbers = np.random.default_rng(2)
    if workload.kind == "transformer":
        return _of_transformer(numbers)
    widths = (*workload.shape, *workload.hidden, CLASSES)
    kernels = _KERNELS if workload.kind == "convnet" else itertools.pairwise(widths)
    weights = []
    for shape in kernels:
        weights += [_drawn(numbers, shape), np.zeros(shape[-1], np.float32)]
    return weights


def _of_transformer(numbers: np.random.Generator) -> list[np.ndarray]:
    each, wide = WIDTH // HEADS, 4 * WIDTH
    norm = [np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)]
    weights = [0.1 * numbers.standard_normal((TOKENS, WIDTH), np.float32)]
    for _ in range(BLOCKS):
        weights += norm
        for _ in ("query", "key", "value"):
            kernel = _drawn(numbers, (WIDTH, WIDTH)).reshape(WIDTH, HEADS, each)
            weights += [kernel, np.zeros((HEADS, each), np.float32)]
        kernel = _drawn(numbers, (WIDTH, WIDTH)).reshape(HEADS, each, WIDTH)
        weights += [kernel, np.zeros(WIDTH, np.float32), *norm]
        for shape in ((WIDTH, wide), (wide, WIDTH)):
            weights += [_drawn(numbers, shape), np.zeros(shape[-1], np.float32)]
    return [*weights, _drawn(numbers, (WIDTH, CLASSES)), np.zeros(CLASSES, np.float32)]


def _drawn(numbers: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bound = np.sqrt(6.0 / (np.prod(shape[:-1]) + shape[-1] * np.prod(shape[:-2])))
    return numbers.uniform(-bound, bound, shape).astype(np.float32)
