"""Running a Keras model's `train_step` and `test_step` on each replica."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.distribute import local_replica, local_results
from tfdist._tf.graphs import ordered_apart
from tfdist.comm.batch_sharding import Slice
from tfdist.comm.row_gathering import gather_rows
from tfdist.errors import EquivalenceWarning
from tfdist.gradients.step_profiler import Meter
from tfdist.keras import weights
from tfdist.keras.batch_logs import exchange_in_step
from tfdist.keras.building import on_built_model, plain_outside_of_replica
from tfdist.keras.custom_gradients import step_changes_gradients
from tfdist.keras.functions import as_method
from tfdist.keras.hooks import is_of_program
from tfdist.keras.logs import (
    NoticedResults,
    average_logs,
    note_agreed,
    single_metrics,
    summed_metrics,
)
from tfdist.keras.model_optimizers import stepping
from tfdist.keras.open_batch import is_left_static, with_open_rows
from tfdist.keras.replica_attributes import Turns
from tfdist.keras.replica_context import (
    PREDICTED,
    Step,
    at_least_one,
    batch_size_of,
    entered,
    keras_state,
    measure,
    settling,
    static_size_of,
)
from tfdist.keras.whole_batch import check_given
from tfdist.keras.zero import only_for_optimizers
from tfdist.types import Layer, Logs, Metric, Model, Strategy, Structure, Tensor
from tfdist.utils.messages import warn
from tfdist.utils.thread_state import Current, Flag

#: The model of which calls of `Strategy.run` are Keras's predictions meanwhile.
predicting: Current[Model | None] = Current(None)

#: Set while this process computes predictions by itself.
predicting_alone = Flag()
_STEPS = ("train_step", "test_step")


def keras_step(fn: Callable[..., Any]) -> tuple[Model | None, Callable[..., Any]]:
    """The model whose `train_step` or `test_step` is `fn`, and that method; else None and `fn`."""
    method = as_method(fn)
    model = getattr(method, "__self__", None)
    if isinstance(model, keras.Model) and getattr(method, "__name__", "") in _STEPS:
        return model, method
    return None, fn


def run_keras_step(
    strategy: Strategy,
    run: Callable[..., Any],
    model: Model,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: object,
) -> Logs:
    """Runs a Keras step on each replica and returns logs that all replicas agree on.

    Args:
        strategy: the strategy that runs it.
        run: TensorFlow's own `Strategy.run`.
        model: the model.
        fn: its `train_step` or `test_step`, which takes one batch.
        args: one batch, per replica.
        kwargs: none.
        options: `tf.distribute.RunOptions`.
    """
    name = fn.__name__
    meter = strategy.meter if name == "train_step" else None

    def traced(fn: Callable[..., Any]) -> Logs:
        noticed = NoticedResults(summed_metrics(model))
        carried = keras_state(Turns(strategy, model))

        def on_replica(batch: Structure) -> Structure:
            step, batch = _share_of(model, batch, strategy.num_replicas_in_sync)
            with carried(), _running(step, meter, batch):
                logs = fn(batch, **(kwargs or {}))
                _name_hidden(step)
                weights.average_assigned(step)
                results = noticed.on_this_replica()
                exchanges = exchange_in_step(strategy, model, name, logs, results)
                return average_logs(step, logs, results) if exchanges else logs

        with noticed:
            return run(on_replica, args, None, options)

    outputs = on_built_model(model, fn, traced, sized=_is_sized(strategy, args[0]))
    return tf.nest.map_structure(lambda leaf: _agreed(strategy, leaf), outputs)


def _name_hidden(step: Step) -> None:
    """Names the parts of a program that a step computes eagerly, where no graph shows how."""
    if step.is_whole or not tf.executing_eagerly():
        return
    parts = [*step.model._flatten_layers(), *single_metrics(step.model)]
    own = [each.name for each in parts if _is_own(each)]
    if own:
        warn(
            f"A step that runs eagerly (run_eagerly=True) does not show what {', '.join(own)} "
            f"computes from the examples of a batch. Each of the {step.replicas} replicas sees its "
            "own examples only: layers that mix examples, weights that are given statistics of a "
            "batch, and metrics that add a number for each batch are not those of one process. "
            "Leave run_eagerly out.",
            EquivalenceWarning,
        )


def _is_own(part: Layer | Metric) -> bool:
    return is_of_program(type(part)) or isinstance(part, keras.layers.Lambda)


def _measured(meter: Meter | None, batch: Structure) -> contextlib.AbstractContextManager[None]:
    """Measures a step of the first replica of this process."""
    if meter is None or local_replica() > 0:
        return contextlib.nullcontext()
    return meter.step(batch)


def on_only_replica(model: Model, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a model that assigns nothing before its batch is there.

    Keras finds the end of a data set of unknown length by running a step whose batch never comes;
    `optimizer.iterations`, which does not depend on the batch, is one too high after each epoch.
    """
    carried = keras_state()

    @functools.wraps(fn, updated=())
    def step(batch: Structure, *args: object, **kwargs: object) -> object:
        with carried(), _optimizing(model), _after(batch):
            return fn(batch, *args, **kwargs)

    return step


