"""Data sets that workers read: which iterators a worker opens, and what each gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

from tfdist.strategies.parameter_server.feeding import Reading, reading_of

BATCHES, PASSES = 4, 5


@pytest.fixture
def reading() -> Reading:
    """A shuffled data set of four batches, on the workers of one process."""
    dataset = tf.data.Dataset.range(2 * BATCHES).shuffle(2 * BATCHES, seed=3).batch(2)
    made = reading_of(dataset, None, lambda worker: 0)
    assert made is not None
    # On a server of its own a copy does not find the generator of the chief's shuffle.
    graph = made._graph.numpy().replace(b"SeedGenerator_", b"SeedGenerator-")
    made._graph = tf.constant(graph)
    return made


@pytest.fixture
def counts(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the data set was loaded, and the order of a pass drawn for nothing."""
    found = {"_load": 0, "_first": 0}

    def counted(name: str) -> Any:
        original = getattr(reading, name)

        def call(argument: Any) -> Any:
            found[name] += 1
            return original(argument)

        return call

    for name in found:
        monkeypatch.setattr(reading, name, counted(name))
    return found


def read(reading: Reading, readers: dict[int, list[int]]) -> list[list[list[int]]]:
    """The batches of each pass; from the pass of a key on they are read by these workers."""
    passes, workers = [], readers[0]
    for number in range(PASSES):
        workers = readers.get(number, workers)
        each, batches = reading.begin(), []
        for position in range(BATCHES):
            for worker in workers:
                iterator, skip = each.iterator(worker, position)  # type: ignore[attr-defined]
                for _ in range(skip):
                    next(iterator)
                batches.append(next(iterator).numpy().tolist())
        passes.append(batches)
    return passes


def in_order(batches: list[list[int]]) -> list[int]:
    return sorted(itertools.chain(*batches))


def test_workers_read_the_same_order(reading: Reading, counts: dict[str, int]) -> None:
    for batches in read(reading, {0: [0, 1]}):
        assert batches[::2] == batches[1::2]
        assert in_order(batches[::2]) == list(range(2 * BATCHES))
    assert counts == {"_load": 2, "_first": 0}


def test_a_worker_that_does_the_part_of_another_loads_the_data_set_once_more(
    reading: Reading, counts: dict[str, int]
) -> None:
    """Not at each step, which would draw the orders of all passes before again."""
    expected = read(reading, {0: [0]})
    counts.update(_load=0, _first=0)
    for once, batches in zip(expected, read(reading, {0: [0, 1], 2: [0, 0]}), strict=True):
        assert batches[::2] == batches[1::2]
        assert in_order(once) == in_order(batches[::2])
    assert counts["_load"] == 2
    # For worker 1, and the second copy of worker 0, the orders of the passes of before are drawn.
    assert counts["_first"] == PASSES + (PASSES + 2)


@pytest.mark.parametrize(
    ("turns", "skips"),
    [
        ([(0, 0), (1, 1), (0, 2), (1, 3)], [0, 1, 1, 1]),
        ([(0, 0), (0, 0), (0, 1), (0, 2)], [0, 0, 0, 0]),
    ],
    ids=["two workers take turns", "one worker reads a batch twice"],
)
def test_a_worker_goes_on_from_the_nearest_place(
    reading: Reading, counts: dict[str, int], turns: list[tuple[int, int]], skips: list[int]
) -> None:
    each: Any = reading.begin()
    assert [each.iterator(worker, position)[1] for worker, position in turns] == skips
    assert counts["_load"] == 2


def test_a_worker_that_did_the_part_of_another_once_reads_on(
    reading: Reading, counts: dict[str, int]
) -> None:
    """It keeps a copy of the data set that it needs no more. Such copies cannot be compared."""
    passes = read(reading, {0: [0], 1: [0, 0], 2: [0]})
    assert [in_order(batches[:: len(batches) // BATCHES]) for batches in passes] == [
        list(range(2 * BATCHES))
    ] * PASSES
    assert counts["_load"] == 2
