"""All targets of a test session, and the reference results that are computed once."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from tests.harness.cluster import CALL_SECONDS, Cluster, result_of
from tests.harness.forking import Zygote
from tests.harness.targets import PLAIN, TARGETS

#: Processes that a pool keeps: more than the strategies of the contract suite have together. Each
#: has some hundred MiB to itself, and test sessions run side by side.
KEPT = 32


class Pool:
    """Hands out one cluster a target.

    Args:
        logs: directory for the logs of all processes.
    """

    def __init__(self, logs: pathlib.Path) -> None:
        self._logs = logs
        # Two: the processes of a target do not all have the same hashes of strings.
        self._zygotes = [Zygote(logs / f"zygote-{i}.log") for i in range(2)]
        self._clusters: dict[str, Cluster] = {}
        self._results: dict[tuple[str, str, bytes], Future[list[Any]]] = {}

    def __call__(self, name: str) -> Cluster:
        """The cluster of the target `name`; its processes start with the first call."""
        cluster = self._clusters.pop(name, None)
        cluster = cluster or Cluster(TARGETS[name], self._logs, self._zygotes)
        self._clusters[name] = cluster  # The last ones are those that were used last.
        count = 0
        for each in reversed(self._clusters.values()):
            count += each.target.tasks if each is cluster else len(each.process_ids())
            if count > KEPT:
                each.stop_when_idle()
        return cluster

    def prefetch(
        self,
        names: Iterable[str],
        function: str,
        /,
        *,
        deadline: float = CALL_SECONDS,
        **kwargs: Any,
    ) -> None:
        """Starts a case on several targets at once; `results` then finds it done."""
        for name in names:
            key = (name, function, pickle.dumps(sorted(kwargs.items())))
            if key not in self._results:
                self._results[key] = self(name).submit(function, deadline=deadline, **kwargs)

    def results(
        self, name: str, function: str, /, *, deadline: float = CALL_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """The results of a case on a target, computed once a session for the same arguments."""
        __tracebackhide__ = True
        self.prefetch([name], function, deadline=deadline, **kwargs)
        key = (name, function, pickle.dumps(sorted(kwargs.items())))
        return result_of(self._results[key])

    def plain(self, function: str, /, **kwargs: Any) -> Any:
        """The result of stock Keras without a strategy, computed once a session."""
        __tracebackhide__ = True
        return self.results(PLAIN, function, **kwargs)[0]

    def close(self) -> None:
        """Ends all processes."""
        for cluster in self._clusters.values():
            cluster.close()
        for zygote in self._zygotes:
            zygote.close()

    def process_ids(self) -> set[int]:
        """The ids of the running processes of all clusters, and of the zygotes."""
        parts = (*self._clusters.values(), *self._zygotes)
        return {pid for part in parts for pid in part.process_ids()}
