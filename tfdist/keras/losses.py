"""Losses inside a Keras step: each replica's own mean, as `replica_context.py` explains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._keras import Trainer, loss_module
from tfdist._tf.graphs import parallel_for
from tfdist.comm.batch_dependence import is_symbolic, is_weight
from tfdist.keras import gathered_loss, metric_updates
from tfdist.keras.batch_axes import batch_axis, holds_chosen
from tfdist.keras.example_pairs import ROWS, Examples
from tfdist.keras.gathered_loss import of_whole_batch
from tfdist.keras.hooks import (
    Hook,
    by_example,
    in_layer,
    of_weights,
    on_gradients,
    on_whole_batch,
    within_gradients,
)
from tfdist.keras.reductions import is_by_feature
from tfdist.keras.replica_context import Step, current_step, settling
from tfdist.keras.whole_batch import (
    as_average,
    check_given,
    check_places,
    note_meeting,
    settle,
    targets_of,
)
from tfdist.types import DType, Layer, Scalar, Structure, Tensor


def hooks() -> list[Hook]:
    """The seams of Keras's losses and metrics."""
    return [
        *gathered_loss.hooks(),
        *metric_updates.hooks(),
        Hook(keras.layers.Layer, "__call__", _noted_as_outputs),
        Hook(loss_module, "scale_loss_for_distribution", _unscaled),
        Hook(loss_module, "unscale_loss_for_distribution", _unscaled),
        Hook(loss_module, "reduce_weighted_values", _reduce_over_all_replicas),
        Hook(Trainer, "_aggregate_additional_loss", _added_as_average),
        *on_gradients(_of_whole_batch, priority=1),
        Hook(parallel_for, "pfor", _by_example),
        Hook(tf.distribute.ReplicaContext, "all_gather", _noted_as_gathered),
        Hook(tf.nn, "compute_average_loss", _average_as_if_alone),
        Hook(tf.nn, "scale_regularization_loss", _regularization_as_if_alone),
    ]


def _unscaled(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Leaves a loss alone in a Keras step, and where it is computed on the whole batch."""

    @functools.wraps(original)
    def scale(value: Tensor) -> Tensor:
        whole = on_whole_batch.is_up or tf.distribute.in_cross_replica_context()
        return value if current_step() or whole else original(value)

    return scale


def _reduce_over_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Corrects the reductions whose mean is not one over the examples."""

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Tensor,
        sample_weight: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | DType | None = None,
    ) -> Tensor:
        step = current_step()
        if step is None:
            return original(values, sample_weight, mask, reduction, dtype)
        values, mask = of_whole_batch(step, values, mask)
        # A loss that has reduced the batch by itself: whatever it is, it counts as an average.
        whole = len(getattr(values, "shape", [None])) == 0
        values = as_average(step, values) if whole else values
        loss = original(values, sample_weight, mask, reduction, dtype)
        if loss.shape.rank != 0 or reduction in (None, "none"):
            return loss
        if is_by_feature(values, step.depends, step.averages()):
            return step.note_mean(as_average(step, loss))
        if whole and any(each is not None and len(each.shape) for each in (sample_weight, mask)):
            factor = _whole_weight(step, original, sample_weight, mask, reduction)
            return step.note_mean(values * tf.cast(factor, values.dtype))
        if reduction == "sum" and not whole:
            return step.note_mean(_divide(loss, step.share(loss.dtype)))
        denominator = (
            None if whole else _denominator(step, loss, values, sample_weight, mask, reduction)
        )
        if denominator is not None:
            loss = loss * _correction(step, denominator)
        return step.note_mean(loss)

    return reduce_weighted_values


def _whole_weight(
    step: Step,
    original: Callable[..., Any],
    sample_weight: Tensor | None,
    mask: Tensor | None,
    reduction: str,
) -> Tensor:
    """The factor by which Keras multiplies a scalar loss, on the whole batch.

    Keras multiplies it by the weight of each example that a mask leaves, and reduces the products.
    """

    def total(weights: Tensor | None) -> Tensor:
        own = original(tf.ones([]), weights, mask, "sum")
        return step.sum(own * step.present(own.dtype))

    weight = total(sample_weight)
    if reduction == "sum":
        return weight
    is_count = reduction != "mean_with_sample_weight" and sample_weight is not None
    count = total(tf.ones_like(sample_weight)) if is_count else weight
    return tf.math.divide_no_nan(weight, count)


def _denominator(
    step: Step,
    loss: Tensor,
    values: Tensor,
    sample_weight: Tensor | None,
    mask: Tensor | None,
    reduction: str,
) -> Tensor | None:
    """The divisor of a replica, if that is not its number of examples; else None."""
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = tf.cast(sample_weight, loss.dtype)
        if mask is not None:
            weights = weights * tf.cast(mask, loss.dtype)
        return tf.reduce_sum(weights)
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, loss.dtype))
    if is_symbolic(values) and holds_chosen(values, step.depends):
        return tf.cast(tf.shape(values)[0], loss.dtype)
    return None


