"""A pipeline of threads, one for each device, that trains on one batch after the other."""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.placement.devices import on
from tfdist.strategies.pipeline.loss import KerasObjective
from tfdist.strategies.pipeline.partitioning import Cut
from tfdist.strategies.pipeline.schedules import Box, Kind, Program, Shape, Step, version
from tfdist.strategies.pipeline.stage import GradientSums, Part, Values
from tfdist.strategies.pipeline.stage_graph import ForwardInputs, Job, Kept, Passes
from tfdist.strategies.pipeline.state import Batch, OutOfMemoryError, StoppedError, Store

__all__ = ["Apply", "Engine", "Worker"]


#: Steps that are kept for a timeline.
_BOXES = 1024

#: A step, what to set when all steps before are done, or the end.
_Entry: TypeAlias = tuple[Step, Batch] | threading.Event | None


class Worker:
    """Runs the steps of one device.

    Args:
        device: its number in the pipeline.
        replica: which replica of the pipeline it is in.
        shape: the pipeline.
        store: the state that the threads share.
        objective: the loss.
        update: applies the gradients of the device's chunks, if each device does so by itself.

    Attributes:
        boxes: the last steps, with their times.
        live: how many forwards have had no backward yet, at most: what activations are kept of.
        sums: the gradients of the chunks, by number.
    """

    def __init__(
        self,
        device: int,
        replica: int,
        shape: Shape,
        store: Store,
        objective: KerasObjective,
        update: Callable[[Step, Batch], None],
    ) -> None:
        self.device, self.replica = device, replica
        self._store, self._objective, self._update = store, objective, update
        self._last = shape.chunks - 1
        self._parts = {
            n: store.parts[replica][n] for n in range(device, shape.chunks, shape.stages)
        }
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self._alive: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.boxes: collections.deque[Box] = collections.deque(maxlen=_BOXES)
        self.live = 0
        self.sums = {number: GradientSums(part) for number, part in self._parts.items()}
        self._passes = {n: Passes(self._job(n, n in shape.recompute)) for n in self._parts}
        self._steps: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"tfdist-stage-{device}", daemon=True
        )
        self._thread.start()

    def push(self, step: Step, batch: Batch) -> None:
        """Gives the thread one more step."""
        self._steps.put((step, batch))

    def settle(self, seconds: float) -> None:
        """Waits until the thread has done, or passed over, all steps that it has."""
        reached = threading.Event()
        self._steps.put(reached)
        reached.wait(seconds)

    def close(self) -> None:
        """Ends the thread after the steps that it has."""
        self._steps.put(None)

    def forget(self) -> None:
        """Drops the tensors that steps have left, after an error."""
        self._kept.clear()
        for sums in self.sums.values():
            sums.clear()

    def _serve(self) -> None:
        while True:
            entry = self._steps.get()
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            step, batch = entry
            try:
                # After an error of any thread the remaining steps are passed over: `settle` waits
                # until the queue has been gone through.
                if self._store.error is None:
                    begin = self._run(step, batch)
                    self.boxes.append(Box(self.device, step, begin, time.perf_counter()))
            except BaseException as error:
                self._store.fail(self._named(error, step))
            finally:
                del entry, batch  # Waiting for the next step must not keep this batch's tensors.
                self._store.done(step)

    def _run(self, step: Step, batch: Batch) -> float:
        """Runs a step.

        Returns:
            When it began to compute, all that it needs being there.
        """
        if step.kind is Kind.FORWARD:
            return self._forward(step, batch)
        if step.kind is Kind.BACKWARD:
            return self._backward(step)
        begin = time.perf_counter()
        self._update(step, batch)
        return begin

    def _job(self, number: int, recompute: bool) -> Job:
        part, store, is_last = self._parts[number], self._store, number == self._last
        return Job(
            part=part,
            sums=self.sums[number],
            floating=[not is_last and store.has_gradient(key) for key in part.chunk.writes],
            wanted=[store.has_gradient(key) for key in part.chunk.reads],
            objective=self._objective.value if is_last else None,
            recompute=recompute and not is_last,
        )

    def _forward(self, step: Step, batch: Batch) -> float:
        part, passes = self._parts[step.chunk], self._passes[step.chunk]
        values = self._read(step, part)
        begin = time.perf_counter()
        inputs = ForwardInputs(
            numbers=passes.numbers(step.microbatch, batch.sizes),
            scale=passes.scale(batch.scale),
            weights=self._store.weights(step.chunk, batch.version[step.chunk], self.replica),
            state=self._store.state(step.chunk, self.replica),
            values=values,
        )
        if step.chunk == self._last:
            kept, result = self._objective.run(passes.forward, inputs, batch, step.microbatch)
            self._objective.note(batch, step.microbatch, result)
        else:
            kept, result = passes.forward(inputs)
        # Each microbatch starts from the state at the begin of the batch; the average of their new
        # values becomes the state when the last one has noted its own.
        self._store.note_state(step, batch, result.following)
        if result.loss is not None:
            self._store.note_loss(step, result.loss)
        # The backward of the same microbatch takes it out again.
        self._kept[step.chunk, step.batch, step.microbatch] = kept
        self._alive.add(kept)
        self.live = max(self.live, len(self._alive))
        if step.chunk != self._last:
            written = zip(part.chunk.writes, *result.values, strict=True)
            for key, tensor, mask in written:
                # A value is taken once, so each reader has a slot of its own.
                for reader in self._store.readers[key]:
                    slot = ("F", step.batch, step.microbatch, reader, key)
                    self._store.put(slot, (tensor, mask))
        return begin

    def _read(self, step: Step, part: Part) -> Values:
        waiting = (
            f"Stage {step.chunk}'s input of microbatch {step.microbatch} of batch {step.batch}"
        )
        result = [
            self._store.take(("F", step.batch, step.microbatch, step.chunk, key), waiting)
            for key in part.chunk.reads
        ]
        return Values([tensor for tensor, _ in result], [mask for _, mask in result])

    def _backward(self, step: Step) -> float:
        part = self._parts[step.chunk]
        grads = [] if step.chunk == self._last else self._received(step, part)
        begin = time.perf_counter()
        kept = self._kept.pop((step.chunk, step.batch, step.microbatch))
        result = iter(self._passes[step.chunk].backward(kept, grads))
        for key in filter(self._store.has_gradient, part.chunk.reads):
            self._store.put(("B", step.batch, step.microbatch, step.chunk, key), next(result))
        return begin

    def _received(self, step: Step, part: Part) -> list[Any]:
        """The gradients of written tensors, summed over all chunks that have read them."""
        waiting = (
            f"Stage {step.chunk}'s gradient of microbatch {step.microbatch} of batch {step.batch}"
        )
        result = []
        for key in filter(self._store.has_gradient, part.chunk.writes):
            parts = [
                self._store.take(("B", step.batch, step.microbatch, reader, key), waiting)
                for reader in self._store.readers[key]
            ]
            present = [each for each in parts if each is not None]
            with on(part.device):
                result.append(tf.add_n(present) if len(present) > 1 else (present or [None])[0])
        return result

    def _named(self, error: BaseException, step: Step) -> BaseException:
        """The error with the stage that it comes from."""
        if isinstance(error, StoppedError):
            return error
        stage = f"{step.chunk} on {self._parts[step.chunk].device}"
        work = f"{step.kind.name.lower()} step of microbatch {step.microbatch}, batch {step.batch}"
        if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
            short = OutOfMemoryError(f"Stage {stage} ran out of memory in the {work}.")
            short.__cause__ = error
            return short
        error.add_note(f"tfdist: in stage {stage}: {work}")
        return error


