"""Data sets of a function that makes one for each worker: each worker reads its own.

A worker that is lost leaves its data set to the others, until it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tensorflow import DistributedDatasetsFromFunction
from tfdist.errors import ConfigError
from tfdist.keras.served.feeds import Load, ServedIterator
from tfdist.keras.served.reading import Reading, ReadLoad, reading_of

__all__ = ["ShardedDatasets", "Shards"]


class ShardedDatasets(DistributedDatasetsFromFunction):  # type: ignore[misc]
    """What a data set function has made, for `fit` and for TensorFlow's coordinator.

    Args:
        stock: what TensorFlow makes of the function.
        shards: makes the data sets that the workers read in `fit`.
    """

    def __init__(self, stock: Any, shards: Callable[[], Shards]) -> None:
        self.__dict__.update(stock.__dict__)
        self._make_shards = shards
        self._shards: Shards | None = None

    def __iter__(self) -> Any:
        if tf.inside_function():
            return super().__iter__()
        return ServedIterator(self._made.feed())

    @property
    def cardinality(self) -> int:
        """Batches of a pass; negative where there is no end."""
        return self._made.batches

    @property
    def _made(self) -> Shards:
        if self._shards is None:
            self._shards = self._make_shards()
        return self._shards


class Shards:
    """One data set for each worker.

    Args:
        make: makes a worker's data set of a `tf.distribute.InputContext`.
        workers: how many workers there are.
        together: whether a global batch takes a batch of each data set, as in `sync`.
        recoveries: for each worker how often it was lost.

    Raises:
        ConfigError: if the workers cannot read the data sets by themselves, or `together` and they
            have different numbers of batches.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        workers: int,
        together: bool,
        recoveries: Callable[[int], int],
    ) -> None:
        contexts = [tf.distribute.InputContext(workers, each, 1) for each in range(workers)]
        datasets = [make(context) for context in contexts]
        self.readings: list[Reading] = []
        for worker, dataset in enumerate(datasets):
            reading = reading_of(dataset, None, recoveries)
            if reading is None:
                raise ConfigError(
                    f"Worker {worker} cannot read what the data set function makes for it: the "
                    "data set runs Python code, holds tables of the chief, has an unknown number "
                    "of batches or no fixed order. Make it of tf.data operations on files, and "
                    "say its length with tf.data.experimental.assert_cardinality(n)."
                )
            self.readings.append(reading)
        self.together = together
        counts = [reading.batches for reading in self.readings]
        if together and len(set(counts)) > 1:
            raise ConfigError(
                f"The workers' data sets have different numbers of batches ({counts}), and "
                "mode='sync' takes one of each for an update. Make them equally long, with "
                "dataset.take or repeat, or choose mode='async'."
            )
        endless = any(count < 0 for count in counts)
        self.batches = -1 if endless else counts[0] if together else sum(counts)

    def feed(self) -> _Pass:
        """One pass over all data sets."""
        return _Pass(self)


class _Pass:
    """One pass: how far each data set is, and how many of its batches are under way."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.batches = shards.batches
        self._passes = [reading.feed() for reading in shards.readings]
        self._taken = [0] * len(self._passes)
        self._under_way = [0] * len(self._passes)

    def batch(self) -> Any:
        """The next batch itself, read on the chief, one data set after the other."""
        for each in self._passes:
            try:
                return each.batch()
            except StopIteration:
                continue
        raise StopIteration

    def next_loads(self) -> Callable[[int], list[Load]]:
        """Makes the loads of the next batch: of all data sets, or of the least busy one."""
        left = [
            shard
            for shard, reading in enumerate(self._shards.readings)
            if reading.batches < 0 or self._taken[shard] < reading.batches
        ]
        if not left:
            raise StopIteration
        if not self._shards.together:
            left = [min(left, key=lambda shard: self._under_way[shard])]
        loads = [self._take(shard, len(left)) for shard in left]

        def of_parts(parts: int) -> list[Load]:
            if parts != len(loads):
                raise ConfigError(
                    "A training step that cannot be computed in parts conflicts with a data set "
                    "function under mode='sync', where each worker reads a part of the global "
                    "batch. Give fit one data set of global batches, or choose mode='async'."
                )
            return list(loads)

        return of_parts

    def _take(self, shard: int, parts: int) -> _ShardLoad:
        place = self._taken[shard]
        self._taken[shard] += 1
        self._under_way[shard] += 1
        return _ShardLoad(self._passes[shard], place, shard, parts, self._end)

    def _end(self, shard: int) -> None:
        self._under_way[shard] -= 1


class _ShardLoad(ReadLoad):
    """A batch of one worker's data set; in `sync` the parts count alike."""

    def __init__(
        self, of: Any, place: int, shard: int, parts: int, end: Callable[[int], None]
    ) -> None:
        super().__init__(of, place, shard if parts > 1 else 0, 1)
        self.prefers = shard
        self._count, self._end = parts, end
        self.key = ("shard", self.key, parts)

    def make_batch(self, resources: list[Any], box: Any) -> tuple[Any, Any, Any]:
        """Reads the batch."""
        batch, _, _ = super().make_batch(resources, box)
        return batch, tf.constant(1, tf.int64), tf.constant(self._count, tf.int64)

    def done(self) -> None:
        """Notes that the step has ended."""
        self._end(self.prefers or 0)
