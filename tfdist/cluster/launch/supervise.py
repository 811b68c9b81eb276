"""Runs a plan to its end and restarts it where the plan allows that; nothing is left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfdist.cluster.launch import blame
from tfdist.cluster.launch.attempt import Attempt, Requests, Restarts, Screen, stop_requests
from tfdist.cluster.launch.plan import JobPlan
from tfdist.cluster.launch.program import SERVER_MODULE
from tfdist.cluster.launch.spawn import Guard, Terminal

__all__ = ["DEFAULT_GRACE", "Outcome", "outcome_of", "run"]

#: Seconds that a task gets between TERM and KILL when another has failed.
DEFAULT_GRACE = 5.0

#: The exit status of a mistake in the call: it would be the same mistake again.
_MISTAKE = 2


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


def run(
    plan: JobPlan,
    *,
    grace: float = DEFAULT_GRACE,
    terminal: Terminal | None = None,
    complain: Callable[[str], None] = lambda text: None,
    notify: Callable[[str, bool], None] = lambda text, new_line: None,
) -> Outcome:
    """Starts all tasks of a plan and waits for their end. Call it in the main thread.

    The first failure ends the job. While the plan has restarts left, all tasks are then started
    again; a spare task is started again by itself (see `Attempt`).

    Args:
        plan: what to run.
        grace: seconds between TERM and KILL for the others after one task has failed.
        terminal: shows the output of the plan's shown task.
        complain: told about logs that cannot be written.
        notify: told what becomes of the tasks meanwhile, and whether the terminal's cursor was left
            within a line.

    Raises:
        TfdistError: if a process cannot be started. Those already started are ended.
    """
    screen, restarts = Screen(terminal, complain, notify), Restarts(plan.max_restarts)
    with stop_requests() as requests, Guard() as guard:
        while True:
            again = f"tfdist: the job is started again ({restarts})" * bool(restarts.used)
            attempt = Attempt(plan, guard, requests, screen, restarts, again=again)
            endings = attempt.run(grace)
            root = blame.root_cause(endings)
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


def _starts_again(root: blame.Ending, requests: Requests, restarts: Restarts) -> bool:
    if requests.received or root.returncode == _MISTAKE:
        return False
    return restarts.take()


def _again(plan: JobPlan, root: blame.Ending, restarts: Restarts) -> str:
    what = "the job" if len(plan.tasks) > 1 else "it"
    served = SERVER_MODULE in plan.tasks[0].command
    script = "" if served else " The script goes on from its last checkpoint."
    log = f" Its log: {root.log}" if root.log is not None else ""
    return f"{blame.headline(root)}; starting {what} again ({restarts}).{script}{log}"


def outcome_of(
    root: blame.Ending | None,
    endings: Sequence[blame.Ending],
    borne: Sequence[blame.Ending],
    requests: Requests,
) -> Outcome:
    """How a job ended, for the user.

    Args:
        root: the task to blame, or None.
        endings: all tasks of the last attempt.
        borne: the tasks whose loss did not end the job.
        requests: the signals that asked to stop.
    """
    if root is not None:
        status = 1 if root.stopped else blame.exit_status(root.returncode)
        earlier = [f"Earlier, {blame.headline(each)}." for each in borne]
        return Outcome(status, "\n".join((blame.describe(root, endings), *earlier)))
    if requests.received:
        number = requests.received[0]
        by = "Ctrl-C" if number.name == "SIGINT" else number.name
        return Outcome(128 + number, f"Stopped by {by}.")
    return Outcome(0)
