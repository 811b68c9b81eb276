"""The loss and the metrics of the last chunk's outputs, as Keras computes them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._keras import Trainer
from tfdist.errors import ConfigError
from tfdist.keras.replica_context import Call, entered
from tfdist.keras.stateless import Assigning
from tfdist.keras.whole_batch import as_average, note_meeting
from tfdist.strategies.pipeline.layer_state import refuse_outside, refuse_reads
from tfdist.strategies.pipeline.microbatch import Microbatch
from tfdist.strategies.pipeline.partitioning import Cut, Key
from tfdist.strategies.pipeline.stage import Part, Values, of_any_size
from tfdist.strategies.pipeline.stage_graph import ForwardInputs, Result
from tfdist.strategies.pipeline.state import Batch
from tfdist.types import KerasVariable, Model, Structure, Tensor

__all__ = ["KerasObjective"]


# The divisor of a loss over a mask: a number of the whole batch, before its first microbatch.
#
# Such a loss is a sum over what the mask leaves, divided by how much that is; so are those of
# `reduction="mean_with_sample_weight"`, by the sum of weights. A microbatch knows its own part of
# the number. The whole comes from a graph of model and loss on the whole batch of which only that
# number is asked: TensorFlow runs what it depends on, such as `ids != 0`, and leaves out all
# layers.

#: From the model's outputs, and labels and sample weights, the numbers that losses are divided by.
_Denominators: TypeAlias = Callable[[Values, Structure], list[Any]]


def _totals(
    parts: Sequence[Part], keys: Sequence[Key], denominators: _Denominators
) -> Callable[[Sequence[Any], Structure], Tensor]:
    """Makes the function that computes the numbers.

    Args:
        parts: the chunks of one replica.
        keys: the model's inputs.
        denominators: see `_Denominators`.

    Returns:
        From the model's inputs, flat, and labels and sample weights the numbers, float64, in the
        order in which losses ask for them. It raises a ConfigError if a mask depends on what a
        layer with weights or random numbers computes.
    """

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]
    def totals(inputs: Sequence[Any], targets: Structure) -> Tensor:
        unknown: set[str] = set()
        known = {key: (each, None) for key, each in zip(keys, inputs, strict=True)}
        values = Values([], [])
        for part in parts:
            reads = [known[key] for key in part.chunk.reads]
            arguments = Values([tensor for tensor, _ in reads], [mask for _, mask in reads])
            weights = [_unknown(weight, unknown) for weight in part.weights]
            state = [_unknown(variable, unknown) for variable in part.state]
            values, _, _ = part.run(weights, state, arguments, tf.ones([3], tf.int64))
            pairs = zip(values.tensors, values.masks, strict=True)
            known.update(zip(part.chunk.writes, pairs, strict=True))
        result = denominators(values, targets)
        _check(result, unknown)
        return tf.stack([tf.cast(each, tf.float64) for each in result])

    return totals


def _unknown(variable: KerasVariable, names: set[str]) -> Tensor:
    """Stands for a variable's value, which nothing that is asked may depend on."""
    value = tf.identity(tf.zeros(variable.shape, variable.dtype))
    names.add(value.op.name)
    return value


def _check(outputs: Sequence[Any], unknown: set[str]) -> None:
    seen: set[str] = set()
    left = [tensor.op for tensor in outputs]
    while left:
        operation = left.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        left += [tensor.op for tensor in operation.inputs]
        left += operation.control_inputs
    if seen & unknown:
        raise ConfigError(
            "strategy='pipeline' cannot compute a loss from sums over the batch that depend on "
            "layers with weights or random numbers, as Dice, a root of a mean, and a mean over "
            "a mask of such a layer do: these sums must be known before the first microbatch. Use "
            "a mean or a sum over the examples, give the mask as sample_weight, or use "
            "strategy='single'."
        )


class _NeedsTotalsError(Exception):
    """A loss asks for a number of the whole batch."""


#: The reason against a metric that reads a weight.
_BEFORE_UPDATE = (
    "microbatches are measured before the update, and Keras measures a batch after it. Read the "
    "weight in a callback, or choose another strategy."
)


