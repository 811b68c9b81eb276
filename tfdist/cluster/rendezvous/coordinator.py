"""The chief's part in the bounded start (see `tfdist.cluster.rendezvous.join`)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence

from tfdist.cluster.rendezvous.transport import (
    ContactError,
    Door,
    JoinReport,
    Line,
    Meeting,
    Message,
    identify,
    open_door,
    pauses_between_tries,
    report_regularly,
)
from tfdist.cluster.spec import Address, Task
from tfdist.errors import StartError

__all__ = ["CLOCKS_APART", "Gathering", "Report", "table"]


# The chief's reports of each task before the start, as one table with the culprits first.

#: Seconds that the clocks of two machines may differ without a word.
CLOCKS_APART = 30.0

#: Tasks without a problem that are listed; of a large cluster the others are counted.
_READY_LISTED = 8
_PROBLEMS_LISTED = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The state of one task before the start.

    Attributes:
        task: which it is.
        address: where it should listen.
        joined: whether it has reached the chief.
        answers: whether the chief has reached it at its address.
        differs: its versions and configuration that are not the chief's, by name.
        apart: seconds that its clock is ahead of the chief's; None if it has not joined.
        problem: the problem in words; empty if there is none.
    """

    task: Task
    address: Address
    joined: bool
    answers: bool
    differs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: float | None = None
    problem: str = ""

    @property
    def clock(self) -> str:
        """The clock's difference in words; empty if it is small or not known."""
        if self.apart is None or abs(self.apart) <= CLOCKS_APART:
            return ""
        return f"{self.apart:+.0f} s"


_HEADER = ("task", "address", "joined", "answers", "runs", "clock", "")


