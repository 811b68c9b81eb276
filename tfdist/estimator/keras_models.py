"""Keras models as Estimators."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._keras import keras_backend as backend
from tfdist._keras import unscale_loss_for_distribution
from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.errors import ConfigError
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.export import PredictOutput
from tfdist.estimator.keras_optimizers import GraphOptimizer
from tfdist.estimator.keras_variables import GraphVariables
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.keras.stateless import Assigning
from tfdist.types import (
    Array,
    Features,
    KerasVariable,
    Model,
    Scaffold,
    Structure,
    Tensor,
)

__all__ = ["model_to_estimator"]

tf1 = tf.compat.v1

#: Methods that a Keras model may replace and a graph cannot run.
_OWN_STEPS = ("train_step", "test_step", "predict_step")

#: Keras's name for the state of random numbers: a seed and a counter.
_SEED = "seed_generator_state"


def model_to_estimator(
    keras_model: Model | None = None,
    keras_model_path: str | Path | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | Path | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str | None = None,
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: Mapping[str, type] | None = None,
) -> Estimator:
    """Makes an Estimator of a compiled Keras model.

    The Estimator starts from the model's weights and the state of its optimizer, and leaves both as
    they are: what it learns is in its checkpoints.

    Args:
        keras_model: the model.
        keras_model_path: instead, a file that `model.save` has written.
        custom_objects: the objects that are needed to read the file.
        model_dir: where checkpoints, event files and exports go.
        config: a `RunConfig`.
        checkpoint_format: only `"saver"`, checkpoints by variables' names, is supported.
        metric_names_map: other names for metrics.
        export_outputs: more signatures: for each an output class of `tfdist.estimator.export`.

    Raises:
        ConfigError: for a model that is not compiled, or that has steps of its own.
    """
    if (keras_model is None) == (keras_model_path is None):
        which = "Neither" if keras_model is None else "Both"
        raise ConfigError(f"{which} of keras_model and keras_model_path is given. Give one.")
    if checkpoint_format not in (None, "saver"):
        raise ConfigError(
            f"checkpoint_format={checkpoint_format!r} is not supported. Leave it out: checkpoints "
            "are written by tf.compat.v1.train.Saver. Keras's own files are written by model.save."
        )
    if keras_model is None:
        keras_model = keras.saving.load_model(keras_model_path, custom_objects=custom_objects)
    _check(keras_model)

    def model_fn(features: Features, labels: Structure, mode: str) -> EstimatorSpec:
        graph = _Graph(keras_model, features, labels)
        if mode == ModeKeys.TRAIN:
            return graph.training()
        if mode == ModeKeys.EVAL:
            return graph.evaluation(metric_names_map or {})
        return graph.prediction(export_outputs or {})

    return Estimator(model_fn, model_dir, config)


def _check(model: Model) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"keras_model={model!r} is no keras.Model of Keras {keras.__version__}. Models of "
            "Keras 2 (tf_keras) are read after they were saved, by keras_model_path."
        )
    if not model.compiled:
        raise ConfigError(
            f"The model {model.name!r} is not compiled. Call model.compile(optimizer, loss) before "
            "model_to_estimator."
        )
    for name in _OWN_STEPS:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ConfigError(
                f"The model {model.name!r} has a {name} of its own, which a graph cannot run. "
                "Override compute_loss or compute_metrics instead, write a model_fn, or train it "
                "by model.fit."
            )
    if model.run_eagerly:
        raise ConfigError(
            f"The model {model.name!r} is compiled with run_eagerly=True, but an Estimator runs a "
            "graph. Leave it out."
        )


class _Graph:
    """A Keras model in the default graph, on the input of one mode."""

    def __init__(self, model: Model, features: Structure, labels: Structure) -> None:
        self._model = model
        self._x, self._y = _as_inputs(model, features), labels
        _build(model, self._x, self._y)
        self._weights = GraphVariables(model.trainable_variables, trainable=True)
        self._state = GraphVariables(model.non_trainable_variables)

    def training(self) -> EstimatorSpec:
        """The graph of training."""
        model, weights = self._model, self._weights.read()
        assert model.optimizer is not None
        with self._after_batch():
            state = [_for_replica(*pair) for pair in self._state.read()]
        # A loss of several outputs updates metrics; those of training are not looked at.
        unused = [(v, tf.zeros(v.shape, v.dtype)) for v in _metric_variables(model)]
        with Assigning([*weights, *state, *unused], initialize=False) as scope:
            outputs = model(self._x, training=True)
            loss = self._loss(outputs, training=True)
        _check_assigned(scope, [*state, *unused])
        optimizer = GraphOptimizer(
            model.optimizer, self._weights.keras, self._weights.graph, compiled=True
        )
        train_op = optimizer.minimize(
            loss,
            [value for _, value in weights],
            tf1.train.get_or_create_global_step(),
            self._state.assigned(state, scope),
        )
        return EstimatorSpec(
            ModeKeys.TRAIN,
            loss=unscale_loss_for_distribution(loss),
            train_op=train_op,
            scaffold=self._scaffold(optimizer.own.feed),
        )

    def evaluation(self, names: Mapping[str, str]) -> EstimatorSpec:
        """The graph of evaluation, with Keras's metrics."""
        model = self._model
        variables = _metric_variables(model)
        totals = GraphVariables(
            variables,
            values=_at_rest(model, variables),
            prefix="keras_metrics/",
            collections=[tf1.GraphKeys.LOCAL_VARIABLES, tf1.GraphKeys.METRIC_VARIABLES],
        )
        with self._after_batch():
            before = totals.read()
        with Assigning(
            [*self._weights.read(), *self._state.read(), *before], initialize=False
        ) as scope:
            outputs = model(self._x, training=False)
            loss = unscale_loss_for_distribution(self._loss(outputs, training=False))
            size = tf.shape(tf.nest.flatten(self._x)[0])[0]
            model._loss_tracker.update_state(loss, sample_weight=size)
            model.compute_metrics(self._x, self._y, outputs, sample_weight=None)
        update = tf.group(*totals.assigned(before, scope))
        with Assigning(totals.read(), initialize=False):
            results = model.get_metrics_result()
        results["average_loss"] = results.pop("loss")
        return EstimatorSpec(
            ModeKeys.EVAL,
            loss=loss,
            predictions=self._named(outputs),
            eval_metric_ops={
                names.get(name, name): (tf.convert_to_tensor(value), update)
                for name, value in results.items()
            },
            scaffold=self._scaffold(),
        )

    def prediction(self, more: Mapping[str, type]) -> EstimatorSpec:
        """The graph of prediction."""
        with Assigning([*self._weights.read(), *self._state.read()], initialize=False):
            predictions = self._named(self._model(self._x, training=False))
        outputs = {"serving_default": PredictOutput(predictions)}
        for name, output in more.items():
            outputs[name] = output(next(iter(predictions.values())))
        return EstimatorSpec(
            ModeKeys.PREDICT,
            predictions=predictions,
            export_outputs=outputs,
            scaffold=self._scaffold(),
        )

    def _after_batch(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose ops run after the batch is there, also if they do not depend on it.

        At the end of the input there is a step that fails for want of a batch: it must not
        change anything.
        """
        batch = [each for each in tf.nest.flatten((self._x, self._y)) if each is not None]
        dependencies: contextlib.AbstractContextManager[Any] = tf.control_dependencies(batch)
        return dependencies

    def _loss(self, outputs: Structure, training: bool) -> Tensor:
        if self._y is None and self._model.loss is not None:
            raise ConfigError(
                f"The model {self._model.name!r} has loss={self._model.loss!r} but got no labels. "
                "Let input_fn return (features, labels)."
            )
        return self._model.compute_loss(self._x, self._y, outputs, None, training=training)

    def _named(self, outputs: Structure) -> dict[str, Any]:
        """The model's outputs by name."""
        if isinstance(outputs, Mapping):
            return dict(outputs)
        tensors = tf.nest.flatten(outputs)
        names = list(getattr(self._model, "output_names", None) or ())
        if len(names) != len(tensors):
            names = [f"output_{i + 1}" for i in range(len(tensors))]
        return dict(zip(names, tensors, strict=True))

    def _scaffold(self, more: Mapping[Any, Any] | None = None) -> Scaffold:
        feed = {**self._weights.feed, **self._state.feed, **(more or {})}
        return tf1.train.Scaffold(init_feed_dict=feed)


def _for_replica(variable: KerasVariable, value: Array) -> tuple[Any, Any]:
    """A variable and its value on this replica: the state of random numbers has another seed."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    if not variable.path.endswith(_SEED):
        return variable, value
    return variable, value + tf.cast(tf.stack([replica, 0]), value.dtype)


def _check_assigned(scope: Assigning, pairs: Sequence[tuple[Any, Any]]) -> None:
    others = scope.others(variable for variable, _ in pairs)
    if others:
        raise ConfigError(
            "model_to_estimator cannot train a model with a layer that assigns "
            f"{others[0].path!r}, a weight that an optimizer trains, as SpectralNormalization "
            "does, or a variable of no layer. Keep the value in a weight of the layer, "
            "self.add_weight(trainable=False), or train the model by fit."
        )


def _metric_variables(model: Model) -> list[Any]:
    return [variable for metric in model.metrics for variable in metric.variables]


def _build(model: Model, x: Structure, y: Structure) -> None:
    """Makes the state that Keras leaves to the first batch, from its shapes, outside of the graph.

    The optimizer is left alone: within a strategy's scope its variables need all processes.
    """
    x, y = tf.nest.map_structure(_symbol, (x, y))
    loss, metrics = model._compile_loss, model._compile_metrics
    with eagerly_outside_of_scope():
        outputs = backend.compute_output_spec(model, x, training=False)
        if y is None:
            return
        if metrics is not None and not metrics.built:
            backend.compute_output_spec(model.compute_metrics, x, y, outputs, sample_weight=None)
        if loss is not None and not loss.built:
            backend.compute_output_spec(model._compute_loss, x, y, outputs, None, training=False)


def _symbol(value: Tensor | None) -> object:
    if value is None:
        return None
    return keras.KerasTensor(tuple(value.shape), value.dtype.name)


def _at_rest(model: Model, variables: list[Any]) -> list[Any]:
    """The values that variables of metrics have before the first batch."""
    with eagerly_outside_of_scope():
        zeros = [(each, tf.zeros(each.shape, each.dtype)) for each in variables]
        with Assigning(zeros, initialize=False) as scope:
            for metric in model.metrics:
                metric.reset_state()
        return [np.asarray(scope.get_current_value(each)) for each in variables]


def _as_inputs(model: Model, features: Structure) -> Structure:
    """Features as the model takes them: by the names of its inputs if there are several."""
    names = [each.name for each in getattr(model, "inputs", None) or ()]
    if not isinstance(features, Mapping) or not names:
        return features
    if len(names) == 1:
        if names[0] in features:
            return features[names[0]]
        if len(features) == 1:
            return next(iter(features.values()))
        raise ConfigError(
            f"The model has one input {names[0]!r}, but the features are {sorted(features)}. Let "
            "input_fn return the feature by that name, or a tensor."
        )
    missing = [name for name in names if name not in features]
    if missing:
        raise ConfigError(
            f"The model {model.name!r} has an input {missing[0]!r}, but the features are "
            f"{sorted(features)}. Let input_fn return features by the names of the inputs."
        )
    return {name: features[name] for name in names}
