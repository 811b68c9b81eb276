"""Gradient functions of a program (`tf.custom_gradient`), given what one process gives them.

A replica's gradients are of the mean of its own examples, and larger than those of the whole batch.
They are weighed before such a function sees them, so that one that clips each element clips the
same elements. A function in which examples meet, as in the norm of all gradients, is named.

Layers in float8 return new scales as gradients, which overwrite the old ones. They follow the
largest values of a batch, of which a replica has its own examples only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TypeAlias

import tensorflow as tf

from tfdist._tf.graphs import custom_gradients
from tfdist.comm.batch_dependence import is_symbolic
from tfdist.errors import ConfigError
from tfdist.keras.batch_axes import batch_axis
from tfdist.keras.example_pairs import ROWS, Examples, Meeting, meeting_of, place_of
from tfdist.keras.hooks import Hook, by_example, is_of_program
from tfdist.keras.reductions import reduction_of
from tfdist.keras.replica_context import GRADIENT, Step, current_step, settling
from tfdist.keras.whole_batch import held_examples
from tfdist.types import Structure, Tensor

__all__ = ["check_overwritten", "hooks", "overwritten_in"]

#: Returns the gradients of the arguments of a function for those of its results.
Backward: TypeAlias = Callable[..., Structure]
#: The function that `tf.custom_gradient` is given.
Forward: TypeAlias = Callable[..., tuple[Structure, Backward]]


def hooks() -> list[Hook]:
    """The seam of TensorFlow's gradient functions."""
    return [Hook(custom_gradients, "_graph_mode_decorator", _given_whole_gradients)]


def _given_whole_gradients(original: Callable[..., object]) -> Callable[..., object]:
    """Gives a gradient function of the program's own what one process gives it."""

    @functools.wraps(original)
    def in_graph(f: Forward, args: object, kwargs: object) -> object:
        step = current_step() or settling.value
        if step is None or not is_of_program(f) or _is_of_tensorflow(f):
            return original(f, args, kwargs)
        name = getattr(f, "__name__", repr(f))

        @functools.wraps(f)
        def forward(*args: Structure, **kwargs: object) -> tuple[Structure, Backward]:
            results, backward = f(*args, **kwargs)
            held = tf.nest.flatten(args)
            return results, _weighing(step, backward, name, held, tf.nest.flatten(results))

        return original(forward, args, kwargs)

    return in_graph


def overwritten_in(weights: Iterable[object]) -> str | None:
    """The path of the first weight that is overwritten with its gradient, or None."""
    found = (each for each in weights if getattr(each, "overwrite_with_gradient", False))
    return next((str(getattr(each, "path", each)) for each in found), None)


def check_overwritten(weights: Iterable[object], parts: str) -> None:
    """Rejects float8 layers where no process sees a whole batch.

    Args:
        weights: those that are trained.
        parts: how batches are divided, to follow "conflicts with".

    Raises:
        ConfigError: if a weight is overwritten with its gradient.
    """
    path = overwritten_in(weights)
    if path is not None:
        raise ConfigError(
            f"The weight {path!r} of a layer in float8 conflicts with {parts}: it follows the "
            "largest values of the whole batch. Train with strategy='single', or in place of "
            "quantize('float8') with the dtype policy 'mixed_bfloat16'."
        )


def _is_of_tensorflow(f: object) -> bool:
    return str(getattr(f, "__module__", "")).startswith("tensorflow.")


def _weighing(
    step: Step, backward: Backward, name: str, held: list[Tensor], results: list[Tensor]
) -> Backward:
    def weighed(*gradients: Tensor, **kwargs: object) -> Structure:
        if step.is_whole or by_example.is_up:
            return backward(*gradients, **kwargs)
        is_weighed = bool(step.scaled_losses) or step is not current_step()
        whole = gradients if is_weighed else tf.nest.map_structure(step.weigh, gradients)
        taken = backward(*whole, **kwargs)
        own = [x for x in tf.nest.flatten(taken) if is_symbolic(x) and step.depends(x)]
        found = _meeting(step, own, list(zip(whole, results, strict=False)), held)
        if found is not None:
            step.note_meeting(found._replace(where=f"{found.where}, of {name!r}"), GRADIENT)
        return taken if is_weighed else tf.nest.map_structure(step.unweigh, taken)

    if "variables" not in inspect.signature(backward).parameters:
        return lambda *gradients: weighed(*gradients)
    return lambda *gradients, variables=None: weighed(*gradients, variables=variables)


def _meeting(
    step: Step, taken: list[Tensor], given: list[tuple[Tensor, Tensor]], held: list[Tensor]
) -> Meeting | None:
    """Finds where examples meet from the gradients that a function is given to those it returns.

    Args:
        step: the calling replica's step.
        taken: the gradients that it returns.
        given: the gradients that it is given, each with the result whose gradient that is. If the
            result has no rows of the batch, as a weight's value, a replica has a part of a sum,
            which only a linear function keeps one.
        held: the arguments of the forward function.
    """
    is_by_row = {id(x): _has_rows(step, result) for x, result in given}
    sums = {id(x): x for x, _ in given if not is_by_row[id(x)]}
    depends = step.depends.beside((), reduced=sums)
    known = held_examples(step)
    known |= {id(x): Examples(ROWS) for x in held if is_symbolic(x) and _has_rows(step, x)}
    known |= {key: Examples(ROWS) if rows else Examples() for key, rows in is_by_row.items()}
    for each in taken:
        if each.shape.rank != 0 and batch_axis(each, depends) is not None:
            found = meeting_of(each, depends, known, statistics=True, counts=True)
            if found is not None:
                return found
        elif not reduction_of(each, depends, sums).linear:
            return Meeting(place_of(each.op))
    return None


def _has_rows(step: Step, tensor: Tensor) -> bool:
    return step.depends(tensor) and batch_axis(tensor, step.depends) is not None
