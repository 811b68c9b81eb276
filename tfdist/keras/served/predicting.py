"""Predictions on the workers, in order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.keras.served import feeds
from tfdist.keras.served.graph import TracedStep, trace
from tfdist.keras.served.serving import Serving, on_chief
from tfdist.servers.cluster import CHIEF
from tfdist.servers.dispatch import Job

__all__ = ["PredictFunction"]


class PredictFunction:
    """What Keras calls for each batch that is predicted: `model.predict_function`.

    Args:
        serving: runs the steps.
        model: the model.
    """

    def __init__(self, serving: Serving, model: Any) -> None:
        self._serving, self._model = serving, model
        self._traced: dict[Any, TracedStep] = {}

    def __call__(self, batches: list[Any]) -> Any:
        """Predicts batches, each spread over the workers; the rows keep their order."""
        results: dict[int, Any] = {}
        loads = [
            load
            for batch in batches
            for load in feeds.split(batch, self._serving.dispatcher.workers)
            if load.rows
        ]
        for place, load in enumerate(loads):
            self._serving.dispatcher.submit(self._job(load, place, results))
        self._serving.dispatcher.wait_until(lambda: len(results) == len(loads))
        ordered = [results[place] for place in range(len(loads))]
        return tf.nest.map_structure(lambda *rows: _concat(rows), *ordered)

    def _job(self, load: feeds.Load, place: int, results: dict[int, Any]) -> Job:
        if load.key not in self._traced:
            servers = self._serving.servers
            with self._serving.tracing():
                self._traced[load.key] = trace(servers, self._model, "predict_step", load, 1)
        traced = self._traced[load.key]
        number = self._serving.dispatcher.next_number()

        def run(worker: int) -> Any:
            box = on_chief(load.box(worker, [number, 0, 0]))
            outputs = traced.function(*load.given(worker), box)
            with tf.device(CHIEF):
                return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)

        def finish(worker: int, outputs: Any) -> None:
            results[place] = outputs

        return Job([number], run, finish)


def _concat(rows: tuple[Any, ...]) -> Any:
    if len(rows) == 1:
        return rows[0]
    if isinstance(rows[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(rows))
    return tf.concat(rows, 0) if rows[0].shape.rank else tf.stack(rows)
