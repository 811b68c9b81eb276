"""Stays with a job on Kubernetes until its end, shows its log, and reports what is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import StartError

__all__ = [
    "Failure",
    "Kubectl",
    "Watch",
    "failure",
    "named",
    "progress",
    "running",
    "waiting",
]


# The state of a job on Kubernetes: whether it has ended, and what became of its pods. Pure.

Seen = Mapping[str, Any]

#: The names of the end of a Job and of a TFJob.
_DONE, _FAILED = ("Complete", "Succeeded"), ("Failed",)
#: Reasons to wait that pass by themselves.
_ORDINARY = ("ContainerCreating", "PodInitializing")


@dataclasses.dataclass(frozen=True)
class Failure:
    """A pod that failed.

    Attributes:
        pod: its name.
        status: its exit status; 1 if it has none.
        why: the reason that Kubernetes gives.
    """

    pod: str
    status: int
    why: str


def progress(seen: Sequence[Seen]) -> tuple[set[str], dict[str, str]]:
    """The Jobs or TFJobs that are complete, and those that have failed, each with why."""
    done: set[str] = set()
    failed: dict[str, str] = {}
    for each in seen:
        if each["kind"] not in ("Job", "TFJob"):
            continue
        name = each["metadata"]["name"]
        for condition in each.get("status", {}).get("conditions") or ():
            if condition.get("status") != "True":
                continue
            if condition["type"] in _DONE:
                done.add(name)
            elif condition["type"] in _FAILED:
                parts = (condition.get("reason"), condition.get("message"))
                failed[name] = ": ".join(text for text in parts if text)
    return done, failed


def named(seen: Sequence[Seen], name: str) -> Seen | None:
    """The pod with a name or, if Kubernetes appends to names, a host name."""
    for each in _pods(seen):
        if name in (each["metadata"]["name"], each.get("spec", {}).get("hostname")):
            return each
    return None


def running(pod: Seen) -> bool:
    """Whether a pod has a log."""
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def waiting(seen: Sequence[Seen]) -> dict[str, str]:
    """The pods that wait for something that may never come, such as an image, with the reason."""
    reasons = {}
    for pod in _pods(seen):
        status = pod.get("status", {})
        whys = [
            container["state"]["waiting"]
            for container in status.get("containerStatuses") or ()
            if container.get("state", {}).get("waiting")
        ]
        whys += [
            condition
            for condition in status.get("conditions") or ()
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        ]
        for why in whys:
            if why.get("reason") and why["reason"] not in _ORDINARY:
                text = f"{why['reason']}: {why['message']}" if why.get("message") else why["reason"]
                reasons[pod["metadata"]["name"]] = text
    return reasons


def failure(seen: Sequence[Seen]) -> Failure | None:
    """The pod that failed first, or None if none is known.

    Those that a signal has ended come last: a Job that has failed ends its other pods so.
    """
    candidates = []
    for pod in _pods(seen):
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for container in status.get("containerStatuses") or ():
            ended = _ended(container)
            if ended and ended.get("exitCode"):
                code, reason = int(ended["exitCode"]), ended.get("reason", "Error")
                late = code in (137, 143) and reason == "Error"
                why = f"exit status {code} ({reason})"
                candidates.append((late, ended.get("finishedAt", ""), Failure(name, code, why)))
        if status.get("phase") == "Failed" and status.get("reason"):
            why = f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
            candidates.append((False, status.get("startTime", ""), Failure(name, 1, why)))
    return min(candidates, key=lambda each: each[:2])[2] if candidates else None


def _ended(container: Seen) -> Seen | None:
    """The end of a container, or its previous end if it was started again."""
    for key in ("state", "lastState"):
        ended: Seen | None = (container.get(key) or {}).get("terminated")
        if ended:
            return ended
    return None


def _pods(seen: Sequence[Seen]) -> list[Seen]:
    return [each for each in seen if each["kind"] == "Pod"]


# `kubectl`, each call with a deadline: what makes, shows and removes a job's objects.
#
# The calls run in sessions of their own, so that Ctrl-C on the terminal reaches them only through
# the process that makes them.

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
        """Makes the objects of a manifest; returns their names, as `job.batch/train`.

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

    def seen(self, kinds: str, selector: str) -> list[Seen]:
        """The objects of some kinds with a label.

        Raises:
            StartError: if there is no answer for a longer time.
        """
        words = ("get", kinds, "-l", selector, "-o", "json")
        begin = time.monotonic()
        while True:
            text, problem = self._call(*words)
            if problem is None:
                items: list[Seen] = json.loads(text)["items"]
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
        """The output of a call, and why it failed, if it did."""
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
            output = late.stdout or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            return text, f"no answer within {_SECONDS:g} s ({' '.join(command[:3])} …)"
        problem = done.stderr.strip() or f"exit status {done.returncode}"
        return done.stdout, problem if done.returncode else None


