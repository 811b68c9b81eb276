"""A pipeline of threads, one for each device, that trains on one batch after the other."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.gradient_sums import GradientSums
from tfdist.strategies.pipeline.loss import KerasObjective, Totals
from tfdist.strategies.pipeline.partitioning import Cut
from tfdist.strategies.pipeline.schedules import Box, Kind, Program, Step, is_synchronous, version
from tfdist.strategies.pipeline.stage import Part
from tfdist.strategies.pipeline.stage_worker import Worker
from tfdist.strategies.pipeline.state import Batch, Board, OutOfMemoryError, Store

__all__ = ["Apply", "Engine", "Shape"]


# The settings with which a pipeline is built.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The settings with which a pipeline is built.

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
        """A device's steps in a batch of fewer microbatches, if batches are separate."""
        if self.schedule != "interleaved" or count % self.stages == 0:
            program = Program(self.schedule, self.stages, count, device, virtual=self.virtual)
            return program.push(batch)
        chunks = range(device, self.chunks, self.stages)
        order = [(chunk, number) for chunk in chunks for number in range(count)]
        forwards = [Step(Kind.FORWARD, batch, number, chunk) for chunk, number in order]
        backwards = [Step(Kind.BACKWARD, batch, number, chunk) for chunk, number in order[::-1]]
        return [*forwards, *backwards]


#: Applies and clears the sums of gradients of some chunks, over all replicas. The second is the
#: number of updates that came before; None to count as the optimizer does.
Apply = Callable[[Sequence[tuple[Part, Sequence[GradientSums]]], int | None], None]


#: Seconds between two looks whether a thread has failed, while another is waited for.
_LOOK_SECONDS = 0.2


