"""The loop of TensorFlow's guide with a Keras 3 model, on tfdist's strategy."""

from __future__ import annotations

import keras

from bench.job import Job
from bench.measure import Meter
from bench.peers.loop import train_by_hand
from bench.tfdist_servers import make_strategy, serve

__all__ = ["serve", "train"]


def train(job: Job, meter: Meter) -> dict[str, float]:
    """Trains with Keras 3."""
    return train_by_hand(job, meter, keras, make_strategy(job))
