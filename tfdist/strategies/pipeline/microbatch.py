"""A microbatch's share of a Keras step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.keras.example_pairs import Meeting
from tfdist.keras.replica_context import LOSS, Step
from tfdist.types import Layer, Structure, Tensor

__all__ = ["Microbatch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch(Step):
    """A microbatch's share of a Keras step: it counts as a replica does.

    Attributes:
        total_of: gives the sum of a number over all microbatches, in the middle of one.
        microbatches: parts of the batch.
    """

    total_of: Callable[[Tensor], Tensor]
    microbatches: int = 1
    size: int | None = None
    replicas: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the batch."""
        return self.microbatches == 1

    def sum(self, values: Structure) -> Any:
        """The sums over all microbatches."""
        return tf.nest.map_structure(self.total_of, values)

    def note_meeting(self, found: Meeting, place: Layer | str = LOSS) -> None:
        """Refuses, as `gather` does."""
        inside = "" if isinstance(place, str) else f", in {place.name!r}"
        self.gather([], found.where + inside)

    def largest(self, numbers: Tensor, where: str) -> Tensor:
        """Refuses, as `gather` does."""
        return self.gather([numbers], where)[1]

    def gather(self, rows: list[Any], where: str) -> tuple[list[Any], Tensor]:
        """Refuses: a microbatch is through before the next one comes.

        Raises:
            ConfigError: always.
        """
        del rows
        place = "a loss, a metric, a layer or a gradient function"
        if self.calls:
            place = f"the loss or metric {self.calls[-1].name!r}"
        raise ConfigError(
            f"microbatches={self.microbatches} conflicts with {place}, "
            f"in which the examples of a batch meet (at {where}): each "
            "microbatch would see its own only. Set microbatches=1, or choose another strategy."
        )
