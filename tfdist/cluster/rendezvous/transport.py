"""The messages of tasks before TensorFlow starts: lines of JSON over TCP, no TensorFlow.

The other end of a connection may be anything: a web server, another job, nothing. An error puts
what was seen into words that a user can act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from tfdist.cluster.ports import ALL_INTERFACES, bind, is_local_host
from tfdist.cluster.spec import Address, ClusterSpec, Task, is_any_address, is_ip
from tfdist.errors import StartError

__all__ = [
    "CONNECT_SECONDS",
    "ContactError",
    "Door",
    "JoinReport",
    "Line",
    "Meeting",
    "Message",
    "dial",
    "encode",
    "identify",
    "open_door",
    "pauses_between_tries",
    "probe",
    "report_regularly",
    "speaks_grpc",
]

_PROTOCOL = "tfdist-join/1"
_LONGEST_LINE = 1 << 16
_SECONDS_TO_ANSWER = 3.0
_SECONDS_TO_CLOSE = 1.0
_BYTES_QUOTED = 30
_QUEUE = 128
#: The first bytes of a client of HTTP/2, the base of gRPC: the preface and a frame without
#: settings (RFC 9113, section 3.4).
_HTTP2_CLIENT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
#: The length of a frame's head, and its number for "settings".
_HTTP2_HEAD, _HTTP2_SETTINGS = 9, 4

#: One message: the names and values of a JSON object.
Message = dict[str, Any]


class ContactError(Exception):
    """No task was reached. The text describes the answer instead, as "connection refused"."""


@dataclasses.dataclass(eq=False)
class Line:
    """One connection to another task."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def origin(self) -> str:
        """The host at the other end."""
        peer = self.writer.get_extra_info("peername")
        return str(peer[0]).removeprefix("::ffff:") if peer else "unknown"

    async def send(self, **message: Any) -> None:
        """Sends one message; silently if the other end has gone, which `receive` then reports."""
        with contextlib.suppress(OSError):
            self.writer.write(encode(**message))
            await self.writer.drain()

    def keep(self) -> socket.socket:
        """A second handle of this connection, which stays open when the line is closed.

        The line reads no more of it.
        """
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # Of TCP, so it can.
        return socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno()))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ContactError: at the end of the connection, or if the other end is not a task of tfdist.
        """
        try:
            data = await self.reader.readline()
        except (OSError, ValueError) as error:
            raise ContactError(_in_words(error)) from error
        if not data:
            raise ContactError("closed the connection")
        return _parse(data)

    async def hear(self) -> Message:
        """The first message of the other end, which must come soon.

        Raises:
            ContactError: as `receive`, or if nothing comes.
        """
        try:
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                return await self.receive()
        except TimeoutError as error:
            text = f"accepted the connection, but said nothing for {_SECONDS_TO_ANSWER:.0f} s"
            raise ContactError(text) from error

    async def close(self) -> None:
        """Closes the connection after what was sent."""
        self.writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_SECONDS_TO_CLOSE):
                await self.writer.wait_closed()


def encode(**message: Any) -> bytes:
    """A message as it is sent: a line of JSON."""
    return json.dumps({"protocol": _PROTOCOL, **message}).encode() + b"\n"


async def dial(address: Address, timeout: float) -> Line:
    """Connects to an address.

    Args:
        address: where a task should listen.
        timeout: seconds for the name lookup and the connection.

    Raises:
        ContactError: if there is no connection.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _connect(await _resolve(address), address.port)
    except OSError as error:  # TimeoutError and the errors of name lookup are among them.
        raise ContactError(_in_words(error)) from error


async def probe(address: Address, timeout: float) -> str:
    """Asks a task's name at an address.

    Returns:
        The name of the task, as "worker 1".

    Raises:
        ContactError: if no task answers.
    """
    line = await dial(address, timeout)
    try:
        await line.send(kind="probe")
        return str((await line.hear()).get("task"))
    finally:
        await line.close()


async def speaks_grpc(address: Address, timeout: float) -> bool:
    """Whether a gRPC server, such as TensorFlow's, listens at an address.

    Args:
        address: where to look.
        timeout: seconds for the connection, and again for the answer.
    """
    try:
        line = await dial(address, timeout)
    except ContactError:
        return False
    try:
        line.writer.write(_HTTP2_CLIENT)
        async with asyncio.timeout(timeout):
            head = await line.reader.readexactly(_HTTP2_HEAD)
        return head[3] == _HTTP2_SETTINGS
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        await line.close()


