"""Shards that a step hands to the program, which may pass them to an optimizer only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfdist.comm.replica_collectives import is_sparse
from tfdist.types import Gradient
from tfdist.utils.thread_state import Current

__all__ = ["HandedOut", "handed_out"]


class HandedOut:
    """Gradients of divided weights in the graph of a step.

    A norm, for one, that a program computes from a shard is not that of the whole gradient.
    """

    def __init__(self) -> None:
        self._shards: list[Any] = []
        self._allowed: set[Any] = set()

    def note(self, gradient: Gradient) -> None:
        """Notes a shard that the program is given."""
        self._shards.append(gradient.values if is_sparse(gradient) else gradient)

    @contextmanager
    def to_optimizer(self) -> Iterator[None]:
        """A block in which an optimizer reads them."""
        before = self._readers()
        try:
            yield
        finally:
            self._allowed |= self._readers() - before

    def read_by_program(self) -> bool:
        """Whether anything has read one outside of an optimizer."""
        return bool(self._readers() - self._allowed)

    def are_in(self, failure: Exception) -> bool:
        """Whether an op that could not be made would have read one, as with a whole tensor."""
        text = str(failure)
        return any(each.op.name in text for each in self._shards)

    def _readers(self) -> set[Any]:
        return {each for shard in self._shards for each in shard.consumers()}


#: The shards of the step of a model that runs; None outside of one.
handed_out: Current[HandedOut | None] = Current(None)
