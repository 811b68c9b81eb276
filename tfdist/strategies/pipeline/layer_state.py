"""Values that layers of a program's own assign in a microbatch, so that their average is right.

Each microbatch starts from the state at the begin of the batch, and the average of what they make
of it, by examples, becomes the state. That is right for a mean over the examples, and for what does
not depend on them. A sum is brought into that form first; all else is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NoReturn

import tensorflow as tf

from tfdist._tf.graphs import assigned_variables
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.errors import ConfigError
from tfdist.keras.assignments import holds_examples
from tfdist.keras.hooks import is_of_program
from tfdist.keras.reductions import Leaf, is_count, reduction_of
from tfdist.keras.stateless import Assigning
from tfdist.keras.whole_batch import computed_again
from tfdist.keras.whole_statistics import with_whole_statistics
from tfdist.strategies.pipeline.microbatch import Microbatch
from tfdist.types import FuncGraph, KerasVariable, Layer, Model, Tensor

__all__ = [
    "check_plain_variables",
    "on_whole_batch",
    "refuse_outside",
    "refuse_reads",
    "states_of_program",
]

_ADVICE = "Set microbatches=1, or choose another strategy."


def states_of_program(layers: Sequence[Layer]) -> set[int]:
    """The `id`s of the variables of layers of the program's own, and of metrics within layers."""
    every = [each for layer in layers for each in layer._flatten_layers()]
    own = [each for each in every if is_of_program(type(each).call)]
    kept = {id(v) for each in own for v in each._trainable_variables}
    kept |= {id(v) for each in own for v in each._non_trainable_variables}
    return kept | {id(v) for each in every for v in each.metrics_variables}


def on_whole_batch(step: Microbatch, variable: KerasVariable, value: Tensor) -> Tensor:
    """A value whose average over the microbatches is what one process assigns.

    Args:
        step: the microbatch's.
        variable: a layer's.
        value: its value after the microbatch.

    Raises:
        ConfigError: if the value is neither a mean nor a sum over the examples.
    """
    if step.is_whole or not is_symbolic(value) or not step.depends(value):
        return value

    def refuse(what: str) -> NoReturn:
        raise ConfigError(
            f"microbatches={step.microbatches} conflicts with a layer that assigns "
            f"{variable.path!r}: {what}, of which a microbatch has its own only. {_ADVICE}"
        )

    def refuse_total(total: Tensor) -> Tensor:
        del total
        refuse("its new value is computed from a statistic of the examples")

    if holds_examples(step, value):
        refuse("it keeps rows of the batch")
    with_whole_statistics(dataclasses.replace(step, total_of=refuse_total), value)
    found = reduction_of(value, step.depends, step.averages())
    counts = all(is_count(leaf.tensor) for leaf in found.leaves)
    is_average = found.linear and value.dtype.is_floating and not any(map(_is_apart, found.leaves))
    if found.unknown or not (counts or is_average):
        refuse("its new value is neither a mean nor a sum over the examples")
    return computed_again(value, found, [_as_average(step, leaf) for leaf in found.leaves])


def _is_apart(leaf: Leaf) -> bool:
    """Whether a leaf has no average by examples, or is a whole number or a boolean."""
    is_whole = leaf.is_discrete and not is_count(leaf.tensor)
    return leaf.chosen is not None or leaf.is_drawn or is_whole


def _as_average(step: Microbatch, leaf: Leaf) -> Tensor:
    tensor = leaf.tensor
    if is_count(tensor):  # A multiple of the number of examples: exactly the batch's.
        whole = tf.cast(tensor, tf.int64) * step.total // tf.maximum(step.count, 1)
        return tf.ensure_shape(tf.cast(whole, tensor.dtype), tensor.shape)
    return tensor * step.per_share(tensor.dtype) if leaf.is_sum else tensor


def refuse_outside(where: str, scope: Assigning, known: Iterable[KerasVariable]) -> None:
    """Refuses assignments to variables that a part of the program does not hold.

    Args:
        where: the part of the program.
        scope: the scope that it ran in.
        known: the variables that it holds.

    Raises:
        ConfigError: if it has assigned another one.
    """
    others = scope.others(known)
    if others:
        raise ConfigError(
            f"strategy='pipeline' conflicts with the assignment of {others[0].path!r} in {where}, "
            "which does not hold it. Let a layer assign weights of its own, made by "
            "self.add_weight(trainable=False), or choose another strategy."
        )


def refuse_reads(model: Model, by: str, because: str) -> None:
    """Refuses that the graph being traced reads a model's weights from their variables.

    The stages get weights as values, and give gradients of these.

    Args:
        model: the model.
        by: the part of the program that is traced.
        because: the reason, and a remedy.

    Raises:
        ConfigError: if it reads one.
    """
    graph = tf.compat.v1.get_default_graph()  # With run_functions_eagerly no function's.
    captured = {id(outer) for outer, _ in getattr(graph, "captures", ())}
    for variable in model.variables:
        if id(variable._value.handle) in captured:
            raise ConfigError(
                f"strategy='pipeline' conflicts with {by} that reads {variable.path!r}, a weight "
                f"of another layer: {because}"
            )


def check_plain_variables(graph: FuncGraph, microbatches: int, recompute: bool) -> None:
    """Refuses variables of TensorFlow's own that more than one forward pass would assign.

    Args:
        graph: that of a forward pass.
        microbatches: parts of the batch.
        recompute: whether a forward pass runs again in the backward pass.

    Raises:
        ConfigError: if it assigns one.
    """
    found = assigned_variables(graph) if microbatches > 1 or recompute else []
    if found:
        option = f"microbatches={microbatches}" if microbatches > 1 else "recompute=True"
        raise ConfigError(
            f"{option} conflicts with a layer that assigns the tf.Variable {found[0]!r}: it would "
            "be assigned several times in a batch. Make it by self.add_weight(trainable=False), "
            "which keeps the value of the whole batch, or choose another strategy."
        )
