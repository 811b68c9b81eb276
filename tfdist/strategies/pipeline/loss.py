"""The loss and the metrics of the last chunk's outputs, as Keras computes them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._keras import Trainer
from tfdist.errors import ConfigError
from tfdist.keras.replica_context import Step as KerasStep
from tfdist.keras.replica_context import entered
from tfdist.strategies.pipeline.partitioning import Key
from tfdist.strategies.pipeline.stage import Part, Values, of_any_size
from tfdist.strategies.pipeline.stage_graph import Given, Result
from tfdist.strategies.pipeline.state import Batch
from tfdist.types import Functional, KerasVariable, Model, Structure, Tensor

__all__ = ["KerasObjective", "Totals"]


# The divisor of a loss over a mask: a number of the whole batch, before its first microbatch.
#
# Such a loss is a sum over what the mask leaves, divided by how much that is; so are those of
# `reduction="mean_with_sample_weight"`, by the sum of weights. A microbatch knows its own part of
# the number. The whole comes from a graph of model and loss on the whole batch of which only that
# number is asked: TensorFlow runs what it depends on, such as `ids != 0`, and leaves out all
# layers.

#: From the model's outputs and labels the numbers that losses are divided by, in a graph.
Denominators: TypeAlias = Callable[[Values, Sequence[Any], Any], list[Any]]


class Totals:
    """Computes the numbers.

    Args:
        parts: the chunks of one replica.
        inputs: the model's inputs.
        denominators: see `Denominators`.
    """

    def __init__(
        self, parts: Sequence[Part], inputs: Sequence[Key], denominators: Denominators
    ) -> None:
        self._parts, self._inputs, self._denominators = parts, inputs, denominators
        self._functions: dict[str, Any] = {}

    def of(self, inputs: Sequence[Any], labels: Sequence[Any], nest: Structure) -> Tensor:
        """The numbers for a batch, float64, in the order in which losses ask for them.

        Args:
            inputs: the model's inputs, flat.
            labels: labels and sample weights, flat.
            nest: the structure that the labels are flat of.

        Raises:
            ConfigError: if a mask depends on what a layer with weights or random numbers computes.
        """
        form = repr(nest)
        if form not in self._functions:

            def run(inputs: Sequence[Any], labels: Sequence[Any]) -> Tensor:
                return self._run(inputs, labels, nest)

            self._functions[form] = tf.function(run, autograph=False, reduce_retracing=True)
        with tf.device("/CPU:0"):
            return self._functions[form](list(inputs), list(labels))

    def _run(self, inputs: Sequence[Any], labels: Sequence[Any], nest: Structure) -> Tensor:
        unknown: set[str] = set()
        known = {key: (each, None) for key, each in zip(self._inputs, inputs, strict=True)}
        values = Values([], [])
        for part in self._parts:
            reads = [known[key] for key in part.chunk.reads]
            given = Values([tensor for tensor, _ in reads], [mask for _, mask in reads])
            weights = [_unknown(weight, unknown) for weight in part.weights]
            state = [_unknown(variable, unknown) for variable in part.state]
            values, _, _ = part.run(weights, state, given, tf.ones([3], tf.int64))
            pairs = zip(values.tensors, values.masks, strict=True)
            known.update(zip(part.chunk.writes, pairs, strict=True))
        result = self._denominators(values, labels, nest)
        _check(result, unknown)
        return tf.stack([tf.cast(each, tf.float64) for each in result])


def _unknown(variable: KerasVariable, names: set[str]) -> Tensor:
    """Stands for a variable's value, which nothing that is asked may depend on."""
    value = tf.identity(tf.zeros(variable.shape, variable.dtype))
    names.add(value.op.name)
    return value


def _check(found: Sequence[Any], unknown: set[str]) -> None:
    seen: set[str] = set()
    left = [tensor.op for tensor in found]
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


