"""Losses whose value on the whole batch is not the average of the replicas' values, made into one.

`reductions.py` finds the parts of a loss. Here its value and its gradient on the whole batch are
computed, in terms that the exchange of gradients averages (`step.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist._tf.graphs import constant_of, run_again
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.errors import ConfigError, EquivalenceWarning
from tfdist.keras.batch_axes import batch_axis
from tfdist.keras.example_pairs import (
    NO_EXAMPLES,
    ROWS,
    Examples,
    examples_of,
    meeting_of,
    statistic_in,
)
from tfdist.keras.hooks import is_of_program
from tfdist.keras.open_batch import SIZE_ADVICE, SIZE_NEEDED
from tfdist.keras.reductions import Leaf, Reduction, reduction_of
from tfdist.keras.replica_context import COMPUTED, KEPT, Step
from tfdist.types import Layer, Structure, Tensor
from tfdist.utils.messages import warn

__all__ = [
    "as_average",
    "check_given",
    "check_kept",
    "check_places",
    "computed_again",
    "examples_in",
    "held_examples",
    "note_meeting",
    "over_whole_batch",
    "settle",
    "targets_of",
]


#: The beginning of a sentence on a loss.
_LOSS = "The loss"


def as_average(
    step: Step, value: Tensor, *, name: str = _LOSS, is_sizeless: bool = False
) -> Tensor:
    """A loss, or another number, whose average over the replicas is its value on the whole batch.

    Its gradient is right as well: averaged over the replicas, it is that of the whole batch.

    Args:
        step: the calling replica's step.
        value: a number or a tensor; only a symbolic scalar of floating point is looked into.
        name: the beginning of a sentence on it.
        is_sizeless: whether no factor of a sum can be made of the size of a batch.

    Returns:
        `value` itself if that is so already.

    Raises:
        ConfigError: if the graph does not determine it.
    """
    if not is_symbolic(value) or value.shape.rank != 0 or not value.dtype.is_floating:
        _warn_of_eager(step, value)
        return value
    found = reduction_of(value, step.depends, step.averages())
    _warn_of_unknown(found, name)
    if found.is_mean or _is_hidden(found):
        return value
    total, parts = _derivatives(step, value, found, is_sizeless)
    # The value and the gradient apart: the value of a term is zero, and its gradient is the part's.
    terms = [
        tf.cast(
            tf.reduce_sum(tf.stop_gradient(factor) * (part - tf.stop_gradient(part))), value.dtype
        )
        for part, factor in parts
    ]
    result = tf.add_n([tf.stop_gradient(total), *terms])
    step.note_mean(result)
    return result


def targets_of(step: Step, target: Tensor) -> list[tuple[Any, Any]] | None:
    """Tensors, each with a factor, whose gradients add up to one that replicas may average.

    Args:
        step: the calling replica's step.
        target: a loss; one of rank 1 and more stands for the sum of its elements.

    Returns:
        None if the gradient of the target itself will do.

    Raises:
        ConfigError: as of `as_average`.
    """
    if not is_symbolic(target) or not target.dtype.is_floating:
        _warn_of_eager(step, target)
        return None
    note_meeting(step, target)
    if target.shape.rank != 0 and batch_axis(target, step.depends) is not None:
        _check_static(step, tf.constant(1.0))
        return [(target, tf.fill(tf.shape(target), step.per_share(target.dtype)))]
    result = reduction_of(target, step.depends, step.averages())
    _warn_of_unknown(result, _LOSS)
    if result.is_mean or _is_hidden(result):
        return None
    return _derivatives(step, target, result)[1]


def note_meeting(step: Step, target: Tensor) -> None:
    """Names a loss in which examples meet, unless they are those of all replicas.

    Statistics are looked for from the last layers on: layers that normalize a batch keep them.
    """
    if step.is_whole:
        return
    known = step.known
    found = meeting_of(target, step.depends, known)
    if found is None:
        known |= _outputs(step) | dict.fromkeys(step.means, Examples())
        found = meeting_of(target, step.depends, known, statistics=True)
    if found is not None:
        step.note_meeting(found)


def _outputs(step: Step) -> dict[int, Examples]:
    """The places of the examples in the outputs of layers, which a loop in one may hide."""
    orders = {key: examples.in_order for key, (_, examples) in step.settled.items()}
    return {
        key: Examples(ROWS, orders.get(key, False))
        for key, x in step.outputs.items()
        if x.shape.rank and step.depends(x)
    }


def check_places(step: Step, values: Sequence[Any]) -> None:
    """Names values to be gathered that examples have met in: a search goes no further than these.

    Args:
        step: the calling replica's step.
        values: tensors of the replica's own examples; only symbolic ones are looked into.
    """
    if step.is_whole:
        return
    given = [x for x in values if is_symbolic(x) and step.depends(x)]
    every = (step.known, step.known | _outputs(step))
    meetings = (meeting_of(x, step.depends, known) for known in every for x in given)
    found = next((each for each in meetings if each is not None), None)
    if found is not None:
        step.note_meeting(found)


def check_kept(step: Step, value: Tensor) -> None:
    """Names a value for a weight, a metric or a log in which examples meet by their places.

    Args:
        step: the calling replica's step.
        value: a symbolic tensor that depends on the batch.
    """
    if step.is_whole:
        return
    found = meeting_of(value, step.depends, _known_beside_means(step))
    if found is not None and found.by_place:
        step.note_meeting(found, KEPT)


def check_given(step: Step, values: Structure, place: str = COMPUTED) -> None:
    """Names values that a step gives to a layer or a loss, if a statistic of the batch is in them.

    Args:
        step: the calling replica's step.
        values: any nest of values; only symbolic ones are looked into.
        place: see `Step.note_meeting`.
    """
    if step.is_whole:
        return
    known = _known_beside_means(step)
    given = (x for x in tf.nest.flatten(values) if is_symbolic(x) and id(x) not in known)
    meetings = (statistic_in(x, step.depends, known) for x in given if step.depends(x))
    found = next((each for each in meetings if each is not None), None)
    if found is not None:
        step.note_meeting(found, place)


def settle(step: Step, layer: Layer, arguments: Structure, outputs: list[Any]) -> None:
    """Notes which outputs of a layer have a row for each example; names a layer that mixes these.

    Of a layer of Keras's own they have one if its inputs do: it keeps the examples apart, or
    normalizes them (`docs/promise.md`).

    Args:
        step: the calling replica's step.
        layer: a layer or operation that has just been called.
        arguments: the arguments of the call.
        outputs: the tensors that it has returned.
    """
    known = held_examples(step)
    is_own = is_of_program(type(layer).call) or isinstance(layer, keras.layers.Lambda)
    if is_own or not isinstance(layer, keras.layers.Layer):  # Such as `keras.ops.mean`.
        meets = functools.partial(meeting_of, depends=step.depends, known=known)
        meetings = (meets(x, statistics=True, counts=True) for x in outputs)
        found = next((each for each in meetings if each is not None), None)
        if found is None:
            return
        step.note_meeting(found, layer)
        held = Examples(ROWS, in_order=False)
    else:
        tensors = [x for x in tf.nest.flatten(arguments) if is_symbolic(x) and step.depends(x)]
        inputs = [examples_of(x, step.depends, known) for x in tensors]
        in_order = all(each.in_order for each in inputs)
        by_row = any(0 in each.axes for each in inputs)
        reduced = not by_row and any(each.reduced for each in inputs)
        held = Examples(ROWS if by_row else NO_EXAMPLES, in_order, reduced)
    for x in outputs:
        if step.depends(x):
            step.settled[id(x)] = (x, held if x.shape.rank else held._replace(axes=NO_EXAMPLES))
            if x.shape.rank and held.axes == ROWS:
                step.depends.rows[id(x)] = x


def examples_in(step: Step, tensor: Tensor) -> Examples:
    """The places of the examples in a tensor that layers have computed."""
    return examples_of(tensor, step.depends, held_examples(step))


def _known_beside_means(step: Step) -> dict[int, Examples]:
    return held_examples(step) | dict.fromkeys(step.means, Examples())


def held_examples(step: Step) -> dict[int, Examples]:
    """For tensors, by `id`, how they hold the examples: the batch, outputs of Keras's layers."""
    return step.known | {key: examples for key, (_, examples) in step.settled.items()}


