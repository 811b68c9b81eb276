"""The arithmetic of layouts, and exchanges of shards among replicas that a test stands for."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.config.strategy_config import StrategyConfig
from tfdist.sharding.exchange import gather, own_shard, reduce_scatter
from tfdist.sharding.layout import Layout, layout_for

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


class Room:
    """Replicas on threads of this process: each call returns when all have made it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=30)
        self.said: dict[int, Any] = {}

    def meet(self, index: int, value: Any) -> list[Any]:
        self.said[index] = value
        self.barrier.wait()
        values = [self.said[i] for i in range(self.count)]
        self.barrier.wait()
        return values


@dataclasses.dataclass
class FakeLink:
    """One of the replicas of a `Room`."""

    room: Room
    index: int

    @property
    def count(self) -> int:
        return self.room.count

    def all_to_all(self, tensor: Any) -> Any:
        return tf.stack([each[self.index] for each in self.room.meet(self.index, tensor)])

    def gather(self, tensor: Any) -> Any:
        return tf.concat(self.room.meet(self.index, tensor), 0)


def on_all(count: int, work: Any) -> list[Any]:
    """The results of `work(link)` on each replica."""
    room, results = Room(count), [None] * count

    def run(index: int) -> None:
        results[index] = work(FakeLink(room, index))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@given(SHAPES, st.integers(1, 6))
def test_shards_are_equal_and_cover_the_first_dimension_that_allows_it(
    shape: tuple[int, ...], shards: int
) -> None:
    layouts = [layout_for(shape, shards, index) for index in range(shards)]
    possible = [d for d, size in enumerate(shape) if size % shards == 0] if shards > 1 else []
    if not possible:
        assert layouts == [None] * shards
        return
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = []
    for layout in layouts:
        assert layout is not None
        assert layout.dimension == possible[0]
        part = own_shard(tf.constant(whole), layout).numpy()
        assert part.shape == layout.shard_shape
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, possible[0]), whole)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_sums_and_wholes_of_shards(shards: int, dtype: str) -> None:
    """Small tensors in one bucket, one of more than a bucket, and all dimensions divided."""
    shapes = [(6,), (5, 12), (6, 7), (7, 5, 18), (1 << 18, 6)]
    rng = np.random.default_rng(0)
    values = [[tf.cast(rng.integers(-9, 9, s), dtype) for s in shapes] for _ in range(shards)]

    def work(link: FakeLink) -> tuple[list[Any], list[Any]]:
        layouts: list[Any] = [layout_for(shape, shards, link.index) for shape in shapes]
        own = reduce_scatter(link, values[link.index], layouts)
        return own, gather(link, own, layouts)

    sums = [sum(np.float64(each[i]) for each in values) for i in range(len(shapes))]
    for index, (own, wholes) in enumerate(on_all(shards, work)):
        for shape, total, shard, whole in zip(shapes, sums, own, wholes, strict=True):
            layout = layout_for(shape, shards, index)
            assert layout is not None
            np.testing.assert_array_equal(np.float64(whole), total)
            np.testing.assert_array_equal(np.float64(shard), own_shard(total, layout))


@pytest.mark.parametrize("dimension", [0, 1])
def test_the_rows_of_a_sparse_gradient_stay_rows(dimension: int) -> None:
    rows = tf.IndexedSlices(tf.reshape(tf.range(12.0), [3, 4]), tf.constant([5, 0, 5]), [6, 4])
    dense = tf.math.unsorted_segment_sum(rows.values, rows.indices, 6)
    for index in range(2):
        layout = Layout((6, 4), dimension, 2, index)
        own = own_shard(rows, layout)
        assert isinstance(own, tf.IndexedSlices)
        size = layout.shard_shape[0]
        found = tf.math.unsorted_segment_sum(own.values, own.indices, size)
        np.testing.assert_array_equal(found, own_shard(dense, layout))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"zero": 2, "mode": "stale"}, "zero=2 conflicts with mode='stale'"),
        ({"zero": 1, "mode": "local"}, "zero=1 conflicts with mode='local'"),
        ({"zero": 2, "devices": 2}, "zero=2 conflicts with devices=2"),
        ({"zero": 2, "compression": "bf16"}, "zero=2 conflicts with the options of gradient"),
        ({"zero": 4}, "zero=4"),
        ({"zero": 3, "strategy": "horovod"}, "zero=3 conflicts with strategy='horovod'"),
        ({"zero": 1, "strategy": "mirrored"}, "zero=1 conflicts with strategy='mirrored'"),
        (
            {"zero": 2, "strategy": "horovod", "reduction": "adasum"},
            "zero=2 conflicts with reduction='adasum'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(tfdist.ConfigError, match=error):
        StrategyConfig.of(**{"strategy": "multi_worker", "processes": 2, **options})


def test_stage_1_goes_with_compression() -> None:
    StrategyConfig.of(strategy="multi_worker", processes=2, zero=1, compression="bf16")