class _LogStream:
    """A pod's log, as it grows, on this process's output."""

    def __init__(self, kubectl: Kubectl, pod: str) -> None:
        self._kubectl = kubectl
        self._pod = pod
        self._ended: float | None = None
        self._process = self._start()

    def mend(self) -> None:
        """Takes the log up again if the connection was lost while the pod runs."""
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


#: Seconds between two looks, and that workers have to end when their chief has ended well.
_EVERY = 2.0
_SECONDS_FOR_OTHERS = 30.0
_LAST_LINES = 20


class Watch:
    """Looks at a job until its end.

    Args:
        kubectl: for the job's namespace.
        kinds: the kinds of objects that show the progress of the job.
        selector: the label of all of them.
        jobs: the names of the Jobs; the first is the main one.
        pod: the name, or host name, of the pod whose log is shown.
        notify: called with reports for the user.

    Attributes:
        ended: the Jobs that had ended when it last looked.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        kinds: str,
        selector: str,
        jobs: Sequence[str],
        pod: str,
        notify: Callable[[str], None],
    ) -> None:
        self.ended: set[str] = set()
        self._kubectl = kubectl
        self._kinds = kinds
        self._selector = selector
        self._jobs = jobs
        self._pod = pod
        self._notify = notify
        self._log: _LogStream | None = None
        self._shown: dict[str, str] = {}
        self._done_at: float | None = None

    def until_end(self, stopped: Callable[[], object]) -> int | None:
        """The exit status of the job, or None if it was `stopped` before its end.

        It has no deadline of its own: a job lasts as long as its training, and waits as long as the
        cluster has no room for it.

        Raises:
            StartError: if `kubectl` fails for a longer time, or somebody removes the job.
        """
        status: int | None = None
        try:
            while status is None and not stopped():
                seen = self._kubectl.seen(self._kinds, self._selector)
                self._show_waiting(seen)
                self._follow(seen)
                status = self._status(seen)
                until = time.monotonic() + _EVERY
                while status is None and time.monotonic() < until and not stopped():
                    time.sleep(min(0.1, _EVERY))
        finally:
            if self._log is not None:
                self._log.close(drain=status is not None)
        return status

    def _status(self, seen: Sequence[Seen]) -> int | None:
        done, failed = progress(seen)
        self.ended = {*done, *failed}
        if failed:
            return self._failed(seen, failed)
        main = self._jobs[0]
        if main in done:
            self._done_at = self._done_at or time.monotonic()
            late = time.monotonic() - self._done_at > _SECONDS_FOR_OTHERS
            return 0 if late or done >= set(self._jobs) else None
        if main not in [each["metadata"]["name"] for each in seen if each["kind"] != "Pod"]:
            raise StartError(f"The job {main!r} is gone from the cluster: somebody has removed it.")
        return None

    def _failed(self, seen: Sequence[Seen], failed: Mapping[str, str]) -> int:
        name, why = next(iter(failed.items()))
        first = failure(seen)
        if first is None:
            self._notify(f"job {name} failed ({why}); no pod of it tells more")
            return 1
        self._notify(f"job {name} failed: pod {first.pod} ended with {first.why}")
        shown = named(seen, self._pod)
        if shown is None or shown["metadata"]["name"] != first.pod:
            lines = self._kubectl.last_lines(first.pod, _LAST_LINES).rstrip()
            if lines:
                self._notify(f"the last lines of {first.pod}:\n{lines}")
        return first.status

    def _follow(self, seen: Sequence[Seen]) -> None:
        pod = named(seen, self._pod)
        if pod is None or not running(pod):
            return
        if self._log is None:
            self._log = _LogStream(self._kubectl, pod["metadata"]["name"])
        elif pod["status"]["phase"] == "Running":
            self._log.mend()

    def _show_waiting(self, seen: Sequence[Seen]) -> None:
        """Shows once why each pod waits."""
        now = waiting(seen)
        for pod, why in now.items():
            if self._shown.get(pod) != why:
                self._notify(f"pod {pod} waits: {why}")
        self._shown = now
