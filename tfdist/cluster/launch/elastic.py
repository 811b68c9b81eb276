"""Runs a job whose number of processes may change: starts it anew whenever the world does.

The tasks leave the state of their training when one of them is lost, or when they are asked to (see
`tfdist.cluster.elastic`), so a new start goes on where the last one ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tfdist.cluster.elastic import RESUME_STATUS, ElasticPlace
from tfdist.cluster.launch import blame
from tfdist.cluster.launch.attempt import Attempt, Requests, Restarts, Screen, stop_requests
from tfdist.cluster.launch.plan import JobPlan
from tfdist.cluster.launch.spawn import Guard
from tfdist.cluster.launch.supervise import Outcome, outcome_of
from tfdist.errors import StartError

__all__ = ["SETTLE_SECONDS", "World", "run"]

#: Seconds in which tasks that have lost another must notice it and leave their state.
SETTLE_SECONDS = 60.0

_SAY_EVERY = 10.0
_POLL = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """How many processes there may be.

    Attributes:
        least: the job waits while fewer can run.
        most: more are not started.
        slots: says how many can run now.
        news: says what is wrong with `slots`, or None.
        timeout: seconds that the job waits for `least`.
        place: where the tasks leave their state.
        max_restarts: how often the job is started again after a task was lost.
    """

    least: int
    most: int
    slots: Callable[[], int]
    news: Callable[[], str | None]
    timeout: float
    place: ElasticPlace
    max_restarts: int

    def size(self) -> int:
        """The number of processes to run now; 0 where there are too few slots."""
        count = min(self.most, self.slots())
        return count if count >= self.least else 0


def run(
    make: Callable[[int], AbstractContextManager[JobPlan]],
    world: World,
    *,
    grace: float,
    screen: Screen,
) -> Outcome:
    """Runs a job to its end, in as many worlds as it takes. Call it in the main thread.

    Args:
        make: plans the job for a number of processes; the ports are held within.
        world: how many processes there may be.
        grace: seconds between TERM and KILL.
        screen: where the job shows itself.

    Raises:
        StartError: if there are too few slots for longer than `world.timeout`.
        TfdistError: if a process cannot be started. Those already started are ended.
    """
    restarts, again = Restarts(world.max_restarts), ""
    with stop_requests() as requests, Guard() as guard:
        while True:
            count = _await_slots(world, screen, requests)
            world.place.begin()
            with make(count) as plan:
                watch = _Watch(world, count, screen)
                attempt = Attempt(plan, guard, requests, screen, restarts, again=again, watch=watch)
                endings = attempt.run(grace)
            root = _own_failure(endings)
            left = any(each.returncode == RESUME_STATUS for each in endings)
            lost = root is not None and root.returncode < 0
            if requests.received or not (lost or (root is None and left)):
                break
            if lost and not restarts.take():
                break
            again = _say(root, world, restarts, screen, attempt.midline)
    outcome = outcome_of(root, endings, (), requests)
    return dataclasses.replace(outcome, midline=attempt.midline)


class _Watch:
    """Asks the tasks to stop when another number of them could run."""

    def __init__(self, world: World, count: int, screen: Screen) -> None:
        self._world = world
        self._count = count
        self._screen = screen
        self._asked = False

    def __call__(self) -> None:
        problem = self._world.news()
        if problem is not None:
            self._screen.notify(problem, False)
        size = self._world.size()
        if not self._asked and size != self._count:
            self._asked = True
            what = f"{size} processes can" if size else "too few processes can"
            self._screen.notify(f"{what} run now, instead of {self._count}.", False)
            self._world.place.request_stop()


def _await_slots(world: World, screen: Screen, requests: Requests) -> int:
    deadline, said = time.monotonic() + world.timeout, 0.0
    while not world.size():
        now = time.monotonic()
        slots = world.slots()
        if requests.received:
            return world.least
        if now > deadline:
            raise StartError(
                f"{slots} processes can run, fewer than --min-np {world.least}, for "
                f"{world.timeout:.0f} s. Lower --min-np, or see to more slots."
            )
        if now - said > _SAY_EVERY:
            said = now
            screen.notify(
                f"waiting for --min-np {world.least} slots; there are {slots}, for another "
                f"{deadline - now:.0f} s",
                False,
            )
        time.sleep(_POLL)
    return world.size()


def _own_failure(endings: Sequence[blame.Ending]) -> blame.Ending | None:
    """The task that failed of itself, or None if all did well or only left their state."""
    return blame.root_cause([each for each in endings if each.returncode != RESUME_STATUS])


def _say(
    root: blame.Ending | None, world: World, restarts: Restarts, screen: Screen, midline: bool
) -> str:
    """Tells why and where the job goes on; returns the line for the logs."""
    newest = world.place.newest()
    where = "from the beginning" if newest is None else f"from {newest[0]}"
    why = "" if root is None else f"{blame.headline(root)} ({restarts}); "
    text = f"{why}the training goes on {where}. The global batch and the learning rate stay."
    screen.notify(text, midline)
    return f"tfdist: {text}"
