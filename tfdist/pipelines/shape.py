"""How a pipeline is built."""

from __future__ import annotations

import dataclasses

from tfdist.pipelines.schedules import Kind, Program, Step

__all__ = ["Shape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How a pipeline is built.

    Attributes:
        schedule: a key of `SCHEDULES`.
        stages: devices of a replica of the pipeline.
        microbatches: parts of a batch, over all replicas.
        virtual: chunks of the model on each device.
        replicas: pipelines beside each other, each with a part of the microbatches.
        recompute: chunks whose forward pass is run again in the backward pass.
        vertical_sync: with `"pipedream"`, whether all stages use the first one's version.
        timeout: seconds that a step may wait for another.
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int = 1
    replicas: int = 1
    recompute: frozenset[int] = frozenset()
    vertical_sync: bool = False
    timeout: float = 600.0

    @property
    def in_words(self) -> str:
        """The pipeline in a line, for people."""
        words = [f"{self.schedule}, {self.stages} stages"]
        if self.virtual > 1:
            words.append(f"of {self.virtual} parts each")
        words.append(f"{self.microbatches} microbatches")
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        if self.recompute:
            words.append("recomputed")
        return ", ".join(words)

    @property
    def chunks(self) -> int:
        """Parts of the model."""
        return self.stages * self.virtual

    @property
    def old_versions(self) -> int:
        """Versions of the weights besides the newest that some stage needs."""
        if self.schedule == "2bw":
            return 1
        return self.stages - 1 if self.vertical_sync else 0

    @property
    def batches_ahead(self) -> int:
        """Without a flush: batches under way when another is given."""
        return 1 if self.schedule == "2bw" else self.stages

    def steps_of(self, device: int, count: int, batch: int) -> list[Step]:
        """A device's steps in a batch of fewer microbatches, where batches are separate."""
        if self.schedule != "interleaved" or count % self.stages == 0:
            program = Program(self.schedule, self.stages, count, device, virtual=self.virtual)
            return program.push(batch)
        chunks = range(device, self.chunks, self.stages)
        order = [(chunk, number) for chunk in chunks for number in range(count)]
        forwards = [Step(Kind.FORWARD, batch, number, chunk) for chunk, number in order]
        backwards = [Step(Kind.BACKWARD, batch, number, chunk) for chunk, number in order[::-1]]
        return [*forwards, *backwards]