def _refused_metric(calls: Sequence[Call], value: Tensor) -> Tensor:
    """Refuses: the other microbatches come later."""
    del value
    metric = f"The metric {calls[-1].name!r}" if calls else "A metric"
    raise ConfigError(
        f"{metric} is not a mean or sum over the examples of a batch, as a root of a mean is none, "
        "which conflicts with strategy='pipeline', whose metrics see microbatches. Return a value "
        "for each example, set microbatches=1, or choose another strategy."
    )


class KerasObjective:
    """The objective of a compiled model: its losses and metrics.

    Args:
        model: the model.
        cut: the model in chunks.
        parts: the chunks of one replica.
        microbatches: parts of a batch.
        lock: held while Keras's variables are changed.

    Attributes:
        measured: whether Keras's metrics have seen a microbatch, so that they have a result.
    """

    def __init__(
        self,
        model: Model,
        cut: Cut,
        parts: Sequence[Part],
        microbatches: int,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._model, self._graph, self._lock = model, cut.graph, lock
        self._microbatches = microbatches
        self._totals = _totals(parts, cut.inputs, self._denominators)
        self._needs_totals = False
        self._latest: tuple[int, Any] | None = None
        self.measured = False
        own = type(model).compute_metrics is not Trainer.compute_metrics
        self._has_metrics = own or model._compile_metrics is not None
        self._add = tf.function(self._add_to_means, autograph=False)
        self._metrics = tf.function(self._update_metrics, autograph=False, reduce_retracing=True)

    def run(
        self,
        forward: Callable[[ForwardInputs], Any],
        inputs: ForwardInputs,
        batch: Batch,
        number: int,
    ) -> Any:
        """Runs the last chunk on a microbatch, with the totals that its losses ask for.

        Args:
            forward: runs it.
            inputs: the chunk's inputs, without labels.
            batch: the batch.
            number: of the microbatch.
        """
        inputs = inputs._replace(targets=batch.examples[number][1:])
        if not self._needs_totals:
            try:
                return forward(inputs)
            except _NeedsTotalsError:
                # Raised when the graph is made, before anything has run.
                self._needs_totals = True
        return forward(inputs._replace(totals=self._totals_of(batch)))

    def value(self, inputs: ForwardInputs, outputs: Values) -> tuple[Any, Any]:
        """The loss of a microbatch, in a graph; see `stage_graph.Objective`."""
        with self._lock:  # Replicas of the pipeline may come at the same time.
            self._build(inputs, outputs)
        means = self._means()
        asked = itertools.count()

        def total_of(value: Tensor) -> Tensor:
            if inputs.totals is None:
                raise _NeedsTotalsError
            total = tf.cast(inputs.totals[next(asked)], value.dtype)
            step.depends.note_shared(total)
            return total

        step = Microbatch(
            self._model,
            inputs.numbers[1],
            inputs.numbers[2],
            total_of=total_of,
            microbatches=self._microbatches,
        )
        # From zero: what is left in the variables is what this microbatch adds to them.
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in means]
        with Assigning(zeros) as scope:
            loss = self._loss(step, inputs.targets, outputs)
        refuse_outside("the loss", scope, means)
        added = [tf.cast(scope.get_current_value(variable), tf.float32) for variable in means]
        return loss, tf.stack(added) if added else None

    def note(self, batch: Batch, microbatch: int, result: Result) -> None:
        """Updates Keras's metrics."""
        x, y, weight = batch.examples[microbatch]
        values = result.values
        with self._lock:
            if self._has_metrics:
                counts = [microbatch, batch.sizes[microbatch], sum(batch.sizes)]
                numbers = tf.constant(counts, tf.int64)
                self._metrics(x, y, weight, values.tensors, values.masks, numbers)
            if result.noted is not None:
                self._add(result.noted)
        self.measured = True

    def _denominators(self, outputs: Values, targets: Structure) -> list[Any]:
        with keras.StatelessScope():  # Keras's means of losses do not count this.
            return self._asked_of_whole(outputs, targets)

    def _asked_of_whole(self, outputs: Values, targets: Structure) -> list[Any]:
        """The sums that losses ask for, if this is the whole batch."""
        asked: list[Any] = []

        def total_of(value: Tensor) -> Tensor:
            asked.append(value)
            return value

        one = tf.ones([], tf.int64)
        self._loss(Microbatch(self._model, one, one, total_of=total_of), targets, outputs)
        return asked

    def _loss(self, step: Microbatch, targets: Structure, outputs: Values) -> Tensor:
        if self._model._compile_loss is None:  # Only losses of layers.
            return tf.zeros([])
        # Of a size that is known Keras weighs some batches by it, and those of other sizes by 1.
        parts = keras.tree.map_structure(of_any_size, (targets, outputs.tensors))
        (y, weight), tensors = parts
        step.note_batch(parts)  # Layers in which examples meet are refused in the chunks.
        for number in (step.count, step.total):  # Of the examples; no example is in them.
            step.depends.note_shared(number)
        with entered(step):
            loss = self._model._compile_loss(y, self._packed(tensors, outputs.masks), weight)
            if loss is None:
                return tf.zeros([])
            if loss.shape.rank != 0:
                raise ConfigError(
                    f"The loss is a tensor of shape {loss.shape} (reduction='none', or a loss "
                    "without a reduction), which conflicts with strategy='pipeline', whose "
                    "microbatches add up numbers. Reduce it by a mean or a sum."
                )
            note_meeting(step, loss)  # A loss with a `__call__` of its own may have reduced it so.
            return as_average(step, loss)

    def _packed(self, tensors: Sequence[Any], masks: Sequence[Any]) -> Structure:
        """The model's outputs in their structure, with Keras's masks."""
        for tensor, mask in zip(tensors, masks, strict=True):
            if mask is not None:
                tensor._keras_mask = mask
        return keras.tree.pack_sequence_as(self._graph._outputs_struct, tensors)

    def _totals_of(self, batch: Batch) -> Tensor:
        with self._lock:
            if self._latest is None or self._latest[0] != batch.number:
                with tf.device("/CPU:0"):
                    self._latest = (batch.number, self._totals(batch.inputs, batch.targets))
            return self._latest[1]

    def _means(self) -> list[Any]:
        """The mean losses of several outputs that Keras keeps in metrics."""
        loss = self._model._compile_loss
        metrics = [] if loss is None else loss.metrics
        return [variable for metric in metrics for variable in metric.variables]

    def _add_to_means(self, noted: Tensor) -> None:
        for number, variable in enumerate(self._means()):
            variable.assign_add(tf.cast(noted[number], variable.dtype))

    def _build(self, inputs: ForwardInputs, outputs: Values) -> None:
        """Lets Keras make its means, in a graph that is thrown away."""
        if self._model._compile_loss is None or self._model._compile_loss.built:
            return
        specs = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype),
            inputs.targets,
        )

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def run(targets: Structure) -> None:
            self._asked_of_whole(outputs, targets)

        run.get_concrete_function(specs)

    def _update_metrics(
        self,
        x: Structure,
        y: Structure,
        weight: Structure,
        tensors: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        numbers: Tensor,
    ) -> None:
        """Updates Keras's metrics, in a graph; a number counts by its share of the batch.

        Args:
            x: the inputs of the microbatch.
            y: its labels.
            weight: its sample weights, or None.
            tensors: the model's outputs.
            masks: their masks.
            numbers: int64 `(3,)`: the microbatch, its examples, and those of the batch.
        """
        # A known size of a microbatch would look like a constant that each batch adds once.
        parts = keras.tree.map_structure(of_any_size, ((x, y, weight), tensors))
        (x, y, weight), tensors = parts
        outputs = self._packed(tensors, masks)
        calls: list[Call] = []
        refused = functools.partial(_refused_metric, calls)
        step = Microbatch(
            self._model,
            numbers[1],
            numbers[2],
            index=numbers[0],
            total_of=refused if self._microbatches > 1 else tf.identity,
            microbatches=self._microbatches,
            calls=calls,
        )
        with entered(step):
            self._model.compute_metrics(x, y, outputs, sample_weight=weight)
        refuse_reads(self._graph, "a metric", _BEFORE_UPDATE)
