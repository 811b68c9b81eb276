"""Reports of training on parameter servers to the user: placement, staleness, NaNs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfdist import types
from tfdist._keras import CallbackList, keras_callbacks
from tfdist.errors import TfdistError
from tfdist.keras.hooks import Hook
from tfdist.strategies.parameter_server.servers import Shelves
from tfdist.strategies.parameter_server.step_function import Serving
from tfdist.types import Logs

__all__ = ["Report", "check_numbers", "hooks", "placement_table"]


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


class Report:
    """Counts from one look to the next.

    Args:
        serving: runs the steps.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._since = time.monotonic()
        self._version = int(serving.servers.updates.version.numpy())
        self._steps: collections.Counter[int] = collections.Counter(serving.steps)
        self._cancelled = serving.cancelled
        serving.servers.counts.news()

    def look(self) -> Counted:
        """The events since the last look. All steps must have ended."""
        serving = self._serving
        dropped, staleness = serving.servers.counts.news()
        now, version = time.monotonic(), int(serving.servers.updates.version.numpy())
        steps = collections.Counter(serving.steps)
        counted = Counted(
            now - self._since,
            version - self._version,
            dropped + serving.cancelled - self._cancelled,
            staleness[: max((i + 1 for i, n in enumerate(staleness) if n), default=0)],
            {w: steps[w] - self._steps[w] for w in range(serving.dispatcher.workers)},
        )
        self._since, self._version, self._steps = now, version, steps
        self._cancelled = serving.cancelled
        return counted


def hooks(serving: Serving) -> list[Hook]:
    """The seams at which training begins, an epoch ends and training ends."""
    state = _Training(serving)
    serving.tell_placement = Placement(serving)
    return [
        Hook(CallbackList, "on_train_begin", state.begins),
        Hook(CallbackList, "on_epoch_end", state.epoch_ends),
        Hook(CallbackList, "on_train_end", state.ends),
    ]


class _Training:
    """The reports of a `fit`."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._epochs: list[Counted] = []
        self._report: Report | None = None

    def begins(self, original: Callable[..., None]) -> Callable[..., None]:
        """Starts counting."""

        @functools.wraps(original)
        def on_train_begin(callbacks: types.CallbackList, logs: Logs | None = None) -> None:
            self._epochs, self._report = [], Report(self._serving)
            self._serving.epochs = self._epochs
            self._serving.verbose = callbacks.params.get("verbose") != 0
            original(callbacks, logs)

        return on_train_begin

    def epoch_ends(self, original: Callable[..., None]) -> Callable[..., None]:
        """Adds an epoch's counts to its logs, the history and TensorBoard."""

        @functools.wraps(original)
        def on_epoch_end(
            callbacks: types.CallbackList, epoch: int, logs: Logs | None = None
        ) -> None:
            if self._report is None or logs is None:
                return original(callbacks, epoch, logs)
            check_numbers(callbacks, logs, f"epoch {epoch + 1}")
            counted = self._report.look()
            self._epochs.append(counted)
            self._check_complete(counted)
            logs.update(self._logs(counted))
            original(callbacks, epoch, logs)
            self._keep(callbacks, epoch, counted)

        return on_epoch_end

    def ends(self, original: Callable[..., None]) -> Callable[..., None]:
        """Shows the table of all epochs."""

        @functools.wraps(original)
        def on_train_end(callbacks: types.CallbackList, logs: Logs | None = None) -> None:
            original(callbacks, logs)
            if self._epochs and self._serving.verbose:
                _print(_final_table(self._epochs, self._serving.servers.rule.mode))
            self._epochs, self._report = [], None

        return on_train_end

    def _check_complete(self, counted: Counted) -> None:
        rule = self._serving.servers.rule
        if counted.dropped and rule.mode == "sync" and not rule.backup_workers:
            raise TfdistError(
                f"{counted.dropped} gradients came to the servers when their update had been made, "
                "though mode='sync' waits for all. Something else has updated the servers' weights "
                "meanwhile: train one model at a time, or go on from the last checkpoint."
            )

    def _logs(self, counted: Counted) -> dict[str, float]:
        rule = self._serving.servers.rule
        if rule.mode == "sync" and not rule.backup_workers:
            return {}  # an epoch's logs are those of one process
        logs = {"gradients_dropped": counted.dropped, "updates_per_second": counted.rate}
        if rule.mode == "sync":
            return logs
        return {**logs, "staleness_mean": counted.mean, "staleness_max": counted.longest}

    def _keep(self, callbacks: types.CallbackList, epoch: int, counted: Counted) -> None:
        if not self._logs(counted):
            return
        for callback in callbacks.callbacks:
            if isinstance(callback, keras_callbacks.TensorBoard):
                values = np.repeat(np.arange(len(counted.staleness)), counted.staleness)
                with callback._train_writer.as_default():
                    tf.summary.histogram("staleness", values, step=epoch)


def check_numbers(callbacks: types.CallbackList, logs: dict[str, Any], when: str) -> None:
    """Ends a training whose results are not numbers any more.

    Raises:
        TfdistError: if a log is NaN, unless the program looks out for it with `TerminateOnNaN`.
    """
    watched = any(isinstance(c, keras_callbacks.TerminateOnNaN) for c in callbacks.callbacks)
    bad = [name for name, value in logs.items() if _is_nan(value)]
    if bad and not watched:
        raise TfdistError(
            f"{', '.join(bad)} became NaN in {when}, and so may all weights on the servers. Lower "
            "the learning rate, clip the gradients (clipnorm=1.0), or look for NaN in the data, "
            "and go on from the last checkpoint. keras.callbacks.TerminateOnNaN ends a training "
            "without this error."
        )


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def placement_table(shelves: Shelves) -> Table:
    """A table of the variables on each server.

    Args:
        shelves: the servers' variables.
    """
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


class Placement:
    """Shows the placement of variables, if that is news.

    Args:
        serving: runs the steps.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._shown = 0

    def __call__(self) -> None:
        """Shows the table unless the user has seen it."""
        shelves = self._serving.servers.shelves
        held = sum(len(each) for each in shelves.held)
        if held != self._shown and self._serving.verbose:
            self._shown = held
            _print(placement_table(shelves))


def _final_table(epochs: list[Counted], mode: str) -> Table:
    table = Table(title=f"parameter server, mode {mode}", title_justify="left")
    names = ("epoch", "updates", "updates/s", "dropped", "staleness mean", "max", "histogram")
    for name in (*names, "steps by worker"):
        table.add_column(name, justify="right")
    shown = list(enumerate(epochs, 1))
    for number, each in shown if len(shown) <= 12 else shown[-12:]:
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
