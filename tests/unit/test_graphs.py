"""What a graph does is read off it, also within the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist._tf.graphs import assigned_variables, constant_of

_KEPT = tf.Variable([0.0, 1.0, 2.0], name="kept")
_INNER = tf.function(lambda x: _KEPT.assign_sub(x))


@pytest.mark.parametrize(
    ("run", "count"),
    [
        pytest.param(lambda x: _KEPT.assign(x), 1, id="assign"),
        pytest.param(lambda x: _KEPT.assign_add(x), 1, id="assign_add"),
        pytest.param(lambda x: _KEPT.scatter_nd_add([[0]], x[:1]), 1, id="scatter"),
        pytest.param(lambda x: _KEPT[1:].assign(x[1:]), 1, id="slice"),
        pytest.param(lambda x: _INNER(x), 1, id="function"),
        pytest.param(
            lambda x: tf.cond(x[0] > 0, lambda: _KEPT.assign(x) + 0, lambda: x), 1, id="branch"
        ),
        pytest.param(lambda x: _KEPT + tf.gather(_KEPT, 0) + x, 0, id="read"),
    ],
)
def test_assigned_variables(run: Callable[[Any], Any], count: int) -> None:
    made = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec([3]))
    names = assigned_variables(made.graph)
    assert names == ["kept:0"] * count


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param(lambda x: tf.constant([1.0, 2.0]), [4.0, 8.0], id="constant"),
        pytest.param(lambda x: x, None, id="input"),
        pytest.param(lambda x: _KEPT[:2], None, id="variable"),
        pytest.param(lambda x: tf.random.uniform([2]), None, id="random"),
    ],
)
def test_constant_of(start: Callable[[Any], Any], expected: Any) -> None:
    found: list[Any] = []

    def traced(x: Any) -> Any:
        value = start(x) * tf.constant(2.0)
        found.append(constant_of(value + value))
        return value

    tf.function(traced, autograph=False).get_concrete_function(tf.TensorSpec([2]))
    assert (found[0] if found[0] is None else found[0].tolist()) == expected


def test_a_constant_that_is_used_often_is_computed_once() -> None:
    found: list[Any] = []

    def traced() -> Any:
        value = tf.constant(1.0)
        for _ in range(1500):  # More than Python's stack has room for, and 2**1500 paths.
            value = tf.math.minimum(value, value)
        found.append(constant_of(value))
        return value

    tf.function(traced, autograph=False).get_concrete_function()
    assert found == [1.0]
