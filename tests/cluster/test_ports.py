import json
import pathlib
import socket
import subprocess
import sys

import pytest

from tfdist import environment
from tfdist.cluster.ports import ALL_INTERFACES, HeldPorts, is_local_host, port_is_free
from tfdist.errors import ConfigError

_STARTS_SERVERS = """
import sys, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
print("replicas", strategy.num_replicas_in_sync)
server = tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0)
print("serves", server.target)
"""


def test_ports_are_distinct_and_come_with_the_host() -> None:
    with HeldPorts(3) as held:
        assert len(set(held.ports)) == 3
        assert [str(a) for a in held.addresses] == [f"127.0.0.1:{port}" for port in held.ports]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_plain_bind_cannot_take_a_held_port(host: str) -> None:
    with HeldPorts(1) as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind((host, held.ports[0]))
        held.release()
        other.bind((host, held.ports[0]))


def test_the_system_gives_no_held_port_to_anybody() -> None:
    with HeldPorts(50) as first, HeldPorts(50) as second:
        assert not set(first.ports) & set(second.ports)


def test_a_held_port_refuses_connections() -> None:
    with HeldPorts(1) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.ports[0]), timeout=5)


@pytest.mark.parametrize("option", ["SO_REUSEADDR", "SO_REUSEPORT"])
def test_a_server_takes_a_held_port_over(option: str) -> None:
    with HeldPorts(1) as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        server.bind(("0.0.0.0", held.ports[0]))
        server.listen()
        with socket.create_connection(("127.0.0.1", held.ports[0]), timeout=5):
            pass
        held.release()
        with socket.create_connection(("127.0.0.1", held.ports[0]), timeout=5):
            pass


def test_one_port_is_released_at_a_time() -> None:
    with HeldPorts(2) as held, socket.socket() as other:
        held.release(held.ports[0])
        held.release(held.ports[0])
        other.bind(("127.0.0.1", held.ports[0]))
        with pytest.raises(OSError, match="in use"), socket.socket() as another:
            another.bind(("127.0.0.1", held.ports[1]))


def test_children_do_not_inherit_held_ports() -> None:
    with HeldPorts(1) as held:
        assert all(not sock.get_inheritable() for sock in held._sockets.values())


def test_a_port_is_free_unless_somebody_listens() -> None:
    with HeldPorts(1) as held, socket.socket() as server:
        (port,) = held.ports
        assert port_is_free(ALL_INTERFACES, port)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not port_is_free(ALL_INTERFACES, port)
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free(ALL_INTERFACES, port)


def test_a_port_of_another_machine_cannot_be_asked_for() -> None:
    with pytest.raises(OSError, match="assign"):
        port_is_free("203.0.113.1", 12345)
    assert not is_local_host("203.0.113.1")
    assert not is_local_host("no-such-host.invalid")
    assert is_local_host("localhost")


def test_no_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"HeldPorts\(0\)"):
        HeldPorts(0)


def test_tensorflow_takes_held_ports_over(tmp_path: pathlib.Path) -> None:
    with HeldPorts(2) as held:
        own, other = map(str, held.addresses)
        content = {"cluster": {"worker": [own]}, "task": {"type": "worker", "index": 0}}
        changes = {"TF_CONFIG": json.dumps(content), "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(
            [sys.executable, "-c", _STARTS_SERVERS, other],
            # TensorFlow shares ports by SO_REUSEADDR alone; this variable must not be needed.
            env=environment.merged({**changes, "TF_GRPC_REUSE_PORT": None}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.splitlines() == ["replicas 1", f"serves grpc://{other}"], done.stderr[-2000:]
