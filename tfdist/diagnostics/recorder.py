"""Records the training of a script: losses, weights and examples of its first steps.

Active in the tasks that `tfdist verify` starts, for which it names a file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import environment
from tfdist._keras import TensorFlowTrainer, random_module
from tfdist.keras.hooks import OBSERVER, Hook, HookSet
from tfdist.keras.replica_context import current_step
from tfdist.strategies.pipeline.train_function import PipelineFunction
from tfdist.types import Array, KerasVariable, Logs, Model, Structure, Tensor

#: Elements of each weight that are compared, evenly spaced.
SAMPLES = 1000

#: Layers that draw random numbers while they train: replicas draw different ones than one process.
_RANDOM_LAYERS = ("Gaussian", "Random", "Noise")


class Recorder:
    """The observations of one task.

    Args:
        path: where to write them, as JSON.
        steps: how many training steps to record before the script is ended.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._logs: list[dict[str, float]] = []
        self._weights: list[dict[str, list[float]]] = []
        self._examples: list[int] = []
        self._notes: set[str] = set()

    def hooks(self) -> list[Hook]:
        """Adds the recorder to every `fit`."""
        return [
            Hook(TensorFlowTrainer, "fit", self._recorded),
            Hook(random_module, "dropout", self._without_dropout),
        ]

    def _without_dropout(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Dropout that drops nothing, in all runs: masks differ between replicas by design."""

        @functools.wraps(original)
        def dropout(inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
            self._notes.add("dropout was switched off in both runs")
            return inputs

        return dropout

    def write(self) -> None:
        """Writes the record."""
        content = {
            "logs": self._logs,
            "weights": self._weights,
            "examples": self._examples,
            "notes": sorted(self._notes),
        }
        self._path.write_text(json.dumps(content))

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fit(model: Model, *args: object, **kwargs: object) -> object:
            self._watch(model)
            callbacks = kwargs.get("callbacks") or []
            if isinstance(callbacks, keras.callbacks.CallbackList):
                callbacks.append(_Observe(self))
            else:
                listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
                kwargs["callbacks"] = [*listed, _Observe(self)]
            return original(model, *args, **kwargs)

        return fit

    def _watch(self, model: Model) -> None:
        """Records the examples that the model's `train_step` is given."""
        if "train_step" in vars(model):
            return
        original = type(model).train_step

        @functools.wraps(original)
        def train_step(self_: Model, data: Structure) -> Logs:
            self._note_examples(data)
            return original(self_, data)

        object.__setattr__(model, "train_step", types.MethodType(train_step, model))
        model.make_train_function(force=True)
        if isinstance(model.train_function, PipelineFunction):
            # It runs the model in parts, and not its `train_step`.
            model.train_function.seen = self._note_examples
        self._notes.update(_random_layers(model))

    def _note_examples(self, data: Structure) -> None:
        leaves = [t for t in tf.nest.flatten(data) if isinstance(t, tf.Tensor) and t.shape.rank]
        step = current_step()
        count = tf.constant(-1, tf.int64) if step is None else step.count
        tf.numpy_function(self._collect, [count, *leaves], [], stateful=True)

    def _collect(self, count: Tensor, *leaves: Sequence[Array]) -> None:
        rows = len(leaves[0]) if count < 0 else int(count)
        for row in range(rows):
            self._examples.append(zlib.crc32(b"|".join(_bytes(leaf[row]) for leaf in leaves)))

    def observe(self, model: Model, logs: Logs | None) -> None:
        """Records the end of one execution of training steps.

        Raises:
            SystemExit: when enough steps have been seen; the script ends.
        """
        self._logs.append({name: float(value) for name, value in (logs or {}).items()})
        self._weights.append({weight.path: _sample(weight) for weight in model.weights})
        if len(self._logs) >= self._steps:
            self.write()
            raise SystemExit(0)


class _Observe(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._recorder.observe(self.model, logs)


@contextlib.contextmanager
def recording_if_asked() -> Iterator[None]:
    """Records in the block, if the environment names a file for it."""
    target = environment.read("TFDIST_RESULT")
    if target is None:
        yield
        return
    recorder = Recorder(Path(target), int(environment.read("TFDIST_VERIFY_STEPS") or 20))
    hooks = HookSet(recorder.hooks, OBSERVER)
    hooks.enter()
    try:
        yield
    finally:
        hooks.leave()
        recorder.write()


def _bytes(row: Array) -> bytes:
    array = np.asarray(row)
    return bytes(array.astype(bytes).tobytes() if array.dtype == object else array.tobytes())


def _sample(weight: KerasVariable) -> list[float]:
    flat = np.asarray(weight.numpy(), np.float64).ravel()
    stride = max(1, len(flat) // SAMPLES)
    return [float(v) for v in flat[::stride][:SAMPLES]]


def _random_layers(model: Model) -> Iterator[str]:
    for layer in model._flatten_layers():
        kind = type(layer).__name__
        if any(word in kind for word in _RANDOM_LAYERS):
            yield f"{layer.name} ({kind}) draws other random numbers on each replica"
        elif kind == "BatchNormalization" and not getattr(layer, "synchronized", False):
            yield (
                f"{layer.name} (BatchNormalization) uses each replica's own statistics; "
                "synchronized=True makes it use those of the global batch"
            )
