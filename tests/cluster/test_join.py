"""The bounded start, on free ports, with threads and with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.rendezvous import join as module
from tfdist.cluster.rendezvous import transport
from tfdist.cluster.rendezvous import transport as meeting_module
from tfdist.cluster.rendezvous.coordinator import Report, table
from tfdist.cluster.rendezvous.join import JoinReport, join
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import StartError

SAME = {"TensorFlow": "2.21.0", "configuration (digest)": "abc"}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of own ports in use; where nobody answers, `silent` waits less too."""
    monkeypatch.setattr(meeting_module, "_SECONDS_FOR_OWN_PORT", 0.3)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for those who never answer: others would be late too on a busy machine."""
    monkeypatch.setattr(meeting_module, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(transport, "_SECONDS_TO_ANSWER", 0.5)


@pytest.fixture
def ports() -> Iterator[Callable[[int], list[int]]]:
    """Free ports, held as the launcher holds them."""
    with contextlib.ExitStack() as held:

        def hold(count: int) -> list[int]:
            return list(held.enter_context(HeldPorts(count)).ports)

        yield hold


def cluster_of(ports: list[int]) -> ClusterSpec:
    return ClusterSpec({"worker": tuple(Address("127.0.0.1", port) for port in ports)})


def start(
    pool: ThreadPoolExecutor,
    cluster: ClusterSpec,
    index: int,
    timeout: float = 10.0,
    **more: object,
) -> Future[JoinReport]:
    arguments = {"identity": SAME, **more}
    return pool.submit(join, cluster, Task("worker", index), timeout=timeout, **arguments)  # type: ignore[arg-type]


def failure(future: Future[JoinReport]) -> str:
    with pytest.raises(StartError) as caught:
        future.result(timeout=20)
    return str(caught.value)


def test_all_join_and_get_what_the_chief_offers(ports: Callable[[int], list[int]]) -> None:
    cluster = cluster_of(ports(4))
    with ThreadPoolExecutor() as pool:
        futures = [
            start(pool, cluster, index, offer={"seed": str(index)}) for index in (3, 1, 2, 0)
        ]
        reports = [future.result(timeout=20) for future in futures]
    assert [report.offer for report in reports] == [{"seed": "0"}] * 4
    assert all(report.seconds < 5 for report in reports)


def test_ports_are_free_after_the_start(ports: Callable[[int], list[int]]) -> None:
    listed = ports(3)
    with ThreadPoolExecutor() as pool:
        for future in [start(pool, cluster_of(listed), index) for index in range(3)]:
            future.result(timeout=20)
    for port in listed:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


def test_a_cluster_of_one_starts_at_once(ports: Callable[[int], list[int]]) -> None:
    report = join(cluster_of(ports(1)), Task("worker", 0), timeout=5, identity=SAME)
    assert report.seconds < 1


def meeting_of(*hosts: str) -> meeting_module.Meeting:
    addresses = tuple(Address(host, 2222 + index) for index, host in enumerate(hosts))
    return meeting_module.Meeting(
        cluster=ClusterSpec({"worker": addresses}),
        task=Task("worker", 0),
        timeout=1.0,
        identity=SAME,
        report=lambda text: None,
    )


@pytest.mark.parametrize(
    ("hosts", "listens"),
    [
        (("127.0.0.1", "127.0.0.1"), "127.0.0.1"),
        (("127.0.0.5", "localhost"), "127.0.0.5"),
        (("localhost", "127.0.0.1"), "127.0.0.1"),
        (("::1", "::1"), "::1"),
        (("127.0.0.1", "192.0.2.77"), "127.0.0.1"),  # Its own address, whatever the others have.
        (("192.0.2.77", "192.0.2.78"), None),  # Not this machine's: it is behind a translation.
        (("0.0.0.0", "192.0.2.78"), None),
        (("a.example", "192.0.2.78"), None),
    ],
)
def test_a_task_listens_where_the_others_look_for_it(
    hosts: tuple[str, ...], listens: str | None
) -> None:
    assert meeting_module.listening_host(meeting_of(*hosts)) == listens


def test_other_interfaces_do_not_see_the_port_of_a_cluster_on_loopback(
    ports: Callable[[int], list[int]],
) -> None:
    (port,) = ports(1)

    async def listen() -> list[str]:
        door = transport.Door("worker 0", on_join=None)
        await door.open(port, "127.0.0.1")
        try:
            found = []
            for host in ("127.0.0.1", "127.0.0.2"):
                try:
                    found.append(await transport.probe(Address(host, port), 0.5))
                except transport.ContactError as error:
                    found.append(str(error))
            return found
        finally:
            door.close()

    assert asyncio.run(listen()) == ["worker 0", "connection refused"]


def test_a_late_chief_is_waited_for(ports: Callable[[int], list[int]]) -> None:
    cluster = cluster_of(ports(2))
    with ThreadPoolExecutor() as pool:
        early = start(pool, cluster, 1)
        time.sleep(1)
        start(pool, cluster, 0).result(timeout=20)
        assert early.result(timeout=20).seconds >= 1


def test_a_missing_task_is_named_to_all(ports: Callable[[int], list[int]]) -> None:
    listed = ports(3)
    cluster = cluster_of(listed)
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        futures = [start(pool, cluster, index, timeout=1.5) for index in (0, 1)]
        messages = [failure(future) for future in futures]
    assert time.monotonic() - begin < 20
    for message in messages:
        assert re.search(rf"worker 2 +127.0.0.1:{listed[2]} +no +no +connection refused", message)
        assert re.search(rf"worker 1 +127.0.0.1:{listed[1]} +yes +yes$", message, re.MULTILINE)
        assert message.index("worker 2") < message.index("worker 1")
        assert "within 1.5 s" in message


def test_a_missing_chief_is_named(ports: Callable[[int], list[int]]) -> None:
    listed = ports(2)
    begin = time.monotonic()
    with pytest.raises(StartError) as caught:
        join(cluster_of(listed), Task("worker", 1), timeout=1, identity=SAME)
    assert f"worker 0 at 127.0.0.1:{listed[0]}: connection refused" in str(caught.value)
    assert time.monotonic() - begin < 20


def test_a_name_that_does_not_resolve(ports: Callable[[int], list[int]]) -> None:
    addresses = (Address("127.0.0.1", ports(1)[0]), Address("no-such-host.invalid", 2222))
    with pytest.raises(StartError, match=r"invalid:2222 +no +no +the name does not resolve"):
        join(ClusterSpec({"worker": addresses}), Task("worker", 0), timeout=1, identity=SAME)


@pytest.mark.usefixtures("silent")
def test_an_address_that_never_answers(ports: Callable[[int], list[int]]) -> None:
    """A listener whose queue is full drops connections, as a firewall does."""
    with contextlib.ExitStack() as crowd:
        full = crowd.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = crowd.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        listed = [*ports(1), full.getsockname()[1]]
        with pytest.raises(StartError, match=r"no answer \(timed out\) \(a firewall"):
            join(cluster_of(listed), Task("worker", 0), timeout=1.2, identity=SAME)


def test_the_wrong_task_answers(ports: Callable[[int], list[int]]) -> None:
    """The chief's list has the addresses of two workers exchanged."""
    listed = ports(3)
    swapped = cluster_of([listed[0], listed[2], listed[1]])
    with ThreadPoolExecutor() as pool:
        futures = [
            start(pool, swapped if index == 0 else cluster_of(listed), index, timeout=2)
            for index in range(3)
        ]
        messages = [failure(future) for future in futures]
    assert "answered as worker 2 instead of worker 1" in messages[0]
    assert "answered as worker 1 instead of worker 2" in messages[1]


