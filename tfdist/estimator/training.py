"""Training: the graph, the hooks and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import listen_to
from tfdist.errors import ConfigError
from tfdist.estimator import distribution, modeling, sessions, together, warm_starting
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.types import Estimator
from tfdist.types import Scaffold, Tensor

__all__ = ["train"]

tf1 = tf.compat.v1


def train(
    estimator: Estimator,
    input_fn: Callable[..., Any],
    hooks: Sequence[Any],
    listeners: Sequence[Any],
) -> None:
    """Trains an Estimator until a hook asks to stop, or the input ends.

    Args:
        estimator: the Estimator.
        input_fn: the input.
        hooks: the caller's hooks.
        listeners: listeners to the saving of checkpoints.
    """
    config = estimator.config
    replicas = distribution.for_training(config)
    with modeling.graph_for(config, replicas), tf1.device(sessions.device_function(config)):
        modeling.make_step(replicas)
        spec = modeling.spec_on_input(estimator, input_fn, ModeKeys.TRAIN, distribution=replicas)
        _add_loss_summary(spec.loss)
        _add_saver(spec, config)
        if config.is_chief:
            warm_starting.apply(estimator.warm_start_settings, estimator.model_dir)
        every = [*hooks, *spec.training_hooks, *_own_hooks(spec, config)]
        scaffold = spec.scaffold or tf1.train.Scaffold()
        if config.is_chief:
            every += _chief_hooks(estimator, spec, scaffold)
            every += _saving_hooks(config, scaffold, every, listeners)
        with (
            sessions.without_cancelled_threads(),
            sessions.for_training(scaffold, config, together.wrapped(every), replicas) as session,
        ):
            while not session.should_stop():
                session.run([spec.train_op, spec.loss])
    if replicas is not None:
        replicas.meet("the end of Estimator.train")


def _own_hooks(spec: EstimatorSpec, config: RunConfig) -> list[Any]:
    """Hooks on every worker."""
    hooks = [tf1.train.NanTensorHook(spec.loss)]
    if config.log_step_count_steps:
        shown = {"loss": spec.loss, "step": tf1.train.get_global_step()}
        hooks.append(tf1.train.LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
    return hooks


def _chief_hooks(estimator: Estimator, spec: EstimatorSpec, scaffold: Scaffold) -> list[Any]:
    """Hooks on the chief alone: they write."""
    config, hooks = estimator.config, list(spec.training_chief_hooks)
    place = estimator.model_dir
    if config.log_step_count_steps:
        hooks.append(
            tf1.train.StepCounterHook(every_n_steps=config.log_step_count_steps, output_dir=place)
        )
    if config.save_summary_steps:
        hooks.append(
            tf1.train.SummarySaverHook(
                save_steps=config.save_summary_steps, scaffold=scaffold, output_dir=place
            )
        )
    return hooks


def _saving_hooks(
    config: RunConfig, scaffold: Scaffold, given: Sequence[Any], listeners: Sequence[Any]
) -> list[Any]:
    """The hook that saves, unless the caller or the model has brought one.

    Raises:
        ConfigError: if there are listeners, but nothing is saved.
    """
    brought = [each for each in given if isinstance(each, tf1.train.CheckpointSaverHook)]
    if brought:
        listen_to(brought[0], listeners)
        return []
    if not (config.save_checkpoints_steps or config.save_checkpoints_secs):
        if listeners:
            raise ConfigError(
                "RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None) saves nothing, "
                "but evaluation and saving_listeners wait for checkpoints. Set one of them."
            )
        return []
    hook = tf1.train.CheckpointSaverHook(
        config.model_dir,
        save_secs=config.save_checkpoints_secs,
        save_steps=config.save_checkpoints_steps,
        scaffold=scaffold,
        listeners=list(listeners),
        save_graph_def=config.checkpoint_save_graph_def,
    )
    return [hook]


def _add_loss_summary(loss: Tensor) -> None:
    summaries = tf1.get_collection(tf1.GraphKeys.SUMMARIES)
    if not any(each.op.name == "loss" for each in summaries):
        tf1.summary.scalar("loss", loss)


def _add_saver(spec: EstimatorSpec, config: RunConfig) -> None:
    """Adds the saver to the graph, unless the model has brought its own."""
    brought = spec.scaffold is not None and spec.scaffold.saver is not None
    if brought or tf1.get_collection(tf1.GraphKeys.SAVERS):
        return
    saver = tf1.train.Saver(
        sharded=True,
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        defer_build=True,
        save_relative_paths=True,
    )
    tf1.add_to_collection(tf1.GraphKeys.SAVERS, saver)
