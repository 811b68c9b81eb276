"""Finds the layer that an operation of a graph belongs to, by its name."""

from __future__ import annotations

import re
from collections.abc import Set

__all__ = ["layer_of"]

_COUNT = re.compile(r"_\d+$")


def layer_of(operation: str, layers: Set[str]) -> str:
    """The path of the layer in whose scope an operation was made.

    Keras opens a layer's name scope once to build it and once to call it, so TensorFlow counts the
    second: `functional_1/encoder_1/dense_2_1/MatMul` is of the layer `dense_2` in `encoder`.

    Args:
        operation: the operation's name.
        layers: the names of the model's layers; if there are none, scopes stand for layers.

    Returns:
        Such as `encoder/dense_2`; empty if no part of the name is a layer.
    """
    parts = operation.split("/")[:-1]
    if not layers:
        return "/".join(parts)
    result: list[str] = []
    for part in parts:
        name = _COUNT.sub("", part)
        name = name if name in layers else part
        if name in layers and name not in result[-1:]:
            result.append(name)
    return "/".join(result)