class Engine:
    """Trains a model in chunks by a schedule.

    Args:
        shape: how.
        cut: the model.
        devices: full names; for each replica one for each stage.
        objective: the loss of the last chunk's outputs, and metrics.
        apply: applies gradients.
        iterations: reads the optimizer's count of updates.
    """

    def __init__(
        self,
        shape: Shape,
        cut: Cut,
        devices: Sequence[Sequence[str]],
        objective: KerasObjective,
        apply: Apply,
        iterations: Callable[[], int],
    ) -> None:
        self.shape, self._cut, self._apply, self._iterations = shape, cut, apply, iterations
        self._board, self._objective = Board(shape.timeout), objective
        self.parts = _parts(shape, cut, devices)
        objective.totals = Totals(self.parts[0], cut.inputs, objective.denominators)
        self._store = Store(cut, self.parts, shape.old_versions, self._board, self._update)
        self.workers = [
            [self._worker(device, replica) for device in range(shape.stages)]
            for replica in range(shape.replicas)
        ]
        self._number = self._empty_since = self._updates_before = 0
        self._programs = self._new_programs()

    @property
    def number(self) -> int:
        """The number of batches so far."""
        return self._number

    @property
    def is_empty(self) -> bool:
        """Whether no batch is under way."""
        return self._number == self._empty_since

    def train(self, inputs: Sequence[Sequence[Any]], batch: Batch) -> dict[int, float]:
        """Gives the pipeline a batch; a synchronous schedule ends it before this returns.

        Args:
            inputs: for each microbatch the model's inputs, flat.
            batch: the batch, of which number and versions are filled in here.

        Returns:
            The losses of the batches that have ended, by number.

        Raises:
            PipelineError: if a device does not answer in time or has too little memory.
        """
        separate = is_synchronous(self.shape.schedule)
        if separate or self.is_empty:
            self._store.reload()
            self._empty_since, self._updates_before = self._number, self._iterations()
        number = self._number
        self._number += 1
        versions = [self._version(chunk, number) for chunk in range(len(self._cut.chunks))]
        batch = dataclasses.replace(batch, number=number, version=versions)
        count = len(batch.sizes)
        chunks = len(self._cut.chunks)
        self._store.expect(number, 2 * chunks * count)
        self._feed(inputs, number)
        steps = [
            (worker, self._steps(worker, replica, number, count))
            for replica, workers in enumerate(self.workers)
            for worker in workers
        ]
        self._push(steps, batch)
        if separate:
            self._wait(number)
            self._apply_all()
            self._empty_since = self._number
        else:
            self._wait(number - self.shape.batches_ahead)
        return self._store.take_losses()

    def wait_for(self, event: threading.Event) -> None:
        """Waits for an event that a thread of the pipeline sets.

        Raises:
            PipelineError: if a thread has failed before, or its waiting has.
        """
        while not event.wait(_LOOK_SECONDS):
            self._raise_if_failed()

    def flush(self) -> dict[int, float]:
        """Ends all batches under way; afterwards Keras's variables have what was trained.

        Returns:
            The losses of the batches that have ended, by number.
        """
        if self.is_empty or is_synchronous(self.shape.schedule):
            return {}
        pairs = zip(self.workers[0], self._programs, strict=True)
        self._push([(worker, program.drain()) for worker, program in pairs], None)
        self._wait(self._number - 1)
        self._store.write_state()
        self._empty_since = self._number
        return self._store.take_losses()

    def boxes(self) -> list[Box]:
        """The steps of the last batches, with their times."""
        rows = [worker for workers in self.workers for worker in workers]
        result = []
        for row, worker in enumerate(rows):
            result += [dataclasses.replace(box, device=row) for box in list(worker.boxes)]
        return sorted(result, key=lambda box: box.begin)

    def last_batch(self) -> list[Box]:
        """The steps of the last batch; without a flush between batches, of the last few."""
        boxes = self.boxes()
        last = max((box.step.batch for box in boxes), default=0)
        since = last if is_synchronous(self.shape.schedule) else last - 2 * self.shape.stages
        return [box for box in boxes if box.step.batch >= since]

    def close(self) -> None:
        """Ends the threads."""
        for workers in self.workers:
            for worker in workers:
                worker.close()

    def _worker(self, device: int, replica: int) -> Worker:
        stages = self.shape.stages
        own = {part.number: part for part in self.parts[replica] if part.number % stages == device}
        last = len(self._cut.chunks) - 1
        again = self.shape.recompute
        return Worker(device, replica, own, self._store, self._board, last, again, self._objective)

    def _new_programs(self) -> list[Program]:
        """The programs of a schedule without a flush, which go on from batch to batch."""
        shape = self.shape
        return [
            Program(shape.schedule, shape.stages, shape.microbatches, device, virtual=shape.virtual)
            for device in range(shape.stages)
        ]

    def _steps(self, worker: Worker, replica: int, number: int, count: int) -> list[Step]:
        """A worker's next steps, with the numbers that microbatches have in the whole batch."""
        shape = self.shape
        if not is_synchronous(shape.schedule):
            return self._programs[worker.device].push(number)
        own = range(replica, count, shape.replicas)
        steps = shape.steps_of(worker.device, len(own), number) if own else []
        return [
            dataclasses.replace(step, microbatch=own[step.microbatch])
            for step in steps
            if step.kind is not Kind.UPDATE
        ]

    def _push(self, steps: Sequence[tuple[Worker, Sequence[Step]]], batch: Batch | None) -> None:
        """Hands each worker its steps."""
        # The workers run while this goes on. A batch ends when no step of it is expected, so all
        # updates are expected before the first step is handed out: else a batch would end, and be
        # forgotten, between the update of one worker and the handing out of another's.
        for _, own in steps:
            for step in own:
                if step.kind is Kind.FORWARD and batch is not None:
                    self._store.batches[step.batch] = batch
                if step.kind is Kind.UPDATE:
                    self._store.expect(step.batch, 1)
        for worker, own in steps:
            for step in own:
                worker.push(step, self._store.batches[step.batch])

    def _feed(self, inputs: Sequence[Sequence[Any]], number: int) -> None:
        for microbatch, tensors in enumerate(inputs):
            for key, tensor in zip(self._cut.inputs, tensors, strict=True):
                for reader in self._store.readers(key):
                    self._board.put(("F", number, microbatch, reader, key), (tensor, None))

    def _version(self, chunk: int, number: int) -> int:
        shape = self.shape
        if is_synchronous(shape.schedule):
            return 0
        late = number - self._empty_since
        return version(shape.schedule, shape.stages, chunk, late, vertical_sync=shape.vertical_sync)

    def _wait(self, number: int) -> None:
        """Waits until all batches up to one have ended.

        Raises:
            PipelineError: if they do not, or a device has too little memory.
        """
        self._store.wait(number, self.shape.timeout)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        error = self._board.error
        if error is not None:
            self._abandon()
            raise _explained(error, self) from (error.__cause__ or error)

    def _abandon(self) -> None:
        """Leaves nothing of a training that has failed to the next one."""
        for workers in self.workers:
            for worker in workers:
                worker.settle(self.shape.timeout)
        self._store.forget()
        self._board.clear()
        for workers in self.workers:
            for worker in workers:
                worker.forget()
        self._empty_since = self._number
        self._programs = self._new_programs()

    def _apply_all(self) -> None:
        self._store.release()
        sums = [(part, self._sums(part.number)) for part in self.parts[0] if part.weights]
        try:
            self._apply(sums, None)
        except tf.errors.ResourceExhaustedError as error:
            short = OutOfMemoryError(
                "A stage ran out of memory where the optimizer updates weights."
            )
            self._abandon()
            raise _explained(short, self) from error
        self._store.write_state()

    def _update(self, step: Step, batch: Batch) -> None:
        """Applies the gradients of one device's weights."""
        own = [part for part in self.parts[0] if part.number % self.shape.stages == step.chunk]
        before = self._updates_before + batch.number - self._empty_since
        self._apply([(part, self._sums(part.number)) for part in own if part.weights], before)
        for part in own:
            self._store.renew(part.number)

    def _sums(self, chunk: int) -> list[GradientSums]:
        return [workers[chunk % self.shape.stages].sums[chunk] for workers in self.workers]


def _parts(shape: Shape, cut: Cut, devices: Sequence[Sequence[str]]) -> list[list[Part]]:
    """The chunks on the devices of each replica of the pipeline."""
    result: list[list[Part]] = []
    for names in devices:
        result.append(
            [
                Part(
                    cut.graph,
                    number,
                    chunk,
                    names[number % shape.stages],
                    result[0][number] if result else None,
                )
                for number, chunk in enumerate(cut.chunks)
            ]
        )
    return result


def _explained(error: BaseException, engine: Engine) -> BaseException:
    """The error of a stage; one about memory lists the weights of the stages."""
    if not isinstance(error, OutOfMemoryError):
        return error
    parts = ", ".join(
        f"stage {part.number} {part.weight_bytes / 2**20:.1f} MiB on {part.device}"
        for part in engine.parts[0]
    )
    live = ", ".join(str(worker.live) for worker in engine.workers[0])
    return OutOfMemoryError(
        f"{error} Weights: {parts}; as much again for gradients, and for each value that the "
        f"optimizer keeps of a weight. On top are the activations of {live} microbatches at once, "
        "device by device. Give more microbatches, so that each is smaller, --recompute "
        "(Pipeline(recompute=True)), more stages or other --cuts, or the schedule 1f1b instead of "
        "gpipe."
    )
