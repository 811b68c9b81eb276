"""A server of TensorFlow starts without TensorFlow's Python API, which takes 4 s to import."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from tests.harness.targets import free_ports

_START = """
import json, os, sys
from tfdist._tf.server import ServerError, start_server
address = sys.argv[1]
try:
    server = start_server({"ps": {0: address}}, "ps", 0, 1)
    found = "started"
except ServerError as error:
    found = str(error)
api = [name for name in ("keras", "tensorflow.python.framework.ops") if name in sys.modules]
print(json.dumps([found, api]), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def _started(port: int) -> tuple[subprocess.Popen[str], list[object]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _START, f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_a_server_listens_without_the_api() -> None:
    (port,) = free_ports(1)
    process, found = _started(port)
    with process:
        assert found == ["started", []]
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        process.communicate("\n", timeout=20)


def test_a_port_that_is_taken_is_an_error_of_its_own() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        process, found = _started(taken.getsockname()[1])
        with process:
            assert found == ["Could not start gRPC server", []]
            process.communicate("\n", timeout=20)
