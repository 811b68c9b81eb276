"""The state that the threads of a pipeline share: tensors, weights by version, progress."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.placement.devices import on
from tfdist.strategies.pipeline.partitioning import Cut, Key
from tfdist.strategies.pipeline.schedules import Shape, Step
from tfdist.strategies.pipeline.stage import Part
from tfdist.types import Structure, Tensor

__all__ = ["Batch", "OutOfMemoryError", "PipelineError", "StoppedError", "Store"]


class PipelineError(TfdistError):
    """A stage failed, or did not answer in time."""


class OutOfMemoryError(PipelineError):
    """A device has too little memory for its stage."""


class StoppedError(Exception):
    """Another thread has failed: there is nothing to wait for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The values of a global batch that all threads use.

    Attributes:
        examples: for each microbatch its inputs, labels and sample weights.
        inputs: the model's inputs, flat, of all microbatches.
        targets: labels and sample weights of all microbatches.
        sizes: for each microbatch its examples.
        scale: the factor of losses before their gradients are taken.
        number: its number since the pipeline was made.
        version: for each chunk the version of its weights.
    """

    examples: Sequence[Any]
    inputs: Sequence[Any]
    targets: Structure
    sizes: Sequence[int]
    scale: float
    number: int = 0
    version: Sequence[int] = ()

    @property
    def shares(self) -> list[float]:
        """For each microbatch its part of the examples."""
        return [size / sum(self.sizes) for size in self.sizes]


class Store:
    """Weights, state and results, for all threads.

    Threads leave tensors for each other by key: put once, taken once, waited for with a deadline.

    Args:
        shape: the pipeline.
        cut: the model in chunks.
        parts: the chunks on their devices, for each replica of the pipeline.

    Attributes:
        batches: those under way, by number.
        readers: the chunks that read a tensor.
        error: the first error of a thread.
    """

    def __init__(self, shape: Shape, cut: Cut, parts: Sequence[Sequence[Part]]) -> None:
        self._seconds, self._old_versions = shape.timeout, shape.old_versions
        self.parts = parts
        self.batches: dict[int, Batch] = {}
        self.readers: dict[Key, list[int]] = collections.defaultdict(list)
        self._floating: set[Key] = set()
        for number, chunk in enumerate(cut.chunks):
            for key in chunk.reads:
                self.readers[key].append(number)
            self._floating |= {key for key, v in chunk.lent.items() if v.trainable}
            for call in chunk.calls:
                pairs = zip(call.writes, call.node.outputs, strict=True)
                self._floating |= {
                    key for key, made in pairs if tf.as_dtype(made.dtype).is_floating
                }
        self._changed = threading.Condition()
        self._values: dict[Hashable, Any] = {}
        self.error: BaseException | None = None
        self._finished: list[int] = []
        self._left: collections.Counter[int] = collections.Counter()
        self.reload()

    # Tensors on their way.

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
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._values or self.error is not None, self._seconds
            )
            if key in self._values:
                return self._values.pop(key)
            if self.error is not None:
                raise StoppedError
        raise PipelineError(
            f"{waiting} did not come within {self._seconds:.0f} s. A device of the pipeline hangs, "
            "or is much slower than the others: see its task's log."
        )

    def has_gradient(self, key: Key) -> bool:
        """Whether a tensor between chunks has gradients; inputs of the model have none."""
        return key in self._floating

    # Weights, and the rest of the state.

    def reload(self) -> None:
        """Reads weights and state anew, as the program may have changed them."""
        self._current = [0] * len(self.parts[0])
        self._weights = [[{0: part.read("weights")} for part in parts] for parts in self.parts]
        self._state = [part.read("state") for part in self.parts[0]]
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
        for parts, weights in zip(self.parts, self._weights, strict=True):
            held = weights[chunk]
            # Batches under way may still need the last few versions, none an older one.
            for old in [v for v in held if v < number - self._old_versions]:
                del held[old]
            held[number] = parts[chunk].read("weights")
        self._current[chunk] = number

    def state(self, chunk: int, replica: int) -> list[Any]:
        """The values of a chunk's other variables at the begin of a batch."""
        if replica == 0:
            return list(self._state[chunk])
        with on(self.parts[replica][chunk].device):
            return [tf.identity(value) for value in self._state[chunk]]

    def note_state(self, step: Step, batch: Batch, following: Sequence[Any]) -> None:
        """Notes a microbatch's new values of the state, which become the average over the batch."""
        if all(value is None for value in following):
            return
        with self._changed:
            noted = self._states.setdefault((step.batch, step.chunk), [])
            noted.append((step.microbatch, list(following)))
            if len(noted) < len(batch.sizes):
                return
            del self._states[step.batch, step.chunk]
        # Microbatches end in any order on several replicas; sums in floating point depend on it.
        noted.sort(key=lambda each: each[0])
        numbers = [i for i, value in enumerate(following) if value is not None]
        rows = [values[i] for i in numbers for _, values in noted]
        result = self.parts[0][step.chunk].averaged(rows, batch.shares)
        for i, value in zip(numbers, result, strict=True):
            self._state[step.chunk][i] = value

    def write_state(self) -> None:
        """Puts the state into Keras's variables."""
        for part, values, unchanged in zip(
            self.parts[0], self._state, self._unchanged, strict=True
        ):
            if any(value is not before for value, before in zip(values, unchanged, strict=True)):
                part.write_state(values)
        self._unchanged = [list(values) for values in self._state]

    # Losses, and progress.

    def note_loss(self, step: Step, loss: Tensor) -> None:
        """Notes a chunk's part of the loss of a batch."""
        with self._changed:
            self._losses[step.batch].append((self.parts[0][step.chunk].device, loss))

    def take_losses(self) -> dict[int, float]:
        """The losses of the batches that have ended since the last call."""
        with self._changed:
            result = {number: self._losses.pop(number, []) for number in sorted(self._finished)}
            self._finished.clear()
        return {number: _sum(losses) for number, losses in result.items()}

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

    def is_under_way(self, number: int) -> bool:
        """Whether some batch up to one has not ended."""
        return any(each <= number for each in self._left)

    def wait(self, reached: Callable[[], bool]) -> None:
        """Waits until a condition holds that steps bring about, or a thread has failed.

        Raises:
            PipelineError: if that does not come in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.error is not None or reached(), self._seconds
            ):
                batches = ", ".join(map(str, sorted(self._left)))
                raise PipelineError(
                    f"The pipeline did not finish batch {batches} within {self._seconds:.0f} s. A "
                    "device hangs, or is much slower than the others: see its task's log."
                )

    def fail(self, error: BaseException) -> None:
        """Stops all threads that wait; the first error counts."""
        with self._changed:
            if self.error is None and not isinstance(error, StoppedError):
                self.error = error
            self._changed.notify_all()

    def forget(self) -> None:
        """Drops the tensors that a failed training has left, and its error."""
        with self._changed:
            for left in (self._left, self._losses, self._states, self._values, self.batches):
                left.clear()
            self._finished.clear()
            self.error = None


def _sum(losses: Sequence[tuple[str, Any]]) -> float:
    """The sum of scalars by device: those of another task cost a call each to read."""
    total = 0.0
    for device in dict.fromkeys(device for device, _ in losses):
        with on(device):
            total += float(tf.add_n([loss for own, loss in losses if own == device]))
    return total
