"""The bounded start: all tasks meet before TensorFlow starts, or report which are missing and why.

TensorFlow itself waits without an end and without a word for a task that does not come, so it is
started only when everybody is there. The tasks meet on the very ports that TensorFlow will use:

1. Every task listens on its port and answers each caller with its own task.
2. Every task connects to the chief, sends its task and what it runs, and stays connected.
3. The chief asks at each task's listed address who is there, so that a wrong address or a firewall
   is seen from outside; then each task asks the others in the same way.
4. The chief has all others close their ports; when they have, it closes its own and sends "go".
   After "go" no task can mistake this protocol for TensorFlow's.
5. Tasks that keep their connections to the chief, for what comes later, answer that they have them.

Pure Python sockets, no TensorFlow.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping

from tfdist.cluster.rendezvous.coordinator import Gathering
from tfdist.cluster.rendezvous.transport import (
    CONNECT_SECONDS,
    ContactError,
    Door,
    JoinReport,
    Line,
    Meeting,
    dial,
    identify,
    open_door,
    pauses_between_tries,
    report_regularly,
    speaks_grpc,
)
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import StartError

__all__ = ["JoinReport", "identity", "join"]

_PACKAGES = {"TensorFlow": "tensorflow", "Keras": "keras", "tfdist": "tfdist"}

_RETRY_SECONDS = 0.3
#: A task that has joined waits so much longer, to hear from the chief why the start failed.
_PATIENCE = 2.0
#: Each task asks so many others who they are; in a large cluster all pairs would be too many.
_NEIGHBOURS = 16


_STARTED = (
    "TensorFlow runs there already: the others have started without this task, or the task that it "
    "replaces has taken a part of the training with it"
)


class _HasStartedError(Exception):
    """The others have started without this task, which need not meet them."""


class Joining:
    """Reaches the chief and follows its messages."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._door = Door(str(meeting.task), on_join=None)
        self._chief = meeting.describe(meeting.chief)
        self._seen = "not tried yet"
        self._joined = False
        self._awaited = ""

    async def run(self) -> JoinReport:
        """Meets; the result has the chief's offer.

        Raises:
            StartError: if the chief is not reached in time, or gives up.
        """
        try:
            async with asyncio.timeout(self._meeting.timeout + _PATIENCE) as final:
                await open_door(self._meeting, self._door)
                async with report_regularly(self._meeting, self._status):
                    return await self._join(final)
        except _HasStartedError:
            return self._meeting.report_of({}, late=True)
        except StartError:  # It is a TimeoutError too.
            raise
        except TimeoutError:
            raise StartError(self._too_late()) from None
        finally:
            self._door.close()

    async def _join(self, final: asyncio.Timeout) -> JoinReport:
        loop = asyncio.get_running_loop()
        deadline = (final.when() or loop.time()) - _PATIENCE
        while True:
            async with asyncio.timeout_at(deadline):
                line = await self._reach_chief()
            try:
                offer = await self._follow(line)
                if not self._meeting.keep_lines:
                    return self._meeting.report_of(offer)
                kept = line.keep()
                await line.send(kind="kept")
                return self._meeting.report_of(offer, (kept,))
            except ContactError as error:
                self._joined, self._seen = False, f"{error} after this task had joined"
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                await line.close()

    async def _reach_chief(self) -> Line:
        """Tries until the chief has let this task in.

        Raises:
            _HasStartedError: if the chief has started TensorFlow, and this task may be late.
        """
        pauses = pauses_between_tries()
        while True:
            with contextlib.suppress(ContactError):
                return await self._ask_to_join()
            if await self._finds_tensorflow():
                self._seen = _STARTED
                if self._meeting.may_be_late:
                    raise _HasStartedError
            await asyncio.sleep(next(pauses))

    async def _finds_tensorflow(self) -> bool:
        if self._seen == "connection refused":
            return False
        address = self._meeting.cluster.address(self._meeting.chief)
        return await speaks_grpc(address, CONNECT_SECONDS)

    async def _ask_to_join(self) -> Line:
        meeting = self._meeting
        try:
            line = await dial(meeting.cluster.address(meeting.chief), CONNECT_SECONDS)
            try:
                await self._introduce(line)
            except BaseException:
                await line.close()
                raise
        except ContactError as error:
            self._seen = str(error)
            raise
        self._joined = True
        return line

    async def _introduce(self, line: Line) -> None:
        meeting = self._meeting
        own = {"task": str(meeting.task), "identity": dict(meeting.identity), "time": time.time()}
        await line.send(kind="join", **own)
        name = (await line.hear()).get("task")
        if name != str(meeting.chief):
            raise ContactError(f"answered as {name} instead of {meeting.chief}")

    async def _follow(self, line: Line) -> dict[str, str]:
        """Follows the chief's messages until "go"."""
        while True:
            message = await line.receive()
            match message.get("kind"):
                case "waiting":
                    self._awaited = str(message.get("awaited", ""))
                case "check":
                    await line.send(kind="checked", trouble=await self._check_neighbours())
                case "close":
                    self._door.close()
                    await line.send(kind="closed")
                case "refuse":
                    raise StartError(f"{self._chief} refused: {message.get('reason')}")
                case "stop":
                    raise StartError(f"The chief stopped the start:\n{message.get('reason')}")
                case "go":
                    return dict(message.get("offer", {}))

    async def _check_neighbours(self) -> list[str]:
        """The problems at the addresses of the tasks that follow this one."""
        everyone = [task for task, _ in self._meeting.cluster.tasks()]
        position = everyone.index(self._meeting.task)
        following = (everyone[position + 1 :] + everyone[:position])[:_NEIGHBOURS]
        seen = await asyncio.gather(*(identify(self._meeting, task) for task in following))
        return [
            f"{self._meeting.task} tried to reach {self._meeting.describe(task)}: {text}"
            for task, text in zip(following, seen, strict=True)
            if text is not None
        ]

    def _status(self) -> str:
        if self._joined:
            return f"{self._meeting.task} has joined {self._chief}, which waits for {self._awaited}"
        return f"{self._meeting.task} waits for {self._chief}: {self._seen}"

    def _too_late(self) -> str:
        seconds = f"{self._meeting.timeout:g} s (--start-timeout)"
        if self._joined:
            awaited = f" It last waited for {self._awaited}." if self._awaited else ""
            return (
                f"{self._meeting.task} joined {self._chief}, but the cluster did not come "
                f"together within {seconds}.{awaited}"
            )
        return (
            f"{self._meeting.task} did not reach the chief within {seconds}:\n"
            f"  {self._chief}: {self._seen}\n"
            "Is the chief started, is its address in TF_CONFIG right, and does a firewall let "
            "that port through?"
        )


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
    report: Callable[[str], None] = lambda text: None,
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
    meeting = Meeting(
        cluster=cluster,
        task=task,
        timeout=timeout,
        identity=identity,
        report=report,
        keep_lines=keep_lines,
        may_be_late=may_be_late,
    )
    meets = Gathering(meeting, offer or {}) if task == cluster.chief else Joining(meeting)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(meets.run())
    # This thread has an event loop already, as in a notebook.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(meets.run())).result()
