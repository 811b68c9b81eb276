"""The loop that TensorFlow's guide to parameter servers writes by hand, with a tf_keras model."""

from __future__ import annotations

import tf_keras

from bench.job import Job
from bench.measure import Meter
from bench.peers.loop import train_by_hand
from bench.stock import make_strategy, serve

__all__ = ["serve", "train"]


def train(job: Job, meter: Meter) -> dict[str, float]:
    """Trains with tf_keras."""
    return train_by_hand(job, meter, tf_keras, make_strategy())
