"""The one driver of a job on Ray: `python -m tfdist.launcher.backends.ray_driver`.

A process of its own beside the launcher, because Ray takes over signals, threads and the end of
the process that it is started in. It makes the placement group and an actor for each task, serves
the tasks' local processes (`ray_relay`) at a socket, and takes all down again when its standard
input ends. If it ends in any other way, Ray ends the actors and removes the group.

Standard input: a wish, then, when the seats are known, the orders; one line of JSON each. Standard
output: lines of JSON with one of `note`, `stage`, `problem` and `seats`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import environment
from tfdist.launcher.backends.ray_actor import Runner, library
from tfdist.launcher.backends.ray_relay import END, frame

__all__ = ["lacking", "main", "short"]


# Texts about Ray's resources and errors. Pure functions.

_LONGEST = 300


def lacking(
    bundles: Sequence[Mapping[str, float]],
    placement: str,
    total: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """The resources requested, and those that there are.

    Args:
        bundles: the resources of each task.
        placement: how they are to be spread.
        total: the cluster's resources.
        free: the part of these that is free.
    """
    kinds = Counter(_listed(bundle) for bundle in bundles)
    asked = " and ".join(f"{count} x ({kind})" for kind, count in kinds.items())
    names = sorted({"CPU", *(name for bundle in bundles for name in bundle)})
    has = ", ".join(f"{n} {total.get(n, 0):g} ({free.get(n, 0):g} free)" for n in names)
    return f"Asked for: {asked}, {placement}. The cluster has: {has}."


def short(error: BaseException) -> str:
    """The end of an error's message, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text[-_LONGEST:].rstrip(".")


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in resources.items())


#: Seconds for a port to answer, and for actors to end.
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_END = 5.0
#: Between TERM and KILL if the launcher has gone.
_GRACE = 1.0
#: Seconds that one poll for output waits.
_POLL = 1.0
#: Bytes of Ray's object store on this machine, which a job does not use.
_OBJECT_STORE = 100 * 1024 * 1024
#: Seconds after which the user learns what is awaited.
_SILENT = 2.0


class _UnableError(Exception):
    """The reason why the job cannot be placed."""


def main() -> int:
    """Places a job, serves it, and takes it down when standard input ends."""
    send = _voice()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    allocated = threading.Event()
    lines: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(lines, allocated), daemon=True).start()
    wish = lines.get()
    actors: list[Any] = []
    try:
        _connect(wish, send)
        actors, seats = _allocate(wish, send)
        allocated.set()
        send({"seats": seats})
        orders = lines.get()
        if orders is not None:
            _serve(wish["door"], actors, orders)
            lines.get()
    except _UnableError as error:
        send({"problem": str(error)})
    finally:
        _shut_down(actors)
        shutil.rmtree(Path(wish["door"]).parent, ignore_errors=True)  # The launcher may be gone.
    return 0


def _voice() -> Callable[[Mapping[str, Any]], None]:
    """Speaks on standard output, if nobody else then does."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(what: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=ours, flush=True)

    return send


def _listen(lines: queue.Queue[Any], allocated: threading.Event) -> None:
    """Passes the launcher's lines on, and None at their end."""
    for line in sys.stdin:
        lines.put(json.loads(line))
    if not allocated.is_set():
        os._exit(1)  # Ray may be waiting for something; it cleans up after a driver that is gone.
    lines.put(None)


