"""Tasks on the nodes of a Ray cluster: a placement group with one actor for each task.

One process beside the launcher talks to Ray (`ray_driver`). Each task has a tiny local process
(`ray_relay`) that passes its output and its signals on, so that its log, its end and its place in
the job are those of any other task.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from tfdist import environment
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import ConfigError, StartError
from tfdist.launcher.backends import ray_relay
from tfdist.launcher.plan import WITH_SERVERS, JobPlan, Program, cluster_variables, task_plan
from tfdist.launcher.ssh import carried, differences

__all__ = [
    "PLACEMENTS",
    "Bundle",
    "Options",
    "Seat",
    "Session",
    "Wish",
    "bundles",
    "cluster_of",
    "options",
    "plan_on",
]


# Requests of a job to Ray, and Ray's answers, as data. Pure: nothing here talks to Ray.

#: Ray's strategies of placement groups.
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options in `--engine-args` for Ray.

    Attributes:
        address: HOST:PORT of a running Ray, or None to look for one.
        cpus_per_task: Ray's CPUs for each task.
        placement: how the tasks are spread over the nodes, one of `PLACEMENTS`.
    """

    address: str | None = None
    cpus_per_task: float = 1.0
    placement: str = "PACK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """The resources that one task needs of a node.

    Attributes:
        task: the task.
        cpus: Ray's CPUs, which are a count and bind nothing.
        gpus: whole GPUs.
    """

    task: Task
    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As a placement group wants it."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        return ", ".join(f"{name} {count:g}" for name, count in self.resources.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """A placement group with an actor for each task.

    Attributes:
        name: the job's name.
        bundles: the tasks' resources, in the order of their ranks.
        options: where and how.
        folder: the directory in which the tasks are to run.
        seconds: how long the placing may take.
    """

    name: str
    bundles: tuple[Bundle, ...]
    options: Options
    folder: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """An actor's report of its node, as `Runner.inspect` gives it.

    Attributes:
        host: the node's address.
        port: a free port, which the actor holds.
        python: the interpreter of Ray there.
        gpus: the GPUs that Ray has given the actor.
        folder: whether the directory of the job is there.
        facts: versions and clock, as `tfdist.launcher.ssh.host_facts` gives them.
    """

    host: str
    port: int
    python: str
    gpus: tuple[str, ...]
    folder: bool
    facts: Mapping[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"--engine-args of ray: {message}. There are --address=HOST:PORT, --cpus-per-task=N "
            f"and --placement={'|'.join(PLACEMENTS)}."
        )


def options(text: str | None) -> Options:
    """Reads `--engine-args`.

    Raises:
        ConfigError: for a word that is not known, or a number that is none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--address")
    parser.add_argument("--cpus-per-task", type=float, default=Options.cpus_per_task)
    parser.add_argument("--placement", choices=PLACEMENTS, default=Options.placement)
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        parser.error(f"{text!r} cannot be split into words ({error})")
    parsed = Options(**vars(parser.parse_args(words)))
    if not 0 < parsed.cpus_per_task < float("inf"):
        parser.error(f"--cpus-per-task={parsed.cpus_per_task:g} is no number of CPUs")
    if parsed.address is not None and parsed.address.startswith("ray://"):
        parser.error(f"--address={parsed.address} is Ray Client's; give HOST:PORT of the head node")
    return parsed


def bundles(counts: Mapping[str, int], cpus: float, gpus: int) -> tuple[Bundle, ...]:
    """The resources of the tasks: GPUs go to those that train.

    Args:
        counts: how many tasks there are of each type, in the order of their ranks.
        cpus: for each task.
        gpus: for each task that trains.
    """
    return tuple(
        Bundle(task=Task(kind, index), cpus=cpus, gpus=gpus if kind == "worker" else 0)
        for kind, count in counts.items()
        for index in range(count)
    )