def test_an_address_that_only_some_reach(ports: Callable[[int], list[int]]) -> None:
    listed, nobody = ports(3), ports(1)[0]
    other_view = cluster_of([listed[0], listed[1], nobody])
    with ThreadPoolExecutor() as pool:
        futures = [
            start(pool, other_view if index == 1 else cluster_of(listed), index)
            for index in range(3)
        ]
        messages = [failure(future) for future in futures]
    assert "worker 1 tried to reach worker 2" in messages[0]
    assert f"127.0.0.1:{nobody}: connection refused" in messages[2]


def test_different_versions_are_named(ports: Callable[[int], list[int]]) -> None:
    cluster = cluster_of(ports(2))
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster, 0)
        other = start(pool, cluster, 1, identity={**SAME, "TensorFlow": "2.20.0"})
        for message in (failure(chief), failure(other)):
            assert "the chief, runs TensorFlow 2.21.0." in message
            assert re.search(r"worker 1 +\S+ +yes +(yes|no) +TensorFlow 2.20.0", message)
            assert "digest" not in message


def test_clocks_apart_are_told(
    ports: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = SimpleNamespace(time=lambda: time.time() + 90)
    monkeypatch.setattr(module, "time", ahead)
    said: list[str] = []
    cluster = cluster_of(ports(2))
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster, 0, report=said.append)
        start(pool, cluster, 1).result(timeout=20)
        chief.result(timeout=20)
    assert [text for text in said if "its clock is +90 s from the chief's" in text]


