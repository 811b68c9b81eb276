"""A thread for each device of a pipeline, that runs the device's steps in their order."""

from __future__ import annotations

import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.pipelines.board import Board, StoppedError
from tfdist.pipelines.parts import Part, Values
from tfdist.pipelines.schedules import Box, Kind, Step
from tfdist.pipelines.store import Batch, Store
from tfdist.pipelines.sums import GradientSums
from tfdist.placement.devices import on

__all__ = ["Loss", "Worker"]


#: Steps that are kept for a timeline.
_BOXES = 1024

#: From the batch, the microbatch and the model's outputs: the loss, a scalar of which gradients are
#: taken.
Loss = Callable[[Batch, int, Values], Any]


#: A step, what to set when all steps before are done, or the end.
_Entry: TypeAlias = tuple[Step, Batch] | threading.Event | None


class _Kept:
    """What a forward step leaves for its backward step."""

    def __init__(self, tape: Any, sources: Any, targets: Any, values: Any) -> None:
        self.tape, self.sources, self.targets, self.values = tape, sources, targets, values


class Worker:
    """Runs the steps of one device.

    Args:
        device: its number in the pipeline.
        replica: which replica of the pipeline it is in.
        parts: the chunks on it, by number.
        store: what the threads share.
        board: where other threads' tensors are.
        last: the number of the last chunk.
        loss: the loss of the model's outputs.
        recompute: chunks that are run again in their backward step.

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
        loss: Loss,
        recompute: frozenset[int],
    ) -> None:
        self.device, self._replica = device, replica
        self._parts, self._store, self._board = parts, store, board
        self._last, self._loss, self._recompute = last, loss, recompute
        self._kept: dict[tuple[int, int, int], _Kept] = {}
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.boxes: collections.deque[Box] = collections.deque(maxlen=_BOXES)
        self.live = 0
        self.sums = {number: GradientSums(part) for number, part in parts.items()}
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
        """Drops what steps have left, after an error."""
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

    def _forward(self, step: Step, batch: Batch) -> float:
        part = self._parts[step.chunk]
        values = self._read(step, part)
        begin = time.perf_counter()
        weights = self._store.weights(step.chunk, batch.version[step.chunk], self._replica)
        state = self._store.state(step.chunk, self._replica)
        number = tf.constant(step.microbatch, tf.int64)
        again = step.chunk in self._recompute and step.chunk != self._last
        with on(part.device):
            if again:
                written, following, _ = part.forward(weights, state, values, number)
                kept = _Kept(None, (weights, state), None, values)
            else:
                kept, written, following = self._taped(step, batch, part, weights, state, values)
        self._store.note_state(step, batch, following)
        self._kept[step.chunk, step.batch, step.microbatch] = kept
        self._alive.add(kept)
        self.live = max(self.live, len(self._alive))
        if step.chunk != self._last:
            for key, tensor, mask in zip(
                part.chunk.writes, written.tensors, written.masks, strict=True
            ):
                for reader in self._store.readers(key):
                    self._board.put(("F", step.batch, step.microbatch, reader, key), (tensor, mask))
        return begin

    def _taped(
        self, step: Step, batch: Batch, part: Part, weights: Any, state: Any, values: Values
    ) -> tuple[_Kept, Values, Any]:
        number = tf.constant(step.microbatch, tf.int64)
        inputs = [tensor for tensor in values.tensors if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch([weights, inputs])
            written, following, added = part.forward(weights, state, values, number)
            share = batch.shares[step.microbatch]
            if step.chunk == self._last:
                loss = self._loss(batch, step.microbatch, written) + added
                self._store.note_loss(step, loss * share)
                targets = [loss * (share * batch.scale)]
            else:
                self._store.note_loss(step, added * share)
                floating = zip(part.chunk.writes, written.tensors, strict=True)
                targets = [t for key, t in floating if self._store.is_floating(key)]
                targets.append(added * (share * batch.scale))
        return _Kept(tape, (weights, inputs), targets, values), written, following

    def _read(self, step: Step, part: Part) -> Values:
        found = [
            self._board.take(
                ("F", step.batch, step.microbatch, step.chunk, key),
                f"Stage {step.chunk}'s input of microbatch {step.microbatch} of batch {step.batch}",
            )
            for key in part.chunk.reads
        ]
        return Values([tensor for tensor, _ in found], [mask for _, mask in found])

    def _backward(self, step: Step, batch: Batch) -> float:
        part = self._parts[step.chunk]
        grads = [] if step.chunk == self._last else self._received(step, part)
        begin = time.perf_counter()
        kept = self._kept.pop((step.chunk, step.batch, step.microbatch))
        with on(part.device):
            if kept.tape is None:
                weights, state = kept.sources
                kept, _, _ = self._taped(step, batch, part, weights, state, kept.values)
            found = self._gradients(kept, grads)
            self.sums[step.chunk].add(found[0])
        self._send_back(step, part, kept.values, found[1])
        return begin

    def _gradients(self, kept: _Kept, grads: list[Any]) -> Any:
        """The gradients of weights and of inputs."""
        targets = list(kept.targets)
        if not grads:
            return kept.tape.gradient(targets, kept.sources)
        one = tf.ones([], targets[-1].dtype)
        pairs = [(t, g) for t, g in zip(targets, [*grads, one], strict=True) if g is not None]
        return kept.tape.gradient(
            [t for t, _ in pairs], kept.sources, output_gradients=[g for _, g in pairs]
        )

    def _received(self, step: Step, part: Part) -> list[Any]:
        """The gradients of what was written, summed over all chunks that have read it."""
        found = []
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
                found.append(tf.add_n(present) if len(present) > 1 else (present or [None])[0])
        return found

    def _send_back(self, step: Step, part: Part, values: Values, grads: Sequence[Any]) -> None:
        following = iter(grads)
        for key, tensor in zip(part.chunk.reads, values.tensors, strict=True):
            grad = next(following) if tensor.dtype.is_floating else None
            if tensor.dtype.is_floating and self._store.is_made(key):
                self._board.put(("B", step.batch, step.microbatch, step.chunk, key), grad)

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
    note = (
        f"in stage {step.chunk} on {part.device}: {names[step.kind]} step of microbatch "
        f"{step.microbatch}, batch {step.batch}"
    )
    error.add_note(f"tfdist: {note}")
    return error
