"""The devices on which operations really ran: the proof of a placement."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tfdist._tf.graphs import partitioned_graphs
from tfdist.placement.calls import number_of
from tfdist.placement.place import devices_by_path
from tfdist.types import Model

__all__ = ["placed_operations"]

#: Operations that compute nothing: constants, transfers, a loop's turns. TensorFlow allows values
#: that the gradient of a `tf.while_loop` carries go around by way of the first device.
_ANYWHERE = (
    *("Const", "NoOp", "_Arg", "_Retval", "_HostSend", "_HostRecv", "_Send", "_Recv", "Identity"),
    *("Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond"),
)


def placed_operations(model: Model, run: Callable[[], Any]) -> dict[str, dict[str, list[str]]]:
    """The operations of each layer, forward and backward, by the device that has run them.

    Args:
        model: a placed model.
        run: runs what is looked at, such as a step of training. Only functions that run for the
            first time are seen: it is compiled anew, or not yet trained.

    Returns:
        For each path, for each device, the names of operations in TensorFlow's graph.
    """
    with partitioned_graphs() as graphs:
        run()
    paths = list(devices_by_path(model))
    result: dict[str, dict[str, list[str]]] = {
        path: collections.defaultdict(list) for path in paths
    }
    for graph in graphs:
        for node in graph.node:
            number = number_of(node.name)
            if number is not None and node.op not in _ANYWHERE:
                result[paths[number]][node.device].append(node.name)
    return result
