"""Reports of training on parameter servers to the user: placement, staleness, NaNs."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, SupportsFloat

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfdist import types
from tfdist._keras import CallbackList, keras_callbacks
from tfdist.errors import TfdistError
from tfdist.keras import progress
from tfdist.keras.hooks import Hook
from tfdist.strategies.parameter_server.servers import Shelves
from tfdist.strategies.parameter_server.step_function import Serving
from tfdist.types import Logs

__all__ = ["Counted", "hooks"]


@dataclasses.dataclass
class Counted:
    """The events of a span of time.

    Attributes:
        seconds: how long it was.
        updates: updates that the servers made.
        dropped: gradients that were discarded.
        staleness: how many gradients were applied at each staleness, from 0.
        steps: steps finished, by worker.
    """

    seconds: float
    updates: int
    dropped: int
    staleness: list[int]
    steps: dict[int, int]

    @property
    def mean(self) -> float:
        """Mean staleness of the gradients that were applied."""
        applied = sum(self.staleness)
        return sum(i * n for i, n in enumerate(self.staleness)) / applied if applied else 0.0

    @property
    def longest(self) -> int:
        """Largest staleness of a gradient that was applied."""
        return max((i for i, n in enumerate(self.staleness) if n), default=0)

    @property
    def rate(self) -> float:
        """Updates a second."""
        return self.updates / max(self.seconds, 1e-9)


def hooks(serving: Serving) -> list[Hook]:
    """The seams at which training begins, an epoch ends and training ends."""
    training = _Training(serving)
    serving.report_placement = training.report_placement
    return [
        Hook(CallbackList, "on_train_begin", training.begins),
        Hook(CallbackList, "on_epoch_end", training.epoch_ends),
        Hook(CallbackList, "on_train_end", training.ends),
    ]


class _Training:
    """The reports of a `fit`, which count from one look to the next."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._reported_variables = serving, 0
        self._epochs: list[Counted] = []
        self._last: _Sums | None = None

    def begins(self, original: Callable[..., None]) -> Callable[..., None]:
        """Starts counting."""

        @wraps(original)
        def on_train_begin(callbacks: types.CallbackList, logs: Logs | None = None) -> None:
            self._epochs, self._last = [], _Sums(self._serving)
            self._serving.servers.counts.drain()
            self._serving.epochs = self._epochs
            self._serving.verbose = callbacks.params.get("verbose") != 0
            original(callbacks, logs)

        return on_train_begin

    def epoch_ends(self, original: Callable[..., None]) -> Callable[..., None]:
        """Adds an epoch's counts to its logs, the history and TensorBoard."""

        @wraps(original)
        def on_epoch_end(
            callbacks: types.CallbackList, epoch: int, logs: Logs | None = None
        ) -> None:
            if self._last is None or logs is None:
                return original(callbacks, epoch, logs)
            _check_numbers(callbacks, logs, f"epoch {epoch + 1}")
            counted = self._count_since(self._last)
            self._epochs.append(counted)
            more = self._logs(counted)
            logs.update(more)
            original(callbacks, epoch, logs)
            _note(counted)
            if more:
                _write_histogram(callbacks, epoch, counted)

        return on_epoch_end

    def ends(self, original: Callable[..., None]) -> Callable[..., None]:
        """Shows the table of all epochs."""

        @wraps(original)
        def on_train_end(callbacks: types.CallbackList, logs: Logs | None = None) -> None:
            original(callbacks, logs)
            if self._epochs and self._serving.verbose:
                _print(_table_of(self._epochs, self._serving.servers.rule.mode))
            self._epochs, self._last = [], None

        return on_train_end

    def report_placement(self) -> None:
        """Shows the servers' variables unless the user has seen them."""
        shelves = self._serving.servers.shelves
        held = sum(len(each) for each in shelves.held)
        if held != self._reported_variables and self._serving.verbose:
            self._reported_variables = held
            _print(_table_of_placement(shelves))

    def _count_since(self, last: _Sums) -> Counted:
        """The events since `last`. All steps must have ended."""
        self._last = now = _Sums(self._serving)
        dropped, staleness = self._serving.servers.counts.drain()
        workers = range(self._serving.dispatcher.workers)
        return Counted(
            now.seconds - last.seconds,
            now.updates - last.updates,
            dropped + now.cancelled - last.cancelled,
            staleness[: max((i + 1 for i, n in enumerate(staleness) if n), default=0)],
            {worker: now.steps[worker] - last.steps[worker] for worker in workers},
        )

    def _logs(self, counted: Counted) -> dict[str, float]:
        rule = self._serving.servers.rule
        if rule.mode == "sync" and not rule.backup_workers:
            if counted.dropped:
                raise TfdistError(
                    f"{counted.dropped} gradients came to the servers when their update had been "
                    "made, though mode='sync' waits for all. Something else has updated the "
                    "servers' weights meanwhile: train one model at a time, or go on from the last "
                    "checkpoint."
                )
            return {}  # an epoch's logs are those of one process
        logs = {"gradients_dropped": counted.dropped, "updates_per_second": counted.rate}
        if rule.mode == "sync":
            return logs
        return {**logs, "staleness_mean": counted.mean, "staleness_max": counted.longest}


