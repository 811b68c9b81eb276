"""The data and the model, the same for every peer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bench.job import Job

__all__ = ["build_model", "make_dataset"]

_EXAMPLES = 1024
_LEARNING_RATE = 1e-3


def make_dataset(job: Job) -> tf.data.Dataset:
    """Endless batches. Each worker draws its own examples, so that none cross the network.

    Features are normal; the label is the place of the greatest of the first features, so there is
    something to learn.
    """
    features = tf.random.stateless_normal((_EXAMPLES, job.widths[0]), seed=(1, 2))
    labels = tf.argmax(features[:, : job.widths[-1]], axis=1)
    examples = tf.data.Dataset.from_tensor_slices((features, labels))
    return examples.repeat().batch(job.batch, drop_remainder=True).prefetch(4)


def build_model(job: Job, keras: Any) -> tuple[Any, Any]:
    """A dense network and its optimizer.

    Args:
        job: the run.
        keras: the module to build with: `keras` or `tf_keras`.
    """
    keras.utils.set_random_seed(1)
    *hidden, classes = job.widths[1:]
    model = keras.Sequential(
        [
            keras.Input((job.widths[0],)),
            *(keras.layers.Dense(units, activation="relu") for units in hidden),
            keras.layers.Dense(classes),
        ]
    )
    makers = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}
    return model, makers[job.optimizer](learning_rate=_LEARNING_RATE)
