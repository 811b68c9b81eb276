"""The outputs of an exported model, each a signature of the SavedModel."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import SignatureDef, Tensor

__all__ = ["ClassificationOutput", "ExportOutput", "PredictOutput", "RegressionOutput"]

tf1 = tf.compat.v1


class ExportOutput(abc.ABC):
    """One signature of an exported model."""

    @abc.abstractmethod
    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> SignatureDef:
        """The signature from the model's inputs to this output.

        Args:
            receiver_tensors: the tensors that are fed, by name.

        Raises:
            ConfigError: if this output cannot have these inputs.
        """


class ClassificationOutput(ExportOutput):
    """Classes with scores, for TensorFlow Serving's Classify.

    Args:
        scores: a float tensor `(batch, classes)`.
        classes: a string tensor `(batch, classes)` or `(classes,)`. One of both may be left out.
    """

    def __init__(self, scores: Tensor | None = None, classes: Tensor | None = None) -> None:
        if scores is None and classes is None:
            raise ConfigError("ClassificationOutput() has neither scores nor classes. Give one.")
        if scores is not None and not scores.dtype.is_floating:
            raise ConfigError(f"ClassificationOutput(scores=…) is of {scores.dtype}, not floating.")
        if classes is not None and classes.dtype != tf.string:
            raise ConfigError(
                f"ClassificationOutput(classes=…) is of {classes.dtype}, not string. Convert it "
                "with tf.strings.as_string."
            )
        self.scores = scores
        self.classes = classes

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> SignatureDef:
        """A signature of Classify; see `ExportOutput.as_signature_def`."""
        examples = _only_examples(receiver_tensors, "ClassificationOutput")
        return tf1.saved_model.classification_signature_def(examples, self.classes, self.scores)


class RegressionOutput(ExportOutput):
    """Values, for TensorFlow Serving's Regress.

    Args:
        value: a float tensor `(batch,)` or `(batch, 1)`.
    """

    def __init__(self, value: Tensor) -> None:
        if not value.dtype.is_floating:
            raise ConfigError(f"RegressionOutput(value=…) is of {value.dtype}, not floating.")
        self.value = value

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> SignatureDef:
        """A signature of Regress; see `ExportOutput.as_signature_def`."""
        examples = _only_examples(receiver_tensors, "RegressionOutput")
        return tf1.saved_model.regression_signature_def(examples, self.value)


class PredictOutput(ExportOutput):
    """Any tensors, for TensorFlow Serving's Predict.

    Args:
        outputs: tensors by name; a single tensor is named "output".
    """

    def __init__(self, outputs: Tensor | Mapping[str, Tensor]) -> None:
        named = outputs if isinstance(outputs, Mapping) else {"output": outputs}
        wrong = [name for name, value in named.items() if not tf.is_tensor(value)]
        if wrong or not named:
            what = f"holds no tensor under {wrong[0]!r}" if wrong else "is empty"
            raise ConfigError(f"PredictOutput(…) {what}. Give tensors by name.")
        self.outputs = dict(named)

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> SignatureDef:
        """A signature of Predict; see `ExportOutput.as_signature_def`."""
        return tf1.saved_model.predict_signature_def(dict(receiver_tensors), self.outputs)


def _only_examples(receiver_tensors: Mapping[str, Any], owner: str) -> Tensor:
    """The only tensor that is fed, which must be of serialized examples."""
    tensors = list(receiver_tensors.values())
    if len(tensors) != 1 or tensors[0].dtype != tf.string:
        raise ConfigError(
            f"{owner} needs one input of serialized tf.Examples, but the receiver has "
            f"{sorted(receiver_tensors)}. Use build_parsing_serving_input_receiver_fn, or give "
            "the model a PredictOutput too."
        )
    return tensors[0]
