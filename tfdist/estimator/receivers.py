"""Input receivers: the inputs of an exported model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.types import Features, Shape, Tensor

__all__ = [
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]

tf1 = tf.compat.v1


class Receiver(NamedTuple):
    features: Features
    receiver_tensors: Mapping[str, Tensor]
    receiver_tensors_alternatives: Mapping[str, Mapping[str, Tensor]] | None


class ServingInputReceiver(Receiver):
    """The features of a model, and the placeholders that they are made from.

    Args:
        features: a tensor, or tensors by name; a single tensor is named "feature".
        receiver_tensors: placeholders by name; a single one is named "input".
        receiver_tensors_alternatives: by name, other placeholders that may be fed instead.

    Raises:
        ConfigError: if they are of other kinds.
    """

    __slots__ = ()

    def __new__(
        cls,
        features: Features,
        receiver_tensors: Tensor | Mapping[str, Tensor],
        receiver_tensors_alternatives: Mapping[str, Any] | None = None,
    ) -> ServingInputReceiver:
        """See the class."""
        return super().__new__(
            cls,
            _named("features", features, "feature"),
            _named("receiver_tensors", receiver_tensors, "input"),
            _alternatives(receiver_tensors_alternatives),
        )


class TensorServingInputReceiver(Receiver):
    """As `ServingInputReceiver`, for a model whose features are one tensor, not a dictionary."""

    __slots__ = ()

    def __new__(
        cls,
        features: Features,
        receiver_tensors: Tensor | Mapping[str, Tensor],
        receiver_tensors_alternatives: Mapping[str, Any] | None = None,
    ) -> TensorServingInputReceiver:
        """See the class."""
        if not _is_tensor(features):
            raise ConfigError(
                f"TensorServingInputReceiver(features={features!r}) is no tensor. Use "
                "ServingInputReceiver for features by name."
            )
        return super().__new__(
            cls,
            features,
            _named("receiver_tensors", receiver_tensors, "input"),
            _alternatives(receiver_tensors_alternatives),
        )


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """A receiver of serialized `tf.Example`s.

    Args:
        feature_spec: as for `tf.io.parse_example`.
        default_batch_size: the batch size; None accepts any.
    """

    def receive() -> ServingInputReceiver:
        serialized = tf1.placeholder(
            tf.string, shape=[default_batch_size], name="input_example_tensor"
        )
        features = tf.io.parse_example(serialized, dict(feature_spec))
        return ServingInputReceiver(features, {"examples": serialized})

    return receive


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """A receiver of the features themselves.

    Args:
        features: tensors by name, of which types and shapes but for the first dimension count;
            anything with `dtype` and `shape` does, such as `tf.TensorSpec`.
        default_batch_size: the batch size; None accepts any.
    """
    like = {
        name: (tf.as_dtype(each.dtype), tf.TensorShape(each.shape))
        for name, each in features.items()
    }

    def receive() -> ServingInputReceiver:
        placeholders = {
            name: tf1.placeholder(dtype, _batched(shape, default_batch_size), _op_name(name))
            for name, (dtype, shape) in like.items()
        }
        return ServingInputReceiver(placeholders, placeholders)

    return receive


def _batched(shape: Shape, size: int | None) -> Shape | list[int | None]:
    return shape if shape.rank is None else [size, *shape.as_list()[1:]]


def _op_name(name: str) -> str:
    """A name that TensorFlow accepts for an op."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-/") else "_" for c in str(name))
    return kept if kept[:1].isalnum() or kept[:1] == "." else f"feature{kept}"


def _is_tensor(value: object) -> bool:
    return tf.is_tensor(value) or isinstance(value, tf.SparseTensor | tf.RaggedTensor)


def _named(what: str, given: Tensor | Mapping[str, Tensor], single: str) -> dict[Any, Any]:
    named = dict(given) if isinstance(given, Mapping) else {single: given}
    for name, value in named.items():
        if not _is_tensor(value):
            raise ConfigError(f"{what} holds {value!r} under {name!r}, which is no tensor.")
    return named


def _alternatives(given: Mapping[str, Any] | None) -> dict[str, dict[Any, Any]] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"receiver_tensors_alternatives={given!r} is no dictionary. Give receivers by name."
        )
    return {
        name: _named("receiver_tensors_alternatives", each, "input") for name, each in given.items()
    }
