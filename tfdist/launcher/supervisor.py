"""One start of a job: its tasks, from their start to their end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from tfdist.cluster.rendezvous.transport import speaks_grpc
from tfdist.cluster.spec import Task
from tfdist.launcher import root_cause
from tfdist.launcher.output import Pump
from tfdist.launcher.plan import SERVER_MODULE, JobPlan, Role, TaskPlan
from tfdist.launcher.process import Guard, RunningTask, Terminal, spawn
from tfdist.launcher.waiting import Waiting
from tfdist.utils.run_record import Record

__all__ = [
    "DEFAULT_GRACE",
    "Attempt",
    "Outcome",
    "Requests",
    "Restarts",
    "Screen",
    "outcome_of",
    "run",
    "stop_requests",
]

_POLL = 0.05
#: The last lines of a task's output in which the reason of its end is looked for.
_LINES_SEEN = 100
#: Seconds in which other failures are collected after the first.
_SETTLE = 1.0
#: The same while all that failed look like consequences: the cause may take longer to exit.
_SETTLE_FOR_CAUSE = 4.0
#: The same with tasks on other machines: ssh notices the loss of one after about 10 s.
_SETTLE_FOR_HOSTS = 15.0
#: After Ctrl-C, which must end everything within 5 s: seconds after INT, then after TERM.
_AFTER_INT, _AFTER_TERM = 2.0, 1.0
#: SIGTERM to the launcher also must end everything within 5 s.
_LONGEST_AFTER_SIGNAL = 3.0
#: Seconds for the kernel to take down what was killed.
_AFTER_KILL = 5.0
#: Seconds to find out whether the job has begun.
_PROBE_SECONDS = 2.0


class Requests:
    """Signals that ask the launcher to stop."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal; a signal handler."""
        self.received.append(signal.Signals(number))


@contextlib.contextmanager
def stop_requests() -> Iterator[Requests]:
    """Notes the signals that would end the launcher, instead of ending it at once."""
    requests = Requests()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
            before[number] = signal.signal(number, requests.note)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Restarts:
    """The number of restarts, in all.

    Attributes:
        most: how often it may be.
        used: how often it was.
    """

    most: int
    used: int = 0

    def take(self) -> bool:
        """Uses one up, if one is left."""
        if self.used >= self.most:
            return False
        self.used += 1
        return True

    def __str__(self) -> str:
        return f"restart {self.used} of {self.most}"


@dataclasses.dataclass(frozen=True)
class Screen:
    """The outputs of a job.

    Attributes:
        terminal: shows the output of the plan's shown task; None shows it nowhere.
        complain: called with logs that cannot be written.
        notify: called with events of the job's tasks, and whether to begin a new line for it.
        record: the record of the starts and ends of tasks.
        waiting: the line that names what the job waits for.
    """

    terminal: Terminal | None
    complain: Callable[[str], None]
    notify: Callable[[str, bool], None]
    record: Record = dataclasses.field(default_factory=lambda: Record(None))
    waiting: Waiting | None = None

    def show(self, text: str) -> None:
        """Shows an event while tasks run; the line that names a wait makes way."""
        with contextlib.nullcontext() if self.waiting is None else self.waiting.aside():
            self.notify(text, False)


