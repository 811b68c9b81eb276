"""Training and evaluation on several replicas: `train_distribute` and `eval_distribute`.

Each replica builds the model on a batch of its own. The `tf.compat.v1.train` optimizer exchanges
the gradients, and hidden local variables add up the metrics, as `tf.distribute` makes them.

Workers in lockstep stop together: if one stops by itself, the others wait for its gradients for
ever. So each step informs all workers whether one of them wants to stop: because a hook has asked
for it, or because its input has no further batch. They stop after that step. The word travels with
the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf.sessions import on_replicas
from tfdist.comm import host_collectives
from tfdist.config.strategy_spec import having
from tfdist.errors import ConfigError
from tfdist.estimator import inputs
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.spec import EstimatorSpec, ModeKeys
from tfdist.strategies import factory
from tfdist.strategies.multi_worker.strategy import MultiWorker
from tfdist.types import (
    Features,
    RunArgs,
    RunContext,
    RunValues,
    Session,
    SessionHook,
    Strategy,
    Structure,
    Tensor,
)

__all__ = ["Distribution", "for_evaluation", "for_training", "stopping_together"]

tf1 = tf.compat.v1

#: The strategies whose replicas exchange gradients by TensorFlow's own means.
_NAMES = having(lambda spec: spec.exchanges_gradients and spec.problem is None)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The replicas of this process, which is number `worker` of so many."""

    strategy: Strategy
    workers: int = 1
    worker: int = 0

    def input_context(self) -> object:
        """The context with which an `input_fn` reads this process's part of the data."""
        return tf.distribute.InputContext(
            num_input_pipelines=self.workers,
            input_pipeline_id=self.worker,
            num_replicas_in_sync=self.strategy.num_replicas_in_sync,
        )

    def meet(self, purpose: str) -> None:
        """Waits for the other processes, so that all see what the chief has written."""
        if self.workers > 1:
            host_collectives.barrier(self.strategy, purpose)

    def spec(
        self, model: Callable[[Any, Any], EstimatorSpec], result: Structure, mode: str
    ) -> EstimatorSpec:
        """The model on all replicas of the result of an `input_fn`, as one spec."""
        evaluates = mode == ModeKeys.EVAL
        together = _Together() if self.workers > 1 and not evaluates else None
        devices = self.strategy.extended.worker_devices
        batches = inputs.batches_of(
            result, len(devices), fill=evaluates, lookahead=together is not None
        )
        made: dict[int, EstimatorSpec] = {}

        def build(
            features: Features, labels: tuple[Structure], number: int, present: Tensor, more: Tensor
        ) -> object:
            spec = made[number] = model(features, labels[0])
            if evaluates:
                loss = tf.where(present, spec.loss, 0.0)
                return tf1.metrics.mean(loss, weights=tf.cast(present, loss.dtype))
            loss = spec.loss if together is None else together.with_loss(spec.loss, more)
            return loss, spec.train_op

        values = [
            (batch.features, (batch.labels,), number, batch.present, batch.more)
            for number, batch in enumerate(batches)
        ]
        built: Any = on_replicas(self.strategy, build, values)
        losses, updates = built
        update = tf.group(*self.strategy.experimental_local_results(updates))
        specs = [made[number] for number in sorted(made)]
        if evaluates:
            metrics = _metrics_of(specs)
            metrics["loss"] = (self._first(losses), update)
            return specs[0]._replace(eval_metric_ops=metrics, **_hooks_of(specs))
        mean = self._first(
            self.strategy.extended.reduce_to(
                tf.distribute.ReduceOp.MEAN, losses, destinations=str(devices[0])
            )
        )
        hooks = _hooks_of(specs)
        if together is not None:
            mean = together.loss_of(mean)
            hooks["training_hooks"] += (together,)
        return specs[0]._replace(loss=mean, train_op=update, **hooks)

    def _first(self, value: object) -> Tensor:
        return self.strategy.experimental_local_results(value)[0]