class Door:
    """A task's own port, where others ask who it is and, at the chief's, ask to join.

    Attributes:
        on_join: gets the connections of those that ask to join, with their first message.
    """

    def __init__(self, name: str, on_join: Callable[[Line, Message], Awaitable[None]] | None):
        self._name = name
        self._on_join = on_join
        self._server: asyncio.Server | None = None

    async def open(self, port: int, host: str | None = None) -> None:
        """Starts to listen.

        Args:
            port: the port.
            host: an address of this machine; None means all interfaces.

        Raises:
            OSError: if another program has the port, or the address is not of this machine.
        """
        # A port that the launcher holds is given, but not one where somebody listens.
        listener = bind(ALL_INTERFACES if host is None else host, port)
        try:
            listener.listen(_QUEUE)
            self._server = await asyncio.start_server(
                self._greet, sock=listener, limit=_LONGEST_LINE
            )
        except BaseException:
            listener.close()
            raise

    def close(self) -> None:
        """Gives the port back at once."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        try:
            hello = await line.hear()
            await line.send(kind="welcome", task=self._name)
            if hello.get("kind") == "join" and self._on_join is not None:
                await self._on_join(line, hello)
        except ContactError:
            pass  # Not one of ours, or gone already: nothing that concerns this task.
        finally:
            await line.close()


async def _connect(hosts: list[str], port: int) -> Line:
    """A connection to the first of several addresses of one host that has one."""
    problem: OSError | None = None
    for host in hosts:
        try:
            return Line(*await asyncio.open_connection(host, port, limit=_LONGEST_LINE))
        except OSError as error:
            problem = problem or error
    raise problem or OSError("the name has no address")


async def _resolve(address: Address) -> list[str]:
    """The numeric addresses of a host, IPv4 first.

    In a thread of its own, which may be left behind: a name lookup can take longer than any
    deadline, and threads of a pool would have to be waited for.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(result: list[str] | OSError) -> None:
        if answer.done():
            return
        if isinstance(result, list):
            answer.set_result(result)
        else:
            answer.set_exception(result)

    def resolve() -> None:
        result: list[str] | OSError
        try:
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            result = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except OSError as error:
            result = error
        except UnicodeError:
            result = socket.gaierror("not a host name")
        with contextlib.suppress(RuntimeError):  # The loop has been closed: nobody waits.
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=resolve, name=f"look up {address.host}", daemon=True).start()
    return await answer


def _parse(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if isinstance(message, dict) and message.get("protocol") == _PROTOCOL:
        return message
    if isinstance(message, dict) and "protocol" in message:
        theirs = str(message["protocol"])[:_BYTES_QUOTED]
        raise ContactError(f"answered as another version of tfdist ({theirs}, not {_PROTOCOL})")
    quoted = data[:_BYTES_QUOTED].decode(errors="replace").strip()
    raise ContactError(f"answered, but not as a task of tfdist (it said {quoted!r})")


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer (timed out)"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    if isinstance(error, ConnectionResetError):
        return "closed the connection"
    if isinstance(error, ValueError):
        return "answered, but not as a task of tfdist (a very long line)"
    return (getattr(error, "strerror", None) or str(error)).lower()


# The parts of the bounded start that chief and others share: see `tfdist.cluster.rendezvous.join`.

#: Seconds for one attempt to connect.
CONNECT_SECONDS = 2.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.03, 0.3

_SECONDS_FOR_OWN_PORT = 5.0
_FIRST_REPORT = 3.0
_REPORT_EVERY = 10.0


@dataclasses.dataclass(frozen=True)
class JoinReport:
    """The report of a start.

    Attributes:
        seconds: how long it took until all had joined.
        offer: the chief's offer: the same values in every task.
        lines: the connections that stay open, if that was asked for: the chief's to all others,
            or a task's to the chief.
        late: whether the others had started already, so that nothing was offered.
    """

    seconds: float
    offer: Mapping[str, str]
    lines: tuple[socket.socket, ...] = ()
    late: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """The tasks that meet, and the deadline. The fields are the arguments of `join`."""

    cluster: ClusterSpec
    task: Task
    timeout: float
    identity: Mapping[str, str]
    report: Callable[[str], None]
    keep_lines: bool = False
    may_be_late: bool = False
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def address(self) -> Address:
        """The address on which this task listens."""
        return self.cluster.address(self.task)

    @property
    def chief(self) -> Task:
        """The task that all others connect to."""
        return self.cluster.chief

    def describe(self, task: Task) -> str:
        """A task and its address, in words."""
        return f"{task} at {self.cluster.address(task)}"

    def others(self) -> list[Task]:
        """All tasks but this one."""
        return [task for task, _ in self.cluster.tasks() if task != self.task]

    def report_of(
        self, offer: Mapping[str, str], lines: tuple[socket.socket, ...] = (), late: bool = False
    ) -> JoinReport:
        """The report of a meeting that succeeded just now."""
        return JoinReport(time.monotonic() - self.started, offer, lines, late)


async def identify(meeting: Meeting, task: Task) -> str | None:
    """Asks a task's name at its listed address.

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
    If all are on loopback addresses, no other machine can. A name may stand for other addresses on
    other machines, so a task with a name listens on all.
    """
    own = meeting.address.host
    if meeting.cluster.is_on_loopback:
        return own if is_ip(own) else "127.0.0.1"
    return own if is_ip(own) and not is_any_address(own) and is_local_host(own) else None


def pauses_between_tries() -> Iterator[float]:
    """Seconds between two tries to reach another task: short ones at first, then 0.3.

    Tasks that are started together are there within moments of each other.
    """
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


async def open_door(meeting: Meeting, door: Door) -> None:
    """Opens this task's port. A program that is just ending gets some seconds to free it.

    Raises:
        StartError: if another program keeps the port.
    """
    host = listening_host(meeting)
    seconds = min(_SECONDS_FOR_OWN_PORT, meeting.timeout)
    deadline = time.monotonic() + seconds
    reported = False
    while True:
        try:
            await door.open(meeting.address.port, host)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartError(await _port_problem(meeting, error, host)) from error
            if not reported:
                reported = True
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