def test_the_table_names_culprits_first_and_stays_short() -> None:
    tasks = [Task("worker", i) for i in range(1, 10_000)]
    address = Address("host", 2222)
    reports = [
        Report(task=each, address=address, joined=each.index != 9000, answers=True, problem="gone")
        if each.index == 9000
        else Report(task=each, address=address, joined=True, answers=True)
        for each in tasks
    ]
    lines = table(reports).splitlines()
    assert lines[1].split() == ["worker", "9000", "host:2222", "no", "yes", "gone"]
    assert len(lines) < 15
    assert "and 9990 more tasks that are ready" in lines[-1]


def test_the_same_task_twice(ports: Callable[[int], list[int]]) -> None:
    listed = ports(3)
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster_of(listed), 0, timeout=2)
        first = start(pool, cluster_of(listed), 1, timeout=2)
        time.sleep(0.7)
        elsewhere = cluster_of([listed[0], listed[2], listed[1]])
        second = start(pool, elsewhere, 1, timeout=2)
        assert "Two processes joined as worker 1" in failure(second)
        assert "Two processes joined as worker 1" in failure(chief)
        failure(first)


def test_a_task_that_the_cluster_does_not_have(ports: Callable[[int], list[int]]) -> None:
    listed = ports(4)
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster_of(listed[:2]), 0, timeout=2)
        stray = start(pool, cluster_of(listed), 3, timeout=2)
        assert "joined as 'worker 3', but the chief's cluster has: worker 0, worker 1" in failure(
            stray
        )
        assert re.search(rf"worker 1 +127.0.0.1:{listed[1]} +no", failure(chief))


@pytest.mark.usefixtures("silent")
def test_own_port_in_use(
    ports: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"[Oo]wn port {port} is in use"):
            join(cluster_of([port]), Task("worker", 0), timeout=1.5, identity=SAME)


def test_own_port_is_taken_by_a_task(ports: Callable[[int], list[int]]) -> None:
    cluster = cluster_of(ports(2))
    with ThreadPoolExecutor() as pool:
        first = start(pool, cluster, 0, timeout=2)
        time.sleep(0.5)
        assert "answered as worker 0. Either this task was started twice" in failure(
            start(pool, cluster, 0, timeout=2)
        )
        failure(first)


@pytest.mark.parametrize("place", ["chief", "worker"])
@pytest.mark.usefixtures("silent")
def test_a_web_server_answers(ports: Callable[[int], list[int]], place: str) -> None:
    listed = ports(1)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            index = 1 if place == "chief" else 0
            listed.insert(1 - index, server.server_port)
            with pytest.raises(StartError, match="not as a task of tfdist"):
                join(cluster_of(listed), Task("worker", index), timeout=1, identity=SAME)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("silent")
def test_strangers_do_not_disturb_the_start(ports: Callable[[int], list[int]]) -> None:
    listed = ports(2)
    noises = [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff" * 50_000, b'{"protocol": 3}\n', b"[]\n", b""]
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster_of(listed), 0)
        time.sleep(0.5)
        with contextlib.ExitStack() as open_ones:
            for noise in noises:
                stranger = open_ones.enter_context(
                    socket.create_connection(("127.0.0.1", listed[0]))
                )
                with contextlib.suppress(OSError):
                    stranger.sendall(noise)
            start(pool, cluster_of(listed), 1).result(timeout=20)
        chief.result(timeout=20)