def _correction(step: Step, denominator: Tensor) -> Tensor:
    """Turns a share of the examples into a share of the denominators."""
    denominator = tf.stop_gradient(denominator) * step.present(denominator.dtype)
    total = step.sum(denominator)
    part = tf.math.divide_no_nan(denominator, total)
    return _divide(part, step.share(part.dtype))


def _divide(value: Tensor, share: Tensor) -> Tensor:
    return tf.math.divide_no_nan(value, share)


def _added_as_average(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the losses of `add_loss` and of activity regularizers, often sums, an average."""

    @functools.wraps(original)
    def aggregate(self: object, loss: Tensor) -> Tensor:
        total, step = original(self, loss), current_step()
        if step is None:
            return total
        if is_symbolic(total) and id(total) not in step.means:
            note_meeting(step, total)
        return as_average(step, total)

    return aggregate


def _divide_activities(step: Step, layer: Layer, outputs: list[object]) -> None:
    """Lets the activity regularizer of a layer be divided by the size of the whole batch.

    Keras divides by that of the replica's batch, as its last op. If that is a constant, nothing
    else in the graph would show it.
    """
    added, count = layer._losses, sum(keras.ops.is_tensor(each) for each in outputs)
    for place in range(max(len(added) - count, 0), len(added)):
        loss = added[place]
        if not is_symbolic(loss) or loss.op.type != "DivNoNan":
            continue
        value, size = loss.op.inputs
        if step.depends(value) and not step.depends(size):
            note_meeting(step, value)
            whole = as_average(step, value, is_sizeless=True)
            added[place] = step.note_mean(whole / (size * step.replicas))


def _noted_as_gathered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the rows of all replicas: a replica's own examples may meet these in a loss."""

    @functools.wraps(original)
    def all_gather(self: object, value: Structure, axis: int, options: object = None) -> Structure:
        step = current_step()
        if step is None:
            return original(self, value, axis, options)
        # TensorFlow refuses what has no device, such as an argument of a function.
        placed = tf.nest.map_structure(
            lambda x: tf.identity(x) if isinstance(x, tf.Tensor) else x, value
        )
        scaled = tf.nest.map_structure(lambda x: with_shares(step, x, inverse=True), placed)
        gathered = original(self, scaled, axis, options)
        gathered = tf.nest.map_structure(lambda x: with_shares(step, x), gathered)
        check_places(step, tf.nest.flatten(value))
        for old, new in zip(tf.nest.flatten(placed), tf.nest.flatten(gathered), strict=True):
            if is_symbolic(old) and is_symbolic(new) and old.shape.rank:
                at = axis % old.shape.rank
                new.set_shape([None if i == at else size for i, size in enumerate(old.shape)])
        for each in tf.nest.flatten(gathered):
            step.note_held(each, Examples())
            step.gathered.append(each)
        return gathered

    return all_gather


def with_shares(step: Step, value: Structure, *, inverse: bool = False) -> Structure:
    """A tensor with `Step.scale_gradient`, if it has a gradient that this would change."""
    if step.even or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    return step.scale_gradient(value, inverse=inverse)


def _noted_as_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the outputs of layers: a loss begins there. Names layers that mix a batch."""

    @functools.wraps(original)
    def call(self: Layer, *args: Structure, **kwargs: Structure) -> Structure:
        step = current_step() or settling.value
        if step is None or within_gradients.is_up:  # Computed again, as by `tf.recompute_grad`.
            return original(self, *args, **kwargs)
        # The values of a layer, and of a loss, are looked into when it has returned.
        if not in_layer.is_up and not step.calls:
            check_given(step, (args, kwargs))
        with in_layer.up():
            outputs = original(self, *args, **kwargs)
        if self.activity_regularizer is not None and step.is_static and not step.is_whole:
            _divide_activities(step, self, tf.nest.flatten(outputs))
        settled(step, self, (args, kwargs), tf.nest.flatten(outputs))
        return outputs

    return call


def settled(step: Step, layer: Layer, arguments: Structure, outputs: list[Any]) -> None:
    """Notes the outputs of a layer, and names it if it mixes a part of a batch."""
    if not step.is_whole:
        tensors = [each for each in outputs if is_symbolic(each)]
        settle(step, layer, arguments, tensors)
        step.outputs.update((id(each), each) for each in tensors)


def _of_whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the gradients of losses that a `train_step` has reduced by itself.

    The exchange averages those of weights. That of a replica's own examples, as adversarial
    training moves them by, is brought to the whole batch here: a mean has more examples there.
    """

    @functools.wraps(original)
    def gradient(
        self: object,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        **kwargs: object,
    ) -> Structure:
        step, targets = current_step(), tf.nest.flatten(target)
        is_inner = within_gradients.is_up and output_gradients is not None
        if step is None or by_example.is_up or is_inner:
            return original(self, target, sources, output_gradients, **kwargs)
        weights = has_weights(sources, step)
        if not weights and all(_is_by_example(step, each) for each in targets):
            with by_example.up():
                return original(self, target, sources, output_gradients, **kwargs)
        given = [None] * len(targets)
        if output_gradients is not None:
            given = tf.nest.flatten(output_gradients)
        parts = [_parts_of(step, *each) for each in zip(targets, given, strict=True)]
        pairs = [
            pair
            for each, part in zip(targets, parts, strict=True)
            for pair in ([(each, tf.ones_like(each))] if part is None else part)
        ]
        tensors, factors = [tensor for tensor, _ in pairs], [factor for _, factor in pairs]
        weight = step.weigh_final(targets) if output_gradients is None else None
        if weight is not None:
            factors = [factor * tf.cast(weight, factor.dtype) for factor in factors]
        with within_gradients.up():
            if weight is None and all(part is None for part in parts):
                result = original(self, target, sources, None, **kwargs)
            else:
                result = original(self, tensors, sources, factors, **kwargs)
        if any(id(each) in step.scaled_losses for each in targets):
            return result
        flat = zip(tf.nest.flatten(sources), tf.nest.flatten(result), strict=True)
        return tf.nest.pack_sequence_as(sources, [_own(step, x, grad) for x, grad in flat])

    return gradient


def _parts_of(
    step: Step, target: Tensor, output_gradient: Tensor | None
) -> list[tuple[Any, Any]] | None:
    """As `targets_of`, of a target whose elements count by an output gradient.

    That is the gradient of their products' sum, through the target alone.
    """
    if output_gradient is None or not target.dtype.is_floating:
        return targets_of(step, target)
    factor = tf.stop_gradient(tf.cast(output_gradient, target.dtype))
    total = tf.reduce_sum(target * factor)
    parts = targets_of(step, total)
    if parts is None:
        return [(target, factor)]
    return [(target, by * factor) if of is total else (of, by) for of, by in parts]


def _by_example(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves the gradients alone that `tf.vectorized_map` and `tape.jacobian` take one by one.

    Each is of one example's loss, as in differentially private training, or of one element.
    """

    @functools.wraps(original)
    def pfor(*args: object, **kwargs: object) -> object:
        with by_example.up():
            return original(*args, **kwargs)

    return pfor


def _is_by_example(step: Step, target: Tensor) -> bool:
    """Whether a target has a number for each example, so that none is a mean over a batch."""
    if step.is_whole or not is_symbolic(target) or not target.dtype.is_floating:
        return True
    return target.shape.rank != 0 and batch_axis(target, step.depends) is not None


def _own(step: Step, source: Any, gradient: Any) -> Any:
    """The gradient of the whole batch's loss, if it is one of a replica's own examples."""
    if step.is_whole or not is_of_examples(step, source) or not isinstance(gradient, tf.Tensor):
        return gradient
    result = step.weigh(gradient)
    step.note_held(result, Examples(ROWS))
    return result


def is_of_examples(step: Step, source: Any) -> bool:
    """Whether a source of a gradient is a tensor of the replica's own examples."""
    stands_in = is_weight(source) or id(source) in of_weights.value
    return is_symbolic(source) and not stands_in and step.depends(source)


def has_weights(sources: Structure, step: Step | None = None) -> bool:
    """Whether there is a variable among the sources of a gradient, or what all replicas share."""
    return any(
        id(each) in of_weights.value
        or isinstance(each, (keras.Variable, tf.Variable))
        or isinstance(getattr(each, "value", None), tf.Variable)
        or (step is not None and is_symbolic(each) and not step.depends(each))
        for each in tf.nest.flatten(sources)
    )


def _average_as_if_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides by the replica's own examples if no global batch size is given.

    TensorFlow's own divides by them times the number of replicas, whose sums it then adds up.
    """

    @functools.wraps(original)
    def compute_average_loss(
        per_example_loss: Tensor,
        sample_weight: Tensor | None = None,
        global_batch_size: Scalar | None = None,
    ) -> Tensor:
        step = current_step()
        if step is None or global_batch_size is not None:
            return original(per_example_loss, sample_weight, global_batch_size)
        loss = tf.convert_to_tensor(per_example_loss)
        if sample_weight is not None:
            loss = loss * tf.cast(sample_weight, loss.dtype)
        mean = tf.reduce_sum(loss) / tf.cast(tf.shape(loss)[0], loss.dtype)
        chosen = is_symbolic(loss) and holds_chosen(loss, step.depends)
        return mean if chosen else step.note_mean(mean)

    return compute_average_loss


def _regularization_as_if_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves a regularization whole: shares of it are averaged."""

    @functools.wraps(original)
    def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
        if current_step() is None:
            return original(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    return scale_regularization_loss
