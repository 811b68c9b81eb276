"""What one run of one peer is: a frozen value that travels as JSON to every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bench.lines import Line

__all__ = ["MODELS", "Job", "Model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A stack of dense layers, and how long it is trained.

    Attributes:
        title: for people.
        widths: numbers of units: input, hidden layers, classes.
        steps: timed steps of a run, unless `--steps` says otherwise.
    """

    title: str
    widths: tuple[int, ...]
    steps: int

    @property
    def parameters(self) -> int:
        """The number of weights and biases."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return sum((inputs + 1) * outputs for inputs, outputs in pairs)


#: `small` spends its time on round trips, `big` on bytes.
MODELS: dict[str, Model] = {
    "small": Model(title="small MLP", widths=(20, 32, 32, 10), steps=600),
    "big": Model(title="16 MB MLP", widths=(1024, 1536, 1536, 10), steps=60),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Line):
    """One run: a peer trains a model on a cluster of its own.

    The peer does `steps` steps that are not timed, then `steps` that are.

    Attributes:
        peer: a module of `bench.peers`.
        model: a key of `MODELS`.
        steps: number of timed steps.
        optimizer: `"adam"` or `"sgd"`.
        workers: number of worker tasks.
        ps: number of parameter servers.
        batch: examples of a step.
        steps_per_execution: Keras's own option, for the peers that train with `fit`.
        slow: how many times slower a task runs, by its name, such as `{"worker-1": 4.0}`.
        options: more fields of `tfdist.config.StrategyConfig`, for the peers that are tfdist, such
            as `{"mode": "stale", "staleness": 4}`.
        target: the loss at which training ends, for the peers that train to one; `steps` are then
            the updates of an epoch.
        timeout: seconds until the whole cluster is killed.
    """

    peer: str
    model: str
    steps: int
    optimizer: str = "adam"
    workers: int = 2
    ps: int = 1
    batch: int = 32
    steps_per_execution: int = 1
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: float = 0.0
    timeout: float = 120.0

    @property
    def widths(self) -> tuple[int, ...]:
        """The model's numbers of units."""
        return MODELS[self.model].widths
