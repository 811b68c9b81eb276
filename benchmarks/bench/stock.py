"""TensorFlow's own servers and strategy, for the peers that use them."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from bench.job import Job

__all__ = ["make_strategy", "serve"]


def make_strategy() -> Any:
    """TensorFlow's strategy on the cluster of TF_CONFIG."""
    return tf.distribute.experimental.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )


def serve(job: Job) -> None:
    """Starts the server of this task of TF_CONFIG and serves until it is killed.

    Every request that waits for another task holds a thread. With fewer threads than tasks that
    may wait, a machine of two cores stands still, so there are some to spare.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = max(job.workers + 2, os.cpu_count() or 1)
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    server.join()
