"""`kubectl`, each call with a deadline: what makes, shows and removes a job's objects.

The calls run in sessions of their own, so that Ctrl-C on the terminal reaches them only through the
process that makes them.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import StartError

__all__ = ["Kubectl", "LogStream"]

#: Seconds for one call.
_SECONDS = 30.0
#: Seconds in which calls may fail, as while the network is gone, before the last failure counts.
_PATIENCE = 120.0
#: Seconds before its end was noticed from which a log is taken up again: rather twice than not.
_OVERLAP = 3
#: Seconds for the rest of a log after its pod has ended.
_SECONDS_TO_DRAIN = 10.0


@dataclasses.dataclass(frozen=True)
class Kubectl:
    """`kubectl` with the arguments that all its calls share.

    Attributes:
        options: such as `--context` and `--namespace`.
    """

    options: tuple[str, ...] = ()

    def command(self, *words: str) -> tuple[str, ...]:
        """The words of a call."""
        return ("kubectl", *self.options, *words)

    def create(self, manifest: str) -> tuple[str, ...]:
        """Makes the objects of a manifest; the names of what it made, as `job.batch/train`.

        `create`, not `apply`: what another job has left under the same name is never taken over.

        Raises:
            StartError: if not all can be made. Those that were are removed again.
        """
        done, problem = self._call("create", "-f", "-", "-o", "name", input=manifest)
        made = tuple(done.split())
        if problem is not None:
            self.delete(made)
            raise StartError(
                f"kubectl did not take the job:\n{problem}\nIf something of that name exists, give "
                "the job another one by --job-name, or remove the other."
            )
        return made

    def seen(self, kinds: str, selector: str) -> list[Mapping[str, Any]]:
        """The objects of some kinds with a label.

        Raises:
            StartError: if there is no answer for a longer time.
        """
        words = ("get", kinds, "-l", selector, "-o", "json")
        begin = time.monotonic()
        while True:
            text, problem = self._call(*words)
            if problem is None:
                items: list[Mapping[str, Any]] = json.loads(text)["items"]
                return items
            if time.monotonic() - begin > _PATIENCE:
                raise StartError(
                    f"kubectl get {kinds} has failed for {_PATIENCE:g} s, so that nothing is known "
                    f"of the job any more; it may still run:\n{problem}"
                )
            time.sleep(2)

    def last_lines(self, pod: str, lines: int) -> str:
        """The last lines of a pod's log; empty if they cannot be had."""
        text, _ = self._call("logs", pod, f"--tail={lines}")
        return text

    def delete(self, names: Sequence[str]) -> str | None:
        """Removes objects without waiting for their pods; what went wrong, or None."""
        if not names:
            return None
        _, problem = self._call("delete", "--ignore-not-found", "--wait=false", *names)
        return problem

    def _call(self, *words: str, input: str = "") -> tuple[str, str | None]:
        """What a call prints, and why it failed, if it did."""
        command = self.command(*words)
        try:
            done = subprocess.run(
                command,
                input=input,
                text=True,
                capture_output=True,
                timeout=_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            return text, f"no answer within {_SECONDS:g} s ({' '.join(command[:3])} …)"
        problem = done.stderr.strip() or f"exit status {done.returncode}"
        return done.stdout, problem if done.returncode else None


class LogStream:
    """A pod's log, as it grows, on this process's output.

    Args:
        kubectl: for the pod's namespace.
        pod: the pod's name.
    """

    def __init__(self, kubectl: Kubectl, pod: str) -> None:
        self._kubectl = kubectl
        self._pod = pod
        self._ended: float | None = None
        self._process = self._start()

    def mend(self) -> None:
        """Takes the log up again where the connection was lost while the pod runs."""
        if self._process.poll() is None:
            return
        if self._ended is None:
            self._ended = time.monotonic()
            return  # The pod may just have ended.
        since = int(time.monotonic() - self._ended) + _OVERLAP
        self._ended = None
        self._process = self._start(f"--since={since}s")

    def close(self, drain: bool) -> None:
        """Ends it; with `drain` not before the rest of the log has come, or some seconds."""
        try:
            self._process.wait(_SECONDS_TO_DRAIN if drain else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._kubectl.command("logs", "--follow", *options, self._pod),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