def _is_hidden(found: Reduction) -> bool:
    """Whether nothing is known of a tensor: of averages of places a quantile would be nonsense."""
    return bool(found.unknown) and not found.linear


def _derivatives(
    step: Step, value: Tensor, found: Reduction, is_sizeless: bool = False
) -> tuple[Any, list[tuple[Any, Any]]]:
    """The value on the whole batch, and for each tensor that it is a function of its factor.

    If the value is linear in means and sums, a replica's part of it does: the average is the same.
    """
    _check_lengths(step, found)
    floating = [leaf.tensor.dtype.is_floating for leaf in found.leaves]
    scales = [
        _scale_of(step, leaf) if is_floating else None
        for leaf, is_floating in zip(found.leaves, floating, strict=True)
    ]
    if found.linear and all(floating):  # A count has no parts by share.
        leaves = [
            leaf.tensor if scale is None else tf.math.multiply_no_nan(leaf.tensor, scale)
            for leaf, scale in zip(found.leaves, scales, strict=True)
        ]
    else:
        leaves = over_whole_batch(step, found.leaves)
    total = computed_again(value, found, leaves)
    parts = []
    sources = [*leaves, *found.shared]
    factors = tf.compat.v1.gradients(total, sources, stop_gradients=sources)
    for leaf, scale, factor in zip(found.leaves, scales, factors, strict=False):
        if factor is not None and leaf.tensor.dtype.is_floating:
            if found.linear and leaf.is_sum and not is_sizeless:
                _check_static(step, factor)
            parts.append((leaf.tensor, factor if scale is None else factor * scale))
    for tensor, factor in zip(found.shared, factors[len(leaves) :], strict=True):
        if factor is not None:
            parts.append((tensor, factor))
    return total, parts


