"""What a pipeline's devices do, as values."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Box", "Kind", "Schedule", "Step"]


class Kind(enum.Enum):
    """What a step does."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a device does at a time.

    Attributes:
        kind: what it does.
        batch: the number of the global batch, from 0.
        microbatch: its number within the batch, from 0; -1 for an update.
        chunk: the part of the model, from 0 at the input. That of an update is the first one of its
            device, whose number is the device's: an update is of all chunks of the device.
    """

    kind: Kind
    batch: int
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        numbers = (self.batch, self.chunk, self.microbatch)[: 2 + (self.kind is not Kind.UPDATE)]
        return f"{self.kind.value}({', '.join(map(str, numbers))})"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What each device of a pipeline does, in order.

    Chunk `c` of the model is on device `c % devices`, as Megatron-LM places its virtual stages.

    Attributes:
        name: a key of `SCHEDULES`.
        devices: their number.
        chunks: the number of parts of the model, a multiple of `devices`.
        microbatches: their number in each global batch.
        programs: the steps of each device.
    """

    name: str
    devices: int
    chunks: int
    microbatches: int
    programs: tuple[tuple[Step, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A step with its time, measured or simulated.

    Attributes:
        device: its number, from 0. The boxes of a device do not overlap.
        step: what was done.
        begin: when it began, in seconds on a clock that all devices share.
        end: when it ended.
    """

    device: int
    step: Step
    begin: float
    end: float