@pytest.mark.usefixtures("silent")
def test_a_silent_listener_is_told_apart(ports: Callable[[int], list[int]]) -> None:
    own = ports(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listed = [own, silent.getsockname()[1]]
        with pytest.raises(StartError, match="said nothing"):
            join(cluster_of(listed), Task("worker", 0), timeout=1.5, identity=SAME)


def test_waiting_is_reported(
    ports: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "_FIRST_REPORT", 0.5)
    said: list[str] = []
    with pytest.raises(StartError):
        join(cluster_of(ports(2)), Task("worker", 0), timeout=1, identity=SAME, report=said.append)
    assert len(said) == 1
    assert "worker 0 waits for worker 1 at" in said[0]


def test_a_task_that_leaves_is_noticed(ports: Callable[[int], list[int]]) -> None:
    listed = ports(3)
    with ThreadPoolExecutor() as pool:
        chief = start(pool, cluster_of(listed), 0, timeout=2)
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", listed[0])) as brief:
            hello = {"protocol": "tfdist-join/1", "kind": "join", "task": "worker 1"}
            brief.sendall(json.dumps({**hello, "identity": SAME}).encode() + b"\n")
            brief.recv(1000)
            time.sleep(0.2)
        message = failure(chief)
    assert re.search(r"worker 1 +\S+ +no +no +connection refused", message)
    assert re.search(r"worker 2 .* connection refused", message)


def test_works_within_an_event_loop(ports: Callable[[int], list[int]]) -> None:
    import asyncio

    async def notebook() -> JoinReport:
        return join(cluster_of(ports(1)), Task("worker", 0), timeout=5, identity=SAME)

    assert asyncio.run(notebook()).seconds < 5


def test_identity_names_versions_and_digest() -> None:
    first, second = module.identity("a"), module.identity("b")
    assert set(first) == {"Python", "TensorFlow", "Keras", "tfdist", "configuration (digest)"}
    assert [name for name in first if first[name] != second[name]] == ["configuration (digest)"]


def test_lines_that_are_kept_outlast_the_start(ports: Callable[[int], list[int]]) -> None:
    """The chief's port is free for TensorFlow meanwhile, and its end is seen by the others."""
    listed = ports(3)
    with ThreadPoolExecutor() as pool:
        futures = [start(pool, cluster_of(listed), i, keep_lines=True) for i in range(3)]
        chief, *others = [future.result(timeout=20) for future in futures]
    with contextlib.ExitStack() as lines:
        for line in (line for report in (chief, *others) for line in report.lines):
            line.settimeout(5)
            lines.enter_context(line)
        assert [len(report.lines) for report in (chief, *others)] == [2, 1, 1]
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", listed[0]))
            server.listen()
        for line in chief.lines:
            line.sendall(b"x")
        assert [report.lines[0].recv(9) for report in others] == [b"x", b"x"]
        for line in chief.lines:
            line.close()
        assert [report.lines[0].recv(9) for report in others] == [b"", b""]


@contextlib.contextmanager
def fake_grpc() -> Iterator[int]:
    """The port of a server that greets as gRPC does: with a frame of settings."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = server.accept()[0]
                    client.sendall(b"\0\0\0\4\0\0\0\0\0")
                    client.recv(1000)
                    client.close()

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_task_that_replaces_another_need_not_meet(ports: Callable[[int], list[int]]) -> None:
    with fake_grpc() as chief:
        cluster = cluster_of([chief, *ports(1)])
        report = join(cluster, Task("worker", 1), timeout=9, identity=SAME, may_be_late=True)
        assert report.late
        assert not report.lines
        with pytest.raises(StartError, match="TensorFlow runs there already: the others have"):
            join(cluster, Task("worker", 1), timeout=1, identity=SAME)


PROGRAM = """
import sys
from tfdist.cluster.rendezvous.join import join
from tfdist.cluster.rendezvous.coordinator import Report, table
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.errors import StartError
ports = [int(port) for port in sys.argv[2].split(",")]
cluster = ClusterSpec({"worker": tuple(Address("127.0.0.1", port) for port in ports)})
try:
    join(cluster, Task("worker", int(sys.argv[1])), timeout=float(sys.argv[3]), identity={})
except StartError as error:
    print(error)
    sys.exit(3)
assert "tensorflow" not in sys.modules
"""


def run_processes(listed: list[int], indices: list[int], timeout: float) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", PROGRAM]
    text = ",".join(map(str, listed))
    processes = [
        subprocess.Popen([*command, str(i), text, str(timeout)], stdout=subprocess.PIPE, text=True)
        for i in indices
    ]
    outputs = [process.communicate(timeout=30)[0] for process in processes]
    return [(process.returncode, out) for process, out in zip(processes, outputs, strict=True)]


def test_processes_join(ports: Callable[[int], list[int]]) -> None:
    assert run_processes(ports(3), [0, 1, 2], 15) == [(0, "")] * 3


def test_processes_end_together_when_one_is_missing(ports: Callable[[int], list[int]]) -> None:
    begin = time.monotonic()
    results = run_processes(ports(3), [0, 2], 2)
    assert time.monotonic() - begin < 30
    assert [status for status, _ in results] == [3, 3]
    assert all(re.search(r"worker 1 +\S+ +no +no +connection refused", out) for _, out in results)
