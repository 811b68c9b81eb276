"""Builds the graph of a mode: the input, and the model on it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import graph_scope, read_step_alone
from tfdist.errors import ConfigError
from tfdist.estimator import inputs
from tfdist.estimator.calling import call_with, check_parameters, parameters_of
from tfdist.estimator.distribution import Distribution
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import Features, Operation, Structure, Variable
from tfdist.utils.messages import log_without

__all__ = ["Model", "graph_for", "without_deprecations"]

tf1 = tf.compat.v1

_MODEL_FN_TAKES = ("features", "labels", "mode", "params", "config")

#: Files with calls of deprecated functions that a user cannot change.
_OWN = (
    "/tfdist/estimator/",
    "/tensorflow/python/training/",
    "/tensorflow/python/saved_model/",
    "/tensorflow/python/data/",
    "/tensorflow/python/distribute/",
)


@contextlib.contextmanager
def graph_for(
    config: RunConfig,
    replicas: Distribution | None = None,
    device: str | Callable[[Operation], str] | None = None,
) -> Iterator[Variable]:
    """A new graph with the run's seed, whose global step it yields.

    Args:
        config: the run's configuration.
        replicas: the replicas in whose scope the graph is, if there are several.
        device: the device of its ops.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(log_without(_is_own_deprecation))
        stack.enter_context(tf.Graph().as_default())
        if replicas is not None:
            stack.enter_context(graph_scope(replicas.strategy))
        if config.tf_random_seed is not None:
            tf1.set_random_seed(config.tf_random_seed)
        stack.enter_context(tf1.device(device))
        step = tf1.train.get_or_create_global_step()
        if replicas is not None:
            read_step_alone(replicas.strategy, step)
        yield step


def without_deprecations() -> contextlib.AbstractContextManager[None]:
    """Keeps all warnings about deprecated functions out of the log, for a ready-made model."""
    return log_without(lambda record: "deprecated" in record.getMessage())


def _is_own_deprecation(record: logging.LogRecord) -> bool:
    first = record.getMessage().partition("\n")[0]
    return "is deprecated" in first and any(path in first for path in _OWN)


@dataclasses.dataclass(frozen=True)
class Model:
    """A `model_fn`, with its parameters and the configuration of the run.

    Raises:
        ConfigError: if `function` is not a function, or takes other arguments.
    """

    function: Callable[..., Any]
    params: object
    config: RunConfig

    def __post_init__(self) -> None:
        check_parameters("model_fn", self.function, _MODEL_FN_TAKES, ("features",))

    def __call__(
        self, features: Features, labels: Structure, mode: str, config: RunConfig | None = None
    ) -> EstimatorSpec:
        """Builds the model in the default graph.

        Raises:
            ConfigError: if there are labels and `model_fn` takes none, or it returns no spec.
        """
        if labels is not None and "labels" not in parameters_of(self.function):
            raise ConfigError(
                "input_fn gives labels, but model_fn takes none. Add the argument `labels`, or let "
                "input_fn give features alone."
            )
        params = copy.deepcopy(self.params)
        values = (features, labels, mode, params, config or self.config)
        spec = call_with(self.function, dict(zip(_MODEL_FN_TAKES, values, strict=True)))
        if not isinstance(spec, EstimatorSpec):
            raise ConfigError(
                f"model_fn returned {spec!r}. Return a tfdist.estimator.EstimatorSpec."
            )
        return spec

    def on_input(
        self, input_fn: Callable[..., Any], mode: str, replicas: Distribution | None = None
    ) -> EstimatorSpec:
        """Builds the model on the result of an `input_fn`, once or on each replica.

        Labels are left out of prediction, as there is nothing to compare with.
        """
        offered = {
            "mode": mode,
            "params": copy.deepcopy(self.params),
            "config": self.config,
            "input_context": None if replicas is None else replicas.input_context(),
        }
        check_parameters("input_fn", input_fn, offered, defaults=True)
        with tf1.device("/cpu:0"):
            result = call_with(input_fn, offered)
        if replicas is not None:
            return replicas.spec(lambda x, y: self(x, y, mode), result, mode)
        features, labels = inputs.features_and_labels(result)
        return self(features, None if mode == ModeKeys.PREDICT else labels, mode)