def _connect(wish: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Connects to a running Ray, or starts one for this job.

    Raises:
        _UnableError: if that which was named cannot be used.
    """
    ray = library()
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    named = wish["address"] or environment.snapshot().get("RAY_ADDRESS") or None
    address = named or ("auto" if _recorded() else "local")
    send({"stage": "a Ray of this job's own" if address == "local" else f"Ray ({address})"})
    if named is not None and named not in ("auto", "local"):
        _knock(named)
    try:
        if address != "local":
            ray.init(address=address, **quiet)
            return
        send({"note": "No Ray was started on this machine: one is started for this job alone."})
        cpus = sum(each["CPU"] for each in wish["bundles"])
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            **quiet,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise _UnableError(
            f"Ray at {address}: {short(error)}. One with token authentication needs "
            "RAY_AUTH_MODE=token here too."
        ) from error


def _recorded() -> bool:
    """Whether a Ray answers that `ray start` has left word of on this machine.

    Without such a word, Ray's own `auto` takes any that it finds among the processes, such as that
    of another job alone.
    """
    environ = environment.snapshot()
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    try:
        address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
        _knock(address)
    except (OSError, _UnableError):
        return False
    return True


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise _UnableError(f"{address!r} is no address of a Ray. Give HOST:PORT of its head node.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise _UnableError(
            f"No Ray answers at {address}: {short(error)}. Check --address or RAY_ADDRESS, or "
            "leave both out to use a Ray of this machine."
        ) from error


def _allocate(
    wish: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]
) -> tuple[list[Any], list[Any]]:
    """The actors, and each one's report of its node.

    Raises:
        _UnableError: if there is no room before the deadline, or an actor does not start.
    """
    ray = library()
    deadline = time.monotonic() + wish["seconds"]
    group = library("ray.util").placement_group(
        wish["bundles"], strategy=wish["placement"], name=wish["name"]
    )
    send({"stage": "room for the tasks"})
    if not group.wait(min(_SILENT, wish["seconds"])):
        missing = lacking(wish["bundles"], wish["placement"], *_resources())
        left = deadline - time.monotonic()
        if left > 0:
            send({"note": f"{missing} Waiting for room, {left:.0f} s at most."})
        if left <= 0 or not group.wait(left):
            missing = lacking(wish["bundles"], wish["placement"], *_resources())
            raise _UnableError(
                f"Ray had no room for the job within {wish['seconds']:g} s. {missing}"
            )
    send({"stage": "the actors of the tasks"})
    scheduling = library("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    actors = [
        ray.remote(Runner)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            name=f"{wish['name']}: {task}",
            scheduling_strategy=scheduling(group, placement_group_bundle_index=number),
        )
        .remote()
        for number, (bundle, task) in enumerate(zip(wish["bundles"], wish["tasks"], strict=True))
    ]
    _answers([actor.ready.remote() for actor in actors], wish["tasks"], deadline)
    reports = [actor.inspect.remote(wish["folder"]) for actor in actors]
    return actors, _answers(reports, wish["tasks"], deadline)


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    ray = library()
    return ray.cluster_resources(), ray.available_resources()


def _answers(asked: Sequence[Any], tasks: Sequence[str], deadline: float) -> list[Any]:
    """The answers of all actors.

    Raises:
        _UnableError: with each that does not, and why.
    """
    ray, errors = library(), library("ray.exceptions")
    answers, problems = [], []
    for task, answer in zip(tasks, asked, strict=True):
        try:
            answers.append(ray.get(answer, timeout=max(1.0, deadline - time.monotonic())))
        except errors.GetTimeoutError:
            problems.append(f"{task}: its actor was placed and did not answer in time.")
        except errors.RayError as error:
            problems.append(f"{task}: {short(error)}. tfdist must be installed on each node.")
    if problems:
        raise _UnableError("Actors do not start:\n  " + "\n  ".join(problems))
    return answers


def _serve(path: str, actors: Sequence[Any], orders: Sequence[Mapping[str, Any]]) -> None:
    """Serves the local process of each task, in threads."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"{path}-")
    door.listen(len(actors))
    os.rename(f"{path}-", path)  # A task that sees it can connect.

    def accept() -> None:
        while True:
            line, _ = door.accept()
            threading.Thread(target=_task, args=(line, actors, orders), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _task(line: socket.socket, actors: Sequence[Any], orders: Sequence[Mapping[str, Any]]) -> None:
    """Runs one task for its local process."""
    with line, line.makefile("rb", buffering=0) as stream:
        number = int(stream.readline())
        actor = actors[number]
        try:
            _run(line, actor, orders[number])
        except OSError:  # Its local process has been killed, so the task is to be killed.
            actor.signal.remote(int(signal.SIGKILL))
        except library("ray.exceptions").RayError as error:
            words = f"tfdist: Ray has lost the actor of this task ({type(error).__name__}): its "
            words += "node or its process has gone, or somebody has ended it.\n"
            with contextlib.suppress(OSError):
                line.sendall(frame(2, words.encode()) + frame(END, b"1"))


def _run(line: socket.socket, actor: Any, order: Mapping[str, Any]) -> None:
    ray = library()
    problem = ray.get(
        actor.start.remote(order["command"], order["environ"], order["folder"], order["streams"])
    )
    if problem is not None:
        line.sendall(frame(2, f"tfdist: {problem}.\n".encode()) + frame(END, b"127"))
        return
    threading.Thread(target=_signals, args=(line, actor), daemon=True).start()
    status = None
    while status is None:
        blocks, status = ray.get(actor.poll.remote(_POLL))
        for kind, data in blocks:
            line.sendall(frame(kind, data))
    line.sendall(frame(END, str(status).encode()))


def _signals(line: socket.socket, actor: Any) -> None:
    """Passes the signals on that a local process gets; KILL when it has gone."""
    with contextlib.suppress(OSError):
        while numbers := line.recv(64):
            for number in numbers:
                actor.signal.remote(number)
    with contextlib.suppress(Exception):  # Ray may be shut down by now.
        actor.signal.remote(int(signal.SIGKILL))


def _shut_down(actors: Sequence[Any]) -> None:
    """Ends the tasks and their actors, and with the driver its placement group."""
    ray = library()
    if not ray.is_initialized():
        return
    ended = [actor.end.remote(_GRACE) for actor in actors]
    if ended:
        ray.wait(ended, num_returns=len(ended), timeout=_SECONDS_TO_END)
    for actor in actors:
        ray.kill(actor)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
