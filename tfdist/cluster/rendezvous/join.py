"""The bounded start: all tasks meet before TensorFlow starts, or report which are missing and why.

TensorFlow itself waits without an end and without a word for a task that does not come, so it is
started only when everybody is there. The tasks meet on the very ports that TensorFlow will use:

1. Every task listens on its port and answers each caller with its own task.
2. Every task connects to the chief, sends its task and what it runs, and stays connected.
3. The chief asks at each task's listed address who is there, so that a wrong address or a firewall
   is seen from outside; then each task asks the others in the same way.
4. The chief has all others close their ports; when they have, it closes its own and sends "go".
   After "go" no task can mistake this protocol for TensorFlow's.

Pure Python sockets, no TensorFlow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfdist.cluster.rendezvous.coordinator import Gathering
from tfdist.cluster.rendezvous.participant import Joining
from tfdist.cluster.rendezvous.transport import Meeting, Met
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import StartError

__all__ = ["JoinReport", "identity", "join"]

_PACKAGES = {"TensorFlow": "tensorflow", "Keras": "keras", "tfdist": "tfdist"}


@dataclasses.dataclass(frozen=True)
class JoinReport:
    """The report of a start.

    Attributes:
        seconds: how long it took until all had joined.
        tasks: number of tasks.
        offer: the chief's offer: the same values in every task.
        lines: the connections that stay open, if that was asked for: the chief's to all others,
            or a task's to the chief.
        late: whether the others had started already, so that nothing was offered.
    """

    seconds: float
    tasks: int
    offer: Mapping[str, str]
    lines: tuple[socket.socket, ...] = ()
    late: bool = False


def identity(config: str) -> dict[str, str]:
    """The identity of a task's program, to be compared between all tasks before the start.

    Args:
        config: the configuration that all tasks must share.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name, package in _PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    digest = hashlib.sha256(config.encode()).hexdigest()[:12]
    return {**versions, "configuration (digest)": digest}


def join(
    cluster: ClusterSpec,
    task: Task,
    *,
    timeout: float,
    identity: Mapping[str, str],
    offer: Mapping[str, str] | None = None,
    report: Callable[[str], None] | None = None,
    keep_lines: bool = False,
    may_be_late: bool = False,
) -> JoinReport:
    """Waits until all tasks of a cluster have joined.

    Call it in every task before TensorFlow starts its server.

    Args:
        cluster: the tasks that take part. Leave out those that need not be waited for.
        task: this process's own.
        timeout: seconds until the start is given up.
        identity: versions and configuration of this task, by name. All tasks must have the same.
        offer: values that the chief gives to all, as a seed drawn by it. Others' are not used.
        report: gets a line of text now and then while something is awaited.
        keep_lines: leave the connections between the chief and the others open, for the caller.
            All tasks must have the same.
        may_be_late: return also when the chief has started TensorFlow already, as a task must that
            takes the place of one that has died.

    Raises:
        StartError: if the cluster does not come together in time, or cannot: with each missing
            task, its address, and what was seen there.
        KeyError: if the cluster has no such task.
    """
    address = cluster.address(task)
    started = time.monotonic()
    meeting = Meeting(
        cluster=cluster,
        task=task,
        address=address,
        timeout=timeout,
        identity=dict(identity),
        report=report or (lambda text: None),
        keep_lines=keep_lines,
        may_be_late=may_be_late,
    )
    met = _run(meeting, dict(offer or {}))
    seconds = time.monotonic() - started
    return JoinReport(seconds, len(list(cluster.tasks())), met.offer, met.lines, met.late)


def _run(meeting: Meeting, offer: dict[str, str]) -> Met:
    """Runs the meeting; in a thread if this one has an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_meet(meeting, offer))
    results: list[Met | StartError] = []

    def work() -> None:
        try:
            results.append(asyncio.run(_meet(meeting, offer)))
        except StartError as error:
            results.append(error)

    thread = threading.Thread(target=work, name="tfdist join")
    thread.start()
    thread.join()
    if isinstance(results[0], StartError):
        raise results[0]
    return results[0]


async def _meet(meeting: Meeting, offer: dict[str, str]) -> Met:
    if meeting.task == meeting.chief:
        return await Gathering(meeting, offer).run()
    return await Joining(meeting).run()
