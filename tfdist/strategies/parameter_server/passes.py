"""Passes over data sets that draw another order for each.

A shuffle of `tf.data` draws the seeds of a pass from a generator. In one process all iterators
share it: those of the data set itself, of what is derived from it (`take`, `map`, `batch`), and of
the program's own loops. Workers have copies of a data set, each with a generator of its own. So the
chief counts the passes over each shuffle, and a copy draws once for each pass that it has not read.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.data import reshuffles
from tfdist.errors import EquivalenceWarning
from tfdist.keras.hooks import STRATEGY, Hook
from tfdist.types import Dataset
from tfdist.utils.messages import warn

__all__ = ["Source", "begin_pass", "hooks", "read_here", "take_nearest"]

#: Attributes of a shuffle: the passes over it that have begun in the job, and those on the chief.
_BEGUN, _DRAWN = "_tfdist_passes", "_tfdist_draws"

#: TensorFlow's own function, also while it is hooked.
_iterate = tf.data.Dataset.__iter__


def hooks() -> list[Hook]:
    """The seam at which a pass on the chief begins."""
    return [Hook(tf.data.Dataset, "__iter__", _counted, STRATEGY)]


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copies on the workers do not know of passes on the chief, nor it of theirs."""

    @functools.wraps(original)
    def iterate(self: Dataset) -> Iterator[Any]:
        if not tf.executing_eagerly():
            return original(self)
        return read_here(self, begin_pass(self))

    return iterate


def begin_pass(dataset: Dataset) -> int:
    """Counts a pass over a data set.

    Returns:
        How many passes over its shuffles were begun before, by whichever data set has them too.
    """
    within = reshuffles(dataset)
    steps = [step for step, _ in within] or [dataset]
    counts = [vars(step).get(_BEGUN, 0) for step in steps]
    again = any(repeated and vars(step).get(_BEGUN, 0) for step, repeated in within)
    if again or len(set(counts)) > 1:
        _warn(again)
    for step, count in zip(steps, counts, strict=True):
        vars(step)[_BEGUN] = count + 1
    return max(counts)


def read_here(dataset: Dataset, number: int) -> Iterator[Any]:
    """An iterator on the chief for the pass after `number` others, which it may not have read."""
    for step, _ in reshuffles(dataset):
        for _ in range(number - vars(step).get(_DRAWN, 0)):
            _iterate(step)
        vars(step)[_DRAWN] = number + 1
    iterator: Iterator[Any] = _iterate(dataset)
    return iterator


class Source(NamedTuple):
    """A source on a worker, which is read in one direction.

    Attributes:
        lost: how often the worker had been lost when it was made.
        source: an iterator, or a data set that draws its orders pass by pass.
        place: the batch, or the pass, that comes next.
    """

    lost: int
    source: Any
    place: int


def take_nearest(
    sources: dict[int, list[Source]], worker: int, place: int, lost: int
) -> Source | None:
    """Takes the source of a worker from its list that is nearest before a place, if one is.

    A worker that does the parts of another reads a batch twice: it keeps a second source for that,
    which would begin from the start again at each step if it were not kept.

    Args:
        sources: those of each worker, of which the one that is returned is taken out.
        worker: the worker.
        place: the batch or the pass that is to be read.
        lost: how often the worker has been lost, and with it what it had then.
    """
    left = [each for each in sources.get(worker, []) if each.lost == lost]
    kept = sources[worker] = sorted(left, key=_place)
    before = bisect.bisect(kept, place, key=_place)
    return kept.pop(before - 1) if before else None


_place = operator.attrgetter("place")


def _warn(again: bool) -> None:
    what = (
        "A second pass has begun over a data set that repeats a shuffle (shuffle(…).repeat())"
        if again
        else "A data set has several shuffles, over some of which more passes have begun"
    )
    warn(
        f"{what}. Workers of strategy='parameter_server' read copies of it, which do not know how "
        "often the shuffle was drawn, so that the examples come in another order than in one "
        "process. Put repeat() before shuffle(), or pass reshuffle_each_iteration=False.",
        EquivalenceWarning,
    )
