"""The properties of an ONNX file, read from the file."""

from __future__ import annotations

import os
from typing import Any

from tfdist.errors import ConfigError
from tfdist.exporting.packages import package
from tfdist.exporting.signature import Input
from tfdist.types import OnnxModel

__all__ = ["described", "opened", "precision_of"]


def opened(path: str) -> OnnxModel:
    """The `ModelProto` of a file.

    Raises:
        ConfigError: if it is missing or not an ONNX model.
    """
    onnx = package("onnx")
    if not os.path.isfile(path):
        raise ConfigError(f"The ONNX model {path!r} does not exist.")
    try:
        model = onnx.load_model(path)
        onnx.checker.check_model(model)
    except Exception as error:
        text = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path!r} is not a valid ONNX model: {text}") from error
    return model


def described(model: OnnxModel) -> tuple[Input, ...]:
    """The inputs of a `ModelProto`; weights that are listed among them are not."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_input(value) for value in model.graph.input if value.name not in weights)


def precision_of(model: OnnxModel) -> str:
    """The key of `options.PRECISIONS` that a `ModelProto` was most likely written with."""
    kinds = {node.op_type for node in model.graph.node}
    if "DynamicQuantizeLinear" in kinds:
        return "int8"
    if "QuantizeLinear" in kinds:
        return "int8_static"
    half = package("onnx").TensorProto.FLOAT16
    return "float16" if any(t.data_type == half for t in model.graph.initializer) else "float32"


def _input(value: Any) -> Input:
    tensor = value.type.tensor_type
    kind = package("onnx").helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = tuple(size.dim_value or None for size in tensor.shape.dim)
    return Input(value.name, "string" if kind.hasobject else str(kind), shape)
