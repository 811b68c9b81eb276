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


def test_the_latest_steps_are_those_since_the_last_look() -> None:
    meter = step_profiler.Meter()

    def steps(count: int, seconds: float) -> None:
        sums = [
            1.0,
            seconds,
            *(count_of * seconds for count_of in (0.25, 0.5, 0.25, 0.1)),
            8.0,
            0.0,
        ]
        for _ in range(count):
            meter._sums.assign_add(sums)

    assert meter.latest() is None
    steps(2, 0.1)
    first = meter.latest()
    steps(3, 0.2)
    second, whole = meter.latest(), meter.split()
    assert first is not None
    assert second is not None
    assert whole is not None
    assert (first.steps, second.steps, whole.steps) == (2, 3, 5)
    assert (round(first.step), round(second.step), round(whole.step)) == (100, 200, 160)
    assert round(second.input) == 50
    assert meter.latest() is None
    meter.begin()
    steps(1, 0.3)
    latest = meter.latest()
    assert latest is not None
    assert round(latest.step) == 300
