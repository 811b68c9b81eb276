"""Private parts of TensorFlow's data sets, iterators and seeds."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context

from tfdist.types import DatasetIterator

__all__ = ["next_of_this_process", "seeded"]


def next_of_this_process(iterator: DatasetIterator) -> list[Any] | None:
    """The next values of a distributed iterator on this process's replicas, or None at its end.

    `next(iterator)` asks the other workers whether they are at their end, this function does not.
    """
    result: list[Any] = []
    for own in iterator._iterators:
        for value in own.get_next_as_optional_list():
            if not value.has_value():
                return None
            result.append(value.get_value())
    return result


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Makes everything in the block as if `seed` had been given to `tf.random.set_seed`.

    The program's own seed, and the counter from which ops draw theirs, go on afterwards as if
    nothing had been built.
    """
    own = context.context()
    before = own._seed, own._rng
    own._seed, own._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        own._seed, own._rng = before
