"""A trace without devices: layers that were placed on several are joined in one graph."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdist.types import Function, GraphDef

__all__ = ["joined", "strip_devices"]


def joined(function: Function) -> Function:
    """A traced `tf.function`, without the devices that its layers were placed on.

    Args:
        function: a `tf.function` with an input signature and one trace, whose result is a dict.

    Returns:
        The same function if no operation names a device; else one that is made of its graph.
    """
    concrete = function.get_concrete_function()
    graph_def = concrete.graph.as_graph_def(add_shapes=True)
    if not strip_devices(graph_def):
        return function
    captured = {inside.name: outside for outside, inside in concrete.graph.captures}
    names = [tensor.name for tensor in concrete.inputs if tensor.name not in captured]
    fetched = {key: tensor.name for key, tensor in concrete.structured_outputs.items()}
    variables = concrete.variables

    def run(*tensors: Any) -> dict[str, Any]:
        for variable in variables:
            variable.read_value()  # makes it known to the converter as a variable of this graph
        graph = tf.compat.v1.get_default_graph()
        held = {name: graph.capture(tensor) for name, tensor in captured.items()}
        feeds = {**dict(zip(names, tensors, strict=True)), **held}
        out = tf.graph_util.import_graph_def(
            graph_def, input_map=feeds, return_elements=list(fetched.values()), name=""
        )
        return {key: tf.identity(value) for key, value in zip(fetched, out, strict=True)}

    again = tf.function(run, input_signature=function.input_signature, autograph=False)
    again.get_concrete_function()
    return again


def strip_devices(graph_def: GraphDef) -> bool:
    """Takes the devices out of a `GraphDef`, its functions included; whether there were any."""
    result = False
    bodies = (function.node_def for function in graph_def.library.function)
    for node in itertools.chain(graph_def.node, *bodies):
        result = result or bool(node.device)
        node.device = ""
    return result
