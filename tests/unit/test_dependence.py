"""What depends on the batch is read off the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.comm.batch_dependence import Dependence, Kind, are_distinct, rows_of
from tfdist.keras.example_pairs import NO_EXAMPLES, ROWS, examples_of, meeting_of
from tfdist.keras.reductions import reduction_of
from tfdist.sharding.relayout import Part, remember


def traced(make: Callable[[Any], Any]) -> Any:
    """The tensor that `make` computes from an argument of shape (batch, length)."""
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def step(batch: Any) -> None:
        found.append(make(batch))

    step.get_concrete_function()
    return found[0]


_VARIABLE = tf.Variable([0, 1, 2])


@tf.function
def _two(x: Any) -> tuple[Any, Any]:
    return x + 1, tf.range(3)


@tf.function
def _ctc(labels: Any) -> Any:
    """Its loops are functions of TensorFlow 1, which have no graph in Python."""
    labels = tf.tile(tf.reshape(labels, [1, -1])[:, :1] + 1, [2, 4])
    logits = tf.reshape(tf.range(90.0), [9, 2, 5])
    return tf.nn.ctc_loss(labels, logits, tf.constant([4, 4]), tf.constant([9, 9]))


def _repeated(step: Callable[[Any], Any], x: Any, goes_on: Any = lambda i, _: i < 3) -> Any:
    return tf.while_loop(goes_on, lambda i, z: (i + 1, step(z)), [0, x])[1]


def _swapped(x: Any) -> Any:
    """A loop whose second variable only has the examples after a round, and its third after two."""
    none = tf.zeros([1, 8])
    return tf.while_loop(
        lambda i, *_: i < 4,
        lambda i, a, b, c: (i + 1, x + 0.0 * a, a - tf.reduce_mean(c, 0), b),
        [0, none, none, none],
        shape_invariants=[tf.TensorShape([]), *3 * [tf.TensorShape([None, 8])]],
    )[2:]


def _rows(x: Any) -> Any:
    return tf.cast(tf.shape(x)[0], tf.float32)


def _drawn(x: Any) -> Any:
    return tf.random.uniform([2], maxval=tf.size(_VARIABLE), dtype=tf.int32)


@pytest.mark.parametrize(
    ("make", "depends"),
    [
        (lambda batch: batch[:, 0], True),
        (lambda batch: tf.range(tf.shape(batch)[0]), True),
        (lambda batch: tf.zeros_like(batch), True),
        (lambda batch: tf.range(tf.shape(batch)[1]), False),
        (lambda batch: tf.range(tf.shape(tf.transpose(batch))[1]), True),
        (lambda batch: tf.constant([0, 1]), False),
        (lambda batch: _VARIABLE + 1, False),
        (lambda batch: _two(batch)[0], True),
        (lambda batch: _two(batch)[1], False),
        (lambda batch: _drawn(batch), True),
        (lambda batch: tf.random.stateless_uniform([2], [1, 2]), True),
        (lambda batch: tf.cond(tf.size(batch) > 3, lambda: 1, lambda: 2), True),
        (lambda batch: tf.cond(_VARIABLE[0] > 3, lambda: 1, lambda: _VARIABLE[1] + 1), False),
        (
            lambda batch: tf.cond(
                _VARIABLE[0] > 3, lambda: tf.constant([1, 2]), lambda: _drawn(batch)
            ),
            True,
        ),
        (lambda batch: _ctc(batch), True),
        (lambda batch: _ctc(_VARIABLE), False),
    ],
)
def test_dependence(make: Callable[[Any], Any], depends: bool) -> None:
    assert Dependence()(traced(make)) is depends


def test_what_is_gathered_of_sums_is_a_sum() -> None:
    def make(batch: Any) -> Any:
        values = tf.cast(batch, tf.float32)
        part = tf.matmul(values, values, transpose_a=True)
        return remember(tf.identity_n([tf.concat([part, part], 1), part])[0], Part(part, 1))

    [leaf] = reduction_of(traced(make), Dependence(), {}).leaves
    assert leaf.is_sum
    assert leaf.tensor.op.type == "IdentityN"


def test_dependence_through_captures() -> None:
    def make(batch: Any) -> Any:
        graph = tf.__internal__.FuncGraph("inner")
        with graph.as_default():
            return graph.capture(batch) + 1, graph.capture(tf.constant(2)) + 1

    own, alike = traced(make)
    assert Dependence()(own)
    assert not Dependence()(alike)


def test_rows_of_a_concatenation_that_is_changed_element_by_element() -> None:
    def make(batch: Any) -> Any:
        ids = tf.concat([tf.reshape(batch, [-1]), tf.range(3)], 0)
        return tf.reshape(tf.cast(tf.where(ids < 0, ids + 3, ids), tf.int64), [-1])

    parts = rows_of(traced(make))
    depends = Dependence()
    assert [any(depends(s) for s in part.sources) for part in parts] == [True, False]


def test_rows_that_are_mixed_are_one_part() -> None:
    def make(batch: Any) -> Any:
        ids = tf.concat([tf.reshape(batch, [-1]), tf.range(3)], 0)
        return tf.reverse(ids, [0])

    assert len(rows_of(traced(make))) == 1


@pytest.mark.parametrize("combine", [tf.sparse.segment_mean, tf.sparse.segment_sum])
def test_the_rows_of_a_gradient_of_segments_are_distinct(combine: Any) -> None:
    """Lookups of bags are such, where the table and the ids are on one device."""

    def rows(batch: Any) -> Any:
        ids = tf.reshape(batch, [-1])
        table = tf.ones([6, 4])
        with tf.GradientTape() as tape:
            tape.watch(table)
            bags = combine(table, ids, tf.range(tf.size(ids)) // 3, sparse_gradient=True)
        return tape.gradient(bags, table).indices

    indices = traced(rows)
    assert are_distinct(indices)
    assert [each.kind for each in rows_of(indices)] == [Kind.DISTINCT]


def test_a_sum_over_processes_has_the_examples_where_its_summands_have_them() -> None:
    def make(batch: Any, one_for_each: bool) -> Any:
        values = tf.cast(batch, tf.float32)
        part = values if one_for_each else tf.reduce_sum(values, 0)
        return tf.raw_ops.CollectiveReduceV2(
            input=part, group_size=2, group_key=1, instance_key=1, ordering_token=[],
            merge_op="Add", final_op="Id",
        )  # fmt: skip

    for one_for_each, axes in ((True, ROWS), (False, NO_EXAMPLES)):
        total = traced(functools.partial(make, one_for_each=one_for_each))
        assert examples_of(total, Dependence()).axes == axes


def _numbers(batch: Any) -> Any:
    """Rows of eight numbers."""
    return tf.ensure_shape(tf.cast(batch, tf.float32), [None, 8])


def _steps(batch: Any) -> Any:
    """Four rows of two numbers for each example."""
    return tf.reshape(_numbers(batch), [-1, 4, 2])


def _halves(x: Any) -> Any:
    both = tf.concat([x, 2 * x], 0)
    return both[: tf.shape(x)[0]] * both[tf.shape(x)[0] :]


def _in_another_order(x: Any) -> Any:
    order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
    return tf.gather(x, order) * tf.gather(tf.exp(x), order)


def _recurrent(x: Any) -> Any:
    """Dot products between the time steps of each example, after a loop over these."""
    states, start = tf.transpose(x, [1, 0, 2]), tf.zeros_like(x[:, 0])
    outputs = tf.transpose(
        tf.scan(lambda state, each: 0.5 * state + each, states, start), [1, 0, 2]
    )
    return tf.matmul(outputs, outputs, transpose_b=True)


def _of_some(x: Any) -> Any:
    return tf.boolean_mask(x, x[:, 0] > 0) * tf.boolean_mask(2 * x, tf.logical_not(x[:, 0] <= 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda b: _numbers(b)[:, 0] + _numbers(b)[:, 1],
        lambda b: _numbers(b)[..., ::-1] + _numbers(b),
        lambda b: _numbers(b)[: tf.shape(b)[0]] + _numbers(b),
        lambda b: tf.reverse(_numbers(b), [0]) - tf.reverse(tf.exp(_numbers(b)), [0]),
        lambda b: _numbers(b)[::-1][::-1] + _numbers(b),
        lambda b: _halves(_numbers(b)),
        lambda b: _in_another_order(_numbers(b)),
        lambda b: _of_some(_numbers(b)),
        lambda b: tf.reshape(tf.exp(tf.reshape(_steps(b), [-1, 2])), [-1, 4, 2])[:, 0],
        lambda b: tf.transpose(_steps(b), [1, 0, 2])[0] + tf.transpose(_steps(b), [1, 0, 2])[-1],
        lambda b: tf.gather(tf.ones([9, 3]), b)[:, 0] + 1.0,
        lambda b: tf.reshape(_numbers(b), [-1, 2, 4])[:, ::-1] + tf.ones([4]),
        lambda b: tf.concat([_numbers(b), tf.zeros_like(_numbers(b))], 1),
        lambda b: tf.reduce_mean(tf.reverse(_numbers(b), [0])),
        lambda b: tf.gather(_numbers(b), tf.range(tf.shape(b)[0])) + _numbers(b),
        lambda b: tf.vectorized_map(tf.reduce_sum, _numbers(b)) + _numbers(b)[:, 0],
        lambda b: tf.map_fn(lambda row: 2.0 * row, _numbers(b)) + _numbers(b),
        lambda b: _recurrent(_steps(b)),
    ],
)
def test_examples_that_keep_apart(make: Callable[[Any], Any]) -> None:
    assert meeting_of(traced(make), Dependence(), {}) is None


@pytest.mark.parametrize(
    ("make", "chooses"),
    [
        (lambda b: _numbers(b)[::-1] + _numbers(b), False),
        (lambda b: tf.reverse(_numbers(b), [0]) * _numbers(b), False),
        (lambda b: tf.roll(_numbers(b), 1, 0) - _numbers(b), False),
        (lambda b: tf.roll(tf.roll(_numbers(b), 1, 0), 1, 0) - _numbers(b), False),
        (lambda b: tf.random.shuffle(_numbers(b)) - _numbers(b), False),
        (lambda b: _in_another_order(_numbers(b)) + _numbers(b), False),
        (lambda b: tf.concat([_numbers(b), tf.reverse(_numbers(b), [0])], 1), False),
        (lambda b: tf.reshape(_numbers(b), [-1, 4, 8]), False),
        (lambda b: tf.reshape(_numbers(b), [-1, 16]), False),
        (lambda b: _numbers(b)[:4], True),
        (lambda b: _numbers(b)[0], True),
        (lambda b: _numbers(b)[1:] - _numbers(b)[:-1], True),
        (lambda b: _numbers(b)[: tf.shape(b)[0] // 2], True),
        (lambda b: _numbers(b)[::2], True),
        (lambda b: tf.slice(_numbers(b), [0, 0], [3, -1]), True),
        (lambda b: tf.split(_numbers(b), 2)[1], True),
        (lambda b: tf.unstack(tf.ensure_shape(_numbers(b), [4, 8]))[1], True),
        (lambda b: tf.gather(_numbers(b), [0, 1]), True),
        (lambda b: tf.boolean_mask(_numbers(b), b[:, 0] > 0)[:3], True),
        (lambda b: tf.gather(_numbers(b), tf.range(0, tf.shape(b)[0], 2)), True),
        (lambda b: tf.gather(_numbers(b), tf.range(tf.shape(b)[0] // 2)), True),
    ],
)
def test_examples_that_meet_by_their_places(make: Callable[[Any], Any], chooses: bool) -> None:
    found = meeting_of(traced(make), Dependence(), {})
    assert found is not None
    assert found.by_place
    assert found.chooses is chooses


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x - tf.reduce_mean(tf.map_fn(lambda row: 2.0 * row, x), 0),
        lambda x: keras.ops.softmax(x, axis=0),
        lambda x: tf.cumsum(x, axis=tf.rank(x) - 2),
        lambda x: tf.cond(tf.reduce_mean(x) > 0.0, lambda: 2.0 * x, lambda: x),
        lambda x: tf.cond(tf.shape(x)[1] > 3, lambda: x - tf.reduce_mean(x, 0), lambda: x),
        lambda x: _repeated(lambda z: z - tf.reduce_mean(z, 0), x),
        lambda x: _repeated(lambda z: z + x - tf.reduce_mean(x, 0), x),
        lambda x: _repeated(lambda z: 0.5 * z, x, lambda _, z: tf.reduce_max(z) > 0.1),
        lambda x: _repeated(lambda z: 0.5 * z, x, lambda _, z: ~tf.reduce_all(z < 0.1)),
        lambda x: tf.scan(lambda kept, row: 0.5 * kept + row, x),
        lambda x: _swapped(x)[0],
        lambda x: tf.numpy_function(lambda a: a, [x], tf.float32),
    ],
)
def test_examples_that_meet_in_their_statistics(make: Callable[[Any], Any]) -> None:
    target = traced(lambda batch: make(_numbers(batch)))
    assert meeting_of(target, Dependence(), {}, statistics=True) is not None
    assert meeting_of(target, Dependence(), {}) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tf.cond(tf.shape(x)[1] > 3, lambda: x - tf.reduce_mean(x, 1)[:, None], lambda: x),
        lambda x: _repeated(lambda z: z - tf.reduce_mean(z, 1, keepdims=True), x),
        lambda x: tf.map_fn(lambda row: row / tf.reduce_max(row), x),
        lambda x: tf.scan(lambda kept, column: 0.5 * kept + column, tf.transpose(x)),
        lambda x: tf.while_loop(
            lambda _, flags: ~tf.reduce_all(flags),
            lambda z, flags: (tf.where(flags, z, 0.5 * z), z < 0.1),
            [x, x < 0.0],
        )[0],
    ],
)
def test_examples_that_loops_keep_apart(make: Callable[[Any], Any]) -> None:
    target = traced(lambda batch: make(_numbers(batch)))
    assert meeting_of(target, Dependence(), {}, statistics=True) is None


def test_the_places_of_ragged_rows_are_no_statistic() -> None:
    offsets = traced(lambda batch: batch + tf.cumsum(batch[:, 0], exclusive=True)[:, None])
    assert meeting_of(offsets, Dependence(), {}, statistics=True) is None


def test_the_number_of_examples_is_one_of_their_statistics_in_a_layer() -> None:
    target = traced(lambda batch: _numbers(batch) / tf.cast(tf.shape(batch)[0], tf.float32))
    assert meeting_of(target, Dependence(), {}, statistics=True, counts=True) is not None
    assert meeting_of(target, Dependence(), {}, statistics=True) is None
    by_length = traced(lambda batch: _numbers(batch) / tf.cast(tf.shape(batch)[1], tf.float32))
    assert meeting_of(by_length, Dependence(), {}, statistics=True, counts=True) is None


@pytest.mark.parametrize(
    ("make", "is_sum"),
    [
        (lambda x: tf.reduce_sum(tf.squeeze(x[:, 0]) * x[:, 1]), True),
        (lambda x: tf.reduce_mean(tf.squeeze(x[:, 0])), False),
        (lambda x: tf.reduce_mean(tf.concat([x, tf.zeros([1, 8])], 0), 0), None),
        (lambda x: (0.0 + 2.0 * tf.reduce_sum(x) + tf.reduce_sum(x * x)) / _rows(x), False),
        (lambda x: tf.reduce_mean(tf.concat([x, tf.zeros_like(x)], 1), 0), False),
    ],
)
def test_reductions(make: Callable[[Any], Any], is_sum: bool | None) -> None:
    found = reduction_of(traced(lambda batch: make(_numbers(batch))), Dependence(), {})
    assert bool(found.unknown) is (is_sum is None)
    assert [leaf.is_sum for leaf in found.leaves] == [bool(is_sum)]


def test_random_numbers_are_drawn_once_for_all_replicas() -> None:
    def make(batch: Any) -> Any:
        noise = tf.random.stateless_normal([8], [1, 2])
        return tf.reduce_mean(_numbers(batch), 0) + noise + tf.random.normal([8])

    found = reduction_of(traced(make), Dependence(), {})
    assert sorted(leaf.is_drawn for leaf in found.leaves) == [False, True, True]
    assert not found.is_mean
    by_example = traced(lambda batch: tf.reduce_mean(tf.random.normal(tf.shape(batch)), 0))
    assert reduction_of(by_example, Dependence(), {}).is_mean


def _doubled(value: Any, times: int) -> Any:
    for _ in range(times):
        value = value + value * 0.5
    return value


@pytest.mark.parametrize("times", [60, 2000])
def test_a_loss_with_many_ways_through_its_graph(times: int) -> None:
    """As many as 2**times; and more ops one after the other than Python's stack has room for."""

    def mean(batch: Any) -> Any:
        examples = tf.cast(tf.shape(batch)[0], tf.float32)
        return _doubled(tf.reduce_sum(_doubled(batch, times)), times) / examples

    found = reduction_of(traced(lambda batch: mean(_numbers(batch))), Dependence(), {})
    [leaf] = found.leaves
    assert found.is_mean
    assert not leaf.is_sum
