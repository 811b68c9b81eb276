"""The part of a task other than the chief in the rendezvous (`tfdist.cluster.rendezvous.join`)."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tfdist.cluster.rendezvous.transport import (
    CONNECT_SECONDS,
    ContactError,
    Door,
    Line,
    Meeting,
    Met,
    dial,
    identify,
    open_door,
    report_regularly,
    speaks_grpc,
)
from tfdist.errors import StartError

__all__ = ["Joining"]

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
        self._chief = meeting.place(meeting.chief)
        self._seen = "not tried yet"
        self._joined = False
        self._awaited = ""

    async def run(self) -> Met:
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
            return Met(offer={}, late=True)
        except StartError:  # It is a TimeoutError too.
            raise
        except TimeoutError:
            raise StartError(self._too_late()) from None
        finally:
            self._door.close()

    async def _join(self, final: asyncio.Timeout) -> Met:
        loop = asyncio.get_running_loop()
        deadline = (final.when() or loop.time()) - _PATIENCE
        while True:
            async with asyncio.timeout_at(deadline):
                line = await self._reach_chief()
            try:
                offer = await self._follow(line)
                lines = (line.keep(),) if self._meeting.keep_lines else ()
                return Met(offer=offer, lines=lines)
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
        while True:
            with contextlib.suppress(ContactError):
                return await self._ask_to_join()
            if await self._finds_tensorflow():
                self._seen = _STARTED
                if self._meeting.may_be_late:
                    raise _HasStartedError
            await asyncio.sleep(_RETRY_SECONDS)

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
            f"{self._meeting.task} tried to reach {self._meeting.place(task)}: {text}"
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