class Attempt:
    """The tasks of a plan, started once. Spare tasks that die may be started again within.

    Args:
        plan: what to run.
        guard: ends the tasks if this process dies.
        requests: the signals that ask to stop.
        screen: where the job shows itself.
        restarts: how often a spare task may still be started again.
        again: if the job is started again, the line that the logs are continued with.
        watch: called often while the job runs.

    Attributes:
        early: the spare task that failed before the job had begun, if one did.
    """

    def __init__(
        self,
        plan: JobPlan,
        guard: Guard,
        requests: Requests,
        screen: Screen,
        restarts: Restarts,
        *,
        again: str = "",
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.early: Task | None = None
        self._plan = plan
        self._guard = guard
        self._requests = requests
        self._screen = screen
        self._restarts = restarts
        self._again = again
        self._watch = watch
        self._waiting = screen.waiting or Waiting(None, plan)
        self._pump = Pump(self._waiting.aside)
        self._tasks: list[RunningTask] = []
        self._ended: list[RunningTask] = []
        self._borne: list[RunningTask] = []
        self._begun = plan.begins_at is None

    @property
    def midline(self) -> bool:
        """Whether the terminal's cursor is within a line."""
        return self._pump.midline

    def run(self, grace: float) -> list[root_cause.Ending]:
        """Starts the tasks and waits until the job is done, has failed or is to stop.

        Args:
            grace: seconds between TERM and KILL for tasks that still run then.

        Returns:
            How each task ended, in the order of their ends.

        Raises:
            TfdistError: if a process cannot be started. Those already started are ended.
        """
        by_themselves = 0
        try:
            self._waiting.begin()
            for each in self._plan.tasks:
                self._tasks.append(self._spawn(each, self._again))
            with _window_changes(self._tasks):
                self._wait()
        finally:
            self._waiting.end()
            by_themselves = len(self._ended)
            self._stop(grace)
            self._pump.close()
            for task in (*self._tasks, *self._borne):
                task.close()
        done = self._is_done(self._ended[:by_themselves])
        endings = [
            self._ending(task, stopped=number >= by_themselves or (done and not _is_main(task)))
            for number, task in enumerate(self._ended)
        ]
        for ending in endings:
            self._note_end(ending)
        return endings

    def borne(self) -> list[root_cause.Ending]:
        """The ends of the spare tasks whose loss did not end the job."""
        return [self._ending(task, stopped=False) for task in self._borne]

    def _note_end(self, ending: root_cause.Ending) -> None:
        failed = ending.returncode != 0 and not ending.stopped
        self._screen.record.add(
            "end",
            task=ending.task,
            returncode=ending.returncode,
            stopped=ending.stopped,
            peak_rss=ending.peak_rss,
            words=root_cause.headline(ending) if failed else "",
        )

    def _spawn(self, plan: TaskPlan, again: str) -> RunningTask:
        self._screen.record.add("start", task=plan.task, again=again)
        return spawn(
            plan,
            guard=self._guard,
            pump=self._pump,
            terminal=self._screen.terminal if plan.task == self._plan.shown else None,
            complain=self._complain,
            again=again,
        )

    def _wait(self) -> None:
        """Until the job is done, one has failed and the others had time to, or a signal came."""
        first_failure: float | None = None
        while not self._requests.received:
            self._collect()
            if self._is_done(self._ended):
                return
            failed = [task for task in self._ended if task.returncode != 0]
            if first_failure is None:
                failed = [task for task in failed if not self._bears(task, failed)]
            if failed:
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                settle = self._plan.settle
                if settle is None:
                    settle = _settling(failed, any(t.plan.host for t in self._tasks))
                if len(self._ended) == len(self._tasks) or now - first_failure > settle:
                    return
            self._watch()
            self._waiting.redraw()
            time.sleep(_POLL)

    def _is_done(self, ended: Sequence[RunningTask]) -> bool:
        """Whether all tasks that the job is about have ended well."""
        main = [task for task in self._tasks if _is_main(task)]
        return all(task in ended and task.returncode == 0 for task in main)

    def _bears(self, task: RunningTask, failed: Sequence[RunningTask]) -> bool:
        """Goes on without a failed spare task, or with another in its place, if it can."""
        others = [other for other in self._tasks if other.plan.role is Role.SPARE]
        lost = [other for other in failed if other.plan.role in (Role.SPARE, Role.REJOINS)]
        if len(lost) < len(failed):
            return False
        if task in others and not self._has_begun():
            self.early = task.plan.task
            return False
        left = [other for other in others if other not in self._ended]
        ending = self._ending(task, stopped=False)
        how = root_cause.headline(ending)
        if self._restarts.take():
            self._notify(f"{how}. It is started again in its place ({self._restarts}).")
            line = f"tfdist: {task.plan.task} is started again ({self._restarts})"
            replacement = [self._spawn(task.plan, line)]
        elif left and task in others:
            count = f"the other {len(left)} workers" if len(left) > 1 else "one worker"
            self._notify(f"{how}. Training goes on with {count}. Its log: {task.plan.log}")
            replacement = []
        else:
            return False
        index = self._tasks.index(task)
        self._tasks[index : index + 1] = replacement
        self._ended.remove(task)
        self._borne.append(task)
        self._note_end(ending)
        return True

    def _has_begun(self) -> bool:
        """Whether the chief has started TensorFlow, so that the job goes on without a worker."""
        if not self._begun and self._plan.begins_at is not None:
            self._begun = asyncio.run(speaks_grpc(self._plan.begins_at, _PROBE_SECONDS))
        return self._begun

    def _notify(self, text: str) -> None:
        with self._waiting.aside():
            self._screen.notify(text, self._pump.midline)

    def _complain(self, text: str) -> None:
        with self._waiting.aside():
            self._screen.complain(text)

    def _collect(self) -> None:
        self._ended += [
            task for task in self._tasks if task not in self._ended and task.poll() is not None
        ]

    def _stop(self, grace: float) -> None:
        """Ends the tasks that still run: politely, then by force."""
        asked = len(self._requests.received)
        for task in self._tasks:
            task.note_pause()
        for number, seconds in _stages(self._requests, grace):
            for task in self._tasks:
                task.signal(number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self._collect()
                if len(self._ended) == len(self._tasks):
                    return
                if number != signal.SIGKILL and len(self._requests.received) > asked:
                    asked = len(self._requests.received)
                    break
                time.sleep(_POLL)

    def _ending(self, task: RunningTask, *, stopped: bool) -> root_cause.Ending:
        assert task.returncode is not None, "the task was waited for"
        return root_cause.Ending(
            task=task.plan.task,
            returncode=task.returncode,
            log=task.plan.log if task.output.logged else None,
            lines=root_cause.without_stacks(task.output.tail())[-_LINES_SEEN:],
            stopped=stopped,
            shown=task.plan.task == self._plan.shown and self._screen.terminal is not None,
            host=task.plan.host,
            crash=root_cause.site(task.output.tail()),
            peak_rss=task.peak_rss,
            paused=task.paused,
        )


def _is_main(task: RunningTask) -> bool:
    return task.plan.role in (Role.MAIN, Role.REJOINS)


def _settling(failed: Sequence[RunningTask], elsewhere: bool) -> float:
    """Seconds to wait for further failures; `elsewhere` if some tasks are on other machines."""
    followers = all(
        root_cause.is_consequence(
            root_cause.without_stacks(task.output.tail())[-root_cause.LINES_SHOWN :],
            task.returncode or 0,
        )
        for task in failed
    )
    if not followers:
        return _SETTLE
    return _SETTLE_FOR_HOSTS if elsewhere else _SETTLE_FOR_CAUSE


def _stages(requests: Requests, grace: float) -> list[tuple[signal.Signals, float]]:
    """The signals to send, and the seconds to wait after each."""
    last = (signal.SIGKILL, _AFTER_KILL)
    if not requests.received:
        return [(signal.SIGTERM, grace), last]
    if requests.received[0] == signal.SIGINT:
        return [(signal.SIGINT, _AFTER_INT), (signal.SIGTERM, min(grace, _AFTER_TERM)), last]
    return [(signal.SIGTERM, min(grace, _LONGEST_AFTER_SIGNAL)), last]


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


# Runs a plan to its end and restarts it if the plan allows that; nothing is left behind.

#: Seconds that a task gets between TERM and KILL when another has failed.
DEFAULT_GRACE = 5.0

#: The exit status of a mistake in the call: it would be the same mistake again.
_MISTAKE = 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: the exit status for the launcher: 0, the failed task's, or 128 + n if signal n
            stopped the launcher.
        message: the message for the user; empty if all went well.
        midline: whether the terminal's cursor was left within a line.
    """

    status: int
    message: str = ""
    midline: bool = False


def run(
    plan: JobPlan,
    *,
    grace: float = DEFAULT_GRACE,
    terminal: Terminal | None = None,
    complain: Callable[[str], None] = lambda text: None,
    notify: Callable[[str, bool], None] = lambda text, new_line: None,
    record: Record | None = None,
    waiting: Waiting | None = None,
) -> Outcome:
    """Starts all tasks of a plan and waits for their end. Call it in the main thread.

    The first failure ends the job. While the plan has restarts left, all tasks are then started
    again; a spare task is started again by itself (see `Attempt`).

    Args:
        plan: what to run.
        grace: seconds between TERM and KILL for the others after one task has failed.
        terminal: shows the output of the plan's shown task.
        complain: called with logs that cannot be written.
        notify: called with events of the tasks meanwhile, and whether the terminal's cursor was
            left within a line.
        record: gets the starts and ends of tasks.
        waiting: the line that names what the job waits for.

    Raises:
        TfdistError: if a process cannot be started. Those already started are ended.
    """
    screen = Screen(terminal, complain, notify, record or Record(None), waiting)
    restarts = Restarts(plan.max_restarts)
    with stop_requests() as requests, Guard() as guard:
        while True:
            again = f"tfdist: the job is started again ({restarts})" * bool(restarts.used)
            attempt = Attempt(plan, guard, requests, screen, restarts, again=again)
            endings = attempt.run(grace)
            root = root_cause.root_cause(endings)
            if root is None or not _starts_again(root, requests, restarts):
                break
            notify(_again(plan, root, restarts), attempt.midline)
    outcome = outcome_of(root, endings, attempt.borne(), requests)
    message = outcome.message
    if root is not None and root.task == attempt.early:
        message += (
            f"\n{root.task} ended before the training had begun, and the others need it then."
        )
    return dataclasses.replace(outcome, message=message, midline=attempt.midline)


def _starts_again(root: root_cause.Ending, requests: Requests, restarts: Restarts) -> bool:
    if requests.received or root.returncode == _MISTAKE:
        return False
    return restarts.take()


def _again(plan: JobPlan, root: root_cause.Ending, restarts: Restarts) -> str:
    what = "the job" if len(plan.tasks) > 1 else "it"
    is_server = SERVER_MODULE in plan.tasks[0].command
    script = "" if is_server else " The script goes on from its last checkpoint."
    log = f" Its log: {root.log}" if root.log is not None else ""
    return f"{root_cause.headline(root)}; starting {what} again ({restarts}).{script}{log}"


def outcome_of(
    root: root_cause.Ending | None,
    endings: Sequence[root_cause.Ending],
    borne: Sequence[root_cause.Ending],
    requests: Requests,
) -> Outcome:
    """The end of a job, for the user.

    Args:
        root: the task to blame, or None.
        endings: all tasks of the last attempt.
        borne: the tasks whose loss did not end the job.
        requests: the signals that asked to stop.
    """
    if root is not None:
        status = 1 if root.stopped else root_cause.exit_status(root.returncode)
        earlier = [f"Earlier, {root_cause.headline(each)}." for each in borne]
        return Outcome(status, "\n".join((root_cause.describe(root, endings), *earlier)))
    if requests.received:
        number = requests.received[0]
        by = "Ctrl-C" if number.name == "SIGINT" else number.name
        return Outcome(128 + number, f"Stopped by {by}.")
    return Outcome(0)
