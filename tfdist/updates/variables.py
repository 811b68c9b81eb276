"""Variables that an exchange keeps from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tensorflow import outside_of_function

__all__ = ["make_variable"]


def make_variable(
    strategy: Any,
    name: str,
    shape: Any,
    dtype: Any,
    *,
    shared: bool,
    initial: Callable[[], Any] | None = None,
) -> Any:
    """Makes a variable of each replica, from wherever the program is.

    Args:
        strategy: the strategy.
        name: its name, without `tfdist_`, which goes before it.
        shape: a static shape.
        dtype: the type.
        shared: whether all replicas hold the same, of which one is saved. Otherwise the sum of what
            they hold is saved, and each takes an equal part of it when it is loaded.
        initial: makes the first value, the same on all replicas; zeros by default.
    """
    apart: dict[str, Any] = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    with outside_of_function(strategy):
        value = tf.zeros(shape, dtype) if initial is None else tf.cast(initial(), dtype)
        return tf.Variable(
            value, trainable=False, dtype=dtype, name=f"tfdist_{name}", **({} if shared else apart)
        )