def _scale_of(step: Step, leaf: Leaf) -> Tensor | None:
    """The factor that makes of a replica's leaf what replicas may average; None for 1."""
    if leaf.chosen is not None:
        count = leaf.count() * step.present(leaf.tensor.dtype)
        return tf.math.divide_no_nan(count / step.sum(count), step.share(count.dtype))
    return step.per_share(leaf.tensor.dtype) if leaf.is_sum else None


def over_whole_batch(step: Step, leaves: list[Leaf]) -> list[Any]:
    """The values that means and sums have on the whole batch, by one all-reduce for each type."""
    own: list[Any] = []
    counts: dict[int, Any] = {}
    for leaf in leaves:
        tensor = tf.logical_not(leaf.tensor) if leaf.is_all else leaf.tensor
        tensor = tf.cast(tensor, tf.float32) if leaf.is_discrete else tensor
        if leaf.chosen is not None:
            counts[len(own)] = leaf.count() * step.present(tensor.dtype)
            own.append(tf.math.multiply_no_nan(tensor, counts[len(own)]))
        elif leaf.is_drawn:
            own.append(step.of_first(tensor))
        else:
            own.append(tensor * step.present(tensor.dtype) if leaf.is_sum else step.weigh(tensor))
    sums = step.sum([tf.stop_gradient(tensor) for tensor in [*own, *counts.values()]])
    for place, count in zip(counts, sums[len(own) :], strict=True):
        sums[place] = sums[place] / count
    return [_total(leaf, total) for leaf, total in zip(leaves, sums, strict=False)]


def _total(leaf: Leaf, total: Tensor) -> Tensor:
    """A leaf of the whole batch, of a sum over the replicas: of booleans, of ones and zeros."""
    result = tf.ensure_shape(tf.cast(total, leaf.tensor.dtype), leaf.tensor.shape)
    return tf.logical_not(result) if leaf.is_all else result


def computed_again(value: Tensor, found: Reduction, whole: list[Any]) -> Tensor:
    """Computes a value once more, from other leaves; all else that it reads is shared."""
    new = {id(leaf.tensor): total for leaf, total in zip(found.leaves, whole, strict=True)}
    for op in found.between:
        results = run_again(op, [new.get(id(x), x) for x in op.inputs])
        for old, result in zip(op.outputs, results, strict=True):
            new.setdefault(id(old), result)
    return new[id(value)]


def _check_static(step: Step, factor: Tensor) -> None:
    """Refuses a sum times a constant if the size of a batch is a constant too.

    `reduce_sum(loss) / x.shape[0]` and `reduce_sum(loss) / GLOBAL_BATCH` are then the same graph.
    """
    constant = tf.get_static_value(factor)
    if step.is_static and step.replicas > 1 and (constant is None or (constant != 1.0).any()):
        _refuse_static()


def _check_lengths(step: Step, found: Reduction) -> None:
    """Refuses a length of the batch that is a constant in a function of sums over the examples."""
    factors = (x for op in found.between if op.type in _SCALING for x in op.inputs)
    if step.is_static and step.replicas > 1 and any(_is_own_length(step, x) for x in factors):
        _refuse_static()


#: Ops by which a sum becomes a mean.
_SCALING = frozenset({"Mul", "RealDiv", "Div", "DivNoNan"})
#: The name of the constant that `tf.shape` makes of a shape that is known.
_SHAPE = re.compile(r"(^|/)Shape(_\d+)?$")


def _is_own_length(step: Step, number: Tensor) -> bool:
    """Whether a number is `tf.shape(x)[0]` of the replica's own examples."""
    while number.op.type in ("Cast", "Identity"):
        number = number.op.inputs[0]
    op = number.op
    if op.type != "StridedSlice" or not _SHAPE.search(op.inputs[0].op.name):
        return False
    start, value = constant_of(op.inputs[1]), constant_of(number)
    return start is not None and not start.any() and value is not None and value == step.size


def _refuse_static() -> NoReturn:
    raise ConfigError(
        f"The loss is a sum over the examples times a factor, and {SIZE_NEEDED}. So tfdist cannot "
        "tell whether the factor belongs to a replica's batch or to the global one. "
        f"{SIZE_ADVICE}, take the mean (tf.reduce_mean) instead of a sum, or leave drop_remainder "
        "out."
    )


def _warn_of_eager(step: Step, value: Tensor) -> None:
    if not tf.executing_eagerly() or not tf.is_tensor(value) or id(value) in step.means:
        return
    warn(
        "A step that runs eagerly (run_eagerly=True) does not show how a loss, or another number, "
        "depends on the examples. It is taken for a mean over them: several replicas train a sum, "
        "a ratio or a root differently from one. Leave run_eagerly out.",
        EquivalenceWarning,
    )


def _warn_of_unknown(found: Reduction, name: str) -> None:
    if not found.unknown:
        return
    otherwise = "the replicas' average is not what one process shows. Reduce it"
    if name == _LOSS:
        otherwise = "several replicas train it differently from one. Reduce a loss"
    warn(
        f"{name} is reduced to a number by {', '.join(sorted(found.unknown))}, which hides how it "
        "depends on the examples. It is taken for a mean over them: if it is none, "
        f"{otherwise} over the examples with a mean or a sum.",
        EquivalenceWarning,
    )
