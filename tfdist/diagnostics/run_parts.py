"""The parts of a step by task: input, computation, exchange, wait for other tasks, and the rest.

Each task measures its own steps with `--report`. An exchange ends on all tasks at about the same
time, so the task whose exchange was the shortest was the last to begin it. The time by which that
of another is longer is its wait for other tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from tfdist.config.strategy_spec import having
from tfdist.diagnostics.run_data import Run, TaskRun

__all__ = [
    "COMPUTATION",
    "EXCHANGE",
    "INPUT",
    "REST",
    "WAIT",
    "WITH_WAIT",
    "Parts",
    "absence",
    "by_epoch",
    "by_task",
    "meanings",
]

#: The names of the parts on a page.
INPUT = "input"
COMPUTATION = "computation"
WAIT = "wait for other tasks"  # At least what is shown.
EXCHANGE = "exchange"
WITH_WAIT = "exchange with wait"  # If the wait is not known.
REST = "the rest"

_STEP, _INPUT, _COMPUTE = "step_ms", "input_ms", "compute_ms"
_WAITED, _HIDDEN = "exchange_waited_ms", "exchange_hidden_ms"

#: The number of an epoch in its `fit`, and the number of steps and the milliseconds of each part.
_Epochs = dict[tuple[int, int], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the mean step of a task, without the first step of each `fit`.

    Attributes:
        steps: how many steps were measured.
        step: milliseconds from the end of one step to the end of the next.
        input: waiting for the batch.
        compute: forward and backward pass.
        exchange: exchanging gradients while nothing else ran.
        wait: waiting for other tasks; None if the exchange includes it.
        hidden: exchanging gradients during the computation, of which it is a part.
    """

    steps: int
    step: float
    input: float
    compute: float
    exchange: float
    wait: float | None
    hidden: float

    @property
    def rest(self) -> float:
        """The time of a step that is in no other part."""
        known = self.input + self.compute + self.exchange + (self.wait or 0.0)
        return max(self.step - known, 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """The parts of which a step consists by their names on a page, from first to last."""
        return {
            INPUT: self.input,
            COMPUTATION: self.compute,
            **({} if self.wait is None else {WAIT: self.wait}),
            WITH_WAIT if self.wait is None else EXCHANGE: self.exchange,
            REST: self.rest,
        }


def by_task(run: Run) -> dict[str, Parts]:
    """The parts of the steps of each task that has measured them, by its name."""
    measured, least = _measured(run)
    return {name: _mean(epochs, least) for name, epochs in measured.items()}


def by_epoch(run: Run) -> list[Parts]:
    """The parts of the steps of the chief in each epoch."""
    measured, least = _measured(run)
    epochs = measured.get(run.chief.name, {}) if run.chief else {}
    return [_mean({key: total}, least) for key, total in epochs.items()]


def _measured(run: Run) -> tuple[dict[str, _Epochs], dict[tuple[int, int], float] | None]:
    """The epochs of each task, and the shortest exchange of a task in each; None if not known."""
    measured = {task.name: _epochs(task) for task in run.tasks}
    measured = {name: epochs for name, epochs in measured.items() if epochs}
    known = not _why_no_wait(run, len(measured))
    return measured, _least(measured.values()) if known else None


def _epochs(task: TaskRun) -> _Epochs:
    """The sums of each epoch, as it was trained last, without the first step of each `fit`.

    An epoch that has not ended is the sum of its pieces.
    """
    whole = {(each.attempt, each.fit, each.epoch) for each in task.epochs if each.parts}
    sums: dict[tuple[int, int, int], dict[str, float]] = {}
    signed = [(each, 1) for each in task.epochs]
    for each in task.windows:
        ended = (each.attempt, each.fit, each.epoch) in whole
        if ended == each.first:  # Of a whole epoch the first step is taken off again.
            signed.append((each, -1 if ended else 1))
    for each, sign in signed:
        if each.parts:
            total = sums.setdefault((each.attempt, each.fit, each.epoch), {})
            total["steps"] = total.get("steps", 0) + sign * each.steps
            for name, value in each.parts.items():
                total[name] = total.get(name, 0.0) + sign * each.steps * value
    return {key[1:]: total for key, total in sorted(sums.items()) if total["steps"] > 0}


def _least(measured: Iterable[_Epochs]) -> dict[tuple[int, int], float]:
    """The shortest mean exchange of a task in each epoch, in milliseconds."""
    least: dict[tuple[int, int], float] = {}
    for epochs in measured:
        for key, total in epochs.items():
            least[key] = min(least.get(key, math.inf), total.get(_WAITED, 0.0) / total["steps"])
    return least


def _mean(epochs: _Epochs, least: Mapping[tuple[int, int], float] | None) -> Parts:
    steps = sum(total["steps"] for total in epochs.values())

    def mean(name: str) -> float:
        return max(sum(total.get(name, 0.0) for total in epochs.values()) / steps, 0.0)

    waited, wait = mean(_WAITED), None
    if least is not None:
        own = sum(least[key] * total["steps"] for key, total in epochs.items()) / steps
        wait = max(waited - own, 0.0)
    return Parts(
        steps=round(steps),
        step=mean(_STEP),
        input=mean(_INPUT),
        compute=mean(_COMPUTE),
        exchange=waited - (wait or 0.0),
        wait=wait,
        hidden=mean(_HIDDEN),
    )


def meanings(run: Run, parts: Mapping[str, Parts]) -> list[tuple[str, str]]:
    """The names of the parts that a page shows, each with sentences on it.

    Args:
        run: the run.
        parts: the result of `by_task`.
    """
    why = _why_no_wait(run, len(parts))
    exchange = "From the task's own gradients to the sum over all tasks, while nothing else ran."
    wait = (
        "The time by which an exchange took longer than that of the task with the shortest one, "
        "which was the last to have its gradients. At least so long: it is taken from the means "
        "of an epoch, so waits of tasks that are late by turns count as exchange."
    )
    return [
        (INPUT, "The step waited for its batch."),
        (
            COMPUTATION,
            "Forward and backward pass. It includes exchanges within these, and waits for other "
            "tasks there, which cannot be distinguished: those of BatchNormalization with "
            "synchronized=True, of layers divided by --mesh and of weights divided by --zero 3.",
        ),
        *([(WITH_WAIT, f"{exchange} {why}")] if why else []),
        *([] if why else [(EXCHANGE, exchange), (WAIT, wait)]),
        (
            REST,
            "The optimizer, metrics, and Python between two steps, such as callbacks. If the "
            "program has callbacks for batches, or a step returns logs of its own, also the "
            "exchange after each step, with the wait for other tasks there. These cannot be "
            "distinguished.",
        ),
        (
            "exchange, hidden",
            "Exchange during the computation, of which it is a part: it costs no time.",
        ),
    ]


def _why_no_wait(run: Run, measured: int) -> str:
    """The reason why the wait for other tasks is not known; nothing if it is."""
    without = [task.name for task in run.tasks if task.trains and not task.recorded]
    without += run.elsewhere
    if without:
        names = ", ".join(without)
        return (
            "The wait for other tasks cannot be distinguished: it shows by a comparison of all "
            f"tasks, and the record of {names} is not here."
        )
    if measured < 2:
        return (
            "The wait of replicas for each other cannot be distinguished: it shows by a "
            "comparison of tasks, and here one task computes."
        )
    return ""


def absence(run: Run) -> str:
    """The reason why a run whose steps were recorded has no parts of them."""
    spec = run.spec
    if spec is None or spec.has_option("report"):
        return (
            "Input, computation, exchange and wait of each task are measured with --report. The "
            "measurement makes steps longer, so it is not made otherwise."
        )
    others = ", ".join(having(lambda each: each.has_option("report")))
    if spec.has_servers:
        why = (
            "workers compute steps that the chief hands out, and keep no record of their own. "
            "Parameter servers, below, has the steps of each worker."
        )
    elif spec.has_stages:
        why = (
            "the stages compute and wait by their schedule. --timeline FILE.png draws a step of "
            "each stage with its gaps, which is shown under Timeline."
        )
    else:
        why = "the strategy has no option --report."
    return (
        f"Input, computation, exchange and wait are not measured on {spec.name}: {why} --report "
        f"measures them on {others}."
    )
