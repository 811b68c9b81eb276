"""Processes along the axes of a mesh, as the extended part of a strategy has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.config.mesh import DATA, Axis

__all__ = ["Line", "Lined"]


class Line(NamedTuple):
    """Processes that exchange tensors with each other.

    Attributes:
        operations: the exchanges between their devices, a `CollectiveAllReduce`.
        on_hosts: those between their hosts.
        workers: the number of processes.
        worker: this process's number among them.
    """

    operations: Any
    on_hosts: Any
    workers: int
    worker: int


class Lined:
    """Processes that a mesh may arrange along axes; those of the data axis are replicas.

    Mixed into the extended part of a strategy on collectives (`CollectiveAllReduceExtended`).
    """

    _all: Line | None = None
    _around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    #: The processes along each axis of a mesh.
    lines: Mapping[str, Line] = {}

    def lay_out(
        self, axes: Sequence[Axis], around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Arranges the processes along the axes of a mesh: those of the data axis are replicas.

        Args:
            axes: the axes as this process sees them, among them the data axis.
            around: makes of a replica's function the one that is run.
        """
        self.lines, self._around = {axis.name: self._line(axis) for axis in axes}, around
        self._all = self._taken
        self._take(self.lines[DATA])

    @contextlib.contextmanager
    def among_all(self) -> Iterator[None]:
        """A block in which all processes of the mesh are replicas."""
        before = self._taken
        self._take(self._all or before)
        try:
            yield
        finally:
            self._take(before)

    @property
    def every_line(self) -> list[Line]:
        """All processes, and those along each axis."""
        return [self._all or self._taken, *self.lines.values()]

    def _line(self, axis: Axis) -> Line:
        """The processes along an axis."""
        raise NotImplementedError

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        run = fn if self._around is None else self._around(fn)
        return super()._call_for_each_replica(run, args, kwargs)  # type: ignore[misc]

    @property
    def _taken(self) -> Line:
        return Line(
            self._cross_device_ops,
            self._host_cross_device_ops,
            self._num_workers,
            self._id_in_cluster,
        )

    def _take(self, line: Line) -> None:
        self._cross_device_ops, self._host_cross_device_ops = line.operations, line.on_hosts
        self._num_workers, self._id_in_cluster = line.workers, line.worker
