"""The base of canned estimators: networks whose logits are added up, and a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.estimator.canned.head import Head
from tfdist.estimator.canned.optimizers import (
    check_optimizer,
    minimize,
    optimizer_of,
    refuse_sync_replicas,
)
from tfdist.estimator.canned.retired_names import saver_for
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.quiet import without_deprecations
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.warm_starting import WarmStartSettings
from tfdist.types import Features, Operation, OptimizerChoice, Tensor

__all__ = ["CannedEstimator", "Network", "Part"]

tf1 = tf.compat.v1


class Network(Protocol):
    """A function from features to logits, with variables in a scope of its own."""

    scope: str

    def logits(
        self, features: Features, mode: str, units: int, servers: int
    ) -> tuple[Any, list[Any]]:
        """See `networks.Deep.logits`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A network and its optimizer.

    Attributes:
        network: makes logits.
        argument: the name of the argument that gave the optimizer, for messages.
        optimizer: the user's optimizer.
        learning_rate: of an optimizer given by name.
    """

    network: Network
    argument: str
    optimizer: OptimizerChoice
    learning_rate: float

    def variables(self) -> list[Any]:
        """The network's trainable variables in the default graph."""
        return list(tf1.trainable_variables(scope=f"{self.network.scope}/"))


class CannedEstimator(Estimator):
    """An Estimator whose model is ready-made.

    Args:
        head: makes predictions, loss and metrics of the logits.
        parts: one or two networks; their logits are added.
        model_dir: see `Estimator`.
        config: see `Estimator`.
        warm_start_from: see `Estimator`.

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
    saver = saver_for(config) if mode == ModeKeys.TRAIN else None
    return spec if saver is None else spec._replace(scaffold=tf1.train.Scaffold(saver=saver))


def _train_op(parts: Sequence[Part], loss: Tensor) -> Operation:
    """One step of all networks' optimizers, after which the global step is one more."""
    step = tf1.train.get_or_create_global_step()
    made = [optimizer_of(part.argument, part.optimizer, part.learning_rate) for part in parts]
    alone = len(parts) == 1
    trained = []
    for part, optimizer in zip(parts, made, strict=True):
        if not alone:
            refuse_sync_replicas(part.argument, optimizer)
        prefix = f"{part.network.scope}/"
        trained.append(minimize(optimizer, loss, part.variables(), step if alone else None, prefix))
    if alone:
        return trained[0]
    with tf.control_dependencies(trained), tf1.device(step.device):
        return step.assign_add(1, read_value=False)
