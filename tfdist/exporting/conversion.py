"""From a Keras model or a signature to a checked ONNX model, by tf2onnx.

Of tf2onnx's ways in, `from_function` is the one that works: `from_keras` asks for attributes that
Keras 3 no longer has (tensorflow-onnx#2329, #2348).
"""

from __future__ import annotations

from typing import Any

from tfdist.exporting import operators
from tfdist.exporting.errors import ExportError
from tfdist.exporting.packages import package
from tfdist.exporting.subject import Subject
from tfdist.exporting.tracing import joined
from tfdist.types import Function, OnnxModel

__all__ = ["check", "convert", "convertible", "frozen", "write"]

_TOO_LARGE = ("2GB", "string too long", "exceeds maximum protobuf size")


def convert(subject: Subject, opset: int) -> OnnxModel:
    """A subject as an ONNX `ModelProto`, accepted by the ONNX checker.

    Args:
        subject: what to convert.
        opset: the version of the operators.

    Raises:
        ExportError: if an operation has no operator in ONNX, with its layer, or the result is not
            a valid model.
    """
    function = joined(convertible(subject))
    with operators.collected() as messages:
        try:
            model, _ = package("tf2onnx").from_function(
                function,
                input_signature=subject.specs(),
                opset=opset,
                custom_op_handlers=dict(operators.HANDLERS),
            )
        except Exception as error:
            raise _failure(error, messages) from error
    operators.refuse_leftovers(model, subject.layers)
    if messages:
        raise ExportError(f"tf2onnx could not convert the model: {messages[0]}")
    _tidy(model, function.get_concrete_function().structured_outputs, subject)
    check(model)
    return model


def convertible(subject: Subject) -> Function:
    """The subject's function, if ONNX has an operator for each of its operations.

    Raises:
        ExportError: naming the first that has none, and its layer.
    """
    traced = subject.trace()
    operators.refuse_foreign(traced.get_concrete_function().graph.as_graph_def(), subject.layers)
    return traced


def check(model: OnnxModel) -> None:
    """Has the ONNX checker look at a model, shapes and types included.

    Raises:
        ExportError: if it finds something.
    """
    onnx = package("onnx")
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"The ONNX checker refuses the converted model: {error}") from error


def frozen(subject: Subject) -> tuple[Any, dict[str, str]]:
    """The TensorFlow graph that tf2onnx converts, to compare its tensors with those of ONNX.

    Args:
        subject: the subject of the conversion.

    Returns:
        A `GraphDef` without variables, and for each output of the model its tensor's name.
    """
    function = joined(subject.trace())
    concrete = function.get_concrete_function()
    count = len(subject.inputs)
    inputs = [tensor.name for tensor in concrete.inputs[:count]]
    outputs = {key: tensor.name for key, tensor in concrete.structured_outputs.items()}
    with operators.collected():
        graph_def = package("freezing").from_function(concrete, inputs, list(outputs.values()))
    return graph_def, {
        **outputs,
        **dict(zip((e.name for e in subject.inputs), inputs, strict=True)),
    }


def write(model: OnnxModel, path: str) -> None:
    """Writes a `ModelProto`."""
    package("onnx").save_model(model, path)


def _failure(error: Exception, messages: list[str]) -> ExportError:
    text = str(error)
    if any(part in text for part in _TOO_LARGE):
        return ExportError(
            "The model has more than the 2 GB that one ONNX file and one graph of TensorFlow can "
            "hold. Choose format='saved_model', whose weights lie in files of their own."
        )
    told = "; ".join(dict.fromkeys([*messages[:1], text.splitlines()[0] if text else ""]))
    return ExportError(f"tf2onnx could not convert the model ({type(error).__name__}): {told}")


def _tidy(model: OnnxModel, outputs: dict[str, Any], subject: Subject) -> None:
    """Puts outputs in the model's order, and names open sizes after what they are."""
    order = list(outputs)
    there = sorted(model.graph.output, key=lambda output: order.index(output.name))
    del model.graph.output[:]
    model.graph.output.extend(there)
    model.graph.name = "tfdist"
    for value in model.graph.input:
        for number, size in enumerate(value.type.tensor_type.shape.dim):
            if size.dim_param:
                size.dim_param = "batch" if number == 0 else f"{value.name}_{number}"
    for value in (*model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.ClearField("dim_param")
