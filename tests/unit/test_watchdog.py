"""The process that ends another whose threads cannot run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tfdist.utils import watchdog
from tfdist.utils.watchdog import ENDED

PROGRAM = """
import pathlib, os, sys, time
from tfdist.utils.watchdog import outside_deadline

with outside_deadline(float(sys.argv[1]), "it waited"):
    print(pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
    time.sleep(float(sys.argv[2]))
print("done", flush=True)
"""


def started(deadline: float, seconds: float) -> tuple[subprocess.Popen[str], int | None]:
    """A process that waits within a deadline, and the entry in /proc of the one that watches it.

    The entry is open: by its number another process could be found there later.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(deadline), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    number = process.stdout.readline().strip()
    assert number
    try:
        return process, os.open(f"/proc/{number}", os.O_RDONLY)
    except FileNotFoundError:
        return process, None


def is_gone(watcher: int | None) -> bool:
    if watcher is None:
        return True
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.stat("stat", dir_fd=watcher)
        except (FileNotFoundError, ProcessLookupError):
            os.close(watcher)
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_waits_too_long_is_ended() -> None:
    process, watcher = started(0.5, 60)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert errors == f"tfdist: it waited {ENDED}\n"
    assert is_gone(watcher)


def test_one_that_does_not_is_left_alone() -> None:
    process, watcher = started(60, 0)
    assert process.stdout is not None
    assert process.stdout.read() == "done\n"  # `communicate` misses what was read ahead.
    assert process.wait(30) == 0
    assert is_gone(watcher)


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_the_watcher_ends_with_the_process(with_signal: signal.Signals) -> None:
    """It would end whichever process has the number by the deadline."""
    process, watcher = started(60, 60)
    process.send_signal(with_signal)
    process.communicate(timeout=30)
    assert is_gone(watcher)


@pytest.mark.parametrize(("moves", "begun"), [(False, 1), (True, 3)])
def test_the_time_of_one_call_is_watched(
    monkeypatch: pytest.MonkeyPatch, moves: bool, begun: int
) -> None:
    """A main thread that goes on to another call has all the time for that."""
    places, possible, deadlines = iter(range(100)), iter([True] * 6), []

    @contextmanager
    def deadline(seconds: float, message: str) -> Iterator[None]:
        deadlines.append((seconds, message))
        yield

    monkeypatch.setattr(watchdog, "outside_deadline", deadline)
    monkeypatch.setattr(watchdog, "_call_of_tensorflow", lambda: next(places) if moves else 0)
    watchdog.end_if_stuck(0.1, lambda: "it waited", lambda: next(possible, False))
    assert deadlines == [(0.1, "it waited")] * begun


def test_horovod_is_shut_down_within_a_deadline() -> None:
    """A process that has failed ends, though another one is stopped."""
    program = (
        "import time, types; from tfdist.strategies.horovod.library import shut_down_at_exit\n"
        "shut_down_at_exit(types.SimpleNamespace(shutdown=lambda: time.sleep(60)), 0.2)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == 1
    assert "Horovod has not shut down within 0.2 s: another process does not answer" in ended.stderr
