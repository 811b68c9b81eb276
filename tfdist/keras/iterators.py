"""Making the iterators of an epoch when they are read, and freeing them on a thread of its own.

Keras makes an iterator at the end of each pass over arrays, and another at the beginning of the
next; only the last one is read (`EpochIterator._enumerate_iterator`). Each costs as much as some
small steps. Those of data sets are all made: a shuffle draws its next order with each.

The destructor of a `tf.data` iterator waits for TensorFlow's autotuning thread. That thread can
miss the end, and then sleeps out its period, which grows with the time since the iterator began, up
to a minute (`Model::OptimizeLoop` asks `IsCancelled` before `StartCancel` has set it). An epoch
then ends late by up to its own length, and all workers wait for the one that it happens to.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfdist import types
from tfdist._keras import ArrayDataAdapter, EpochIterator, TFEpochIterator
from tfdist._tf.data import resources_of
from tfdist.keras.hooks import Hook
from tfdist.utils.messages import logger

#: Seconds until a reference is dropped: by then the owner of the resource has dropped its own.
_PAUSE = 0.05
#: Seconds that the end of the process waits; the longest period of the autotuning thread.
_LONGEST = 60.0
#: Seconds of that after which it is reported.
_SAY_AFTER = 5.0
#: An attribute of an owner whose resource is left to the thread.
_LEFT = "_tfdist_left_to_thread"


class _Unmade:
    """An iterator of a data set, made when it is read."""

    def __init__(self, dataset: types.Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> _Unmade:
        return self

    def __next__(self) -> object:
        return next(self.iterator)

    @functools.cached_property
    def iterator(self) -> types.DatasetIterator:
        """The iterator."""
        made: types.DatasetIterator = iter(self._dataset)
        return made


class _Last(NamedTuple):
    """The last reference to a resource, and when it may go, in seconds of the monotonic clock."""

    due: float
    resource: object


def hooks() -> list[Hook]:
    """The seams at which Keras makes iterators and goes through an epoch."""
    return [
        Hook(TFEpochIterator, "_get_iterator", _made_later),
        Hook(EpochIterator, "_enumerate_iterator", _freed_by_thread, priority=-1),
    ]


def _made_later(original: Callable[..., Any]) -> Callable[..., Any]:
    """An iterator that is not read costs nothing."""

    @functools.wraps(original)
    def get_iterator(self: types.EpochIterator) -> object:
        dataset = original(self)
        return _Unmade(dataset) if isinstance(self.data_adapter, ArrayDataAdapter) else dataset

    return get_iterator


def _freed_by_thread(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The end of an epoch does not wait for TensorFlow's autotuning thread."""

    @functools.wraps(original)
    def enumerate_iterator(self: types.EpochIterator) -> Iterator[Any]:
        known = None
        for begin, end, batches in original(self):
            if isinstance(batches, _Unmade):
                batches = self._current_iterator = batches.iterator
            if batches is not known:
                known = batches
                _leave_to_thread(batches)
            yield begin, end, batches

    return enumerate_iterator


def _leave_to_thread(iterator: types.DatasetIterator) -> None:
    """Lets the thread drop the last references to the resources of an iterator.

    An iterator that is read on in the next epoch is seen again.
    """
    for owner, resource in resources_of(iterator):
        if _LEFT not in vars(owner):
            vars(owner)[_LEFT] = True
            weakref.finalize(owner, _leave, _last_references(), resource).atexit = False


def _leave(references: queue.SimpleQueue[_Last | None], resource: object) -> None:
    references.put(_Last(time.monotonic() + _PAUSE, resource))


@functools.cache
def _last_references() -> queue.SimpleQueue[_Last | None]:
    """The queue that the thread reads, which starts with the first call."""
    references: queue.SimpleQueue[_Last | None] = queue.SimpleQueue()
    name = "tfdist free iterators"
    thread = threading.Thread(target=_drop, args=(references,), name=name, daemon=True)
    thread.start()

    atexit.register(_finish, references, thread)
    return references


def _finish(references: queue.SimpleQueue[_Last | None], thread: threading.Thread) -> None:
    """TensorFlow's libraries may not end while an iterator is being destroyed."""
    references.put(None)
    thread.join(_SAY_AFTER)
    if thread.is_alive():
        logger.info(
            "the process ends when TensorFlow's autotuning of the input has, within "
            f"{_LONGEST:g} s; docs/troubleshooting.md, 'It is slow', has the reason"
        )
        thread.join(_LONGEST - _SAY_AFTER)


def _drop(references: queue.SimpleQueue[_Last | None]) -> None:
    """Drops references one after the other, until there is None."""
    for reference in iter(references.get, None):
        time.sleep(max(reference.due - time.monotonic(), 0.0))
        del reference
