"""The parts of the parameter server that need no server."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.keras.served.boxes import FIELDS, Layout, joined, parted, unbox
from tfdist.servers.cluster import UpdateRule
from tfdist.servers.gate import Gate, gate_of
from tfdist.servers.placement import Held, Shelves, row_ranges
from tfdist.servers.slices import fingerprint

TOLD = [7, 3, 1, 5, 11, 2]


def put(shelves: Shelves, *sizes: int) -> list[int]:
    """Puts variables of these sizes one after the other; returns where each went."""
    servers = []
    for number, size in enumerate(sizes):
        servers.append(shelves.emptiest())
        shelves.put(servers[-1], Held(f"v{number}", (size,), size))
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
        assert gate.under_way == len(overlaps)
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
    assert gate.under_way == 1
    assert gate.may_start()


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (UpdateRule(mode="stale", staleness=0), True),
        (UpdateRule(mode="stale", staleness=0, on_stale="drop"), False),
        (UpdateRule(mode="stale", on_stale="damp"), False),
        (UpdateRule(mode="async", workers=2), False),
        (UpdateRule(mode="sync", workers=2), False),
    ],
)
def test_only_a_bound_that_is_waited_for_has_a_gate(rule, waits):
    gate = gate_of(rule)
    gate.start(1)
    assert gate.may_start() is not waits


@pytest.mark.parametrize(
    ("rule", "parts", "needed"),
    [
        (UpdateRule(mode="sync", workers=3), 3, 3),
        (UpdateRule(mode="sync", workers=3, backup_workers=1), 3, 2),
        (UpdateRule(mode="async", workers=3), 1, 1),
        (UpdateRule(mode="stale", workers=3, staleness=4), 1, 1),
    ],
)
def test_parts_of_a_global_batch_and_those_that_are_waited_for(rule, parts, needed):
    assert (rule.parts, rule.needed) == (parts, needed)


@pytest.mark.parametrize(
    "other", [[], [1, 2], [1, 3, 2], [1, 2, 4], [1, 2, 3, 0], [2, 3, 1], [0, 2, 3, 1]]
)
def test_lists_of_indices_that_differ_have_other_fingerprints(other):
    one, two = fingerprint(tf.constant([1, 2, 3])), fingerprint(tf.constant(other, tf.int32))
    assert one.numpy().tolist() != two.numpy().tolist()


def test_the_type_of_indices_makes_no_difference_to_their_fingerprint():
    narrow, wide = (fingerprint(tf.constant([4, 4, 9], kind)) for kind in (tf.int32, tf.int64))
    assert narrow.numpy().tolist() == wide.numpy().tolist()


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
