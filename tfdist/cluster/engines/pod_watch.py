"""Stays with a job on Kubernetes until its end, shows its log, and tells what is wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.cluster.engines import pod_states
from tfdist.cluster.engines.kubectl import Kubectl, LogStream
from tfdist.errors import StartError

__all__ = ["Target", "Watch"]

#: Seconds between two looks, and that workers have to end when their chief has ended well.
_EVERY = 2.0
_SECONDS_FOR_OTHERS = 30.0
_LAST_LINES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What to look at.

    Attributes:
        kinds: the kinds of objects that tell how far the job is.
        selector: the label of all of them.
        jobs: the names of the Jobs; the first is the main one.
        pod: the name, or host name, of the pod whose log is shown.
    """

    kinds: str
    selector: str
    jobs: tuple[str, ...]
    pod: str


class Watch:
    """Looks at a job until its end.

    Args:
        kubectl: for the job's namespace.
        target: the job.
        notify: told what the user should know.

    Attributes:
        ended: the Jobs that had ended when it last looked.
    """

    def __init__(self, kubectl: Kubectl, target: Target, notify: Callable[[str], None]) -> None:
        self.ended: frozenset[str] = frozenset()
        self._kubectl = kubectl
        self._target = target
        self._notify = notify
        self._log: LogStream | None = None
        self._told: dict[str, str] = {}
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
                seen = self._kubectl.seen(self._target.kinds, self._target.selector)
                self._tell(seen)
                self._follow(seen)
                status = self._status(seen)
                if status is None:
                    self._pause(stopped)
        finally:
            if self._log is not None:
                self._log.close(drain=status is not None)
        return status

    def _status(self, seen: Sequence[Mapping[str, Any]]) -> int | None:
        state = pod_states.progress(seen)
        self.ended = state.done | state.failed.keys()
        if state.failed:
            return self._failed(seen, state.failed)
        main = self._target.jobs[0]
        if main in state.done:
            self._done_at = self._done_at or time.monotonic()
            late = time.monotonic() - self._done_at > _SECONDS_FOR_OTHERS
            return 0 if late or state.done >= set(self._target.jobs) else None
        if main not in [each["metadata"]["name"] for each in seen if each["kind"] != "Pod"]:
            raise StartError(f"The job {main!r} is gone from the cluster: somebody has removed it.")
        return None

    def _failed(self, seen: Sequence[Mapping[str, Any]], failed: Mapping[str, str]) -> int:
        name, why = next(iter(failed.items()))
        first = pod_states.failure(seen)
        if first is None:
            self._notify(f"job {name} failed ({why}); no pod of it tells more")
            return 1
        self._notify(f"job {name} failed: pod {first.pod} ended with {first.why}")
        shown = pod_states.named(seen, self._target.pod)
        if shown is None or shown["metadata"]["name"] != first.pod:
            lines = self._kubectl.last_lines(first.pod, _LAST_LINES).rstrip()
            if lines:
                self._notify(f"the last lines of {first.pod}:\n{lines}")
        return first.status

    def _follow(self, seen: Sequence[Mapping[str, Any]]) -> None:
        pod = pod_states.named(seen, self._target.pod)
        if pod is None or not pod_states.running(pod):
            return
        if self._log is None:
            self._log = LogStream(self._kubectl, pod["metadata"]["name"])
        elif pod["status"]["phase"] == "Running":
            self._log.mend()

    def _tell(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """Tells once what each pod waits for."""
        waiting = pod_states.waiting(seen)
        for pod, why in waiting.items():
            if self._told.get(pod) != why:
                self._notify(f"pod {pod} waits: {why}")
        self._told = waiting

    def _pause(self, stopped: Callable[[], object]) -> None:
        until = time.monotonic() + _EVERY
        while time.monotonic() < until and not stopped():
            time.sleep(min(0.1, _EVERY))
