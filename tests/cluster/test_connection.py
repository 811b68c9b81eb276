"""Waiting for the chief's server before the first call to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.launcher.plan import local_cluster
from tfdist.strategies.connection import await_chief, connecting
from tfdist.strategies.membership import Member


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """The chief's port, at which nobody listens yet."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def member(bound: socket.socket, index: int) -> Member:
    return Member(local_cluster([bound.getsockname()[1], 1]), Task("worker", index), seed=0)


def test_a_worker_goes_on_when_the_chief_listens(bound: socket.socket) -> None:
    wait = threading.Thread(target=await_chief, args=(member(bound, 1),), daemon=True)
    wait.start()
    wait.join(0.3)
    assert wait.is_alive()
    bound.listen()
    wait.join(10)
    assert not wait.is_alive()


def test_the_chief_does_not_wait_for_itself(bound: socket.socket) -> None:
    await_chief(member(bound, 0))


def test_a_task_whose_own_name_does_not_resolve_is_named() -> None:
    cluster = ClusterSpec({"worker": (Address("no-such-host.invalid", 1001),)})
    with pytest.raises(ConfigError, match=r"'no-such-host.invalid' of worker 0, this task"):
        connecting(
            Member(cluster, Task("worker", 0), seed=0), StrategyConfig.of(strategy="multi_worker")
        )
