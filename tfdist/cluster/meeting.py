"""What the chief and the others share at the bounded start (see `tfdist.cluster.join`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping

from tfdist.cluster.addresses import is_any_address, is_ip, is_loopback
from tfdist.cluster.ports import is_local_host
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.cluster.wire import ContactError, Door, probe
from tfdist.errors import StartError

__all__ = ["CONNECT_SECONDS", "Meeting", "Met", "identify", "open_door", "report_regularly"]

#: Seconds for one attempt to connect.
CONNECT_SECONDS = 2.0

_SECONDS_FOR_OWN_PORT = 5.0
_FIRST_REPORT = 3.0
_REPORT_EVERY = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """Who meets, and until when.

    Attributes:
        cluster: all that take part.
        task: this process's own.
        address: where this task listens.
        timeout: seconds until the start is given up.
        identity: what this task runs.
        report: gets a line of text while something is awaited.
        keep_lines: whether the connections to the chief stay open after the start.
        may_be_late: whether this task may find that the others have started without it.
    """

    cluster: ClusterSpec
    task: Task
    address: Address
    timeout: float
    identity: Mapping[str, str]
    report: Callable[[str], None]
    keep_lines: bool = False
    may_be_late: bool = False

    @property
    def chief(self) -> Task:
        """The task that all others connect to."""
        return self.cluster.chief

    def place(self, task: Task) -> str:
        """A task and its address, in words."""
        return f"{task} at {self.cluster.address(task)}"

    def others(self) -> list[Task]:
        """All tasks but this one."""
        return [task for task, _ in self.cluster.tasks() if task != self.task]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Met:
    """How a meeting ended well.

    Attributes:
        offer: what the chief offered.
        lines: the connections that stay open: the chief's to all others, or a task's to the chief.
        late: whether the others had started already, so that there was no meeting.
    """

    offer: Mapping[str, str]
    lines: tuple[socket.socket, ...] = ()
    late: bool = False


async def identify(meeting: Meeting, task: Task) -> str | None:
    """Asks at a task's listed address who is there.

    Returns:
        None if it is the task; else what was seen instead.
    """
    try:
        name = await probe(meeting.cluster.address(task), CONNECT_SECONDS)
    except ContactError as error:
        return str(error)
    return None if name == str(task) else f"answered as {name} instead of {task}"


def listening_host(meeting: Meeting) -> str | None:
    """The one address on which this task listens, or None for all interfaces.

    Nobody but tasks of the cluster has to reach the port, and they use the address that is listed.
    Where all are on loopback addresses, nobody else can. A name may stand for other addresses on
    other machines, so a task with a name listens on all.
    """
    own = meeting.address.host
    if all(is_loopback(address.host) for _, address in meeting.cluster.tasks()):
        return own if is_ip(own) else "127.0.0.1"
    return own if is_ip(own) and not is_any_address(own) and is_local_host(own) else None


async def open_door(meeting: Meeting, door: Door) -> None:
    """Opens this task's port. A program that is just ending gets some seconds to free it.

    Raises:
        StartError: if another program keeps the port.
    """
    host = listening_host(meeting)
    seconds = min(_SECONDS_FOR_OWN_PORT, meeting.timeout)
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            await door.open(meeting.address.port, host)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(await _port_problem(meeting, error, host)) from error
            if not told:
                told = True
                port = meeting.address.port
                meeting.report(f"{meeting.task} waits up to {seconds:g} s for its own port {port}")
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def report_regularly(meeting: Meeting, status: Callable[[], str]) -> AsyncIterator[None]:
    """Within the block, reports now and then what is awaited."""

    async def report() -> None:
        await asyncio.sleep(_FIRST_REPORT)
        while True:
            meeting.report(status())
            await asyncio.sleep(_REPORT_EVERY)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


async def _port_problem(meeting: Meeting, error: OSError, host: str | None) -> str:
    port = meeting.address.port
    if error.errno != errno.EADDRINUSE:
        return (
            f"{meeting.task} cannot listen on its own port {port}: "
            f"{(error.strerror or str(error)).lower()}. Give it another port in TF_CONFIG, in "
            "every task; ports below 1024 are the administrator's."
        )
    start = f"{meeting.task} cannot start, since its own port {port} is in use"
    try:
        name = await probe(Address(host or "127.0.0.1", port), CONNECT_SECONDS)
    except ContactError:
        return (
            f"{start} by another program (`ss -ltnp sport = :{port}` shows which). End that "
            f"program, or give {meeting.task} another port in TF_CONFIG, in every task."
        )
    return (
        f"{start} by a task of tfdist, which answered as {name}. Either this task was started "
        "twice, or two tasks have the same address in TF_CONFIG."
    )