@dataclasses.dataclass(frozen=True)
class _Microbatch(KerasStep):
    """A microbatch's share of a Keras step: it counts as a replica does.

    Attributes:
        totals: the sums over the batch that losses ask for, in their order; None if not known.
        asked: one entry for each that has been asked for.
        microbatches: parts of the batch.
    """

    totals: Tensor | None = None
    asked: list[Any] = dataclasses.field(default_factory=list)
    microbatches: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the batch."""
        return self.microbatches == 1

    def sum(self, values: Structure) -> Any:
        """The sums over all microbatches, in the middle of one.

        Raises:
            _NeedsTotalsError: if it is not known.
        """
        totals = self.totals
        if totals is None:
            raise _NeedsTotalsError

        def total(value: Tensor) -> Tensor:
            self.asked.append(value)
            return tf.cast(totals[len(self.asked) - 1], value.dtype)

        return tf.nest.map_structure(total, values)

    def gather(self, rows: list[Any], where: str) -> tuple[list[Any], Tensor]:
        """Refuses: a microbatch is through before the next one comes.

        Raises:
            ConfigError: always.
        """
        del rows
        raise ConfigError(
            f"microbatches={self.microbatches} conflicts with a loss in which the examples of a "
            f"batch meet (at {where}): each microbatch would see its own only. Set microbatches=1, "
            "or choose another strategy."
        )


@dataclasses.dataclass(frozen=True)
class _WholeBatch(KerasStep):
    """All of a batch, when losses are asked what they are divided by.

    Attributes:
        found: that, in their order.
    """

    found: list[Any] = dataclasses.field(default_factory=list)

    def sum(self, values: Structure) -> Any:
        """The values themselves, which are noted."""
        self.found.extend(tf.nest.flatten(values))
        return values


class KerasObjective:
    """The objective of a compiled model: its losses and metrics.

    Args:
        model: the model.
        graph: its Functional graph.
        microbatches: parts of a batch.
        lock: held while Keras's variables are changed.

    Attributes:
        totals: computes the divisors of losses over masks.
        measured: set when Keras's metrics have seen a microbatch, so that they have a result.
    """

    def __init__(
        self,
        model: Model,
        graph: Functional,
        microbatches: int,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._model, self._graph, self._lock = model, graph, lock
        self._microbatches = microbatches
        self.totals: Totals | None = None
        self._needs_totals = False
        self._latest: tuple[int, Any] | None = None
        self.measured = threading.Event()
        own = type(model).compute_metrics is not Trainer.compute_metrics
        self._has_metrics = own or model._compile_metrics is not None
        self._add = tf.function(self._add_to_means, autograph=False)
        self._metrics = tf.function(self._update_metrics, autograph=False, reduce_retracing=True)

    def completed(self, given: Given, batch: Batch, microbatch: int) -> Given:
        """The inputs of the last chunk, with labels."""
        return dataclasses.replace(
            given,
            labels=batch.labels[microbatch],
            nest=batch.nest,
            form=batch.form,
            totals=self._totals_of(batch) if self._needs_totals else None,
        )

    def run(self, forward: Callable[[Given], Any], given: Given, batch: Batch, number: int) -> Any:
        """Runs the last chunk on a microbatch, with the totals that its losses ask for.

        Args:
            forward: runs it.
            given: its inputs, without labels.
            batch: the batch.
            number: of the microbatch.
        """
        try:
            return forward(self.completed(given, batch, number))
        except _NeedsTotalsError:
            # Raised when the graph is made, before anything has run.
            self._needs_totals = True
        return forward(self.completed(given, batch, number))

    def value(self, given: Given, outputs: Values) -> tuple[Any, Any]:
        """The loss of a microbatch, in a graph; see `stage_graph.Objective`."""
        with self._lock:  # Replicas of the pipeline may come at the same time.
            self._build(given, outputs)
        means = self._means()
        count, total = given.numbers[1], given.numbers[2]
        parts = self._microbatches
        step = _Microbatch(
            self._model, count, total, False, 1, totals=given.totals, microbatches=parts
        )
        # From zero: what is left in the variables is what this microbatch adds to them.
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in means]
        with keras.StatelessScope(state_mapping=zeros) as scope:
            loss = self._loss(step, given.labels, given.nest, outputs)
        added = [tf.cast(scope.get_current_value(variable), tf.float32) for variable in means]
        return loss, tf.stack(added) if added else None

    def denominators(self, outputs: Values, labels: Sequence[Any], nest: Structure) -> list[Any]:
        """The divisors of losses; see `tfdist.strategies.pipeline.loss.Denominators`."""
        one = tf.ones([], tf.int64)
        step = _WholeBatch(self._model, one, one, False, 1)
        with keras.StatelessScope():  # Keras's means of losses do not count this.
            self._loss(step, labels, nest, outputs)
        return step.found

    def _loss(
        self, step: KerasStep, labels: Sequence[Any], nest: Structure, outputs: Values
    ) -> Tensor:
        if self._model._compile_loss is None:  # Only losses of layers.
            return tf.zeros([])
        y, weight = keras.tree.pack_sequence_as(nest, list(labels))
        # Of a size that is known Keras weighs some batches by it, and those of other sizes by 1.
        y, weight, tensors = keras.tree.map_structure(of_any_size, (y, weight, outputs.tensors))
        with entered(step):
            loss = self._model._compile_loss(y, self._packed(tensors, outputs.masks), weight)
        return tf.zeros([]) if loss is None else loss

    def _packed(self, tensors: Sequence[Any], masks: Sequence[Any]) -> Structure:
        """The model's outputs in their structure, with Keras's masks."""
        for tensor, mask in zip(tensors, masks, strict=True):
            if mask is not None:
                tensor._keras_mask = mask
        return keras.tree.pack_sequence_as(self._graph._outputs_struct, tensors)

    def _totals_of(self, batch: Batch) -> Tensor | None:
        with self._lock:
            if self._latest is None or self._latest[0] != batch.number:
                assert self.totals is not None
                result = self.totals.of(batch.inputs, batch.targets, batch.nest)
                self._latest = (batch.number, result)
            return self._latest[1]

    def note(self, batch: Batch, microbatch: int, result: Result) -> None:
        """Updates Keras's metrics."""
        if self._has_metrics or result.noted is not None:
            x, y, weight = batch.examples[microbatch]
            values = result.values
            with self._lock:
                if self._has_metrics:
                    self._metrics(x, y, weight, values.tensors, values.masks)
                if result.noted is not None:
                    self._add(result.noted)
        self.measured.set()

    def _means(self) -> list[Any]:
        """The mean losses of several outputs that Keras keeps in metrics."""
        loss = self._model._compile_loss
        metrics = [] if loss is None else loss.metrics
        return [variable for metric in metrics for variable in metric.variables]

    def _add_to_means(self, noted: Tensor) -> None:
        for number, variable in enumerate(self._means()):
            variable.assign_add(tf.cast(noted[number], variable.dtype))

    def _build(self, given: Given, outputs: Values) -> None:
        """Lets Keras make its means, in a graph that is thrown away."""
        if self._model._compile_loss is None or self._model._compile_loss.built:
            return
        one = tf.ones([], tf.int64)
        step = _WholeBatch(self._model, one, one, False, 1)

        def run(*labels: Any) -> None:
            each = iter(labels)
            flat = [None if label is None else next(each) for label in given.labels]
            self._loss(step, flat, given.nest, outputs)

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in given.labels if t is not None]
        tf.function(run, autograph=False).get_concrete_function(*specs)

    def _update_metrics(
        self,
        x: Structure,
        y: Structure,
        weight: Structure,
        tensors: Sequence[Tensor],
        masks: Sequence[Tensor | None],
    ) -> None:
        outputs = self._packed(tensors, masks)
        self._model.compute_metrics(x, y, outputs, sample_weight=weight)
