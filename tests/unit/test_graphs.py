"""What a graph does is read off it, also within the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist._tf.graphs import assigned_variables

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
