"""Builds the graph of a mode: the input, and the model on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator import feeding
from tfdist.estimator.calling import call_with, parameters_of
from tfdist.estimator.distribution import Distribution
from tfdist.estimator.quiet import without_own_deprecations
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec
from tfdist.estimator.types import Estimator
from tfdist.types import Features, Structure, Variable

__all__ = ["call_model_fn", "check_model_fn", "graph_for", "make_step", "spec_on_input"]

tf1 = tf.compat.v1

_MODEL_FN_NEEDS = ("features",)
_MODEL_FN_TAKES = ("features", "labels", "mode", "params", "config")


@contextlib.contextmanager
def graph_for(config: RunConfig, distribution: Distribution | None = None) -> Iterator[Any]:
    """A new graph with the run's seed, in the scope of the replicas if there are several."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_own_deprecations())
        graph = stack.enter_context(tf.Graph().as_default())
        if distribution is not None:
            stack.enter_context(distribution.scope())
        if config.tf_random_seed is not None:
            tf1.set_random_seed(config.tf_random_seed)
        yield graph


def make_step(distribution: Distribution | None = None) -> Variable:
    """The global step of the default graph."""
    if distribution is not None:
        return distribution.make_step()
    return tf1.train.get_or_create_global_step()


def check_model_fn(model_fn: object) -> None:
    """Rejects values that cannot be a `model_fn`.

    Raises:
        ConfigError: if it is not a function, or takes other arguments.
    """
    if not callable(model_fn):
        raise ConfigError(f"model_fn={model_fn!r} is no function. Give one that returns a spec.")
    names = [name for name in parameters_of(model_fn) if name != "self"]
    unknown = [name for name in names if name not in _MODEL_FN_TAKES]
    if unknown or "features" not in names:
        wrong = f"takes {unknown[0]!r}" if unknown else "does not take 'features'"
        raise ConfigError(
            f"model_fn {wrong}. It must take features, and may take {', '.join(_MODEL_FN_TAKES)}."
        )


def call_model_fn(
    model_fn: Callable[..., Any],
    features: Features,
    labels: Structure,
    mode: str,
    *,
    params: object,
    config: RunConfig,
) -> EstimatorSpec:
    """Calls a `model_fn` with the arguments that it takes.

    Raises:
        ConfigError: if there are labels and it takes none, or it returns no spec.
    """
    offered = {"features": features, "mode": mode, "params": params, "config": config}
    takes = parameters_of(model_fn)
    if "labels" in takes:
        offered["labels"] = labels
    elif labels is not None:
        raise ConfigError(
            "input_fn gives labels, but model_fn takes none. Add the argument `labels`, or let "
            "input_fn give features alone."
        )
    spec = call_with("model_fn", model_fn, offered, _MODEL_FN_NEEDS)
    if not isinstance(spec, EstimatorSpec):
        raise ConfigError(f"model_fn returned {spec!r}. Return a tfdist.estimator.EstimatorSpec.")
    return spec


def spec_on_input(
    estimator: Estimator,
    input_fn: Callable[..., Any],
    mode: str,
    *,
    without_labels: bool = False,
    distribution: Distribution | None = None,
) -> EstimatorSpec:
    """The model of an Estimator on the result of an `input_fn`, in the default graph.

    Args:
        estimator: the Estimator.
        input_fn: the input.
        mode: one of `ModeKeys`.
        without_labels: whether labels are left out, as there is nothing to compare with.
        distribution: the replicas, or None to build the model once.
    """
    config = estimator.config
    offered = {"mode": mode, "params": estimator.params, "config": config}
    if distribution is not None:
        offered["input_context"] = distribution.input_context()
        result = feeding.call_input_fn(input_fn, offered)
        merged: EstimatorSpec = distribution.spec(
            lambda features, labels: estimator.call_model_fn(features, labels, mode), result, mode
        )
        return merged
    features, labels = feeding.features_and_labels(feeding.call_input_fn(input_fn, offered))
    labels = None if without_labels else labels
    built: EstimatorSpec = estimator.call_model_fn(features, labels, mode)
    return built
