"""`tfdist.estimator.export`: the inputs and outputs of exported models, and their SavedModels."""

from __future__ import annotations

import abc
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import modeling, sessions
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import Features, Shape, SignatureDef, Tensor

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]

tf1 = tf.compat.v1

_DEFAULT = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
#: Attempts to find a second that has no directory yet.
_ATTEMPTS = 10


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


class _Fields(NamedTuple):
    features: Features
    receiver_tensors: Mapping[str, Tensor]
    receiver_tensors_alternatives: Mapping[str, Mapping[str, Tensor]] | None


class ServingInputReceiver(_Fields):
    """The features of a model by name, and the placeholders that they are made from.

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
    ) -> Self:
        """See the class."""
        others = receiver_tensors_alternatives
        if others is not None:
            if not isinstance(others, Mapping):
                raise ConfigError(
                    f"receiver_tensors_alternatives={others!r} is no dictionary. Give receivers by "
                    "name."
                )
            what = "receiver_tensors_alternatives"
            others = {name: _named(what, each, "input") for name, each in others.items()}
        tensors = _named("receiver_tensors", receiver_tensors, "input")
        return super().__new__(cls, cls._checked(features), tensors, others)

    @staticmethod
    def _checked(features: Features) -> Features:
        return _named("features", features, "feature")


class TensorServingInputReceiver(ServingInputReceiver):
    """As `ServingInputReceiver`, for a model whose features are one tensor, not a dictionary."""

    __slots__ = ()

    @staticmethod
    def _checked(features: Features) -> Features:
        if not _is_tensor(features):
            raise ConfigError(
                f"TensorServingInputReceiver(features={features!r}) is no tensor. Use "
                "ServingInputReceiver for features by name."
            )
        return features


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
    kept = re.sub(r"[^A-Za-z0-9_.\-/]", "_", str(name))
    return kept if kept[:1].isalnum() or kept[:1] == "." else f"feature{kept}"


def _is_tensor(value: object) -> bool:
    return tf.is_tensor(value) or isinstance(value, tf.SparseTensor | tf.RaggedTensor)


def _named(what: str, tensors: Tensor | Mapping[str, Tensor], single: str) -> dict[Any, Any]:
    named = dict(tensors) if isinstance(tensors, Mapping) else {single: tensors}
    for name, value in named.items():
        if not _is_tensor(value):
            raise ConfigError(f"{what} holds {value!r} under {name!r}, which is not a tensor.")
    return named


def export_saved_model(
    model: modeling.Model,
    base: str | Path,
    receiver_fn: Callable[[], Any],
    assets_extra: Mapping[str, str],
    as_text: bool,
    checkpoint: str,
) -> bytes:
    """Writes a SavedModel into a new directory, complete or not at all.

    For the arguments see `Estimator.export_saved_model`.
    """
    final = _new_directory(base)
    unfinished = final.with_name(f"temp-{final.name}")
    _write(model, unfinished, receiver_fn, as_text, checkpoint)
    for target, source in assets_extra.items():
        destination = unfinished / "assets.extra" / target
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, destination)
    unfinished.rename(final)
    return str(final).encode()


def _write(
    model: modeling.Model,
    directory: Path,
    receiver_fn: Callable[[], Any],
    as_text: bool,
    checkpoint: str,
) -> None:
    with modeling.graph_for(model.config):
        receiver = receiver_fn()
        spec = model(receiver.features, None, ModeKeys.PREDICT)
        signed = _signatures(spec, receiver)
        scaffold = spec.scaffold or tf1.train.Scaffold()
        with tf1.Session(config=sessions.local_config(model.config)) as session:
            saver = scaffold.saver or tf1.train.Saver(sharded=True)
            saver.restore(session, checkpoint)
            builder = tf1.saved_model.Builder(str(directory))
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                signature_def_map=signed,
                assets_collection=tf1.get_collection(tf1.GraphKeys.ASSET_FILEPATHS),
                main_op=scaffold.local_init_op or tf1.train.Scaffold.default_local_init_op(),
                saver=saver,
                strip_default_attrs=True,
            )
            builder.save(as_text)


def _new_directory(base: str | Path) -> Path:
    """A directory that does not exist yet, named after the time in seconds."""
    for _ in range(_ATTEMPTS):
        directory = Path(base) / str(int(time.time()))
        if not directory.exists() and not directory.with_name(f"temp-{directory.name}").exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            return directory
        time.sleep(1)
    raise ConfigError(
        f"export_dir_base={str(base)!r}: another export takes the name of each second. Export "
        "into another directory."
    )


def _signatures(spec: EstimatorSpec, receiver: ServingInputReceiver) -> dict[str, Any]:
    """The signatures of a model by name; those that do not go with a receiver are left out."""
    outputs = spec.export_outputs or {_DEFAULT: PredictOutput(spec.predictions)}
    if len(outputs) > 1 and _DEFAULT not in outputs:
        raise ConfigError(
            f"export_outputs has {', '.join(sorted(outputs))}, but no default. Name one "
            f"{_DEFAULT!r}."
        )
    outputs = {**outputs, _DEFAULT: outputs.get(_DEFAULT, next(iter(outputs.values())))}
    receivers = {"": receiver.receiver_tensors}
    for name, tensors in (receiver.receiver_tensors_alternatives or {}).items():
        receivers[f"{name}:"] = tensors
    made, problems = {}, []
    for prefix, tensors in receivers.items():
        for name, output in outputs.items():
            try:
                made[prefix + name] = output.as_signature_def(tensors)
            except ConfigError as error:
                problems.append(f"{prefix + name}: {error}")
    for problem in problems:
        tf1.logging.info("A signature is left out. %s", problem)
    if not made:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"No output of the model goes with the receiver:\n{lines}")
    return made