def _metrics_of(specs: Sequence[EstimatorSpec]) -> dict[str, Any]:
    """The metrics of the first spec, with the updates of all."""
    return {
        name: (value, tf.group(*[tf.nest.flatten(each.eval_metric_ops[name][1]) for each in specs]))
        for name, (value, _) in specs[0].eval_metric_ops.items()
    }


def _hooks_of(specs: Sequence[EstimatorSpec]) -> dict[str, tuple[Any, ...]]:
    """The hooks of all specs, by field."""
    kinds = ("training_hooks", "training_chief_hooks", "evaluation_hooks")
    return {
        kind: tuple(dict.fromkeys(hook for spec in specs for hook in getattr(spec, kind)))
        for kind in kinds
    }


def for_training(config: RunConfig) -> Distribution | None:
    """The replicas to train on; None if the model is built once.

    If the configuration names none, the strategy of `tfdist run` counts.
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
    """The replicas to evaluate on; None if the model is built once."""
    chosen = config.eval_distribute
    if chosen is None:
        return None
    clustered = having(lambda spec: spec.is_clustered and spec.name in _NAMES)
    if chosen in clustered or isinstance(chosen, MultiWorker):
        raise ConfigError(
            f"eval_distribute={'multi_worker' if isinstance(chosen, MultiWorker) else chosen!r} "
            "is not supported: the chief, or the evaluator, evaluates by itself. Leave it out, or "
            "choose 'mirrored'."
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


class _Together(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Asks the other workers to stop, and stops when one of them asks."""

    def __init__(self) -> None:
        self.asked = False  # Whether a hook of this process wants to stop.
        self._flag = tf1.placeholder_with_default(0.0, [], name="wants_to_stop")
        self._votes: Tensor | None = None

    def with_loss(self, loss: Tensor, more: Tensor) -> Tensor:
        """The loss and this replica's wish, as one tensor that is to be averaged."""
        wish = tf.maximum(self._flag, 1.0 - tf.cast(more, tf.float32))
        return tf.stack([loss, tf.cast(wish, loss.dtype)])

    def loss_of(self, mean: Tensor) -> Tensor:
        """The mean loss, out of the average of `with_loss`."""
        self._votes = mean[1]
        return mean[0]

    def before_run(self, run_context: RunContext) -> RunArgs:
        return tf1.train.SessionRunArgs(self._votes, feed_dict={self._flag: float(self.asked)})

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        if run_values.results > 0:
            run_context.request_stop()


def stopping_together(hooks: Sequence[Any]) -> list[Any]:
    """The hooks of a session, whose requests to stop reach all workers first.

    `StopAtStepHook` stops by itself: the global step is the same on all workers.
    """
    together = next((hook for hook in hooks if isinstance(hook, _Together)), None)
    if together is None:
        return list(hooks)
    alike = (_Together, tf1.train.StopAtStepHook)
    return [hook if isinstance(hook, alike) else _Asking(hook, together) for hook in hooks]


class _Asking(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that asks to stop rather than stops."""

    def __init__(self, hook: SessionHook, together: _Together) -> None:
        self._hook = hook
        self._together = together

    def begin(self) -> None:
        self._hook.begin()

    def after_create_session(self, session: Session, coord: object) -> None:
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: RunContext) -> RunArgs:
        return self._hook.before_run(_Context(run_context, self._together))

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        self._hook.after_run(_Context(run_context, self._together), run_values)

    def end(self, session: Session) -> None:
        self._hook.end(session)


class _Context(tf.compat.v1.train.SessionRunContext):  # type: ignore[misc]
    """The context that a hook gets of a step."""

    def __init__(self, context: RunContext, together: _Together) -> None:
        super().__init__(context.original_args, context.session)
        self._together = together

    def request_stop(self) -> None:
        self._together.asked = True
