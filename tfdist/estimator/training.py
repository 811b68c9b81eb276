"""Training: the graph, the hooks and the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import listen_to
from tfdist.errors import ConfigError
from tfdist.estimator import distribution, modeling, sessions, warm_starting
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.types import Scaffold, Tensor

__all__ = ["train"]

tf1 = tf.compat.v1


def train(
    model: modeling.Model,
    input_fn: Callable[..., Any],
    hooks: Sequence[Any],
    listeners: Sequence[Any],
    warm_start: warm_starting.WarmStartSettings | None,
) -> None:
    """Trains a model until a hook asks to stop, or the input ends; see `Estimator.train`."""
    config = model.config
    replicas = distribution.for_training(config)
    with modeling.graph_for(config, replicas, sessions.device_function(config)):
        spec = model.on_input(input_fn, ModeKeys.TRAIN, replicas)
        _add_loss_summary(spec.loss)
        _add_saver(spec, config)
        if config.is_chief:
            warm_starting.apply(warm_start, str(config.model_dir))
        every = [*hooks, *spec.training_hooks, *_own_hooks(spec, config)]
        scaffold = spec.scaffold or tf1.train.Scaffold()
        if config.is_chief:
            every += [*spec.training_chief_hooks, *_writing_hooks(config, scaffold)]
            every += _saving_hooks(config, scaffold, every, listeners)
        every = distribution.stopping_together(every)
        with (
            sessions.without_cancelled_threads(),
            sessions.for_training(scaffold, config, every, replicas) as session,
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


def _writing_hooks(config: RunConfig, scaffold: Scaffold) -> list[Any]:
    """Hooks on the chief alone, besides that which saves."""
    hooks, directory = [], config.model_dir
    if config.log_step_count_steps:
        hooks.append(
            tf1.train.StepCounterHook(
                every_n_steps=config.log_step_count_steps, output_dir=directory
            )
        )
    if config.save_summary_steps:
        hooks.append(
            tf1.train.SummarySaverHook(
                save_steps=config.save_summary_steps, scaffold=scaffold, output_dir=directory
            )
        )
    return hooks


def _saving_hooks(
    config: RunConfig, scaffold: Scaffold, hooks: Sequence[Any], listeners: Sequence[Any]
) -> list[Any]:
    """The hook that saves, unless the caller or the model has brought one."""
    brought = [each for each in hooks if isinstance(each, tf1.train.CheckpointSaverHook)]
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
