"""Keras's training function over a pipeline."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import TensorFlowTrainer, Trainer, keras_backend, unpack_x_y_sample_weight
from tfdist.comm.halves import as_of_halves
from tfdist.errors import ConfigError
from tfdist.keras.gradient_functions import check_overwritten
from tfdist.keras.hooks import exchanged
from tfdist.placement.devices import on
from tfdist.placement.place import place
from tfdist.strategies.pipeline.engine import Engine
from tfdist.strategies.pipeline.loss import KerasObjective
from tfdist.strategies.pipeline.partitioning import check_stateless, cut
from tfdist.strategies.pipeline.schedules import Shape
from tfdist.strategies.pipeline.stage import GradientSums, Part
from tfdist.strategies.pipeline.state import Batch
from tfdist.types import (
    Gradient,
    KerasVariable,
    Logs,
    Model,
    Optimizer,
    Structure,
    Tensor,
)

__all__ = ["PipelineFunction"]


# A global batch as microbatches.


def _examples_of(data: Structure) -> int:
    """The number of examples of a batch.

    Args:
        data: a nest of tensors of shape `(batch, ...)`.

    Raises:
        ConfigError: if a tensor is ragged or sparse.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    for leaf in leaves:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ConfigError(
                f"strategy='pipeline' cannot split a {type(leaf).__name__} into microbatches. Make "
                "it dense in the data set: `tensor.to_tensor()` or `tf.sparse.to_dense(tensor)`."
            )
    if not leaves:
        raise ConfigError("The batch is empty: strategy='pipeline' found no tensor in it.")
    return int(leaves[0].shape[0])


def _sizes_of(examples: int, microbatches: int, *, first: bool) -> list[int]:
    """The sizes of the microbatches: alike, or in a last batch different by one at most.

    Args:
        examples: of the batch.
        microbatches: how many.
        first: whether this is the first batch, which must be divisible: its size is the program's,
            and not what is left at the end of the data.

    Raises:
        ConfigError: if the first batch cannot be divided.
    """
    if first and examples % microbatches:
        below = examples // microbatches * microbatches
        near = " or ".join(str(each) for each in (below, below + microbatches) if each)
        raise ConfigError(
            f"microbatches={microbatches} does not divide the batch of {examples} examples. Choose "
            f"a batch of {near} examples, or a number of microbatches that divides {examples}."
        )
    count = min(examples, microbatches)
    least, more = divmod(examples, count)
    return [least + (number < more) for number in range(count)]


def _split_rows(data: Structure, sizes: Sequence[int]) -> list[Any]:
    """Parts of a nest of tensors, one after the other.

    Args:
        data: a nest of tensors of shape `(batch, ...)` and Nones.
        sizes: the parts' numbers of examples.
    """
    flat = keras.tree.flatten(data)
    parts = [
        [None] * len(sizes) if leaf is None else tf.split(leaf, list(sizes), 0) for leaf in flat
    ]
    return [
        keras.tree.pack_sequence_as(data, [each[number] for each in parts])
        for number in range(len(sizes))
    ]


