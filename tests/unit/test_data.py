"""How a global batch is divided among replicas."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist._keras import ArrayDataAdapter
from tfdist.comm import batch_sharding
from tfdist.errors import ConfigError
from tfdist.keras import feeding

SHARD = batch_sharding.Shard(workers=2, worker=1, local=1)


@pytest.mark.parametrize(
    ("batch", "replicas", "text"),
    [
        (64, 3, "22 + 21 + 21"),
        (1, 2, "1 + 0"),
        (64, 16, "4 on each of 16"),
        (64, 9, "7 or 8 on each of 9"),
    ],
)
def test_how_a_batch_is_split_in_words(batch: int, replicas: int, text: str) -> None:
    assert batch_sharding.split_in_words(batch, replicas) == text
    if " + " in text:
        bounds = [batch_sharding.slice_bounds(batch, place, replicas) for place in range(replicas)]
        assert " + ".join(str(end - start) for start, end in bounds) == text


@pytest.mark.parametrize(("examples", "size"), [(8, 8), (40, 32), (64, 32), (32, 32)])
def test_the_first_batch_of_arrays_has_a_known_size(examples: int, size: int) -> None:
    adapter = ArrayDataAdapter(np.zeros([examples, 2]), batch_size=32)
    assert feeding._first_batch(adapter) == size


def test_a_batch_without_examples_is_refused_by_name() -> None:
    nodes, edges = np.zeros([4, 3]), np.zeros([7, 2])
    with pytest.raises(ConfigError, match=r"different numbers of rows.* They have 4, 7 rows"):
        batch_sharding.slice_with_share((nodes, edges), 0, 2)
    fixed = tf.data.Dataset.from_tensors((nodes, edges))
    with pytest.raises(ConfigError, match="They have 4, 7 rows"):
        batch_sharding.local_dataset(fixed, SHARD)


@pytest.mark.parametrize("edges", [4, 7])
@pytest.mark.parametrize("preview", [False, True])
def test_batches_of_open_lengths_are_compared_when_they_are_read(edges: int, preview: bool) -> None:
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))
    batches = tf.data.Dataset.from_generator(
        lambda: [(np.zeros([4, 3]), np.zeros([edges, 2]))], output_signature=spec
    )
    local = batch_sharding.local_dataset(batches, SHARD, True, preview)
    if edges == 4:
        assert [len(part.batch[0]) for part in local] == ([4, 2] if preview else [2])
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of rows"):
        next(iter(local))


def _pair(kind: Any, numbers: Any) -> Any:
    return kind(numbers, -numbers)


def test_functions_for_batches_of_one_kind_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    original = batch_sharding.slice_batch
    monkeypatch.setattr(
        batch_sharding, "slice_batch", lambda *args: traced.append(args) or original(*args)
    )
    monkeypatch.setattr(batch_sharding, "_traced", {})
    first = collections.namedtuple("Pair", "a b")
    second = collections.namedtuple("Pair", "a b")
    shard = batch_sharding.Shard(workers=2, worker=1, local=1)
    for kind, preview, more in ((first, False, 1), (first, True, 1), (second, False, 1)):
        for begin in (0, 10):
            numbers = tf.data.Dataset.range(begin, begin + 7).batch(3)
            whole = numbers.map(functools.partial(_pair, kind))
            count = len(traced)
            found = [*batch_sharding.local_dataset(whole, shard, preview=preview)]
            assert len(traced) - count == (0 if begin else more)
            assert all(type(each) is kind for each in found)
            own = [each.a.numpy().tolist() for each in found][preview:]
            assert own == [[begin + 2], [begin + 5], []]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("size", "local", "shown"),
    [
        pytest.param(4, 1, [[0, 1, 2, 3]], id="open"),
        pytest.param(6, 1, [[0, 1], [2, 3], [4, 5]], id="even"),
        pytest.param(7, 2, [[0, 1], [2], [3], [4], [5], [6]], id="several"),
    ],
)
def test_a_preview_is_the_first_batch(
    shares: bool, size: int, local: int, shown: list[list[int]]
) -> None:
    """The whole batch, or slices of it, from which the reader puts the batch together."""
    shard = batch_sharding.Shard(workers=3, worker=0, local=local)
    numbers = tf.range(2 * size)
    rows = tf.data.Dataset.from_tensor_slices({"a": numbers, "b": tf.stack([numbers] * 2, 1)})
    whole = rows.batch(size, drop_remainder=size == 6)
    if size == 6:
        whole = whole.map(lambda batch: batch | {"c": 1})
    found = [*batch_sharding.local_dataset(whole, shard, shares, preview=True)]
    batches = [each.batch if shares else each for each in found]
    assert batch_sharding.preview_reads(whole, shard) * local == len(shown)
    assert [each["a"].numpy().tolist() for each in batches[: len(shown)]] == shown
    assert all((each["b"][:, 1] == each["a"]).numpy().all() for each in batches)
    if shares:
        assert [int(each.count) for each in found] == [len(each["a"]) for each in batches]
        assert {int(each.total) for each in found} == {size}
    own = [*batch_sharding.local_dataset(whole, shard, shares)]
    own = [(each.batch if shares else each)["a"].numpy().tolist() for each in own]
    assert [each["a"].numpy().tolist() for each in batches[len(shown) :]] == own