def cluster_of(allocation: Sequence[tuple[Bundle, Seat]]) -> ClusterSpec:
    """The tasks where Ray has placed them."""
    addresses: dict[str, tuple[Address, ...]] = {}
    for bundle, seat in allocation:
        kind = bundle.task.type
        addresses[kind] = (*addresses.get(kind, ()), Address(seat.host, seat.port))
    return ClusterSpec(addresses)


_DRIVER = "tfdist.launcher.backends.ray_driver"
#: Seconds for Ray itself to come up or to answer, besides those for the placing.
_SECONDS_FOR_RAY = 60.0
#: Seconds for the driver to end all tasks and to leave Ray.
_SECONDS_TO_END = 15.0
_LAST_WORDS = 300


def plan_on(
    program: Program,
    allocation: Sequence[tuple[Bundle, Seat]],
    *,
    clustered: bool,
    log_dir: Path,
    environ: Mapping[str, str],
    python: str | None = None,
) -> JobPlan:
    """Plans a job on the nodes that Ray has given. Pure; see `Session.relayed`.

    Args:
        program: what to run.
        allocation: each task with its place.
        clustered: whether the strategy's tasks make a cluster.
        log_dir: where the log files go, on this machine.
        environ: the environment that is carried over.
        python: the interpreter there; None takes that of Ray.
    """
    cluster = cluster_of(allocation) if clustered else None
    variables = cluster_variables(program, cluster, log_dir) if cluster is not None else None
    base = {k: v for k, v in carried(environ).items() if not k.startswith("RAY_")}
    tasks = []
    for bundle, seat in allocation:
        there = dataclasses.replace(program, python=python or seat.python)
        gpus = seat.gpus if bundle.gpus else ()
        plan = task_plan(there, cluster, bundle.task, log_dir, base, gpus, variables)
        tasks.append(dataclasses.replace(plan, environ={**base, **plan.environ}, host=seat.host))
    shown = allocation[0][0].task if cluster is None else cluster.chief
    has_servers = cluster is not None and program.roles == WITH_SERVERS
    return JobPlan(
        tasks=tuple(tasks),
        cluster=cluster,
        shown=shown,
        log_dir=log_dir,
        begins_at=cluster.address(shown) if cluster is not None and has_servers else None,
        files=variables.files if variables is not None else {},
    )


