"""How servers learn of their chief's end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tfdist.cluster.rendezvous import liveness
from tfdist.cluster.rendezvous.liveness import End, await_end, await_silence
from tfdist.cluster.spec import Address

CHIEF = """
import os, signal, socket, sys
from tfdist.cluster.rendezvous import liveness
liveness.hold([socket.create_connection(("127.0.0.1", int(sys.argv[1])))])
print("connected", flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("liveness.send_farewell(3)", 3),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
    ],
)
def test_a_server_learns_how_its_chief_ended(
    pool: ThreadPoolExecutor, ending: str, status: int | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        command = [sys.executable, "-c", CHIEF, str(door.getsockname()[1]), ending]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet), door.accept()[0] as line:  # type: ignore[call-overload]
            end = pool.submit(await_end, line).result(timeout=15)
    assert end.status == status


def test_the_line_stays_open_after_the_farewell(pool: ThreadPoolExecutor) -> None:
    """TensorFlow still talks to its servers while the chief's process ends."""
    code = "import time; liveness.send_farewell(0); time.sleep(0.7); print('gone')"
    with socket.create_server(("127.0.0.1", 0)) as door:
        command = [sys.executable, "-c", CHIEF, str(door.getsockname()[1]), code]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as chief:
            with door.accept()[0] as line:
                begin = time.monotonic()
                assert pool.submit(await_end, line).result(timeout=15).status == 0
                assert time.monotonic() - begin > 0.5
            assert chief.wait(5) == 0


def test_a_chief_that_does_not_end_is_not_waited_for(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_SECONDS_TO_LEAVE", 0.2)
    chief, server = socket.socketpair()
    with chief, server:
        waiting: Future[End] = pool.submit(await_end, server)
        monkeypatch.setattr(liveness, "_held", [chief.dup()])
        liveness.send_farewell(0)
        assert waiting.result(timeout=20).status == 0


def test_something_else_on_the_line_is_no_farewell(pool: ThreadPoolExecutor) -> None:
    chief, server = socket.socketpair()
    with server:
        chief.sendall(b"GET / HTTP/1.1\r\n")
        chief.close()
        assert await_end(server) == End(None, "it said something that is not a farewell")


def test_keep_alive_finds_a_machine_that_is_gone_in_ten_seconds() -> None:
    with socket.socket() as line:
        liveness._keep_alive(line)
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            line.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert idle + interval * count <= 10


def test_a_port_that_nobody_answers_means_that_the_chief_is_gone(
    pool: ThreadPoolExecutor,
) -> None:
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    silence = pool.submit(await_silence, Address("127.0.0.1", port), every=0.05, gone=0.5)
    time.sleep(0.8)
    assert not silence.done()
    door.close()
    begin = time.monotonic()
    end = silence.result(timeout=20)
    assert 0.3 < time.monotonic() - begin < 15
    assert end == End(None, "connection refused for 0.5 s")
