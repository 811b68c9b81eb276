"""Keras's training function over a pipeline."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.trainer import Trainer

from tfdist.errors import ConfigError
from tfdist.keras.flags import exchanged
from tfdist.keras.step import Step as KerasStep
from tfdist.keras.step import entered
from tfdist.pipelines.cutting import cut
from tfdist.pipelines.engine import Engine
from tfdist.pipelines.parts import Part, Values
from tfdist.pipelines.schedules import is_synchronous
from tfdist.pipelines.shape import Shape
from tfdist.pipelines.splitting import examples_of, sizes_of, split_rows
from tfdist.pipelines.stages import chunks_of
from tfdist.pipelines.store import Batch
from tfdist.pipelines.sums import GradientSums
from tfdist.placement.devices import on
from tfdist.placement.place import place

__all__ = ["PipelineFunction"]


class _Microbatch(KerasStep):
    """A microbatch's share of a Keras step: it counts as a replica does."""

    def sum(self, values: Any) -> Any:
        """Refuses what needs all microbatches in the middle of one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "strategy='pipeline' cannot average a loss over a mask, or over sample weights "
            "(reduction='mean_with_sample_weight'): the number that it divides by is known only "
            "when all microbatches have been computed. Give the weights as sample_weight, with the "
            "loss's default reduction."
        )


class PipelineFunction:
    """What Keras calls for each step: `model.train_function`.

    Args:
        model: the model.
        shape: the pipeline.
        devices: full names; for each replica of the pipeline one for each stage.
        stages: the paths of the layers that stages begin with; None to plan by measurement.
    """

    def __init__(
        self,
        model: Any,
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
        self._measured = threading.Event()
        self._graph: Any = None
        self._loss = tf.function(self._compute_loss, autograph=False, reduce_retracing=True)
        self._metrics = tf.function(self._update_metrics, autograph=False, reduce_retracing=True)
        self._updates: dict[tuple[int, ...], Any] = {}

    def __call__(self, iterator: Any) -> Any:
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

    def _step(self, data: Any) -> None:
        examples = examples_of(data)
        sizes = sizes_of(examples, self._shape.microbatches, first=self.engine is None)
        if len(sizes) < self._shape.microbatches and not is_synchronous(self._shape.schedule):
            raise ConfigError(
                f"A batch of {examples} examples conflicts with microbatches="
                f"{self._shape.microbatches}, as schedule={self._shape.schedule!r} goes on from "
                "batch to batch. Leave the last batch out (drop_remainder=True)."
            )
        engine = self.engine or self._build(data, sizes[0])
        x, _, _ = unpack_x_y_sample_weight(data)
        flat = self._graph._standardize_inputs(x)
        inputs = split_rows(flat, sizes)
        scale = 1.0
        if self._model.optimizer is not None:
            scale = float(self._model.optimizer.scale_loss(tf.constant(1.0)))
        batch = Batch(
            number=0,
            examples=[unpack_x_y_sample_weight(part) for part in split_rows(data, sizes)],
            sizes=sizes,
            scale=scale,
            version=(),
        )
        self._sizes[engine.number] = examples
        self._track(engine.train(inputs, batch))
        # Keras's metrics have a result when they have seen a microbatch.
        engine.wait_for(self._measured)

    def _build(self, data: Any, size: int) -> Engine:
        """Cuts and places the model when the first batch is known."""
        x, _, _ = unpack_x_y_sample_weight(data)
        (first, *_) = split_rows(x, [size, examples_of(data) - size])
        chunk_of, table = chunks_of(self._model, first, self._shape.chunks, self._stages)
        made = cut(self._model, chunk_of, self._shape.chunks)
        self._graph = made.graph
        names = self._devices[0]
        if table:
            print(table, file=sys.stderr, flush=True)
        function = self._model.train_function
        place(
            self._model,
            {path: names[chunk % len(names)] for path, chunk in chunk_of.items()},
        )
        self._model.train_function = function
        self.engine = Engine(
            self._shape, made, self._devices, self._loss_of, self._apply, self._iterations
        )
        return self.engine

    def _iterations(self) -> int:
        return int(self._model.optimizer.iterations.numpy())

    def _track(self, losses: Mapping[int, float]) -> None:
        for number, loss in losses.items():
            self._model._loss_tracker.update_state(loss, sample_weight=self._sizes.pop(number))

    def _loss_of(self, batch: Batch, microbatch: int, outputs: Values) -> Any:
        x, y, weight = batch.examples[microbatch]
        counts = tf.constant([batch.sizes[microbatch], sum(batch.sizes)], tf.int64)
        loss = self._loss(y, weight, outputs.tensors, outputs.masks, counts)
        with self._lock:
            self._metrics(x, y, weight, outputs.tensors)
        self._measured.set()
        return loss

    def _compute_loss(self, y: Any, weight: Any, tensors: Any, masks: Any, counts: Any) -> Any:
        # Of a size that is known Keras weighs some batches by it, and those of other sizes by 1.
        y, weight, tensors = keras.tree.map_structure(_of_any_size, (y, weight, tensors))
        for tensor, mask in zip(tensors, masks, strict=True):
            if mask is not None:
                tensor._keras_mask = mask
        outputs = keras.tree.pack_sequence_as(self._graph._outputs_struct, tensors)
        step = _Microbatch(self._model, counts[0], counts[1], even=False, replicas=1)
        with entered(step):
            loss = self._model._compile_loss(y, outputs, weight)
        return tf.zeros([]) if loss is None else loss

    def _update_metrics(self, x: Any, y: Any, weight: Any, tensors: Any) -> None:
        outputs = keras.tree.pack_sequence_as(self._graph._outputs_struct, tensors)
        self._model.compute_metrics(x, y, outputs, sample_weight=weight)

    def _apply(
        self, sums: Sequence[tuple[Part, Sequence[GradientSums]]], before: int | None
    ) -> None:
        """Applies and clears gradients; see `tfdist.pipelines.engine.Apply`."""
        key = tuple(part.number for part, _ in sums)
        with self._lock:
            if key not in self._updates:
                self._updates[key] = tf.function(
                    lambda count: self._applied(sums, count), autograph=False
                )
            # The threads of a pipeline are in no scope of their own.
            with self._strategy.scope():
                self._updates[key](None if before is None else tf.constant(before, tf.int64))

    def _applied(self, sums: Sequence[tuple[Part, Sequence[GradientSums]]], before: Any) -> None:
        optimizer = self._model.optimizer
        if before is not None:
            iterations = optimizer.iterations._value
            iterations.assign(tf.cast(before, iterations.dtype))
        grads, weights = [], []
        for part, parts in sums:
            for i, weight in enumerate(part.weights):
                if any(each.touched[i] for each in parts):
                    with on(part.device):
                        grads.append(tf.add_n([each.variables[i].read_value() for each in parts]))
                    weights.append(weight)

        def on_replica() -> None:
            with exchanged.up():
                optimizer.apply(grads, weights)

        self._strategy.run(on_replica)
        for _, parts in sums:
            for each in parts:
                each.clear()


def _of_any_size(tensor: Any) -> Any:
    if tensor is None or not tensor.shape.rank:
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _check(model: Any, shape: Shape) -> None:
    """Refuses what a pipeline cannot run, before the first step.

    Raises:
        ConfigError: for a `train_step` or `compute_loss` of the model's own, for eager steps, and
            for a clipping over all weights where each stage updates by itself.
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
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not is_synchronous(shape.schedule):
        _check_asynchronous(model.optimizer, optimizer, shape.schedule)


def _check_asynchronous(outer: Any, optimizer: Any, schedule: str) -> None:
    what = ""
    if outer is not optimizer:
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
