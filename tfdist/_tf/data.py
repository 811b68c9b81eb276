"""Private names of TensorFlow's data sets and iterators, and the functions that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import debug_mode

from tfdist.types import Dataset, DatasetIterator, Tensor

__all__ = ["is_debugged", "next_of_this_process", "reshuffles", "resources_of", "unordered_steps"]


def unordered_steps(dataset: Dataset) -> list[str]:
    """Steps of a data set's pipeline whose order differs from run to run.

    They were made with `deterministic=False`, which the data set's options do not override.
    """
    return [
        type(step).__name__.lstrip("_").removesuffix("Dataset")
        for step, _ in _steps(dataset)
        if getattr(step, "_deterministic", None) == "false"
    ]


def _steps(dataset: Dataset) -> Iterator[tuple[Dataset, bool]]:
    """The steps of a data set's pipeline, each with whether a later one repeats it."""
    waiting = [(dataset, False)]
    while waiting:
        step, repeated = waiting.pop()
        yield step, repeated
        repeated = repeated or type(step).__name__ == "_RepeatDataset"
        waiting.extend((each, repeated) for each in step._inputs())


def is_debugged() -> bool:
    """Whether functions of `tf.data` run eagerly (`tf.data.experimental.enable_debug_mode`)."""
    return bool(debug_mode.DEBUG_MODE)


def reshuffles(dataset: Dataset) -> list[tuple[Dataset, bool]]:
    """The shuffles of a data set's pipeline that draw another order for each pass.

    Returns:
        Each with whether a pass over the data set may pass over it several times.
    """
    found = [
        each for each in _steps(dataset) if getattr(each[0], "_reshuffle_each_iteration", False)
    ]
    return list({id(step): (step, repeated) for step, repeated in found}.values())


def next_of_this_process(iterator: DatasetIterator) -> list[Any] | None:
    """The next values of an iterator on this process's replicas, or None at its end.

    `next` of a distributed iterator asks the other workers whether they are at their end, this
    function does not.
    """
    if not isinstance(iterator, tf.distribute.DistributedIterator):
        value = iterator.get_next_as_optional()
        return [value.get_value()] if value.has_value() else None
    result: list[Any] = []
    for own in iterator._iterators:
        for value in own.get_next_as_optional_list():
            if not value.has_value():
                return None
            result.append(value.get_value())
    return result


def resources_of(iterator: DatasetIterator) -> list[tuple[object, Tensor]]:
    """The objects that own the resources of an iterator, each with its resource.

    Args:
        iterator: of a data set, or of a distributed one. Others, such as generators, have none.
    """
    if isinstance(iterator, tf.distribute.DistributedIterator):
        owners = [own._iterator for own in iterator._iterators]
    else:
        owners = [iterator]
    owners = [
        each for owner in owners for each in (*getattr(owner, "_device_iterators", ()), owner)
    ]
    names = ("_iterator_resource", "_multi_device_iterator_resource")
    return [(owner, getattr(owner, n)) for owner in owners for n in names if hasattr(owner, n)]
