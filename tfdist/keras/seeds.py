"""Keras's own shuffles of arrays and of PyDatasets, made the same on every worker.

Every worker reads all batches and takes its slice, so all must shuffle alike. Keras draws the order
of arrays from TensorFlow's seed, and that of a PyDataset's batches from Python's generator: if
the workers have other ones, they take the chief's, with which one process would have shuffled.
Other random numbers are the program's own; `input_comparison.py` compares the batches they make.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._keras import ArrayDataAdapter, PyDatasetAdapter
from tfdist._tf.distribute import global_seed, seeded
from tfdist.comm import host_collectives
from tfdist.keras.hooks import Hook
from tfdist.types import DataAdapter, Dataset


def hooks() -> list[Hook]:
    """The seams at which Keras makes data sets that it shuffles."""
    return [
        Hook(ArrayDataAdapter, "get_tf_dataset", _of_chiefs_seed),
        Hook(PyDatasetAdapter, "get_tf_dataset", _of_chiefs_state),
    ]


def _of_chiefs_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Workers that shuffle by other seeds read some examples twice and others never."""

    @functools.wraps(original)
    def get_tf_dataset(self: DataAdapter) -> Dataset:
        strategy = tf.distribute.get_strategy()
        if not self._shuffle or host_collectives.worker_count(strategy) == 1:
            return original(self)
        # The order is drawn in a function of the data set, whose graph takes the seed of now.
        with seeded(host_collectives.from_chief(strategy, global_seed(), "the seed of a shuffle")):
            return original(self)

    return get_tf_dataset


def _of_chiefs_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Workers that shuffle by other seeds read some examples twice and others never."""

    @functools.wraps(original)
    def get_tf_dataset(self: DataAdapter) -> Dataset:
        strategy = tf.distribute.get_strategy()
        if self.shuffle and host_collectives.worker_count(strategy) > 1:
            own = random.getstate()
            chiefs = host_collectives.from_chief(strategy, own, "the random numbers of a shuffle")
            random.setstate(_tuples(chiefs))
        return original(self)

    return get_tf_dataset


def _tuples(value: object) -> Any:
    """A value with its lists as tuples, which JSON does not keep apart."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
