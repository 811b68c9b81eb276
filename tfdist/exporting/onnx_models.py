"""ONNX models: the packages for them, imported at first use, and files, properties and sessions."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tfdist import environment
from tfdist.errors import ConfigError
from tfdist.exporting.subject import Arrays, ExportError, Input, first_line
from tfdist.types import OnnxModel, OnnxSession

__all__ = ["described", "opened", "package", "precision_of", "runner"]


def package(name: str) -> ModuleType:
    """A module of tf2onnx, onnx or onnxruntime.

    Raises:
        ConfigError: if it is not installed; the message names the install command.
    """
    try:
        # tf2onnx sets TF_CPP_MIN_LOG_LEVEL when it is imported, for all that this process starts.
        with warnings.catch_warnings(), environment.patched({}):
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        raise ConfigError(
            f"format='onnx' needs the package {missing!r}, which is not installed. Run: pip "
            "install 'tfdist[export]'. format='saved_model' needs no further package."
        ) from error


def opened(path: str) -> OnnxModel:
    """The `ModelProto` of a file.

    Raises:
        ConfigError: if it is missing or not an ONNX model.
    """
    onnx = package("onnx")
    if not os.path.isfile(path):
        raise ConfigError(f"The ONNX model {path!r} does not exist.")
    try:
        model: OnnxModel = onnx.load_model(path)
        onnx.checker.check_model(model)
    except Exception as error:
        raise ConfigError(f"{path!r} is not a valid ONNX model: {first_line(error)}") from error
    return model


def described(model: OnnxModel) -> tuple[Input, ...]:
    """The inputs of a `ModelProto`; weights that are listed among them are not."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_input(value) for value in model.graph.input if value.name not in weights)


def _input(value: Any) -> Input:
    tensor = value.type.tensor_type
    kind = package("onnx").helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = tuple(size.dim_value or None for size in tensor.shape.dim)
    return Input(value.name, "string" if kind.hasobject else str(kind), shape)


def precision_of(model: OnnxModel) -> str:
    """The key of `options.TOLERANCES` that a `ModelProto` was most likely written with."""
    kinds = {node.op_type for node in model.graph.node}
    if "DynamicQuantizeLinear" in kinds:
        return "int8"
    if "QuantizeLinear" in kinds:
        return "int8_static"
    half = package("onnx").TensorProto.FLOAT16
    return "float16" if any(t.data_type == half for t in model.graph.initializer) else "float32"


def runner(model: OnnxModel | str) -> Callable[[Arrays], Arrays]:
    """Computes an ONNX model's outputs from arrays by name, in onnxruntime on the CPU.

    Args:
        model: a `ModelProto` or the path of an ONNX file. Inputs that it lacks are left out.

    Raises:
        ExportError: if onnxruntime refuses the model.
    """
    runtime = package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # its warnings concern its own optimisations
    source = model if isinstance(model, str) else model.SerializeToString()
    try:
        session: OnnxSession = runtime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(f"onnxruntime refuses the model: {first_line(error)}") from error
    inputs = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(values: Arrays) -> Arrays:
        feeds = {name: values[name] for name in inputs if name in values}
        return dict(zip(outputs, session.run(outputs, feeds), strict=True))

    return run
