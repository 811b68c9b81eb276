"""What Kubernetes says of a job: whether it has ended, and what became of its pods. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Failure", "Progress", "failure", "named", "progress", "running", "waiting"]

Seen = Mapping[str, Any]

#: What the end of a Job and of a TFJob is called.
_DONE, _FAILED = ("Complete", "Succeeded"), ("Failed",)
#: Reasons to wait that pass by themselves.
_ORDINARY = ("ContainerCreating", "PodInitializing")


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        done: the Jobs that are complete.
        failed: those that have failed, each with why.
    """

    done: frozenset[str]
    failed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A pod that failed.

    Attributes:
        pod: its name.
        status: its exit status; 1 where it has none.
        why: what Kubernetes says of it.
    """

    pod: str
    status: int
    why: str


def progress(seen: Sequence[Seen]) -> Progress:
    """How far a job is, by the conditions of its Jobs or its TFJob."""
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
                told = (condition.get("reason"), condition.get("message"))
                failed[name] = ": ".join(text for text in told if text)
    return Progress(frozenset(done), failed)


def named(seen: Sequence[Seen], name: str) -> Seen | None:
    """The pod with a name or, where Kubernetes appends to names, a host name."""
    for each in _pods(seen):
        if name in (each["metadata"]["name"], each.get("spec", {}).get("hostname")):
            return each
    return None


def running(pod: Seen) -> bool:
    """Whether a pod has a log."""
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def waiting(seen: Sequence[Seen]) -> dict[str, str]:
    """The pods that wait for what may never come, such as an image or a GPU, and for what."""
    found = {}
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
                found[pod["metadata"]["name"]] = text
    return found


def failure(seen: Sequence[Seen]) -> Failure | None:
    """The pod that failed first, or None where none is known.

    Those that a signal has ended come last: a Job that has failed ends its other pods so.
    """
    found = []
    for pod in _pods(seen):
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for container in status.get("containerStatuses") or ():
            ended = _ended(container)
            if ended and ended.get("exitCode"):
                code, reason = int(ended["exitCode"]), ended.get("reason", "Error")
                late = code in (137, 143) and reason == "Error"
                why = f"exit status {code} ({reason})"
                found.append((late, ended.get("finishedAt", ""), Failure(name, code, why)))
        if status.get("phase") == "Failed" and status.get("reason"):
            why = f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
            found.append((False, status.get("startTime", ""), Failure(name, 1, why)))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _ended(container: Seen) -> Seen | None:
    """How a container ended, or did before it was started again."""
    for key in ("state", "lastState"):
        ended: Seen | None = (container.get(key) or {}).get("terminated")
        if ended:
            return ended
    return None


def _pods(seen: Sequence[Seen]) -> list[Seen]:
    return [each for each in seen if each["kind"] == "Pod"]