#: Applies and clears the sums of gradients of some chunks, those of all replicas for each. The
#: second is the number of updates that came before; None to count as the optimizer does.
Apply: TypeAlias = Callable[[Sequence[Sequence[GradientSums]], int | None], None]


class Engine:
    """Trains a model in chunks by a schedule.

    Args:
        shape: how.
        cut: the model.
        parts: the chunks on their devices, for each replica of the pipeline.
        objective: the loss of the last chunk's outputs, and metrics.
        apply: applies gradients.
        iterations: reads the optimizer's count of updates.

    Attributes:
        cut: the model.
        workers: for each replica the threads of its devices.
        number: the number of batches so far.
    """

    def __init__(
        self,
        shape: Shape,
        cut: Cut,
        parts: Sequence[Sequence[Part]],
        objective: KerasObjective,
        apply: Apply,
        iterations: Callable[[], int],
    ) -> None:
        self._shape, self.cut, self._objective = shape, cut, objective
        self._apply, self._iterations = apply, iterations
        self._store = Store(shape, cut, parts)
        self.workers = [
            [
                Worker(device, replica, shape, self._store, objective, self._update)
                for device in range(shape.stages)
            ]
            for replica in range(shape.replicas)
        ]
        self._every = [worker for workers in self.workers for worker in workers]
        self.number = self._empty_since = self._updates_before = 0
        self._programs = self._new_programs()

    @property
    def is_empty(self) -> bool:
        """Whether no batch is under way."""
        return self.number == self._empty_since

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
        separate = self._shape.is_synchronous
        if separate or self.is_empty:
            # Nothing is under way, so Keras's variables are the truth: the program may have set
            # them since. Versions of weights are counted from here.
            self._store.reload()
            self._empty_since, self._updates_before = self.number, self._iterations()
        number = self.number
        self.number += 1
        chunks = range(self._shape.chunks)
        versions = [self._version(chunk, number - self._empty_since) for chunk in chunks]
        batch = dataclasses.replace(batch, number=number, version=versions)
        count = len(batch.sizes)
        # A forward and a backward of each chunk and microbatch; `_push` adds the updates.
        self._store.expect(number, 2 * len(chunks) * count)
        self._feed(inputs, number)
        self._push([(worker, self._steps(worker, number, count)) for worker in self._every], batch)
        if separate:
            # The flush: all gradients are there before the one call of the optimizer.
            self._wait_for_batches(number)
            self._apply_all()
            self._empty_since = self.number
        else:
            self._wait_for_batches(number - self._shape.batches_ahead)
        # Keras's metrics have a result when they have seen a microbatch.
        self._wait(lambda: self._objective.measured)
        return self._store.take_losses()

    def flush(self) -> dict[int, float]:
        """Ends all batches under way; afterwards Keras's variables have what was trained.

        Returns:
            The losses of the batches that have ended, by number.
        """
        if self.is_empty or self._shape.is_synchronous:
            return {}
        pairs = zip(self.workers[0], self._programs, strict=True)
        self._push([(worker, program.drain()) for worker, program in pairs], None)
        self._wait_for_batches(self.number - 1)
        self._store.write_state()
        self._empty_since = self.number
        return self._store.take_losses()

    def boxes(self) -> list[Box]:
        """The steps of the last batches, with their times."""
        result = [
            dataclasses.replace(box, device=row)
            for row, worker in enumerate(self._every)
            for box in list(worker.boxes)
        ]
        return sorted(result, key=lambda box: box.begin)

    def last_batch(self) -> list[Box]:
        """The steps of the last batch; without a flush between batches, of the last few."""
        boxes = self.boxes()
        last = max((box.step.batch for box in boxes), default=0)
        since = last if self._shape.is_synchronous else last - 2 * self._shape.stages
        return [box for box in boxes if box.step.batch >= since]

    def close(self) -> None:
        """Ends the threads."""
        for worker in self._every:
            worker.close()

    def _new_programs(self) -> list[Program]:
        """The programs of a schedule without a flush, which go on from batch to batch."""
        if self._shape.is_synchronous:
            return []
        return [self._shape.program(d, self._shape.microbatches) for d in range(self._shape.stages)]

    def _steps(self, worker: Worker, number: int, count: int) -> list[Step]:
        """A worker's next steps, with the numbers that microbatches have in the whole batch."""
        shape = self._shape
        if not shape.is_synchronous:
            return self._programs[worker.device].push(number)
        own = range(worker.replica, count, shape.replicas)
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
        if batch is not None:
            self._store.batches[batch.number] = batch
        for _, own in steps:
            for step in own:
                if step.kind is Kind.UPDATE:
                    self._store.expect(step.batch, 1)
        for worker, own in steps:
            for step in own:
                worker.push(step, self._store.batches[step.batch])

    def _feed(self, inputs: Sequence[Sequence[Any]], number: int) -> None:
        for microbatch, tensors in enumerate(inputs):
            for key, tensor in zip(self.cut.inputs, tensors, strict=True):
                for reader in self._store.readers[key]:
                    self._store.put(("F", number, microbatch, reader, key), (tensor, None))

    def _version(self, chunk: int, batch: int) -> int:
        shape = self._shape
        if shape.is_synchronous:
            return 0
        return version(
            shape.schedule, shape.stages, chunk, batch, vertical_sync=shape.vertical_sync
        )

    def _wait_for_batches(self, number: int) -> None:
        """Waits until all batches up to one have ended.

        Raises:
            PipelineError: if they do not, or a device has too little memory.
        """
        self._wait(lambda: not self._store.is_under_way(number))

    def _wait(self, reached: Callable[[], bool]) -> None:
        self._store.wait(reached)
        error = self._store.error
        if error is not None:
            self._abandon()
            raise self._explained(error) from (error.__cause__ or error)

    def _abandon(self) -> None:
        """Leaves nothing of a training that has failed to the next one."""
        # Threads must be idle first: a step that still ran would leave tensors after the clearing.
        for worker in self._every:
            worker.settle(self._shape.timeout)
        self._store.forget()
        for worker in self._every:
            worker.forget()
        self._empty_since = self.number
        self._programs = self._new_programs()

    def _apply_all(self) -> None:
        self._store.release()
        try:
            self._apply([self._sums(part) for part in self._store.parts[0] if part.weights], None)
        except tf.errors.ResourceExhaustedError as error:
            short = OutOfMemoryError(
                "A stage ran out of memory where the optimizer updates weights."
            )
            self._abandon()
            raise self._explained(short) from error
        self._store.write_state()

    def _update(self, step: Step, batch: Batch) -> None:
        """Applies the gradients of one device's weights."""
        own = [
            part for part in self._store.parts[0] if part.number % self._shape.stages == step.chunk
        ]
        before = self._updates_before + batch.number - self._empty_since
        self._apply([self._sums(part) for part in own if part.weights], before)
        for part in own:
            self._store.renew(part.number)

    def _sums(self, part: Part) -> list[GradientSums]:
        device = part.number % self._shape.stages
        return [workers[device].sums[part.number] for workers in self.workers]

    def _explained(self, error: BaseException) -> BaseException:
        """The error of a stage; one about memory lists the weights of the stages."""
        if not isinstance(error, OutOfMemoryError):
            return error
        parts = ", ".join(
            f"stage {part.number} {part.weight_bytes / 2**20:.1f} MiB on {part.device}"
            for part in self._store.parts[0]
        )
        live = ", ".join(str(worker.live) for worker in self.workers[0])
        return OutOfMemoryError(
            f"{error} Weights: {parts}; as much again for gradients, and for each value that the "
            f"optimizer keeps of a weight. On top are the activations of {live} microbatches at "
            "once, device by device. Give more microbatches, so that each is smaller, --recompute "
            "(Pipeline(recompute=True)), more stages or other --cuts, or the schedule 1f1b instead "
            "of gpipe."
        )