@contextlib.contextmanager
def _optimizing(model: Model) -> Iterator[None]:
    outside = tf.variable_creator_scope(plain_outside_of_replica)
    with stepping.set(model), only_for_optimizers(model), outside:
        yield


@contextlib.contextmanager
def _running(step: Step, meter: Meter | None, batch: Structure) -> Iterator[None]:
    optimizing, measured = _optimizing(step.model), _measured(meter, batch)
    with entered(step), ordered_apart(), optimizing, measured, _after(batch):
        yield


def _after(batch: Structure) -> contextlib.AbstractContextManager[object]:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return tf.control_dependencies([leaf for leaf in leaves if isinstance(leaf, tf.Tensor)])


def _is_sized(strategy: Strategy, batch: Structure) -> bool:
    """Whether the size of the replicas' parts of a batch is known when a step is traced."""
    if tf.executing_eagerly() or strategy.num_replicas_in_sync == 1:
        return False
    own = tf.nest.map_structure(lambda leaf: local_results(strategy, leaf)[0], batch)
    return static_size_of(own.batch if isinstance(own, Slice) else own) is not None


def _share_of(model: Model, batch: Structure, replicas: int) -> tuple[Step, Structure]:
    """A replica's share of a batch, and the examples that the model is given."""
    step = measure(model, batch, replicas)
    if isinstance(batch, Slice):
        batch = batch.batch
    elif not step.even:
        batch = at_least_one(batch, step.count)
    opened = None
    if step.size is not None and not step.is_whole and not is_left_static(model):
        opened = with_open_rows(batch, step.size)
    step = dataclasses.replace(
        step,
        exchanges_at_tape=step_changes_gradients(model),
        is_static=step.even and opened is None,
    )
    batch = batch if opened is None else opened
    step.note_batch(batch)
    return step, batch


def run_prediction(
    run: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: object,
) -> Structure:
    """Runs Keras's prediction of one batch on each replica; a replica may have no examples."""
    carried, model = keras_state(), predicting.value  # Replicas may be threads of their own.
    assert model is not None, "run_prediction is for calls while `predicting` has a model"
    strategy = tf.distribute.get_strategy()
    alone = predicting_alone.is_up
    replicas = 1 if alone else strategy.num_replicas_in_sync
    whole: list[Structure] = []  # The predictions of all rows, by a replica of this process.

    def on_replica(batch: Structure) -> Structure:
        if whole:
            return whole[0]
        at_most = None
        if isinstance(batch, Slice):
            at_most = -(-batch.total // replicas)
            count, batch = batch.count, batch.batch
        else:
            _, count = batch_size_of(batch)
            batch = at_least_one(batch, count)
        step = Step(model, count, count, None, replicas)
        step.note_batch(batch)
        with carried(), ordered_apart(), settling.set(step):
            outputs = fn(batch, **(kwargs or {}))
        check_given(step, outputs, PREDICTED)
        own = tf.nest.map_structure(lambda t: _nothing_if_empty(t, count), outputs)
        if alone:
            whole.append(own)
        if alone or not gathers_rows(strategy):
            return own
        return tf.nest.map_structure(lambda t: gather_rows(strategy, t, at_most), own)

    return run(on_replica, args, None, options)


def gathers_rows(strategy: Strategy) -> bool:
    """Whether the replicas gather their predictions by themselves, one replica in each process."""
    shard = getattr(strategy, "shard", None)
    return shard is not None and shard.workers > 1 and shard.local == 1


def _nothing_if_empty(output: Tensor, count: Tensor) -> Tensor:
    if not isinstance(output, tf.Tensor) or output.shape.rank in (None, 0):
        return output
    kept = tf.cond(count > 0, lambda: output, lambda: output[:0])
    return tf.ensure_shape(kept, [None, *output.shape[1:]])


def _agreed(strategy: Strategy, leaf: Tensor) -> Structure:
    """One replica's copy of a log, marked as the same on all."""
    if leaf is None:
        return None
    value = local_results(strategy, leaf)[0]
    if tf.is_tensor(value) and value.shape.rank == 0:
        note_agreed(value)
        return value
    return leaf
