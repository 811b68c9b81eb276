"""The functions that make logits of features: a deep network, a linear model, a bias.

Names of variables are those of the retired Estimators, such as `dnn/hiddenlayer_0/kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.columns import input_layer, linear_model
from tfdist.estimator.spec import ModeKeys
from tfdist.types import Features, Partitioner, Tensor, Variable
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = ["Baseline", "Deep", "Linear", "Network"]

tf1 = tf.compat.v1

#: Of moving averages, in the retired Estimators' batch normalization.
_MOMENTUM = 0.999
_EPSILON = 1e-3

#: Tables are split over parameter servers into parts of at least so many bytes.
_LEAST_BYTES = 64 << 20


class Deep:
    """A network of dense layers, in the scope `dnn`; for the arguments see `DNNEstimator`."""

    scope = "dnn"

    def __init__(
        self,
        hidden_units: Sequence[int],
        columns: Sequence[Any],
        activation_fn: Callable[[Any], Any] | None,
        dropout: float | None,
        batch_norm: bool,
        partitioner: Partitioner | None = None,
    ) -> None:
        for units in hidden_units:
            check_number("hidden_units", int(units), 1)
        if activation_fn is not None and not callable(activation_fn):
            raise ConfigError(
                f"activation_fn={activation_fn!r} is no function. Give one, such as tf.nn.relu."
            )
        if dropout is not None:
            check_range("dropout", dropout, least=0, below=1)
        self._hidden_units = tuple(int(units) for units in hidden_units)
        self._columns, self._activation = tuple(columns), activation_fn
        self._dropout, self._batch_norm, self._partitioner = dropout, batch_norm, partitioner

    def logits(
        self, features: Features, mode: str, units: int, servers: int
    ) -> tuple[Any, list[Any]]:
        """Makes a tensor `(batch, units)` of features, and the updates of moving averages."""
        updates: list[Any] = []
        with tf1.variable_scope(self.scope):
            partitioner = self._partitioner or _partitioner(servers)
            with tf1.variable_scope("input_from_feature_columns", partitioner=partitioner):
                net = input_layer(features, self._columns)
            for i, width in enumerate(self._hidden_units):
                with tf1.variable_scope(f"hiddenlayer_{i}"):
                    net = self._hidden(net, i, width, mode == ModeKeys.TRAIN, updates)
                _summarize(f"{self.scope}/hiddenlayer_{i}", net)
            with tf1.variable_scope("logits"):
                logits = _dense(net, units)
            _summarize(f"{self.scope}/logits", logits)
        return logits, updates

    def _hidden(
        self, net: Tensor, i: int, width: int, training: bool, updates: list[Any]
    ) -> Tensor:
        net = _dense(net, width)
        if self._activation is not None:
            net = self._activation(net)
        if self._dropout and training:
            net = tf.nn.dropout(net, rate=self._dropout)
        if self._batch_norm:
            with tf1.variable_scope(f"batchnorm_{i}"):
                net = _normalized(net, training, updates)
        return net


class Linear:
    """A linear model, in the scope `linear`; for the arguments see `LinearEstimator`."""

    scope = "linear"

    def __init__(
        self, columns: Sequence[Any], sparse_combiner: str, partitioner: Partitioner | None = None
    ) -> None:
        check_choice("sparse_combiner", sparse_combiner, ("sum", "mean", "sqrtn"))
        self._columns, self._combiner = tuple(columns), sparse_combiner
        self._partitioner = partitioner

    def logits(
        self, features: Features, mode: str, units: int, servers: int
    ) -> tuple[Any, list[Any]]:
        """See `Deep.logits`."""
        del mode
        partitioner = self._partitioner or _partitioner(servers)
        with tf1.variable_scope(self.scope, partitioner=partitioner):
            logits = linear_model(features, self._columns, units, self._combiner)
            _summarize(f"{self.scope}/logits", logits)
        return logits, []


class Baseline:
    """The same logits for all examples, in the scope `baseline`."""

    scope = "baseline"

    def logits(
        self, features: Features, mode: str, units: int, servers: int
    ) -> tuple[Any, list[Any]]:
        """See `Deep.logits`; features only give the number of examples."""
        del mode, servers
        if not isinstance(features, Mapping) or not features:
            raise ConfigError(
                f"The features are {features!r}, not a dictionary with at least one feature. Let "
                "input_fn return features by name."
            )
        size = tf.shape(next(iter(features.values())))[0]
        with tf1.variable_scope(self.scope):
            bias = tf1.get_variable("bias", [units], initializer=tf1.zeros_initializer())
            return tf.tile(bias[tf.newaxis], [size, 1]), []


Network: TypeAlias = Deep | Linear | Baseline


def _dense(x: Tensor, units: int) -> Tensor:
    kernel = tf1.get_variable(
        "kernel", [x.shape[-1], units], initializer=tf1.glorot_uniform_initializer()
    )
    bias = tf1.get_variable("bias", [units], initializer=tf1.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _normalized(x: Tensor, training: bool, updates: list[Any]) -> Tensor:
    """Batch normalization over the batch; appends the updates of the moving averages."""
    width = [x.shape[-1]]
    ones, zeros = tf1.ones_initializer(), tf1.zeros_initializer()
    gamma = tf1.get_variable("gamma", width, initializer=ones)
    beta = tf1.get_variable("beta", width, initializer=zeros)
    moving = [_moving("moving_mean", width, zeros), _moving("moving_variance", width, ones)]
    mean, variance = moving
    if training:
        mean, variance = tf.nn.moments(x, axes=[0])
        for average, value in zip(moving, (mean, variance), strict=True):
            change = (average - tf.stop_gradient(value)) * (1 - _MOMENTUM)
            updates.append(average.assign_sub(change))
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, _EPSILON)


def _moving(name: str, shape: Sequence[Any], initializer: object) -> Variable:
    return tf1.get_variable(
        name,
        shape,
        initializer=initializer,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def _partitioner(servers: int) -> Partitioner | None:
    """Splits large tables if there are several servers to hold the parts."""
    if servers < 2:
        return None
    return tf1.min_max_variable_partitioner(max_partitions=servers, min_slice_size=_LEAST_BYTES)


def _summarize(name: str, value: Tensor) -> None:
    """Adds the summaries of a layer that TensorBoard shows."""
    tf1.summary.scalar(f"{name}/fraction_of_zero_values", tf.nn.zero_fraction(value))
    tf1.summary.histogram(f"{name}/activation", value)
