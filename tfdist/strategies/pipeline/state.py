"""The state that the threads of a pipeline share: weights by version, losses, and progress."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.placement.devices import on
from tfdist.strategies.pipeline.partitioning import Cut, Key
from tfdist.strategies.pipeline.schedules import Step
from tfdist.strategies.pipeline.stage import Part
from tfdist.types import Structure, Tensor

__all__ = ["Batch", "Board", "OutOfMemoryError", "PipelineError", "StoppedError", "Store", "Update"]


# The place in which the threads of a pipeline leave tensors for each other.


class PipelineError(TfdistError):
    """A stage failed, or did not answer in time."""


class OutOfMemoryError(PipelineError):
    """A device has too little memory for its stage."""


class StoppedError(Exception):
    """Another thread has failed: there is nothing to wait for."""


class Board:
    """Values by key: put once, taken once, waited for with a deadline.

    Args:
        seconds: how long a thread waits for a value.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[Hashable, Any] = {}
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    def put(self, key: Hashable, value: object) -> None:
        """Leaves a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: Hashable, waiting: str) -> Any:
        """Takes a value, as soon as it is there.

        Args:
            key: under which it is left.
            waiting: the stage that waits and the value it waits for, for the error.

        Raises:
            PipelineError: if it does not come in time.
            StoppedError: if another thread has failed.
        """
        end = time.monotonic() + self._seconds
        with self._changed:
            while key not in self._values:
                if self.error is not None:
                    raise StoppedError
                left = end - time.monotonic()
                if left <= 0:
                    raise PipelineError(
                        f"{waiting} did not come within {self._seconds:.0f} s. A device of the "
                        "pipeline hangs, or is much slower than the others: see its task's log."
                    )
                self._changed.wait(left)
            return self._values.pop(key)

    def fail(self, error: BaseException) -> None:
        """Stops all threads that wait; the first error counts."""
        with self._changed:
            if self.error is None and not isinstance(error, StoppedError):
                self.error = error
            self._changed.notify_all()

    def clear(self) -> None:
        """Forgets all values, and the error."""
        with self._changed:
            self._values.clear()
            self.error = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The values of a global batch that all threads use.

    Attributes:
        number: its number since the pipeline was made.
        examples: for each microbatch its inputs, labels and sample weights.
        inputs: the model's inputs, flat, of all microbatches.
        targets: labels and sample weights of all microbatches, flat.
        labels: for each microbatch its labels and sample weights, flat.
        nest: the structure that they are flat of.
        form: the same in words.
        sizes: for each microbatch its examples.
        scale: the factor of losses before their gradients are taken.
        version: for each chunk the version of its weights.
    """

    number: int
    examples: Sequence[Any]
    inputs: Sequence[Any]
    targets: Sequence[Any]
    labels: Sequence[Sequence[Any]]
    nest: Structure
    form: str
    sizes: Sequence[int]
    scale: float
    version: Sequence[int]

    @property
    def shares(self) -> list[float]:
        """For each microbatch its part of the examples."""
        return [size / sum(self.sizes) for size in self.sizes]


#: Applies the gradients of a device's chunks, if each device does so by itself.
Update = Callable[[Step, Batch], None]