class PipelineFunction:
    """The function that Keras calls for each step: `model.train_function`.

    Args:
        model: the model.
        shape: the pipeline.
        devices: full names; for each replica of the pipeline one for each stage.
        stages: the paths of the layers that stages begin with; None to plan by measurement.

    Attributes:
        seen: called with the data of each step, before it is run.
    """

    seen: Callable[[Any], None] | None = None

    def __init__(
        self,
        model: Model,
        shape: Shape,
        devices: Sequence[Sequence[str]],
        stages: Sequence[str] | Mapping[str, int] | None,
    ) -> None:
        _check(model, shape)
        self._strategy = tf.distribute.get_strategy()
        self._model, self._shape, self._devices, self._stages = model, shape, devices, stages
        self.engine: Engine | None = None
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._updates: dict[Any, Any] = {}

    def __call__(self, iterator: Iterator[Any]) -> Logs:
        """Runs the steps of an execution.

        Args:
            iterator: an iterator over batches.

        Returns:
            The logs so far.

        Raises:
            StopIteration: at the end of the data.
        """
        for number in range(self._model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise
                break
            self._step(data)
        return self._model.get_metrics_result()

    def close(self) -> None:
        """Ends the pipeline's threads."""
        if self.engine is not None:
            self.engine.close()

    @property
    def is_under_way(self) -> bool:
        """Whether there are batches that have not ended."""
        return self.engine is not None and not self.engine.is_empty

    def flush(self) -> None:
        """Ends all batches under way, so that the weights are those of all batches given."""
        if self.engine is not None and self.is_under_way:
            self._track(self.engine.flush())

    def _step(self, data: Structure) -> None:
        if self.seen is not None:
            self.seen(data)
        count = _examples_of(data)
        sizes = _sizes_of(count, self._shape.microbatches, first=self.engine is None)
        if len(sizes) < self._shape.microbatches and not self._shape.is_synchronous:
            raise ConfigError(
                f"A batch of {count} examples conflicts with microbatches="
                f"{self._shape.microbatches}, as schedule={self._shape.schedule!r} goes on from "
                "batch to batch. Leave the last batch out (drop_remainder=True)."
            )
        engine = self.engine or self._build(data, sizes[0])
        x, *targets = unpack_x_y_sample_weight(data)
        inputs = engine.cut.graph._standardize_inputs(x)
        scale = 1.0
        if self._model.optimizer is not None:
            scale = float(self._model.optimizer.scale_loss(tf.constant(1.0)))
        batch = Batch(
            examples=[unpack_x_y_sample_weight(part) for part in _split_rows(data, sizes)],
            inputs=inputs,
            targets=tuple(targets),
            sizes=sizes,
            scale=scale,
        )
        self._sizes[engine.number] = count
        self._track(engine.train(_split_rows(inputs, sizes), batch))

    def _build(self, data: Structure, size: int) -> Engine:
        """Cuts and places the model when the first batch is known."""
        model, shape = self._model, self._shape
        x, _, _ = unpack_x_y_sample_weight(data)
        (first, *_) = _split_rows(x, [size, _examples_of(data) - size])
        check_stateless(model)
        if not model.built:  # As Keras does it: layers assign nothing.
            keras_backend.compute_output_spec(model, first, training=False)
        made = cut(model, first, shape.chunks, self._stages)
        if made.table:
            print(made.table, file=sys.stderr, flush=True)
        function = model.train_function
        names = self._devices[0]
        place(model, {path: names[chunk % shape.stages] for path, chunk in made.chunk_of.items()})
        model.train_function = function
        parts = [
            [
                Part(
                    made,
                    number,
                    names[number % shape.stages],
                    is_copy=replica > 0,
                    microbatches=shape.microbatches,
                )
                for number in range(shape.chunks)
            ]
            for replica, names in enumerate(self._devices)
        ]
        objective = KerasObjective(model, made, parts[0], shape.microbatches, self._lock)
        self.engine = Engine(shape, made, parts, objective, self._apply, self._iterations)
        return self.engine

    def _iterations(self) -> int:
        optimizer = self._model.optimizer
        assert optimizer is not None
        return int(optimizer.iterations.numpy())

    def _track(self, losses: Mapping[int, float]) -> None:
        for number, loss in losses.items():
            self._model._loss_tracker.update_state(loss, sample_weight=self._sizes.pop(number))

    def _apply(self, sums: Sequence[Sequence[GradientSums]], before: int | None) -> None:
        """Applies and clears gradients; see `tfdist.strategies.pipeline.engine.Apply`."""
        every = [each for replicas in sums for each in replicas]
        for each in every:
            each.settle()
        rows = [_rows_of(replicas) for replicas in sums]
        key = tuple(
            (replicas[0].part.number, *own, *(t for each in replicas for t in each.touched))
            for replicas, own in zip(sums, rows, strict=True)
        )
        with self._lock:
            if key not in self._updates:
                self._updates[key] = tf.function(
                    lambda count, rows: self._applied(sums, count, rows),
                    autograph=False,
                    reduce_retracing=True,
                )
            # The threads of a pipeline are in no scope of their own.
            with self._strategy.scope():
                count = None if before is None else tf.constant(before, tf.int64)
                self._updates[key](count, rows)
        for each in every:
            each.clear()

    def _applied(
        self, sums: Sequence[Sequence[GradientSums]], before: Tensor | None, rows: list[Any]
    ) -> None:
        optimizer = self._model.optimizer
        assert optimizer is not None
        if before is not None:
            iterations = optimizer.iterations._value
            iterations.assign(tf.cast(before, iterations.dtype))
        grads, weights = [], []
        for replicas, own in zip(sums, rows, strict=True):
            part = replicas[0].part
            for i, weight in enumerate(part.weights):
                with on(part.device):
                    grad = _sum_of(weight, i, replicas, own.get(str(i)))
                if grad is not None:
                    grads.append(grad)
                    weights.append(weight)

        def on_replica() -> None:
            with exchanged.up():
                optimizer.apply_gradients(zip(grads, weights, strict=True))

        self._strategy.run(on_replica)


def _rows_of(replicas: Sequence[GradientSums]) -> dict[str, tuple[Any, Any]]:
    """The gradients of rows of all microbatches and replicas, by the number of their weight.

    Rows that are looked up whatever the batch is, such as those of positions, come once.
    """
    result = {}
    with on(replicas[0].part.device):
        for i, own in enumerate(zip(*(each.rows for each in replicas), strict=True)):
            rows = [row for microbatches in own for row in microbatches]
            if rows:
                values, numbers, shared_values, shared_numbers = zip(*rows, strict=True)
                result[str(i)] = (
                    tf.concat([*values, tf.add_n(shared_values)], 0),
                    tf.concat([*numbers, shared_numbers[0]], 0),
                )
    return result


def _sum_of(
    weight: KerasVariable,
    i: int,
    replicas: Sequence[GradientSums],
    rows: tuple[Any, Any] | None,
) -> Gradient | None:
    """The gradient of a weight, in a graph; None if there is none."""
    dense = [each.variables[i].read_value() for each in replicas if each.touched[i]]
    if rows is None:
        if dense and any(i in each.of_halves for each in replicas):
            return as_of_halves(tf.add_n(dense))
        return tf.add_n(dense) if dense else None
    sparse = tf.IndexedSlices(*rows, tf.constant(list(weight.shape), rows[1].dtype))
    return tf.add_n([*dense, tf.convert_to_tensor(sparse)]) if dense else sparse


def _check(model: Model, shape: Shape) -> None:
    """Rejects models that a pipeline cannot run, before the first step.

    Raises:
        ConfigError: for a `train_step` or `compute_loss` of the model's own, for eager steps, and
            for a clipping over all weights if each stage updates by itself.
    """
    kind = type(model)
    for name, stock in (("train_step", TensorFlowTrainer), ("compute_loss", Trainer)):
        if getattr(kind, name) is not getattr(stock, name):
            raise ConfigError(
                f"{kind.__name__}.{name} conflicts with strategy='pipeline', which runs the model "
                "in parts. Use a compiled loss and `add_loss`, or strategy='single' with "
                "tfdist.place."
            )
    if model.run_eagerly:
        raise ConfigError(
            "run_eagerly=True conflicts with strategy='pipeline', whose stages run graphs. Compile "
            "with run_eagerly=False, or debug with strategy='single'."
        )
    check_overwritten(model.trainable_variables, "strategy='pipeline', which divides batches")
    if model.optimizer is not None and not shape.is_synchronous:
        _check_asynchronous(model.optimizer, shape.schedule)


def _check_asynchronous(optimizer: Optimizer, schedule: str) -> None:
    what = ""
    if hasattr(optimizer, "inner_optimizer"):
        what = "LossScaleOptimizer, whose scale changes between updates"
    elif optimizer.global_clipnorm is not None:
        what = f"global_clipnorm={optimizer.global_clipnorm}, the norm of all stages' gradients"
    elif optimizer.gradient_accumulation_steps:
        what = f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
    elif optimizer.use_ema:
        what = "use_ema=True"
    if what:
        raise ConfigError(
            f"The optimizer's {what} conflicts with schedule={schedule!r}, where each stage "
            "updates its own weights. Leave it out, or choose schedule='1f1b'."
        )
