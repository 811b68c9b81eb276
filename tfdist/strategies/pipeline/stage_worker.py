"""A thread for each device of a pipeline, that runs the device's steps in their order."""

from __future__ import annotations

import collections
import queue
import threading
import time
import weakref
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.placement.devices import on
from tfdist.strategies.pipeline.gradient_sums import GradientSums
from tfdist.strategies.pipeline.loss import KerasObjective
from tfdist.strategies.pipeline.schedules import Box, Kind, Step
from tfdist.strategies.pipeline.stage import Part, Values
from tfdist.strategies.pipeline.stage_graph import Given, Job, Kept, Passes
from tfdist.strategies.pipeline.state import Batch, Board, OutOfMemoryError, StoppedError, Store

__all__ = ["Worker"]


#: Steps that are kept for a timeline.
_BOXES = 1024

#: A step, what to set when all steps before are done, or the end.
_Entry: TypeAlias = tuple[Step, Batch] | threading.Event | None


class Worker:
    """Runs the steps of one device.

    Args:
        device: its number in the pipeline.
        replica: which replica of the pipeline it is in.
        parts: the chunks on it, by number.
        store: the state that the threads share.
        board: where other threads' tensors are.
        last: the number of the last chunk.
        recompute: chunks that are run again in their backward step.
        objective: the loss.

    Attributes:
        boxes: the last steps, with their times.
        live: how many forwards have had no backward yet, at most: what activations are kept of.
    """

    def __init__(
        self,
        device: int,
        replica: int,
        parts: dict[int, Part],
        store: Store,
        board: Board,
        last: int,
        recompute: frozenset[int],
        objective: KerasObjective,
    ) -> None:
        self.device, self._replica = device, replica
        self._parts, self._store, self._board = parts, store, board
        self._last, self._objective = last, objective
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self._alive: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.boxes: collections.deque[Box] = collections.deque(maxlen=_BOXES)
        self.live = 0
        self.sums = {number: GradientSums(part) for number, part in parts.items()}
        self._passes = {number: Passes(self._job(number, number in recompute)) for number in parts}
        self._steps: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"tfdist-stage-{device}", daemon=True
        )
        self._thread.start()

    def push(self, step: Step, batch: Batch) -> None:
        """Gives the thread one more step."""
        self._steps.put((step, batch))

    def settle(self, seconds: float) -> bool:
        """Waits until the thread has done, or passed over, all steps that it has.

        Returns:
            Whether it has in so many seconds.
        """
        reached = threading.Event()
        self._steps.put(reached)
        return reached.wait(seconds)

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
            if self._board.error is not None:
                self._store.done(step)
                continue
            try:
                self._run(step, batch)
            except BaseException as error:
                self._board.fail(_named(error, step, self))
            finally:
                del entry, batch
                self._store.done(step)

    def _run(self, step: Step, batch: Batch) -> None:
        run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.UPDATE: self._update,
        }
        begin = run[step.kind](step, batch)
        self.boxes.append(Box(self.device, step, begin, time.perf_counter()))

    def _job(self, number: int, recompute: bool) -> Job:
        part, store, is_last = self._parts[number], self._store, number == self._last
        return Job(
            part=part,
            sums=self.sums[number],
            floating=[not is_last and store.is_floating(key) for key in part.chunk.writes],
            wanted=[store.wants_gradient(key) for key in part.chunk.reads],
            objective=self._objective.value if is_last else None,
            recompute=recompute and not is_last,
        )

    def _forward(self, step: Step, batch: Batch) -> float:
        part, passes = self._parts[step.chunk], self._passes[step.chunk]
        values = self._read(step, part)
        begin = time.perf_counter()
        given = Given(
            numbers=passes.numbers(step.microbatch, batch.sizes),
            scale=passes.scale(batch.scale),
            weights=self._store.weights(step.chunk, batch.version[step.chunk], self._replica),
            state=self._store.state(step.chunk, self._replica),
            values=values,
        )
        if step.chunk == self._last:
            run = self._objective.run
            kept, result = run(passes.forward, given, batch, step.microbatch)
            self._objective.note(batch, step.microbatch, result)
        else:
            kept, result = passes.forward(given)
        self._store.note_state(step, batch, result.following)
        if result.loss is not None:
            self._store.note_loss(step, result.loss)
        self._kept[step.chunk, step.batch, step.microbatch] = kept
        self._alive.add(kept)
        self.live = max(self.live, len(self._alive))
        if step.chunk != self._last:
            self._send_on(step, part, result.values)
        return begin

    def _send_on(self, step: Step, part: Part, values: Values) -> None:
        for key, tensor, mask in zip(part.chunk.writes, values.tensors, values.masks, strict=True):
            for reader in self._store.readers(key):
                self._board.put(("F", step.batch, step.microbatch, reader, key), (tensor, mask))

    def _read(self, step: Step, part: Part) -> Values:
        result = [
            self._board.take(
                ("F", step.batch, step.microbatch, step.chunk, key),
                f"Stage {step.chunk}'s input of microbatch {step.microbatch} of batch {step.batch}",
            )
            for key in part.chunk.reads
        ]
        return Values([tensor for tensor, _ in result], [mask for _, mask in result])

    def _backward(self, step: Step, batch: Batch) -> float:
        part = self._parts[step.chunk]
        grads = [] if step.chunk == self._last else self._received(step, part)
        begin = time.perf_counter()
        kept = self._kept.pop((step.chunk, step.batch, step.microbatch))
        result = iter(self._passes[step.chunk].backward(kept, grads))
        for key in filter(self._store.wants_gradient, part.chunk.reads):
            self._board.put(("B", step.batch, step.microbatch, step.chunk, key), next(result))
        return begin

    def _received(self, step: Step, part: Part) -> list[Any]:
        """The gradients of written tensors, summed over all chunks that have read them."""
        result = []
        for key in part.chunk.writes:
            if not self._store.is_floating(key):
                continue
            parts = [
                self._board.take(
                    ("B", step.batch, step.microbatch, reader, key),
                    f"Stage {step.chunk}'s gradient of microbatch {step.microbatch} of batch "
                    f"{step.batch}",
                )
                for reader in self._store.readers(key)
            ]
            present = [each for each in parts if each is not None]
            with on(part.device):
                result.append(tf.add_n(present) if len(present) > 1 else (present or [None])[0])
        return result

    def _update(self, step: Step, batch: Batch) -> float:
        begin = time.perf_counter()
        self._store.update(step, batch)
        return begin


def _named(error: BaseException, step: Step, worker: Worker) -> BaseException:
    """The error with the stage that it comes from."""
    if isinstance(error, StoppedError):
        return error
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}
    part = worker._parts[step.chunk]
    place = f"stage {step.chunk} on {part.device}"
    work = f"{names[step.kind]} step of microbatch {step.microbatch}, batch {step.batch}"
    if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
        short = OutOfMemoryError(f"S{place[1:]} ran out of memory in the {work}.")
        short.__cause__ = error
        return short
    error.add_note(f"tfdist: in {place}: {work}")
    return error