class Store:
    """Weights, state and results, for all threads.

    Args:
        cut: the model in chunks.
        parts: the chunks on their devices; those of the other replicas of the pipeline after them.
        versions: how many old versions of the weights are kept.
        board: stops all that wait, after an error.
        update: see `Update`.

    Attributes:
        batches: those under way, by number.
    """

    def __init__(
        self,
        cut: Cut,
        parts: Sequence[Sequence[Part]],
        versions: int,
        board: Board,
        update: Update,
    ) -> None:
        self._parts, self._board = parts, board
        self._versions, self.update = versions, update
        self.batches: dict[int, Batch] = {}
        self._made: dict[Key, bool] = {}
        self._readers: dict[Key, list[int]] = collections.defaultdict(list)
        for number, chunk in enumerate(cut.chunks):
            for key in chunk.reads:
                self._readers[key].append(number)
            for call in chunk.calls:
                for key, symbol in zip(call.writes, call.node.outputs, strict=True):
                    self._made[key] = tf.as_dtype(symbol.dtype).is_floating
        self._changed = threading.Condition()
        self._finished: list[int] = []
        self._left: collections.Counter[int] = collections.Counter()
        self.reload()

    def reload(self) -> None:
        """Reads weights and state anew, as the program may have changed them."""
        count = len(self._parts[0])
        self._current = [0] * count
        self._weights = [[{0: part.read("weights")} for part in parts] for parts in self._parts]
        self._state = [part.read("state") for part in self._parts[0]]
        self._unchanged = [list(values) for values in self._state]
        self._states: dict[tuple[int, int], list[Any]] = {}
        self._losses: dict[int, list[tuple[str, Any]]] = collections.defaultdict(list)

    def release(self) -> None:
        """Lets go of the weights before an update: memory that is held is copied when assigned."""
        for parts in self._weights:
            for held in parts:
                held.clear()

    def weights(self, chunk: int, version: int, replica: int) -> list[Any]:
        """The values of a chunk's weights after so many updates since `reload`."""
        return list(self._weights[replica][chunk][version])

    def renew(self, chunk: int) -> None:
        """Notes that a chunk's weights have had an update."""
        number = self._current[chunk] + 1
        for replica, parts in enumerate(self._parts):
            part, held = parts[chunk], self._weights[replica][chunk]
            for old in [v for v in held if v < number - self._versions]:
                del held[old]
            held[number] = part.read("weights")
        self._current[chunk] = number

    def state(self, chunk: int, replica: int) -> list[Any]:
        """The values of a chunk's other variables at the begin of a batch."""
        if replica == 0:
            return list(self._state[chunk])
        with on(self._parts[replica][chunk].device):
            return [tf.identity(value) for value in self._state[chunk]]

    def note_state(self, step: Step, batch: Batch, following: Sequence[Any]) -> None:
        """Notes a microbatch's new values of the state, which become the average over the batch."""
        part = self._parts[0][step.chunk]
        if all(value is None for value in following):
            return
        with self._changed:
            noted = self._states.setdefault((step.batch, step.chunk), [])
            noted.append((step.microbatch, list(following)))
            if len(noted) < len(batch.shares):
                return
            del self._states[step.batch, step.chunk]
        noted.sort(key=lambda each: each[0])
        numbers = [i for i, value in enumerate(following) if value is not None]
        rows = [values[i] for i in numbers for _, values in noted]
        result = part.averaged(rows, batch.shares)
        for i, value in zip(numbers, result, strict=True):
            self._state[step.chunk][i] = value

    def write_state(self) -> None:
        """Puts the state into Keras's variables."""
        rows = zip(self._parts[0], self._state, self._unchanged, strict=True)
        for part, values, unchanged in rows:
            if any(value is not before for value, before in zip(values, unchanged, strict=True)):
                part.write_state(values)
        self._unchanged = [list(values) for values in self._state]

    def note_loss(self, step: Step, loss: Tensor) -> None:
        """Notes a chunk's part of the loss of a batch."""
        with self._changed:
            self._losses[step.batch].append((self._parts[0][step.chunk].device, loss))

    def take_losses(self) -> dict[int, float]:
        """The losses of the batches that have ended since the last call."""
        with self._changed:
            result = {number: self._losses.pop(number, []) for number in sorted(self._finished)}
            self._finished.clear()
        return {number: _sum(losses) for number, losses in result.items()}

    def readers(self, key: Key) -> list[int]:
        """The chunks that read a tensor."""
        return self._readers[key]

    def is_floating(self, key: Key) -> bool:
        """Whether a tensor that a chunk makes has gradients."""
        return self._made[key]

    def wants_gradient(self, key: Key) -> bool:
        """Whether a tensor that a chunk reads has gradients: an earlier chunk makes it."""
        return self._made.get(key, False)

    def expect(self, batch: int, steps: int) -> None:
        """Notes how many more steps a batch takes."""
        with self._changed:
            self._left[batch] += steps

    def done(self, step: Step) -> None:
        """Notes that a step has ended, well or not."""
        with self._changed:
            self._left[step.batch] -= 1
            if not self._left[step.batch]:
                del self._left[step.batch]
                self._finished.append(step.batch)
                self.batches.pop(step.batch, None)
            self._changed.notify_all()

    def forget(self) -> None:
        """Drops the tensors that a failed training has left."""
        with self._changed:
            self._left.clear()
            self._losses.clear()
            self._states.clear()
            self._finished.clear()
            self.batches.clear()

    def wait(self, number: int, seconds: float) -> None:
        """Waits until no batch up to one is under way, or a thread has failed.

        Raises:
            PipelineError: if that does not come in time.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while self._board.error is None and any(each <= number for each in self._left):
                left = end - time.monotonic()
                if left <= 0:
                    batches = ", ".join(map(str, sorted(self._left)))
                    raise PipelineError(
                        f"The pipeline did not finish batch {batches} within {seconds:.0f} s. A "
                        "device hangs, or is much slower than the others: see its task's log."
                    )
                # An error is put on the board, not here.
                self._changed.wait(min(left, 0.2))


def _sum(losses: Sequence[tuple[str, Any]]) -> float:
    """The sum of scalars by device: those of another task cost a call each to read."""
    total = 0.0
    for device in dict.fromkeys(device for device, _ in losses):
        with on(device):
            total += float(tf.add_n([loss for own, loss in losses if own == device]))
    return total
