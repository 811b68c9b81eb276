"""Training and evaluation on several replicas: `train_distribute` and `eval_distribute`.

Each replica builds the model on a batch of its own. The `tf.compat.v1.train` optimizer exchanges
the gradients, and hidden local variables add up the metrics, as `tf.distribute` makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf import sessions as private
from tfdist.comm import host_collectives
from tfdist.config.strategy_spec import having
from tfdist.errors import ConfigError
from tfdist.estimator import replica_batches
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.estimator.together import Together
from tfdist.strategies import factory
from tfdist.strategies.multi_worker.strategy import MultiWorker
from tfdist.types import ConfigProto, Features, Strategy, Structure, Tensor, Variable

__all__ = ["Distribution", "for_evaluation", "for_training"]

tf1 = tf.compat.v1

#: The strategies whose replicas exchange gradients by TensorFlow's own means.
_NAMES = having(lambda spec: spec.exchanges_gradients and spec.problem is None)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The replicas of this process.

    Attributes:
        strategy: the strategy.
        workers: how many processes train together.
        worker: the number of this one.
    """

    strategy: Strategy
    workers: int = 1
    worker: int = 0

    @property
    def local(self) -> int:
        """The replicas of this process."""
        return len(self.strategy.extended.worker_devices)

    def input_context(self) -> object:
        """The context with which an `input_fn` reads this process's part of the data."""
        return tf.distribute.InputContext(
            num_input_pipelines=self.workers,
            input_pipeline_id=self.worker,
            num_replicas_in_sync=self.strategy.num_replicas_in_sync,
        )

    def meet(self, place: str) -> None:
        """Waits for the other processes, so that all see what the chief has written.

        Args:
            place: where in the program this is, for errors.
        """
        if self.workers > 1:
            host_collectives.barrier(self.strategy, place)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """In which the model is built."""
        return private.graph_scope(self.strategy)

    def make_step(self) -> Variable:
        """The global step in the default graph, which this process may read by itself."""
        step = tf1.train.get_or_create_global_step()
        private.read_step_alone(self.strategy, step)
        return step

    def session_config(self, config: ConfigProto | None) -> ConfigProto | None:
        """A session's configuration with the settings that the collectives need."""
        return private.session_config_for(self.strategy, config) if self.workers > 1 else config

    def spec(
        self, model: Callable[[Any, Any], EstimatorSpec], result: Structure, mode: str
    ) -> EstimatorSpec:
        """The model on all replicas, as one spec.

        Args:
            model: builds the model on features and labels.
            result: the result of the `input_fn`.
            mode: one of `ModeKeys`.
        """
        together = Together() if self.workers > 1 and mode == ModeKeys.TRAIN else None
        batches = replica_batches.of(
            result, self.local, fill=mode == ModeKeys.EVAL, look_ahead=together is not None
        )
        specs: dict[int, EstimatorSpec] = {}

        def build(
            features: Features, labels: tuple[Structure], number: int, present: Tensor, more: Tensor
        ) -> object:
            spec = model(features, labels[0])
            specs[number] = spec
            if mode == ModeKeys.EVAL:
                loss = tf.where(present, spec.loss, 0.0)
                return tf1.metrics.mean(loss, weights=tf.cast(present, loss.dtype))
            loss = spec.loss if together is None else together.with_loss(spec.loss, more)
            return loss, spec.train_op

        values = [
            (batch.features, (batch.labels,), number, batch.present, batch.more)
            for number, batch in enumerate(batches)
        ]
        built: Any = private.on_replicas(self.strategy, build, values)
        ordered = [specs[number] for number in sorted(specs)]
        if mode == ModeKeys.EVAL:
            return _with_hooks(self._for_evaluation(ordered, built), ordered)
        return _with_hooks(self._for_training(ordered, built, together), ordered, together)

    def _for_training(
        self, specs: list[EstimatorSpec], built: tuple[Any, Any], together: Together | None
    ) -> EstimatorSpec:
        losses, train_ops = built
        loss = self.strategy.extended.reduce_to(
            tf.distribute.ReduceOp.MEAN, losses, destinations=self._first_device()
        )
        mean = self._own(loss)
        merged: EstimatorSpec = specs[0]._replace(
            loss=mean if together is None else together.loss_of(mean),
            train_op=tf.group(*self._results(train_ops)),
        )
        return merged

    def _for_evaluation(self, specs: list[EstimatorSpec], built: tuple[Any, Any]) -> EstimatorSpec:
        metrics = {
            name: (
                value,
                tf.group(*[tf.nest.flatten(each.eval_metric_ops[name][1]) for each in specs]),
            )
            for name, (value, _) in specs[0].eval_metric_ops.items()
        }
        value, update = built
        metrics["loss"] = (self._own(value), tf.group(*self._results(update)))
        merged: EstimatorSpec = specs[0]._replace(eval_metric_ops=metrics)
        return merged

    def _results(self, value: object) -> tuple[Any, ...]:
        return tuple(self.strategy.experimental_local_results(value))

    def _own(self, value: object) -> Any:
        return self._results(value)[0]

    def _first_device(self) -> str:
        return str(self.strategy.extended.worker_devices[0])


