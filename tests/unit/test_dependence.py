"""What depends on the batch is read off the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist.comm.batch_dependence import Dependence, rows_of
from tfdist.keras.example_pairs import NO_EXAMPLES, ROWS, axes_of


def traced(make: Callable[[Any], Any]) -> Any:
    """The tensor that `make` computes from an argument of shape (batch, length)."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def step(batch: Any) -> None:
        found.append(make(batch))

    step.get_concrete_function()
    return found[0]


_VARIABLE = tf.Variable([0, 1, 2])


@tf.function
def _two(x: Any) -> tuple[Any, Any]:
    return x + 1, tf.range(3)


@tf.function
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
    ],
)
def test_dependence(make: Callable[[Any], Any], depends: bool) -> None:
    assert Dependence()(traced(make)) is depends


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
        assert axes_of(total, Dependence(), {}) == axes
