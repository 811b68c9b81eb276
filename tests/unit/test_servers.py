"""The parts of the parameter server that need no server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.comm.batch_dependence import common_rows
from tfdist.config.server_options import ServerOptions
from tfdist.strategies.parameter_server.scheduler import Gate, gate_of
from tfdist.strategies.parameter_server.serialization import (
    FIELDS,
    Layout,
    Vector,
    joined,
    parted,
    unbox,
)
from tfdist.strategies.parameter_server.servers import Held, Shelves, Slices, row_ranges
from tfdist.strategies.parameter_server.transaction_log import (
    APPLIED,
    DROPPED,
    FORGOTTEN,
    WINDOW,
    Ledger,
)

TOLD = [7, 3, 1, 5, 11, 2]


def put(shelves: Shelves, *sizes: int) -> list[int]:
    """Puts variables of these sizes one after the other; returns where each went."""
    servers = []
    for number, size in enumerate(sizes):
        servers.append(shelves.emptiest())
        shelves.held[servers[-1]].append(Held(f"v{number}", (size,), size))
    return servers


def test_each_variable_goes_to_the_server_that_holds_the_fewest_bytes():
    shelves = Shelves(2, min_shard_bytes=1 << 20)
    assert put(shelves, 100, 10, 10, 10, 90) == [0, 1, 1, 1, 1]
    assert [shelves.bytes_on(server) for server in range(2)] == [100, 120]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), max_size=40), servers=st.integers(1, 6))
def test_no_server_holds_more_than_another_by_more_than_one_variable(sizes, servers):
    shelves = Shelves(servers, min_shard_bytes=1)
    put(shelves, *sizes)
    held = [shelves.bytes_on(server) for server in range(servers)]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes, default=0)


def test_servers_are_passed_over_unless_there_is_no_other():
    shelves = Shelves(3, min_shard_bytes=1)
    assert shelves.emptiest(without=[0]) == 1
    assert shelves.emptiest(without=[0, 1, 2]) == 0


@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        ((), {}, 1),
        ((0, 4), {}, 1),
        ((100, 4), {}, 3),
        ((100, 4), {"min_shard_bytes": 800}, 2),
        ((100, 4), {"min_shard_bytes": 801}, 1),
        ((100, 4), {"max_shards": 1}, 1),
        ((100, 4), {"max_shards": 8}, 8),
        ((2, 1000), {"max_shards": 8}, 2),
    ],
)
def test_how_many_parts_a_variable_has(shape, options, parts):
    shelves = Shelves(3, **{"min_shard_bytes": 64, **options})
    assert shelves.parts(shape, item_bytes=4) == parts


@settings(deadline=None)
@given(rows=st.integers(0, 500), parts=st.integers(1, 20))
def test_parts_cover_all_rows_in_order_and_differ_by_one_at_most(rows, parts):
    ranges = row_ranges(rows, parts)
    assert [row for start, end in ranges for row in range(start, end)] == list(range(rows))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=300)
@given(
    bound=st.integers(0, 6),
    choices=st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 9)), max_size=120),
)
def test_no_step_overlaps_with_more_updates_than_the_bound(bound, choices):
    """Each choice starts a step of some updates, if it may start, or ends one that is under way."""
    gate, updates = Gate(bound), []
    overlaps: dict[int, set[int]] = {}
    for starts, count, which in choices:
        if not overlaps:
            assert gate.may_start(count)
        if starts and gate.may_start(count):
            step = len(updates)
            updates.append(count)
            gate.start(step, count)
            for others in overlaps.values():
                others.add(step)
            overlaps[step] = set(overlaps)
        elif overlaps:
            step = sorted(overlaps)[which % len(overlaps)]
            assert gate.has_started(step)
            gate.end(step)
            del overlaps[step]
            assert not gate.has_started(step)
        assert len(gate._updates) == len(overlaps)
        for others in overlaps.values():
            assert sum(updates[other] for other in others) <= bound


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_steps_of_one_update_run_side_by_side_up_to_the_bound(bound):
    gate = Gate(bound)
    for step in range(bound + 1):
        assert gate.may_start()
        gate.start(step)
    assert not gate.may_start()


def test_a_fast_worker_waits_for_a_slow_one_and_goes_on_after_it():
    gate = Gate(2)
    gate.start(1)
    for step in (2, 3):
        assert gate.may_start()
        gate.start(step)
        gate.end(step)
    assert not gate.may_start()
    gate.end(1)
    assert gate.may_start()


def test_updates_of_steps_that_have_ended_do_not_count():
    gate = Gate(1)
    for step in range(3):
        gate.start(step)
        gate.end(step)
    gate.start(3)
    assert gate.may_start()


def test_a_step_that_starts_again_on_another_worker_counts_once():
    gate = Gate(1)
    gate.start(1)
    gate.start(1)
    assert len(gate._updates) == 1
    assert gate.may_start()


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (ServerOptions(mode="stale", staleness=0), True),
        (ServerOptions(mode="stale", staleness=0, on_stale="drop"), False),
        (ServerOptions(mode="stale", on_stale="damp"), False),
        (ServerOptions(mode="async"), False),
        (ServerOptions(mode="sync"), False),
    ],
)
def test_only_a_bound_that_is_waited_for_has_a_gate(rule, waits):
    gate = gate_of(rule)
    gate.start(1)
    assert gate.may_start() is not waits


@pytest.mark.parametrize(
    ("rule", "parts", "needed"),
    [
        (ServerOptions(), 3, 3),
        (ServerOptions(backup_workers=1), 3, 2),
        (ServerOptions(mode="async"), 1, 1),
        (ServerOptions(mode="stale", staleness=4), 1, 1),
    ],
)
def test_parts_of_a_global_batch_and_those_that_are_waited_for(rule, parts, needed):
    assert (rule.parts(3), rule.needed(3)) == (parts, needed)


def lookups(batch: tf.Tensor, seed: tf.Tensor) -> dict[str, Callable[[], tf.Tensor]]:
    """Ids that come from a batch in one way or another, or do not."""
    places = tf.range(tf.shape(batch)[1])

    @tf.function(autograph=False)
    def inner(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.range(3), tf.unique(tf.reshape(ids, [-1]))[0]

    return {
        "constant": lambda: tf.range(5),
        "length": lambda: places,
        "called apart": lambda: inner(batch)[0],
        "batch": lambda: tf.reshape(batch, [-1]),
        "called with": lambda: inner(batch)[1],
        "first size": lambda: tf.range(tf.shape(batch)[0]),
        "first of a transposed": lambda: tf.range(tf.shape(tf.transpose(batch))[1]),
        "tiled": lambda: tf.reshape(tf.tile(places[None], [tf.shape(batch)[0], 1]), [-1]),
        "drawn by state": lambda: tf.random.uniform([3], 0, 4, tf.int32),
        "drawn by seed": lambda: tf.random.stateless_uniform([3], seed, 0, 4, tf.int32),
        "branch": lambda: tf.cond(batch[0, 0] > 0, lambda: places, lambda: places + 1),
        "several": lambda: tf.concat([places, tf.reshape(batch, [-1])], 0),
    }


@pytest.mark.parametrize(
    ("which", "common"),
    [
        ("constant", True),
        ("length", True),
        ("called apart", True),
        ("batch", False),
        ("called with", False),
        ("first size", False),
        ("first of a transposed", False),
        ("tiled", False),
        ("drawn by state", False),
        ("drawn by seed", False),
        ("branch", False),
        ("several", None),
    ],
)
def test_rows_are_common_to_all_parts_unless_their_ids_come_from_the_batch(which, common):
    rows: list[Any] = []

    def run(batch: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        rows.append(common_rows(lookups(batch, seed)[which]()))
        return tf.convert_to_tensor(rows[-1])

    specs = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([2], tf.int32)]
    found = tf.function(run, specs, autograph=False)(tf.constant([[2, 0], [0, 1]]), [1, 2])
    if common is None:
        assert found.numpy().tolist() == [True, True, False, False, False, False]
    else:
        assert rows == [common]


def test_common_rows_are_added_up_and_those_of_examples_stay_one_by_one():
    """The ids of the examples of both parts have sums alike."""
    slices = Slices("/device:CPU:0", tf.float32)

    def part(ids: list[int]) -> tf.IndexedSlices:
        values = tf.constant([[1.0], [2.0], [3.0], [4.0]])
        return tf.IndexedSlices(values, tf.constant(ids), tf.constant([5, 1]))

    slices.put(part([3, 4, 2, 0]), tf.constant(2))
    slices.put(part([3, 4, 0, 1]), tf.constant(2))
    taken = slices.take(2, [5, 1])
    pairs = sorted(zip(taken.indices.numpy().tolist(), taken.values.numpy()[:, 0], strict=True))
    assert pairs == [(0, 3.0), (0, 4.0), (1, 4.0), (2, 3.0), (3, 2.0), (4, 4.0)]


def fates(ledger: Ledger, *numbers: int) -> list[int]:
    return [int(ledger.fate(CPU, tf.constant(n, tf.int64))) for n in numbers]


CPU = "/device:CPU:0"


def test_a_ledger_refuses_what_it_cannot_remember():
    ledger = Ledger([CPU])
    ledger.note(CPU, tf.constant(5, tf.int64), APPLIED)
    assert fates(ledger, 5, 5 + WINDOW, 6) == [APPLIED, 0, 0]
    ledger.note(CPU, tf.constant(5 + WINDOW, tf.int64), DROPPED)
    assert fates(ledger, 5, 5 + WINDOW, 5 + 2 * WINDOW) == [FORGOTTEN, DROPPED, 0]


def test_a_ledger_refuses_what_belongs_to_a_training_that_is_over():
    ledger = Ledger([CPU])
    ledger.refuse_before(7)
    assert fates(ledger, 6, 7) == [FORGOTTEN, 0]


def tensors(rows: int) -> list[np.ndarray]:
    random = np.random.default_rng(rows)
    return [
        random.normal(size=(rows, 3)).astype("float32"),
        random.integers(-9, 9, (rows,)).astype("int64"),
        random.integers(0, 2, (rows, 2)).astype(bool),
        random.integers(0, 255, (rows, 2, 2)).astype("uint8"),
        random.normal(size=(2 * rows + 1, 2)).astype("float64"),
        random.normal(size=(rows, 2)).astype("float16"),
        random.normal(size=(rows,)).astype(tf.bfloat16.as_numpy_dtype),
        np.array(2.5, "float32"),
    ]


def assert_equal(values: list[np.ndarray], opened: list[tf.Tensor]) -> None:
    for expected, actual in zip(values, opened, strict=True):
        assert actual.dtype.as_numpy_dtype == expected.dtype
        assert actual.shape == expected.shape
        assert np.array_equal(expected, actual.numpy())


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_what_is_put_into_a_box_comes_out_of_it(rows):
    """The layout is made from a batch of another size."""
    layout = Layout([tf.constant(each) for each in tensors(4)])
    box = layout.box(TOLD, tensors(rows))
    opened = tf.function(layout.open, input_signature=[tf.TensorSpec([None], tf.uint8)])
    assert_equal(tensors(rows), opened(box))
    told = unbox(tf.constant(box))
    fields = [told.job, told.update, told.part, told.count, told.total, told.skip]
    assert [int(field) for field in fields] == TOLD
    assert len(fields) == FIELDS


def test_arrays_that_are_not_contiguous():
    array = np.arange(12, dtype="int32").reshape(3, 4)
    for view in (array.T, array[:, ::2], array[::-1]):
        layout = Layout([tf.constant(view)])
        assert_equal([view], layout.open(tf.constant(layout.box(TOLD, [view]))))


def test_boxes_that_were_joined_are_parted_in_order():
    layout = Layout([tf.constant(each) for each in tensors(1)])
    sizes = [3, 0, 8]
    together = joined([layout.box([n, *TOLD[1:]], tensors(n)) for n in sizes])
    for size, box in zip(sizes, parted(tf.constant(together), len(sizes)), strict=True):
        assert int(unbox(box).job) == size
        assert_equal(tensors(size), layout.open(box))


def test_a_box_without_a_batch():
    box = Layout([]).box(TOLD, [])
    assert Layout([]).open(tf.constant(box)) == []
    assert int(unbox(tf.constant(box)).skip) == TOLD[-1]


def test_numbers_that_are_packed_come_out_as_they_were():
    numbers = [2.5, np.arange(6, dtype="int32").reshape(2, 3), np.zeros([0]), np.ones([2], bool)]
    vector = Vector([np.shape(each) for each in numbers])
    packed = vector.pack(numbers, tf.float64)
    for expected, actual in zip(numbers, vector.unpack(packed.numpy()), strict=True):
        assert np.array_equal(expected, actual)
