"""Runs a plan to its end. The first failure ends the job; nothing is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from tfdist.cluster.launch import blame
from tfdist.cluster.launch.output import Pump
from tfdist.cluster.launch.plan import JobPlan
from tfdist.cluster.launch.spawn import Guard, RunningTask, Terminal, spawn

__all__ = ["DEFAULT_GRACE", "Outcome", "run"]

#: Seconds that a task gets between TERM and KILL when another has failed.
DEFAULT_GRACE = 5.0

_POLL = 0.05
#: Seconds in which other failures are collected after the first.
_SETTLE = 1.0
#: The same while all that failed look like consequences: the cause may take longer to exit.
_SETTLE_FOR_CAUSE = 4.0
#: After Ctrl-C, which must end everything within 5 s: seconds after INT, then after TERM.
_AFTER_INT, _AFTER_TERM = 2.0, 1.0
#: SIGTERM to the launcher also must end everything within 5 s.
_LONGEST_AFTER_SIGNAL = 3.0
#: Seconds for the kernel to take down what was killed.
_AFTER_KILL = 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: the exit status for the launcher: 0, the failed task's, or 128 + n where signal n
            stopped the launcher.
        message: what to tell the user; empty where all went well.
        midline: whether the terminal's cursor was left within a line.
    """

    status: int
    message: str = ""
    midline: bool = False


class _Requests:
    """Signals that ask the launcher to stop."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def run(
    plan: JobPlan,
    *,
    grace: float = DEFAULT_GRACE,
    terminal: Terminal | None = None,
    complain: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Starts all tasks of a plan and waits for their end. Call it in the main thread.

    Args:
        plan: what to run.
        grace: seconds between TERM and KILL for the others after one task has failed.
        terminal: shows the output of the plan's shown task.
        complain: told about logs that cannot be written.

    Raises:
        TfdistError: if a process cannot be started. Those already started are ended.
    """
    tasks: list[RunningTask] = []
    ended: list[RunningTask] = []
    with _stop_requests() as requests, Guard() as guard:
        pump = Pump()
        try:
            for each in plan.tasks:
                shown = terminal if each.task == plan.shown else None
                task = spawn(each, guard=guard, pump=pump, terminal=shown, complain=complain)
                tasks.append(task)
            with _window_changes(tasks):
                _wait(tasks, ended, requests)
        finally:
            by_themselves = len(ended)
            _stop(tasks, ended, requests, grace)
            pump.close()
            for task in tasks:
                task.close()
    endings = [
        _ending(task, shown=task.plan.task == plan.shown and terminal is not None, stopped=stopped)
        for stopped, group in ((False, ended[:by_themselves]), (True, ended[by_themselves:]))
        for task in group
    ]
    return dataclasses.replace(_outcome(endings, requests), midline=pump.midline)


def _wait(tasks: Sequence[RunningTask], ended: list[RunningTask], requests: _Requests) -> None:
    """Until all have ended, one has failed and the others had time to, or a signal came."""
    first_failure: float | None = None
    while not requests.received:
        _collect(tasks, ended)
        failed = [task for task in ended if task.returncode != 0]
        if len(ended) == len(tasks):
            return
        if failed:
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            if now - first_failure > _settling(failed):
                return
        time.sleep(_POLL)


def _settling(failed: Sequence[RunningTask]) -> float:
    """Seconds to wait for further failures."""
    followers = all(blame.is_consequence(task.output.tail(blame.LINES_SHOWN)) for task in failed)
    return _SETTLE_FOR_CAUSE if followers else _SETTLE


def _collect(tasks: Sequence[RunningTask], ended: list[RunningTask]) -> None:
    ended += [task for task in tasks if task not in ended and task.poll() is not None]


def _stop(
    tasks: Sequence[RunningTask], ended: list[RunningTask], requests: _Requests, grace: float
) -> None:
    """Ends what still runs: politely, then by force."""
    asked = len(requests.received)
    for number, seconds in _stages(requests, grace):
        for task in tasks:
            task.signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            _collect(tasks, ended)
            if len(ended) == len(tasks):
                return
            if number != signal.SIGKILL and len(requests.received) > asked:
                asked = len(requests.received)
                break
            time.sleep(_POLL)


def _stages(requests: _Requests, grace: float) -> list[tuple[signal.Signals, float]]:
    """Which signals to send, and the seconds to wait after each."""
    last = (signal.SIGKILL, _AFTER_KILL)
    if not requests.received:
        return [(signal.SIGTERM, grace), last]
    if requests.received[0] == signal.SIGINT:
        return [(signal.SIGINT, _AFTER_INT), (signal.SIGTERM, min(grace, _AFTER_TERM)), last]
    return [(signal.SIGTERM, min(grace, _LONGEST_AFTER_SIGNAL)), last]


def _ending(task: RunningTask, *, shown: bool, stopped: bool) -> blame.Ending:
    assert task.returncode is not None, "the task was waited for"
    return blame.Ending(
        task=task.plan.task,
        returncode=task.returncode,
        log=task.plan.log if task.output.logged else None,
        lines=task.output.tail(100),
        stopped=stopped,
        shown=shown,
    )


def _outcome(endings: Sequence[blame.Ending], requests: _Requests) -> Outcome:
    root = blame.root_cause(endings)
    if requests.received and root is None:
        number = requests.received[0]
        by = "Ctrl-C" if number == signal.SIGINT else number.name
        return Outcome(128 + number, f"Stopped by {by}.")
    if root is None:
        return Outcome(0)
    status = 1 if root.stopped else blame.exit_status(root.returncode)
    return Outcome(status, blame.describe(root, endings))


@contextlib.contextmanager
def _stop_requests() -> Iterator[_Requests]:
    """Notes the signals that would end the launcher, instead of ending it at once."""
    requests = _Requests()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
            before[number] = signal.signal(number, requests.note)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _window_changes(tasks: Sequence[RunningTask]) -> Iterator[None]:
    """Passes changes of the terminal's size on."""

    def resize(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.resize()

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
