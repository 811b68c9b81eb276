"""Data and initial weights in NumPy, the same for every peer."""

from __future__ import annotations

import pydoc_data.topics

import numpy as np

from bench.pair import data as pair_data
from bench.pair.job import WORKLOADS
from bench.two_hosts.job import BATCH

__all__ = ["DEPTH", "HEADS", "LENGTH", "VOCABULARY", "WIDTH", "examples", "held_out", "weights"]

#: Of the transformer: tokens of a sequence, bytes that are told apart, sizes. 1.4 million weights.
LENGTH, VOCABULARY, WIDTH, HEADS, DEPTH = 64, 128, 192, 4, 3
_HELD_OUT = 64


def text() -> np.ndarray:
    """English: the help texts of Python's own reference, which ship with it, as bytes."""
    topics = pydoc_data.topics.topics
    joined = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(joined.encode("ascii", "replace"), np.uint8)


def examples(model: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of so many updates."""
    count = steps * BATCH[model]
    if model == "mlp":
        features, labels = pair_data.examples(WORKLOADS["mlp"])
        times = -(-count // len(features))
        return np.tile(features, (times, 1))[:count], np.tile(labels, times)[:count]
    return _sequences(count, seed=1)


def held_out(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Examples that the loss is computed on."""
    if model == "mlp":
        return pair_data.judged(WORKLOADS["mlp"])
    return _sequences(_HELD_OUT, seed=2)


def _sequences(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the text, and the byte after each byte; the last tenth is held out."""
    whole = text()
    border = len(whole) * 9 // 10
    part = whole[:border] if seed == 1 else whole[border:]
    starts = np.random.default_rng(seed).integers(0, len(part) - LENGTH - 1, count)
    rows = part[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def weights(model: str) -> list[np.ndarray]:
    """Initial values: matrices as (inputs, outputs), in the order of Keras's `weights`."""
    if model == "mlp":
        return pair_data.initial_weights(WORKLOADS["mlp"])
    numbers = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (numbers.standard_normal((rows, columns)) * 0.02).astype(np.float32)

    def norm() -> list[np.ndarray]:
        return [np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)]

    def dense(rows: int, columns: int) -> list[np.ndarray]:
        return [matrix(rows, columns), np.zeros(columns, np.float32)]

    found = [matrix(VOCABULARY, WIDTH), matrix(LENGTH, WIDTH)]
    for _ in range(DEPTH):
        found += [*norm(), *dense(WIDTH, 3 * WIDTH), *dense(WIDTH, WIDTH)]
        found += [*norm(), *dense(WIDTH, 4 * WIDTH), *dense(4 * WIDTH, WIDTH)]
    return [*found, *norm(), *dense(WIDTH, VOCABULARY)]
