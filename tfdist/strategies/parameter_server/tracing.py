"""The graph of a step: what a worker runs, traced once for each kind of batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.distribute import OnlyReplica
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras import replica_context as keras_step
from tfdist.keras.building import plain_outside_of_replica
from tfdist.keras.example_pairs import Examples, place_of
from tfdist.keras.hooks import accounted
from tfdist.keras.logs import NoticedResults, single_metrics, summed_metrics
from tfdist.keras.stateful import is_stateful
from tfdist.keras.whole_statistics import average_of
from tfdist.strategies.parameter_server import apply_update
from tfdist.strategies.parameter_server.feeding import Load
from tfdist.strategies.parameter_server.remote_step import (
    Part,
    RemoteStep,
    Results,
    TraceAgain,
    remote_step,
)
from tfdist.strategies.parameter_server.serialization import BOX, Vector, parted, unbox
from tfdist.strategies.parameter_server.servers import Servers
from tfdist.strategies.parameter_server.transaction_log import Tally
from tfdist.types import Array, ConcreteFunction, KerasVariable, Model, Structure, Tensor
from tfdist.utils.messages import warn

__all__ = ["Numbers", "TracedStep", "trace"]

#: Bytes of the weights of a small model.
_SMALL = 1 << 20

#: Keeps a step a function of its own within one of several steps. TensorFlow would put its ops into
#: that graph, where each one without inputs waits for a signal of the worker, constants of the
#: servers under their lock included: a worker that is stopped meanwhile would stop all others.
_APART = {"_noinline": True}

#: A hint for an error of a program that computes with `x.shape[0]`.
_SIZE_NEEDED = (
    "With strategy='parameter_server' a step is traced without the size of its batches: x.shape[0] "
    "is None, also with drop_remainder=True. Write tf.shape(x)[0] or keras.ops.shape(x)[0]."
)


@dataclasses.dataclass
class TracedStep:
    """A step that can be run on workers.

    Its numbers are, in this order: scalars of its logs, how many steps these are of (1, or a
    part's share), and for each metric variable what is added to it. A step that changes weights
    adds them to a tally on the servers; any other returns them.

    Attributes:
        functions: for a number of steps the function that runs them one after the other. It takes
            a load's resources and box, or joined boxes; that of one step returns the packed
            numbers, or nothing if there is a tally, or for a prediction the outputs.
        tally: where the numbers are added up; None if they are returned.
        returned: the layout of the numbers that are returned, as one tensor of float64.
        metrics: Keras variables that the numbers add to, in order.
        logs: the structure that the step returned: for each leaf a metric's result, the place of a
            scalar among the numbers, or None for what is neither.
        scalars: how many scalars there are.
        updates: how many updates a step makes.
        assigns: whether a step assigns variables, other than by an optimizer or a metric.
        draws: the states of the generators that a step draws seeds from, once for each.
        small: whether the model is so small that a call to a worker costs more than a step.
    """

    functions: dict[int, ConcreteFunction] = dataclasses.field(default_factory=dict)
    tally: Tally | None = None
    returned: Vector = dataclasses.field(init=False)
    metrics: list[Any] = dataclasses.field(default_factory=list)
    logs: object = None
    scalars: int = 0
    updates: int = 0
    assigns: bool = False
    draws: list[Any] = dataclasses.field(default_factory=list)
    small: bool = False

    @property
    def function(self) -> ConcreteFunction:
        """The function of one step."""
        return self.functions[1]

    def trace_several(self, count: int) -> None:
        """Makes the function of several steps."""

        def run(*inputs: Any) -> None:
            *resources, box = inputs
            for each in parted(box, count):
                self.function(*resources, each)

        signature = self.function.structured_input_signature[0]
        several = tf.function(run, input_signature=signature, autograph=False)
        self.functions[count] = several.get_concrete_function()


def trace(servers: Servers, model: Model, method: str, load: Load, parts: int) -> TracedStep:
    """Traces a step of a model: its `train_step`, `test_step` or `predict_step`.

    Args:
        servers: where the model's weights are.
        model: a Keras model.
        method: the step's name.
        load: makes the batch.
        parts: into how many parts a global batch is split.

    Raises:
        NotSplittable: if the step cannot be computed in parts.
        ConfigError: if an RNN is to go on from the states of the batch before.
    """
    if is_stateful(model):
        raise ConfigError(
            f"The model {model.name!r} has a stateful RNN, which conflicts with "
            "strategy='parameter_server': each batch may go to another worker, at the same time as "
            "the one before, so that there are no states to go on from. Choose "
            "strategy='multi_worker', or leave stateful=True out."
        )
    traced = TracedStep()

    def run(*inputs: Any) -> Any:
        *resources, box = inputs
        header = unbox(box)
        batch, count, total = load.make_batch(resources, box)
        own = 1 if method == "predict_step" else parts
        step = RemoteStep(servers, header.job, header.update, header.part, own, apply_update.send)
        outside = tf.variable_creator_scope(plain_outside_of_replica)
        with remote_step.set(step), OnlyReplica(tf.distribute.get_strategy()), outside:
            if method == "predict_step":
                outputs = _predict(model, batch, count, total, parts)
                _name_assigned(step)
                step.close_pending_reads()
                traced.draws = step.draws
                return outputs
            return _run_step(traced, step, model, method, box, batch, count, total)

    try:
        traced.functions[1] = _function_of(run, [*load.resources, BOX])
    except TypeError as error:
        if "None" in str(error):
            error.add_note(_SIZE_NEEDED)
        raise
    size = sum(w.shape.num_elements() * w.value.dtype.size for w in model.weights)
    traced.small = size <= _SMALL
    return traced


def _predict(model: Model, batch: Structure, count: Tensor, total: Tensor, parts: int) -> Structure:
    if parts == 1:
        return model.predict_step(batch)
    part = Part(model, count, total, None, parts)
    part.note_batch(batch)
    with keras_step.settling.set(part):
        return model.predict_step(batch)


def _name_assigned(step: RemoteStep) -> None:
    if step.assigned:
        warn(
            f"While it predicts, the model assigns {', '.join(step.assigned)}. With "
            "strategy='parameter_server' workers predict parts of a batch at the same time, so "
            "that these do not get the values that one process gives them. Assign them in fit or "
            "evaluate.",
            EquivalenceWarning,
        )


def _function_of(run: Callable[..., Any], signature: list[Any], more: int = 2) -> Any:
    """Traces a step; again if that has built its optimizer, and once more for its metrics."""
    try:
        function = tf.function(run, signature, autograph=False, experimental_attributes=_APART)
        return function.get_concrete_function()
    except TraceAgain:
        if not more:
            raise
    return _function_of(run, signature, more - 1)


def _run_step(
    traced: TracedStep,
    step: RemoteStep,
    model: Model,
    method: str,
    box: Tensor,
    batch: Structure,
    count: Tensor,
    total: Tensor,
) -> Any:
    known, noticed = single_metrics(model), NoticedResults(summed_metrics(model))
    share, part = tf.constant(1.0, tf.float64), None
    with noticed, contextlib.ExitStack() as stack:
        if step.parts > 1:
            part = Part(model, count, total, None, step.parts, index=step.part)
            part.note_held(box, Examples())  # the batch is unpacked from it, and numbers are
            part.note_batch(batch)
            stack.enter_context(keras_step.entered(part))
            share = part.share(tf.float64)
        logs = getattr(model, method)(batch)
        traced.assigns = bool(step.assigned)
        if single_metrics(model) != known:
            raise TraceAgain  # The results of those that the step has made were not noticed.
        scalars: list[Any] = []
        results = noticed.on_this_replica()
        traced.logs = tf.nest.map_structure(
            lambda leaf: _source_of(leaf, results, scalars, part), logs
        )
        changes, traced.draws = step.metric_changes(), step.draws
        traced.metrics, traced.scalars = [variable for variable, _ in changes], len(scalars)
        numbers = [*(value * share for value in scalars), share, *(c for _, c in changes)]
        return _hand_over(traced, step, numbers)


def _hand_over(traced: TracedStep, step: RemoteStep, numbers: list[Any]) -> Any:
    """Adds a step's numbers up on the servers, with its last update, or returns them."""
    shapes = [number.shape.as_list() for number in numbers]
    if step.changes_weights:
        with accounted.set(True):
            traced.tally = Tally(step.servers.lock, shapes)
        step.flush(Results(traced.tally, traced.tally.pack(numbers)))
        traced.updates = step.updates
        return []
    step.close_pending_reads()
    traced.returned = Vector(shapes)
    return traced.returned.pack(numbers, tf.float64)


def _source_of(leaf: Any, results: Any, values: list[Any], part: Part | None) -> object:
    """The source of a leaf of the logs: a metric's result, the place of a scalar, or None."""
    if id(leaf) in results:
        return results[id(leaf)]
    if isinstance(leaf, (int, float)) or getattr(leaf, "shape", None) == ():
        whole = leaf if part is None else average_of(part, leaf)
        values.append(tf.cast(whole, tf.float64))
        return len(values) - 1
    if isinstance(leaf, tf.Tensor):
        warn(
            f"A log is a tensor of shape {leaf.shape} (at {place_of(leaf.op)}), which workers of "
            "parameter servers do not pass on: it is shown as None. Log numbers.",
            EquivalenceWarning,
        )
    return None


# The numbers of finished steps on their way into Keras's metrics and logs.


class Numbers:
    """Adds up what steps return or have added up on the servers, and what they have drawn.

    They are kept in NumPy, where adding costs little, and go to the metrics' variables when these
    are looked at.

    Attributes:
        latest: the kind of step whose numbers came last.
    """

    def __init__(self) -> None:
        self.latest: TracedStep
        self._step = -1
        self._scalars: list[Any] = []
        self._sums: dict[int, tuple[KerasVariable, Array]] = {}

    @property
    def pending(self) -> bool:
        """Whether there are numbers that the metrics do not have yet."""
        return bool(self._sums)

    def add(self, traced: TracedStep, numbers: list[Any], step: int | None = None) -> None:
        """Adds the numbers of one step, or the sums of several.

        Args:
            traced: the kind of step.
            numbers: as `TracedStep` orders them; scalars become means over the steps.
            step: the number of the one step; scalars are those of the last.
        """
        steps = float(numbers[traced.scalars])
        if steps <= 0:
            return
        if step is None or step > self._step:
            self.latest, self._step = traced, self._step if step is None else step
            self._scalars = [number / steps for number in numbers[: traced.scalars]]
        for variable, value in zip(traced.metrics, numbers[traced.scalars + 1 :], strict=True):
            self._add(variable, value)

    def note_draws(self, traced: TracedStep, steps: int = 1) -> None:
        """Advances the generators of a kind of step as often as each step has drawn from them."""
        for state in traced.draws:
            self._add(state, np.array([0, steps]))

    def _add(self, variable: KerasVariable, value: Array) -> None:
        known = self._sums.get(id(variable))
        self._sums[id(variable)] = (variable, value if known is None else known[1] + value)

    def flush(self) -> list[Any]:
        """Brings the variables up to date, and returns the latest scalars."""
        for variable, value in self._sums.values():
            variable._value.assign_add(value.astype(variable._value.dtype.as_numpy_dtype))
        self._sums.clear()
        return self._scalars
