"""Runs a job whose number of processes may change: starts it anew whenever the world does.

A task that loses another, or is asked to stop, leaves the state of its training in a directory and
exits with `RESUME_STATUS`; the launcher then starts the job again, perhaps with another number of
tasks, which go on from the newest state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from tfdist.errors import ConfigError, StartError
from tfdist.launcher import root_cause
from tfdist.launcher.elastic_directory import RESUME_STATUS, ElasticDirectory
from tfdist.launcher.plan import JobPlan
from tfdist.launcher.process import Guard
from tfdist.launcher.supervisor import (
    Attempt,
    Outcome,
    Requests,
    Restarts,
    Screen,
    outcome_of,
    stop_requests,
)

__all__ = [
    "SETTLE_SECONDS",
    "Discovery",
    "World",
    "run",
    "slots_of",
]

# The worlds of a job, one after the other.

#: Seconds in which tasks that have lost another must notice it and leave their state.
SETTLE_SECONDS = 60.0

_NOTIFY_EVERY = 10.0
_POLL = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The numbers of processes that are allowed.

    Attributes:
        least: the job waits while fewer can run.
        most: more are not started.
        slots: returns how many can run now.
        problem: returns what is wrong with `slots`, or None.
        timeout: seconds that the job waits for `least`.
        states: where the tasks leave their state.
        max_restarts: how often the job is started again after a task was lost.
    """

    least: int
    most: int
    slots: Callable[[], int]
    problem: Callable[[], str | None]
    timeout: float
    states: ElasticDirectory
    max_restarts: int

    def size(self) -> int:
        """The number of processes to run now; 0 if there are too few slots."""
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
            world.states.begin()
            with make(count) as plan:
                watch = _Watch(world, count, screen)
                attempt = Attempt(plan, guard, requests, screen, restarts, again=again, watch=watch)
                endings = attempt.run(grace)
            own = [each for each in endings if each.returncode != RESUME_STATUS]
            root, left = root_cause.root_cause(own), len(own) < len(endings)
            lost = root is not None and root.returncode < 0
            if requests.received or not (lost or (root is None and left)):
                break
            if lost and not restarts.take():
                break
            again = _announce(root, world, restarts, screen, attempt.midline)
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
        problem = self._world.problem()
        if problem is not None:
            self._screen.show(problem)
        size = self._world.size()
        if not self._asked and size != self._count:
            self._asked = True
            what = f"{size} processes can" if size else "too few processes can"
            self._screen.show(f"{what} run now, instead of {self._count}.")
            self._world.states.request_stop()


def _await_slots(world: World, screen: Screen, requests: Requests) -> int:
    deadline, notified = time.monotonic() + world.timeout, 0.0
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
        if now - notified > _NOTIFY_EVERY:
            notified = now
            screen.notify(
                f"waiting for --min-np {world.least} slots; there are {slots}, for another "
                f"{deadline - now:.0f} s",
                False,
            )
        time.sleep(_POLL)
    return world.size()


def _announce(
    root: root_cause.Ending | None, world: World, restarts: Restarts, screen: Screen, midline: bool
) -> str:
    """Shows why and where the job goes on; returns the line for the logs."""
    newest = world.states.newest()
    where = "from the beginning" if newest is None else f"from {newest[0]}"
    why = "" if root is None else f"{root_cause.headline(root)} ({restarts}); "
    text = f"{why}the training goes on {where}. The global batch and the learning rate stay."
    screen.notify(text, midline)
    return f"tfdist: {text}"


# The number of processes that this machine may run now, from a script of the user's.

_SCRIPT_SECONDS = 10.0
_PERIOD = 1.0


def slots_of(text: str, script: str) -> int:
    """Adds up the slots of a list of hosts.

    Args:
        text: a line for each host, `name:slots` or `name` for one slot, as Horovod's discovery
            scripts print them.
        script: where it came from, for messages.

    Raises:
        ConfigError: if a line is none of these, or names another machine.
    """
    total = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        host, _, count = line.rpartition(":") if ":" in line else (line, "", "1")
        if not count.isdecimal():
            raise ConfigError(
                f"--host-discovery-script {script!r} printed {line!r}. It must print a line for "
                "each host, such as localhost:4."
            )
        if not _is_here(host):
            raise ConfigError(
                f"--host-discovery-script {script!r} printed {line!r}, which is another machine. "
                "Elastic jobs run on the machine where they are started: let it print localhost "
                "and the number of processes, such as localhost:4."
            )
        total += int(count)
    return total


class Discovery:
    """Asks the script again and again while a job runs. A context manager.

    Args:
        script: a program that prints hosts and their slots.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._slots = self._ask()
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdist discovery", daemon=True)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(_SCRIPT_SECONDS + 1)

    @property
    def slots(self) -> int:
        """The number of processes that may run, as the script printed it last."""
        return self._slots

    def take_problem(self) -> str | None:
        """The script's failure since it was asked last, once."""
        problem, self._problem = self._problem, None
        return problem

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                self._slots = self._ask()
            except ConfigError as error:
                self._problem = str(error)

    def _ask(self) -> int:
        try:
            done = subprocess.run(
                [self._script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} took longer than "
                f"{_SCRIPT_SECONDS:.0f} s. Let it print what it knows and end."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} cannot be run: {error.strerror}. Give "
                "the path of an executable file, such as ./hosts.sh."
            ) from error
        if done.returncode:
            raise ConfigError(
                f"--host-discovery-script {self._script!r} failed with exit status "
                f"{done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return slots_of(done.stdout, self._script)


def _is_here(host: str) -> bool:
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    if host.strip("[]") in names:
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False
