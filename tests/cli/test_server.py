"""`tfdist.cli.server`: what it refuses, and what it makes of its chief's end. No TensorFlow."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

import pytest

from tfdist.cli import server
from tfdist.cluster.rendezvous import liveness
from tfdist.cluster.rendezvous.liveness import End
from tfdist.cluster.spec import Task
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.launcher.plan import local_cluster
from tfdist.strategies.membership import ServerMember, join_cluster
from tfdist.utils import turns

CONFIG = StrategyConfig.of(strategy="parameter_server", processes=1, start_timeout=0.5)
CLUSTER = local_cluster([1, 2, 3], chief=True, ps=1)


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run(*args: str, **variables: str) -> tuple[int, str]:
        for name in ("TF_CONFIG", "TFDIST_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = server.main(args)
        return status, capsys.readouterr().err

    return run


def test_it_is_started_by_the_launcher(serve: Callable[..., tuple[int, str]]) -> None:
    assert serve("train.py")[0] == 2
    status, said = serve(TF_CONFIG=CLUSTER.tf_config(Task("ps", 0)))
    assert status == 2
    assert "TFDIST_CONFIG is not set. Start servers with `tfdist run" in said
    status, said = serve(TFDIST_CONFIG=CONFIG.to_json())
    assert status == 2
    assert "TF_CONFIG is not set" in said


def test_a_chief_is_no_server(serve: Callable[..., tuple[int, str]]) -> None:
    variables = {
        "TFDIST_CONFIG": CONFIG.to_json(),
        "TF_CONFIG": CLUSTER.tf_config(Task("chief", 0)),
    }
    status, said = serve(**variables)
    assert status == 2
    assert "makes this process chief 0, but only tasks of type worker and ps are servers" in said


def test_only_the_chief_runs_the_script() -> None:
    with pytest.raises(ConfigError, match=r"this process worker 0, but .* only the chief runs"):
        join_cluster(CLUSTER.tf_config(Task("worker", 0)), CONFIG)
    nobody = json.dumps({"cluster": CLUSTER.as_dict()})
    with pytest.raises(ConfigError, match="this process no task"):
        join_cluster(nobody, CONFIG)


def test_a_missing_chief_ends_the_wait(serve: Callable[..., tuple[int, str]]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    cluster = local_cluster([1, port, 3], chief=True, ps=1)
    text = cluster.tf_config(Task("worker", 0))
    status, said = serve(TFDIST_CONFIG=CONFIG.to_json(), TF_CONFIG=text)
    assert status == 3
    assert "chief 0 at 127.0.0.1:1: connection refused" in said


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (End(0, "it ended with exit status 0"), 0, ""),
        (End(4, "it ended with exit status 4"), 1, "has failed (it ended with exit status 4)"),
        (End(None, "its connection was closed"), 1, "has gone without a farewell"),
    ],
)
def test_what_the_chiefs_end_means(
    end: End,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(liveness, "await_end", lambda line: end)
    monkeypatch.setattr(server, "_SECONDS_TO_STAY", 0)
    with socket.socket() as line:
        assert server._stay(ServerMember(CLUSTER, Task("ps", 0), line)) == status
    said = capsys.readouterr().err
    assert words in said
    assert bool(said) == bool(words)


def test_who_took_anothers_place_cannot_know_how_the_chief_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(liveness, "await_silence", lambda address: End(None, "connection refused"))
    assert server._stay(ServerMember(CLUSTER, Task("worker", 0), None)) == 0
    assert "took the place of one that had died" in capsys.readouterr().err


def test_servers_import_in_turns_and_none_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(turns.os, "getuid", lambda: f"of test {os.getpid()}")
    monkeypatch.setattr(turns, "_LONGEST", 0.3)

    def seconds() -> float:
        begin = time.monotonic()
        with turns.turn():
            return time.monotonic() - begin

    with turns.turn():
        assert seconds() < 0.2
        with turns.turn():
            assert seconds() >= 0.3
        assert seconds() < 0.2
