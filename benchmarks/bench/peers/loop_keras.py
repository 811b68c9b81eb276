"""The loop that TensorFlow's guide to parameter servers writes by hand, with a Keras 3 model."""

from __future__ import annotations

import keras

from bench.job import Job
from bench.measure import Meter
from bench.peers.loop import train_by_hand
from bench.stock import make_strategy, serve

__all__ = ["serve", "train"]


def train(job: Job, meter: Meter) -> dict[str, float]:
    """Trains with Keras 3."""
    return train_by_hand(job, meter, keras, make_strategy())