def _with_hooks(
    merged: EstimatorSpec, specs: list[EstimatorSpec], together: Together | None = None
) -> EstimatorSpec:
    """A spec with the hooks of all replicas."""
    kinds = ("training_hooks", "training_chief_hooks", "evaluation_hooks")
    hooks = {
        kind: tuple(dict.fromkeys(hook for spec in specs for hook in getattr(spec, kind)))
        for kind in kinds
    }
    if together is not None:
        hooks["training_hooks"] += (together,)
    changed: EstimatorSpec = merged._replace(**hooks)
    return changed


def for_training(config: RunConfig) -> Distribution | None:
    """The replicas to train on; None if the model is built once.

    If the configuration names none, the strategy of `tfdist run` counts.

    Raises:
        ConfigError: for a strategy that Estimators do not train with.
    """
    chosen = config.train_distribute
    if config.task_type in ("evaluator", "ps"):
        return None
    if chosen is None:
        made = _settled("The strategy of this job", factory.active())
    else:
        made = _settled("train_distribute", chosen)
    if made is not None and config.num_ps_replicas:
        raise ConfigError(
            f"train_distribute={chosen!r} conflicts with the parameter servers of TF_CONFIG. Leave "
            "one of them out."
        )
    trainers = config.num_worker_replicas
    if trainers > 1 and not config.num_ps_replicas and (made is None or made.workers < trainers):
        raise ConfigError(
            f"TF_CONFIG lists {trainers} tasks that train and no parameter server, and "
            f"train_distribute={chosen!r}: each would train a model of its own. Give "
            "train_distribute='multi_worker', start the script by `tfdist run --strategy "
            "multi_worker`, or add tasks of type ps."
        )
    return made


def for_evaluation(config: RunConfig) -> Distribution | None:
    """The replicas to evaluate on; None if the model is built once.

    Raises:
        ConfigError: for a strategy that Estimators do not evaluate with.
    """
    chosen = config.eval_distribute
    if chosen is None:
        return None
    clustered = having(lambda spec: spec.is_clustered and spec.name in _NAMES)
    if chosen in clustered or isinstance(chosen, MultiWorker):
        raise ConfigError(
            f"eval_distribute={chosen!r} is not supported: the chief, or the evaluator, evaluates "
            "by itself. Leave it out, or choose 'mirrored'."
        )
    return _settled("eval_distribute", chosen)


def _advice(chosen: str) -> str:
    if chosen in having(lambda spec: spec.has_servers):
        return (
            f"Start the script by `tfdist run --strategy {chosen}`, with `--every-task` where its "
            "own text does not use tfdist.estimator; leave train_distribute out."
        )
    return f"Choose one of {', '.join(_NAMES)}."


def _settled(name: str, chosen: object) -> Distribution | None:
    """The replicas of a strategy that is given by its name or itself."""
    if isinstance(chosen, str):
        if chosen not in _NAMES:
            raise ConfigError(f"{name}={chosen!r} does not go with Estimators. {_advice(chosen)}")
        chosen = factory.strategy(chosen)
    if chosen is None:
        return None
    kind = getattr(chosen, "name", "")
    if kind in having(lambda spec: spec.is_clustered) and kind not in _NAMES:
        raise ConfigError(f"{name}, {kind!r}, does not go with Estimators. {_advice(kind)}")
    if isinstance(chosen, MultiWorker):
        shard = chosen.shard
        return Distribution(chosen, shard.workers, shard.worker)
    kinds = (tf.distribute.MirroredStrategy, tf1.distribute.MirroredStrategy)
    if isinstance(chosen, kinds):
        return Distribution(chosen) if chosen.num_replicas_in_sync > 1 else None
    if isinstance(chosen, tf.distribute.OneDeviceStrategy):
        return None
    raise ConfigError(
        f"{name}={chosen!r} does not go with Estimators. Give one of {', '.join(_NAMES)}, "
        "tfdist.Mirrored, tfdist.MultiWorker or tf.distribute.MirroredStrategy."
    )
