"""The parent's side of one target: starts its processes, calls functions on them, ends them."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tests.harness.forking import START_SECONDS, Forked, Zygote
from tests.harness.targets import Target, tf_configs
from tfdist import environment

CALL_SECONDS = 240.0
#: How long the other processes may go on after one of them has failed.
GRACE_SECONDS = 10.0
TAIL_LINES = 15


class CallError(AssertionError):
    """A call failed on at least one process.

    Attributes:
        errors: `Type: message` for each process; empty where it did not fail itself.
    """

    def __init__(self, message: str, errors: list[str]) -> None:
        super().__init__(message)
        self.errors = errors


@dataclasses.dataclass
class _Process:
    task: str
    forked: Forked
    connection: Connection
    stdin: int
    log: pathlib.Path

    def tail(self) -> str:
        with self.log.open(errors="replace") as lines:
            last = collections.deque(lines, TAIL_LINES)
        return "".join(f"    {line.rstrip()[:400]}\n" for line in last)

    def kill(self) -> None:
        self.forked.kill()
        self.forked.wait()
        self.connection.close()
        os.close(self.stdin)


class Cluster:
    """The processes of one target. They start with the first call and are kept for the next.

    Args:
        target: what to start.
        logs: directory for one log file a process.
        zygotes: what the processes are forked from, in turn.
    """

    def __init__(self, target: Target, logs: pathlib.Path, zygotes: Sequence[Zygote]) -> None:
        self.target = target
        self._zygotes = zygotes
        self._logs = logs
        self._processes: list[_Process] = []
        self._starts = 0
        self._stopping = threading.Lock()
        self._queue = ThreadPoolExecutor(1, thread_name_prefix=f"harness-{target.name}")

    def call(self, function: str, /, *, deadline: float = CALL_SECONDS, **kwargs: Any) -> list[Any]:
        """Runs `function(strategy, **kwargs)` on every process.

        Args:
            function: `module:function`.
            deadline: seconds until the processes are killed.
            **kwargs: picklable arguments.

        Returns:
            One result a process, in the order of their ranks.

        Raises:
            CallError: if a process raised, died, or did not answer in time.
        """
        __tracebackhide__ = True
        return result_of(self.submit(function, deadline=deadline, **kwargs))

    def submit(
        self, function: str, /, *, deadline: float = CALL_SECONDS, **kwargs: Any
    ) -> Future[list[Any]]:
        """Like `call`, without waiting. Calls of one cluster run one after the other."""
        return self._queue.submit(self._call, function, deadline, kwargs)

    def stop(self) -> None:
        """Kills the processes; the next call starts new ones."""
        with self._stopping:  # A call that is under way stops them, too, when they are killed.
            ended, self._processes = self._processes, []
        for process in ended:
            process.kill()

    def stop_when_idle(self) -> None:
        """Like `stop`, after the calls that have been submitted."""
        self._queue.submit(self.stop)

    def close(self) -> None:
        """Kills the processes for good."""
        self._queue.shutdown(wait=False, cancel_futures=True)
        self.stop()
        self._queue.shutdown(wait=True)

    def process_ids(self) -> list[int]:
        """The ids of the running processes."""
        return [process.forked.pid for process in self._processes]

    def _call(self, function: str, deadline: float, kwargs: dict[str, Any]) -> list[Any]:
        if any(process.forked.has_ended() for process in self._processes):
            self.stop()
        if not self._processes:
            self._start()
        self._signal_rest(signal.SIGCONT)
        for process in self._processes:
            process.connection.send((function, kwargs))
        try:
            return self._collect(function, deadline)
        finally:
            self._signal_rest(signal.SIGSTOP)

    def _signal_rest(self, number: signal.Signals) -> None:
        """Stops processes that would not rest by themselves, or lets them go on."""
        for process in self._processes if self.target.rests else ():
            process.forked.send_signal(number)

    def _start(self) -> None:
        self._starts += 1
        configs = tf_configs(self.target)
        self._processes = [self._spawn(i, config) for i, config in enumerate(configs)]
        self._collect("start", START_SECONDS)

    def _spawn(self, index: int, config: str | None) -> _Process:
        log = self._logs / f"{self.target.name}-{index}-{self._starts}.log"
        ours, theirs = Pipe()
        source, stdin = os.pipe()
        with log.open("wb") as output:
            forked = self._zygotes[index % len(self._zygotes)].fork(
                "tests.harness.worker:main",
                self.target.name,
                environ=_environment(config),
                files=[source, output.fileno(), theirs.fileno()],
            )
        os.close(source)
        theirs.close()
        return _Process(f"{self.target.name} worker {index}", forked, ours, stdin, log)

    def _collect(self, function: str, seconds: float) -> list[Any]:
        """Waits for every process's answer; ends them all unless all succeeded."""
        pending = {process.connection: i for i, process in enumerate(self._processes)}
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while pending and time.monotonic() < end:
            for connection in wait(list(pending), timeout=end - time.monotonic()):
                index = pending.pop(connection)  # type: ignore[call-overload]
                answers[index] = _receive(connection)
                if not answers[index][0]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for index in pending.values():
            answers[index] = (False, (f"No answer within {seconds:g} s.", ""))
        ordered = [answers[i] for i in range(len(self._processes))]
        if all(ok for ok, _ in ordered):
            return [result for _, result in ordered]
        message = self._report(function, ordered)
        self.stop()
        raise CallError(message, [result[0] if not ok else "" for ok, result in ordered])

    def _report(self, function: str, answers: list[tuple[bool, Any]]) -> str:
        lines = [f"{function} failed on {self.target.name}."]
        for process, (ok, result) in zip(self._processes, answers, strict=True):
            lines.append(f"{process.task}: {'finished' if ok else result[0]}")
            if not ok and result[1]:
                lines.append(result[1])
            if not (ok or result[1]):
                lines.append(f"  last lines of {process.log}:\n{process.tail()}")
        return "\n".join(lines)


def result_of(call: Future[list[Any]]) -> list[Any]:
    """Waits for a call. Its error has the remote traceback only, not the harness's own."""
    __tracebackhide__ = True
    try:
        return call.result()
    except CallError as error:
        message, errors = str(error), error.errors
    raise CallError(message, errors)


def _receive(connection: Any) -> tuple[bool, Any]:
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionError):
        return False, ("The process ended.", "")


def _environment(config: str | None) -> dict[str, str]:
    return environment.merged(
        {
            "TF_CONFIG": config,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_BACKEND": "tensorflow",
            "TF_USE_LEGACY_KERAS": None,
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )
