"""The packages that only an export to ONNX needs, imported when they are first used."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from tfdist import environment
from tfdist.errors import ConfigError

__all__ = ["package"]

_NAMES = {
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "tf2onnx": "tf2onnx.convert",
    "freezing": "tf2onnx.tf_loader",
    "quantization": "onnxruntime.quantization",
    "quantization_shapes": "onnxruntime.quantization.shape_inference",
    "float16": "onnxruntime.transformers.float16",
}


def package(name: str) -> ModuleType:
    """A module of tf2onnx, onnx or onnxruntime.

    Args:
        name: a key of `_NAMES`.

    Raises:
        ConfigError: if it is not installed; the message names the install command.
    """
    module = _NAMES[name]
    try:
        # tf2onnx sets TF_CPP_MIN_LOG_LEVEL when it is imported, for all that this process starts.
        with warnings.catch_warnings(), environment.patched({}):
            warnings.simplefilter("ignore")
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        raise ConfigError(
            f"format='onnx' needs the package {missing!r}, which is not installed. Run: pip "
            "install 'tfdist[export]'. format='saved_model' needs no further package."
        ) from error
    return imported
