"""The report of a training: in logs, in the task's record, and as a table at the end of `fit`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import tensorflow as tf

from tfdist import types
from tfdist._keras import CallbackList
from tfdist.gradients.step_profiler import Meter, Split
from tfdist.keras import progress
from tfdist.keras.hooks import Hook
from tfdist.types import Logs

__all__ = ["hooks"]

_SPLITS = "_tfdist_splits"


def hooks() -> list[Hook]:
    """The seams at which `fit` begins and ends an epoch, ends a step, and ends."""
    return [
        Hook(CallbackList, "on_epoch_begin", _begin),
        Hook(CallbackList, "on_train_batch_end", _note_step, priority=2),
        Hook(CallbackList, "on_epoch_end", _add_to_logs, priority=1),
        Hook(CallbackList, "on_train_end", _show, priority=1),
    ]


def _meter() -> Meter | None:
    return getattr(tf.distribute.get_strategy(), "meter", None)


def _latest() -> Split | None:
    meter = _meter()
    return None if meter is None else meter.latest()


def _begin(original: Callable[..., None]) -> Callable[..., None]:
    """Counts the exchanges and the time of an epoch from its first step."""

    @functools.wraps(original)
    def on_epoch_begin(self: types.CallbackList, epoch: int, logs: Logs | None = None) -> None:
        original(self, epoch, logs)
        meter = _meter()
        if meter is not None:
            meter.begin()
        noted = progress.current()
        if noted is not None:
            noted.epoch_begins(self, epoch)

    return on_epoch_begin


def _note_step(original: Callable[..., None]) -> Callable[..., None]:
    """Notes steps in the task's record, with their parts if they are measured."""

    @functools.wraps(original)
    def on_train_batch_end(self: types.CallbackList, batch: int, logs: Logs | None = None) -> None:
        original(self, batch, logs)
        noted = progress.current()
        if noted is not None:
            noted.batch_ends(self, batch, logs, _latest)

    return on_train_batch_end


def _add_to_logs(original: Callable[..., None]) -> Callable[..., None]:
    """Adds the exchanges of an epoch to its logs, and these to the task's record."""

    @functools.wraps(original)
    def on_epoch_end(self: types.CallbackList, epoch: int, logs: Logs | None = None) -> None:
        meter = _meter()
        split = None if meter is None else meter.split()
        if split is not None:
            vars(self).setdefault(_SPLITS, []).append((epoch, split))
            logs = {**(logs or {}), **split.logs()}
        noted = progress.current()
        if noted is not None:
            noted.epoch_ends(logs)
        original(self, epoch, logs)

    return on_epoch_end


def _show(original: Callable[..., None]) -> Callable[..., None]:
    """Shows the exchanges of all epochs at the end."""

    @functools.wraps(original)
    def on_train_end(self: types.CallbackList, logs: Logs | None = None) -> None:
        splits = vars(self).pop(_SPLITS, [])
        if splits and getattr(tf.distribute.get_strategy(), "is_chief", True):
            print(table(splits), file=sys.stderr, flush=True)
        original(self, logs)

    return on_train_end


def table(splits: list[tuple[int, Split]]) -> str:
    """Lines for a terminal or a log: a row for each epoch.

    Args:
        splits: the epochs' numbers, from 0, with the parts of their mean step.
    """
    header = ("epoch", "steps", "step", "input", "compute", "waited", "hidden", "sent a step")
    rows = [
        (
            str(epoch + 1),
            str(split.steps),
            *(
                f"{value:.2f}"
                for value in (split.step, split.input, split.compute, split.waited, split.hidden)
            ),
            _size(split.sent),
        )
        for epoch, split in splits
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return "\n".join(
        [
            "tfdist: where the time of a step went, in ms, on this process's first replica "
            "(waited and hidden: exchange of gradients)",
            *(f"  {line}" for line in lines),
        ]
    )


def _size(count: float) -> str:
    for unit, bound in (("B", 1e3), ("kB", 1e6), ("MB", 1e9)):
        if count < bound:
            return f"{count / bound * 1e3:.4g} {unit}"
    return f"{count / 1e9:.4g} GB"
