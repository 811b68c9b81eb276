"""An Estimator whose gradients are sparse, with other numbers of rows on each replica and step."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.cases.estimator_numbers import RATE, sparse_batches
from tfdist import estimator
from tfdist.estimator.evaluation import eval_metrics

tf1 = tf.compat.v1


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    table = tf1.get_variable("table", [50, 4], initializer=tf1.constant_initializer(0.1))
    rows = tf.nn.embedding_lookup(table, features["ids"])
    loss = tf.reduce_mean((tf.reduce_sum(rows, [1, 2])[:, None] - labels) ** 2)
    optimizer = tf1.train.GradientDescentOptimizer(RATE)
    step = optimizer.minimize(loss, tf1.train.get_global_step())
    return estimator.EstimatorSpec(mode, loss=loss, train_op=step)


def input_fn(input_context: Any) -> Any:
    """On devices of one process their batches take turns; each process has its own."""
    number, of = input_context.input_pipeline_id, input_context.num_input_pipelines

    def batches() -> Any:
        for ids, labels in sparse_batches()[number::of]:
            yield {"ids": ids}, labels

    kinds = ({"ids": tf.TensorSpec([None, 3], tf.int32)}, tf.TensorSpec([None, 1], tf.float32))
    return tf.data.Dataset.from_generator(batches, output_signature=kinds)


def evaluated_meanwhile(strategy: Any, *, path: str) -> tuple[Any, list[int]]:
    """The table after a training that stops for evaluations on the same replicas, and their steps.

    In one process: `train_and_evaluate` of several evaluates after the training.
    """
    replicas = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = estimator.RunConfig(
        path, train_distribute=replicas, eval_distribute=replicas, save_checkpoints_steps=2
    )
    model = estimator.Estimator(model_fn, config=config)
    estimator.train_and_evaluate(
        model,
        estimator.TrainSpec(input_fn, max_steps=len(sparse_batches()) // 2),
        estimator.EvalSpec(input_fn, steps=None, throttle_secs=0),
    )
    table = np.asarray(model.get_variable_value("table"))
    return table, list(eval_metrics(model.eval_dir()))


def trained_twice(strategy: Any, *, path: str) -> Any:
    """The table after two trainings in one process: the second has other sizes in each run."""
    replicas = strategy or tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = estimator.RunConfig(path, train_distribute=replicas)
    model = estimator.Estimator(model_fn, config=config)
    steps = len(sparse_batches()) // 2
    model.train(input_fn, steps=2)

    def rest(input_context: Any) -> Any:
        return input_fn(input_context).skip(4 // input_context.num_input_pipelines)

    model.train(rest, steps=steps - 2)
    return np.asarray(model.get_variable_value("table"))


def trained(strategy: Any, *, path: str) -> Any:
    """The table after training on two replicas."""
    replicas = strategy or tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    config = estimator.RunConfig(path, train_distribute=replicas)
    model = estimator.Estimator(model_fn, config=config)
    model.train(input_fn, max_steps=len(sparse_batches()) // 2)
    return np.asarray(model.get_variable_value("table"))
