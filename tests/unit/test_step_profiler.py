"""What a step's profile adds up, from times that a test chooses."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist.gradients import step_profiler


@pytest.mark.parametrize(
    ("exchanges", "waited", "hidden"),
    [
        ([(1, 4)], 2, 1),
        ([(1, 2)], 0, 1),
        ([(2, 4), (2, 4)], 2, 0),  # two optimizers, at the same time
        ([(3, 5), (1, 4)], 3, 1),  # not in their order
        ([(1, 2), (3, 4)], 1, 1),
    ],
)
def test_seconds_of_exchange_count_once(
    exchanges: list[tuple[int, int]], waited: float, hidden: float
) -> None:
    """The gradients are there at second 2."""

    @tf.function
    def costs() -> list[tf.Tensor]:
        marks = step_profiler.Marks(tf.constant(0.0), tf.constant(0.0))
        marks.computed = tf.constant(2.0, tf.float64)
        marks.exchanges = [tf.constant([8.0, *times], tf.float64) for times in exchanges]
        return list(step_profiler._costs(marks))

    assert [float(each) for each in costs()] == [8.0 * len(exchanges), waited, hidden]


def test_a_step_computes_after_its_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(seen: object) -> np.float64:
        time.sleep(0.2)  # a host with other work
        return np.float64(time.perf_counter())

    monkeypatch.setattr(step_profiler, "_now", now)
    meter = step_profiler.Meter()

    @tf.function
    def step(batch: tf.Tensor) -> tf.Tensor:
        with meter.step(batch):
            marks = step_profiler.current_marks()
            assert marks is not None
            computed = tf.numpy_function(
                lambda _: np.float64(time.perf_counter()), [batch * 2], tf.float64, stateful=False
            )
        return computed - marks.fed

    assert float(step(tf.ones([4]))) > 0