class Session:
    """A placement group of Ray, from its making to its removal. A context manager.

    Args:
        wish: what to ask for.
        notify: called with reports on the job.

    Attributes:
        seats: where the tasks are, in the order of the wish's bundles.
    """

    def __init__(self, wish: Wish, notify: Callable[[str], None]) -> None:
        self.seats: tuple[Seat, ...] = ()
        self._wish = wish
        self._notify = notify
        self._stage = "Ray"
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Session:
        """Waits until all tasks have a place.

        Raises:
            StartError: if they get none, or the nodes are not like this machine.
        """
        with contextlib.ExitStack() as stack:
            # For the driver's socket; the driver removes it too.
            folder = tempfile.TemporaryDirectory(prefix="tfdist-", ignore_cleanup_errors=True)
            self._door = str(Path(stack.enter_context(folder)) / "door")
            self._errors = stack.enter_context(tempfile.TemporaryFile())
            self._driver = _started(self._errors)
            stack.callback(self._end)
            self._send(_request(self._wish, self._door))
            self.seats = tuple(
                Seat(**{**seat, "gpus": tuple(seat["gpus"])}) for seat in self._await_seats()
            )
            self._compare()
            self._ends = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.close()

    def relayed(self, plan: JobPlan, *, split: bool) -> JobPlan:
        """The plan with the local process of each task, which runs it where it is planned.

        Args:
            plan: by `plan_on`, for the seats.
            split: whether the shown task's errors are kept apart from its output.
        """
        orders = [
            {
                "command": each.command,
                "environ": dict(each.environ),
                "folder": self._wish.folder,
                "streams": 2 if split and each.task == plan.shown else 1,
            }
            for each in plan.tasks
        ]
        self._send(orders)
        self._await_door()
        relay = (sys.executable, "-I", "-S", ray_relay.__file__, self._door)
        tasks = tuple(
            dataclasses.replace(each, command=(*relay, str(number)), environ={})
            for number, each in enumerate(plan.tasks)
        )
        return dataclasses.replace(plan, tasks=tasks)

    def _await_seats(self) -> list[Any]:
        """The driver's answer."""
        deadline = time.monotonic() + self._wish.seconds + _SECONDS_FOR_RAY
        rest = b""
        while True:
            *lines, rest = (rest + self._read(deadline)).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self._stage = message.get("stage", self._stage)
                if "note" in message:
                    self._notify(message["note"])
                if "problem" in message:
                    raise StartError(message["problem"])
                if "seats" in message:
                    seats: list[Any] = message["seats"]
                    return seats

    def _read(self, deadline: float) -> bytes:
        assert self._driver.stdout is not None, "it is a pipe"
        ready, _, _ = select.select([self._driver.stdout], [], [], deadline - time.monotonic())
        if not ready:
            waited = self._wish.seconds + _SECONDS_FOR_RAY
            raise StartError(
                f"Ray: waited {waited:.0f} s in vain for {self._stage}. `ray status` shows the "
                "state of a cluster; --start-timeout gives it more time."
            )
        data = os.read(self._driver.stdout.fileno(), 1 << 16)
        if not data:
            raise StartError(f"Ray: no {self._stage}: {self._last_words()}")
        return data

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_SECONDS_TO_END)
        self._errors.seek(0)
        errors = " ".join(self._errors.read().decode(errors="replace").split())
        return errors[-_LAST_WORDS:] or f"its driver ended with {self._driver.returncode}"

    def _compare(self) -> None:
        """Raises StartError if a node differs from this machine."""
        seats = {seat.host: seat for seat in self.seats}
        problems = [each for h, seat in seats.items() for each in differences(h, seat.facts)]
        problems += [
            f"{host}: there is no directory {self._wish.folder!r}. It must be on every node at the "
            "same path, with the script in it."
            for host, seat in seats.items()
            if not seat.folder
        ]
        if problems:
            raise StartError(
                "The job cannot start on all nodes of Ray:\n  " + "\n  ".join(problems)
            )

    def _await_door(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_END
        while not Path(self._door).exists():
            if time.monotonic() > deadline or self._driver.poll() is not None:
                raise StartError(f"Ray: its driver does not serve the tasks: {self._last_words()}")
            time.sleep(0.01)

    def _send(self, what: Any) -> None:
        assert self._driver.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):  # The reader of its answer sees the reason.
            self._driver.stdin.write(json.dumps(what).encode() + b"\n")
            self._driver.stdin.flush()

    def _end(self) -> None:
        """Has the driver take all down, and waits until it has."""
        driver = self._driver
        if self.seats and driver.poll() is not None:
            self._notify(f"Ray's driver has ended before the job: {self._last_words()}")
        for stream in (driver.stdin, driver.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            driver.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._notify(
                f"Ray did not take the job down within {_SECONDS_TO_END:.0f} s. What is left of it "
                "ends with its driver, which is killed now."
            )
            driver.kill()
            driver.wait()


def _started(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """The driver, in a session of its own: Ctrl-C is for the launcher."""
    return subprocess.Popen(
        [sys.executable, "-m", _DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment.merged({"RAY_USAGE_STATS_ENABLED": "0"}),
        start_new_session=True,
    )


def _request(wish: Wish, door: str) -> dict[str, Any]:
    return {
        "name": wish.name,
        "tasks": [str(bundle.task) for bundle in wish.bundles],
        "bundles": [bundle.resources for bundle in wish.bundles],
        "address": wish.options.address,
        "placement": wish.options.placement,
        "folder": wish.folder,
        "seconds": wish.seconds,
        "door": door,
    }