def table(reports: Sequence[Report]) -> str:
    """Lines for a terminal or a log: tasks with a problem first, then some of the others.

    Args:
        reports: all tasks but the chief, in any order.
    """
    culprits = [each for each in reports if each.problem or each.differs]
    ready = [each for each in reports if not each.problem and not each.differs]
    shown = [*culprits[:_PROBLEMS_LISTED], *ready[:_READY_LISTED]]
    rows = [_HEADER, *(_row(each) for each in shown)]
    used = [i for i in range(len(_HEADER)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]
    left = len(culprits[_PROBLEMS_LISTED:])
    if left:
        lines.append(f"and {left} more tasks with a problem")
    if ready[_READY_LISTED:]:
        lines.append(f"and {len(ready) - _READY_LISTED} more tasks that are ready")
    return "\n".join(f"  {line}" for line in lines)


def _row(report: Report) -> tuple[str, ...]:
    return (
        str(report.task),
        str(report.address),
        "yes" if report.joined else "no",
        "yes" if report.answers else "no",
        ", ".join(f"{name} {value}" for name, value in report.differs.items()),
        report.clock,
        report.problem,
    )


_BROADCAST_EVERY = 1.0
#: Seconds for the tasks to look at each other, and to close their ports.
_SECONDS_TO_AGREE = 10.0

_HINTS = {
    "connection refused": "nothing listens there; is this task started?",
    "no answer (timed out)": "a firewall, a machine that is off, or a wrong address",
    "the name does not resolve": "check the host name",
}


class Gathering:
    """Lets the other tasks join, checks them, and gives the sign to start."""

    def __init__(self, meeting: Meeting, offer: Mapping[str, str]) -> None:
        self._meeting = meeting
        self._offer = dict(offer)
        self._door = Door(str(meeting.task), self._admit)
        self._others = meeting.others()
        self._joined: dict[Task, Line] = {}
        self._seen: dict[Task, str] = dict.fromkeys(self._others, "not tried yet")
        self._confirmed: set[Task] = set()
        self._differs: dict[Task, dict[str, str]] = {}
        self._apart: dict[Task, float] = {}
        self._answers: dict[str, dict[Task, Message]] = {"checked": {}, "closed": {}, "kept": {}}
        self._notes: list[str] = []
        self._failure: str | None = None
        self._changed = asyncio.Event()

    async def run(self) -> JoinReport:
        """Meets; what this task, as the chief, offers goes to all.

        Raises:
            StartError: if a task is missing at the deadline, or cannot take part.
        """
        helpers = [asyncio.create_task(self._confirm(task)) for task in self._others]
        helpers.append(asyncio.create_task(self._broadcast_awaited()))
        try:
            await self._gather()
            await self._start()
            kept = self._joined.values() if self._meeting.keep_lines else ()
            lines = tuple(line.keep() for line in kept)
        except StartError as error:
            await self._broadcast(kind="stop", reason=str(error))
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            self._door.close()
            await asyncio.gather(*(line.close() for line in self._joined.values()))
        return self._meeting.report_of(self._offer, lines)

    async def _gather(self) -> None:
        """Until every other task has joined and was found at its address."""
        try:
            async with asyncio.timeout(self._meeting.timeout):
                await open_door(self._meeting, self._door)
                async with report_regularly(self._meeting, self._status):
                    while self._missing():
                        await self._change()
        except StartError:  # It is a TimeoutError too.
            raise
        except TimeoutError:
            raise StartError(self._too_late()) from None

    async def _start(self) -> None:
        """Has the tasks look at each other and close their ports, then sends "go".

        Connections are kept only when the others have: what is sent before goes to the protocol.
        """
        trouble = [
            text
            for answer in (await self._ask_all("check", "checked")).values()
            for text in answer.get("trouble", [])
        ]
        if trouble:
            raise StartError(
                "The chief reaches every task, but some tasks do not reach each other:\n"
                + "\n".join(f"  {text}" for text in trouble)
                + "\nAll tasks need to reach all others: check firewalls and addresses between "
                "those machines."
            )
        await self._ask_all("close", "closed")
        self._door.close()
        if self._meeting.keep_lines:
            await self._ask_all("go", "kept", offer=self._offer)
        else:
            await self._broadcast(kind="go", offer=self._offer)

    async def _ask_all(self, question: str, answer: str, **more: object) -> dict[Task, Message]:
        await self._broadcast(kind=question, **more)
        answers = self._answers[answer]
        try:
            async with asyncio.timeout(_SECONDS_TO_AGREE):
                while len(answers) < len(self._others):
                    await self._change()
                    gone = [task for task in self._others if task not in self._joined]
                    if gone:
                        raise StartError(self._left(gone))
        except StartError:
            raise
        except TimeoutError:
            silent = [task for task in self._others if task not in answers]
            raise StartError(
                "These tasks joined, but then did not answer the chief within "
                f"{_SECONDS_TO_AGREE:g} s: {', '.join(map(self._meeting.describe, silent))}."
            ) from None
        return answers

    async def _change(self) -> None:
        """Waits for news.

        Raises:
            StartError: if the news is that the start cannot succeed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise StartError(self._failure)

    async def _admit(self, line: Line, hello: Message) -> None:
        """Lets a task in that asks to join, and listens to it until it leaves."""
        name = str(hello.get("task"))
        task = next((other for other in self._others if str(other) == name), None)
        refusal = self._refusal(task, name, line)
        if refusal is not None or task is None:
            self._notes.append(f"Refused: {refusal}")
            await line.send(kind="refuse", reason=refusal)
            return
        self._joined[task] = line
        self._compare(task, hello.get("identity", {}))
        self._compare_clocks(task, hello.get("time"))
        self._changed.set()
        try:
            while True:
                answer = await line.receive()
                self._answers.get(str(answer.get("kind")), {})[task] = answer
                self._changed.set()
        except ContactError:
            if self._joined.get(task) is line:
                del self._joined[task]
            self._seen[task] = f"joined from {line.origin}, then left"
            self._changed.set()

    def _refusal(self, task: Task | None, name: str, line: Line) -> str | None:
        if task is None:
            have = ", ".join(str(other) for other, _ in self._meeting.cluster.tasks())
            return (
                f"A process on {line.origin} joined as {name!r}, but the chief's cluster has: "
                f"{have}. Give all tasks the same cluster in TF_CONFIG, and each its own task."
            )
        if task in self._joined:
            return (
                f"Two processes joined as {name}: one on {self._joined[task].origin}, another on "
                f"{line.origin}. Give each its own task type and index in TF_CONFIG."
            )
        return None

    def _compare(self, task: Task, theirs: Mapping[str, object]) -> None:
        ours = self._meeting.identity
        names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if not names:
            return
        self._differs[task] = {name: str(theirs.get(name)) for name in names}
        here = ", ".join(f"{name} {ours.get(name)}" for name in names)
        self._failure = (
            f"The tasks do not run the same. {self._meeting.describe(self._meeting.task)}, "
            f"the chief, runs {here}.\n{table(self._reports())}\n"
            "Install the same versions and give the same options in every task."
        )

    def _compare_clocks(self, task: Task, theirs: object) -> None:
        if not isinstance(theirs, int | float):
            return
        self._apart[task] = apart = theirs - time.time()
        if abs(apart) > CLOCKS_APART:
            self._meeting.report(
                f"{self._meeting.describe(task)}: its clock is {apart:+.0f} s from the chief's, so "
                "times in logs and dates of files do not go together. Set it, as by NTP."
            )

    async def _confirm(self, task: Task) -> None:
        """Asks at a task's address who is there until it is the task."""
        pauses = pauses_between_tries()
        while (seen := await identify(self._meeting, task)) is not None:
            self._seen[task] = seen
            await asyncio.sleep(next(pauses))
        self._seen[task] = "found there, but it has not joined"
        self._confirmed.add(task)
        self._changed.set()

    async def _broadcast_awaited(self) -> None:
        while True:
            await asyncio.sleep(_BROADCAST_EVERY)
            if self._missing():
                await self._broadcast(kind="waiting", awaited="; ".join(self._awaited()))

    async def _broadcast(self, **message: object) -> None:
        await asyncio.gather(*(line.send(**message) for line in self._joined.values()))

    def _missing(self) -> list[Task]:
        return [
            task for task in self._others if task not in self._joined or task not in self._confirmed
        ]

    def _awaited(self) -> list[str]:
        """Each missing task with its address and the last observation there."""
        return [f"{self._meeting.describe(task)}: {self._sight(task)}" for task in self._missing()]

    def _sight(self, task: Task) -> str:
        seen = self._seen[task]
        if task in self._joined:
            origin = self._joined[task].origin
            return f"{seen} at that address, though the task has joined from {origin}"
        hint = _HINTS.get(seen)
        return f"{seen} ({hint})" if hint else seen

    def _status(self) -> str:
        return f"{self._meeting.task} waits for {'; '.join(self._awaited())}"

    def _left(self, tasks: list[Task]) -> str:
        names = "; ".join(f"{self._meeting.describe(task)}: {self._seen[task]}" for task in tasks)
        return f"A task left during the start, see its own log. {names}"

    def _reports(self) -> list[Report]:
        """The states of all other tasks."""
        missing = set(self._missing())
        return [
            Report(
                task=task,
                address=self._meeting.cluster.address(task),
                joined=task in self._joined,
                answers=task in self._confirmed,
                differs=self._differs.get(task, {}),
                apart=self._apart.get(task),
                problem=self._sight(task) if task in missing else "",
            )
            for task in self._others
        ]

    def _too_late(self) -> str:
        count = len(self._missing())
        lines = [
            f"The cluster did not come together within {self._meeting.timeout:g} s "
            f"(--start-timeout). {self._meeting.task}, the chief, misses {count} of "
            f"{len(self._others) + 1} tasks:",
            table(self._reports()),
            *dict.fromkeys(self._notes),
            "Start the missing tasks or correct their addresses in TF_CONFIG; a longer "
            "--start-timeout waits longer.",
        ]
        return "\n".join(lines)