class _Sums:
    """The events of all time."""

    def __init__(self, serving: Serving) -> None:
        self.seconds = time.monotonic()
        self.updates = int(serving.servers.updates.version.numpy())
        self.steps = collections.Counter(serving.steps)
        self.cancelled = serving.cancelled


def _note(counted: Counted) -> None:
    """Writes an epoch's counts to the task's record."""
    noted = progress.current()
    if noted is not None:
        noted.add("served", **dataclasses.asdict(counted))


def _write_histogram(callbacks: types.CallbackList, epoch: int, counted: Counted) -> None:
    for callback in callbacks.callbacks:
        if isinstance(callback, keras_callbacks.TensorBoard):
            values = np.repeat(np.arange(len(counted.staleness)), counted.staleness)
            with callback._train_writer.as_default():
                tf.summary.histogram("staleness", values, step=epoch)


def _check_numbers(callbacks: types.CallbackList, logs: dict[str, Any], when: str) -> None:
    """Ends a training whose losses are NaN, unless the program looks out for that itself."""
    watched = any(isinstance(c, keras_callbacks.TerminateOnNaN) for c in callbacks.callbacks)
    bad = [name for name, value in logs.items() if name.endswith("loss") and _is_nan(value)]
    if bad and not watched:
        raise TfdistError(
            f"{', '.join(bad)} became NaN in {when}, and so may all weights on the servers. Lower "
            "the learning rate, clip the gradients (clipnorm=1.0), or look for NaN in the data, "
            "and go on from the last checkpoint. keras.callbacks.TerminateOnNaN ends a training "
            "without this error."
        )


def _is_nan(value: SupportsFloat) -> bool:
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def _table_of_placement(shelves: Shelves) -> Table:
    table = Table(title="variables on the parameter servers", title_justify="left")
    for name in ("server", "variables", "MiB", "largest"):
        table.add_column(name, justify="right" if name != "largest" else "left")
    for server, held in enumerate(shelves.held):
        largest = sorted(held, key=lambda each: -each.bytes)[:3]
        names = ", ".join(
            f"{each.name} {'x'.join(map(str, each.shape)) or 'scalar'}" for each in largest
        )
        size = f"{shelves.bytes_on(server) / 2**20:.2f}"
        table.add_row(f"ps {server}", str(len(held)), size, names)
    return table


def _table_of(epochs: list[Counted], mode: str) -> Table:
    table = Table(title=f"parameter server, mode {mode}", title_justify="left")
    names = ("epoch", "updates", "updates/s", "dropped", "staleness mean", "max", "histogram")
    for name in (*names, "steps by worker"):
        table.add_column(name, justify="right")
    for number, each in list(enumerate(epochs, 1))[-12:]:
        table.add_row(
            str(number),
            str(each.updates),
            f"{each.rate:.1f}",
            str(each.dropped),
            f"{each.mean:.2f}",
            str(each.longest),
            " ".join(map(str, each.staleness)) if mode != "sync" else "-",
            " ".join(str(count) for count in each.steps.values()),
        )
    return table


def _print(table: Table) -> None:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    console.print(table)
