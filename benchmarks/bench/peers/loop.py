"""A `ClusterCoordinator` loop as TensorFlow's guide has it.

https://www.tensorflow.org/tutorials/distribute/parameter_server_training
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bench.data import build_model, make_dataset
from bench.job import Job
from bench.measure import Meter

__all__ = ["train_by_hand"]


def train_by_hand(job: Job, meter: Meter, keras: Any, strategy: Any) -> dict[str, float]:
    """Schedules `job.steps` steps, joins, and does the same again under the meter.

    Args:
        job: the run.
        meter: what measures the second half.
        keras: `keras` or `tf_keras`.
        strategy: of this cluster.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = build_model(job, keras)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
    step = _make_step(job, strategy, model, optimizer, accuracy)
    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(lambda context: make_dataset(job))
        )
    )

    def schedule() -> None:
        for _ in range(job.steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    schedule()
    accuracy.reset_state()
    meter.start()
    schedule()
    meter.stop()
    return {
        "iterations": int(optimizer.iterations.numpy()),
        "accuracy": float(accuracy.result().numpy()),
    }


def _make_step(job: Job, strategy: Any, model: Any, optimizer: Any, accuracy: Any) -> Any:
    def replica_step(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=job.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return step
