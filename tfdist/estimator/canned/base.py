"""The base of canned estimators: networks whose logits are added up, and a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.head import Head
from tfdist.estimator.canned.networks import Network
from tfdist.estimator.canned.optimizers import (
    check_optimizer,
    minimize,
    optimizer_of,
    refuse_sync_replicas,
)
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.modeling import without_deprecations
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import Features, Operation, OptimizerChoice, Saver, Tensor

__all__ = ["CannedEstimator", "Part"]

tf1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Part:
    """A network and its optimizer, which an argument gave; names have the learning rate."""

    network: Network
    argument: str
    optimizer: OptimizerChoice
    learning_rate: float


class CannedEstimator(Estimator):
    """An Estimator whose model is ready-made: a head on the sum of one or two networks' logits.

    Raises:
        ConfigError: if the head is none, or an optimizer cannot be one.
    """

    def __init__(
        self,
        head: Head,
        parts: Sequence[Part],
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        if not isinstance(head, Head):
            raise ConfigError(
                f"head={head!r} is no head. Give one of tfdist.estimator.BinaryClassHead, "
                "MultiClassHead, MultiLabelHead and RegressionHead."
            )
        for part in parts:
            check_optimizer(part.argument, part.optimizer)
            if len(parts) > 1:
                refuse_sync_replicas(part.argument, part.optimizer)

        def model_fn(
            features: Features, labels: Tensor | None, mode: str, config: RunConfig
        ) -> EstimatorSpec:
            with without_deprecations():
                return _build(head, parts, features, labels, mode, config)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


def _build(
    head: Head,
    parts: Sequence[Part],
    features: Features,
    labels: Tensor | None,
    mode: str,
    config: RunConfig,
) -> EstimatorSpec:
    """Builds the graph of a mode."""
    logits, updates = [], []
    for part in parts:
        made, after = part.network.logits(
            features, mode, head.logits_dimension, config.num_ps_replicas
        )
        logits.append(made)
        updates.extend(after)
    spec = head.create_estimator_spec(
        features=features,
        mode=mode,
        logits=tf.add_n(logits) if len(logits) > 1 else logits[0],
        labels=labels,
        train_op_fn=lambda loss: _train_op(parts, loss),
        update_ops=updates,
    )
    saver = _saver_of_retired(config) if mode == ModeKeys.TRAIN else None
    return spec if saver is None else spec._replace(scaffold=tf1.train.Scaffold(saver=saver))


def _train_op(parts: Sequence[Part], loss: Tensor) -> Operation:
    """One step of all networks' optimizers, after which the global step is one more."""
    step = tf1.train.get_or_create_global_step()
    alone = len(parts) == 1
    trained = []
    for part in parts:
        optimizer = optimizer_of(part.argument, part.optimizer, part.learning_rate)
        if not alone:
            refuse_sync_replicas(part.argument, optimizer)
        prefix = f"{part.network.scope}/"
        variables: list[Any] = tf1.trainable_variables(scope=prefix)
        trained.append(minimize(optimizer, loss, variables, step if alone else None, prefix))
    if alone:
        return trained[0]
    with tf.control_dependencies(trained), tf1.device(step.device):
        return step.assign_add(1, read_value=False)


def _saver_of_retired(config: RunConfig) -> Saver | None:
    """A saver that keeps to the names of a retired Estimator's checkpoint, if it goes on from one.

    Weights have the same names there. State of optimizers is named differently: TensorFlow 1's
    canned estimators made each variable as one part of a split one, which left a remnant in the
    names, as in `dnn/hiddenlayer_0/kernel/t_0/Adagrad` and
    `linear/linear_model/age/weights/part_0/Ftrl`.
    """
    latest = tf.train.latest_checkpoint(config.model_dir) if config.model_dir else None
    if latest is None or config.num_ps_replicas > 1:  # Several servers hold parts of variables.
        return None
    saved = {name for name, _ in tf.train.list_variables(latest)}
    named = {}
    for variable in tf1.global_variables():
        name = variable.op.name
        weight, _, slot = name.rpartition("/")
        candidates = (name, f"{weight}/t_0/{slot}", f"{weight}/part_0/{slot}")
        named[next((each for each in candidates if each in saved), name)] = variable
    if all(name == variable.op.name for name, variable in named.items()):
        return None
    return tf1.train.Saver(
        named,
        sharded=True,
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        save_relative_paths=True,
    )
