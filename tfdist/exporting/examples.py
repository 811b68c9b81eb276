"""Inputs to try a model on: drawn from its signature, and the user's own examples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigError, TfdistError
from tfdist.exporting.subject import Arrays, Input, Subject, first_line

__all__ = ["Case", "Examples", "cases_of", "read"]

#: Batch sizes to try if the batch is left open.
BATCHES = (1, 3, 8)

#: Two sizes for each dimension that is left open; the first pair that the model accepts is used.
LENGTHS = ((7, 12), (32, 45), (96, 128), (224, 256), (2, 3))

_SEED = 5

#: TensorFlow's message for an index outside of a table of so many rows.
_OUTSIDE = re.compile(r"not in \[0, (?P<rows>\d+)\)")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples as arrays, examples first.

    Attributes:
        inputs: by input name.
        labels: by output name; empty if none were given.
    """

    inputs: Arrays
    labels: Arrays

    @classmethod
    def of(cls, data: Mapping[str, Any], subject: Subject) -> Examples:
        """Examples from arrays by name.

        Args:
            data: `x` for the only input, or arrays by the inputs' names; `y` for the labels of
                the only output, or arrays by the outputs' names.
            subject: the model, which is tried on the first example.

        Raises:
            ConfigError: if an input is missing, a name is unknown, or sizes do not fit.
        """
        arrays = {name: np.asarray(value) for name, value in data.items()}
        names = [each.name for each in subject.inputs]
        if len(names) == 1 and "x" in arrays and "x" not in names:
            arrays[names[0]] = arrays.pop("x")
        if any(name not in arrays for name in names):
            raise ConfigError(_unnamed(arrays, names, ()))
        inputs = {each.name: _fitting(arrays.pop(each.name), each) for each in subject.inputs}
        counts = {name: len(value) for name, value in {**inputs, **arrays}.items()}
        if len(set(counts.values())) != 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ConfigError(f"The data has different numbers of examples ({listed}).")
        if 0 in counts.values():
            raise ConfigError("The data holds no examples.")
        try:
            outputs = subject.compute({name: value[:1] for name, value in inputs.items()})
        except Exception as error:
            raise ConfigError(f"The model does not accept the data: {first_line(error)}") from error
        return cls(inputs, _labels(arrays, names, outputs))

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def part(self, start: int, stop: int | None = None) -> Examples:
        """The examples from `start` to before `stop`."""
        return Examples(
            {name: value[start:stop] for name, value in self.inputs.items()},
            {name: value[start:stop] for name, value in self.labels.items()},
        )

    def batches(self, size: int) -> Iterator[Arrays]:
        """The inputs, so many examples at a time."""
        for start in range(0, len(self), size):
            yield self.part(start, start + size).inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs and the model's outputs.

    Attributes:
        inputs: arrays by input name.
        expected: the model's outputs by name.
        title: the kind of inputs, such as `batch 3, length 12`.
    """

    inputs: Arrays
    expected: Arrays
    title: str


def read(path: str) -> dict[str, Any]:
    """The arrays of an `.npz` file.

    Raises:
        ConfigError: if it is missing or no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ConfigError(f"The data {path!r} is one array. Write it with np.savez.")
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise ConfigError(f"The data {path!r} does not exist.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The data {path!r} is no .npz file of arrays, as np.savez(…, x=…, y=…) writes it."
        ) from error


def _labels(arrays: Arrays, inputs: Sequence[str], outputs: Arrays) -> Arrays:
    """The labels by output, each of a shape that can be scored."""
    if "y" in arrays and "y" not in outputs and len(outputs) == 1:
        arrays[next(iter(outputs))] = arrays.pop("y")
    if any(name not in outputs for name in arrays):
        raise ConfigError(_unnamed([*inputs, *arrays], inputs, tuple(outputs)))
    for name, labels in arrays.items():
        own = outputs[name].shape[1:]
        if labels.shape[1:] not in (own, own[:-1], (*own[:-1], 1)):
            raise ConfigError(
                f"The labels for {name!r} have the shape {list(labels.shape)}, and the output has "
                f"[examples{''.join(f', {size}' for size in own)}]. Give a class or a value each."
            )
    return arrays


def _unnamed(there: Iterable[str], inputs: Sequence[str], outputs: Sequence[str]) -> str:
    alone = "x or " if len(inputs) == 1 else ""
    labels = "y or " if len(outputs) == 1 else ""
    named = f" Labels are named {labels}{', '.join(outputs)}." if outputs else ""
    return (
        f"The data has {', '.join(there) or 'nothing'}, and the model takes {alone}"
        f"{', '.join(inputs)}.{named}"
    )


def _fitting(array: np.ndarray[Any, Any], own: Input) -> np.ndarray[Any, Any]:
    sizes = zip(own.shape[1:], array.shape[1:], strict=False)
    if array.ndim != len(own.shape) or any(want not in (None, got) for want, got in sizes):
        raise ConfigError(
            f"The data for {str(own)!r} has the shape {list(array.shape)}, which does not fit."
        )
    return array if own.dtype in ("string", "bfloat16") else array.astype(own.dtype)


def cases_of(subject: Subject, examples: Examples | None, precision: str) -> list[Case]:
    """Cases to compare on: drawn ones and the user's, or only the user's.

    The scales of int8_static hold for inputs like those that set them, and no others.

    Raises:
        ConfigError: if there are none of the user's, and int8_static needs them or the model
            accepts none of the inputs that were drawn.
    """
    own = [] if examples is None else [_own(subject, examples, count) for count in (1, 32)]
    if precision == "int8_static":
        if not own:
            raise ConfigError(
                "An int8_static model is right on inputs like those that set its scales. Give "
                "such inputs: --data FILE.npz, or data={'x': …} in Python."
            )
        return own
    try:
        return [*_drawn_cases(subject), *own]
    except ConfigError:
        if not own:
            raise
        return own


def _own(subject: Subject, examples: Examples, count: int) -> Case:
    first = examples.part(0, count)
    return Case(first.inputs, subject.compute(first.inputs), f"{len(first)} examples of the data")


def _drawn_cases(subject: Subject) -> list[Case]:
    """Cases of several batch sizes, and of several lengths if there are open dimensions."""
    failures: list[str] = []
    is_open = any(None in each.shape[1:] for each in subject.inputs)
    for lengths in LENGTHS if is_open else ((None, None),):
        try:
            return list(_drawn(subject, lengths))
        except TfdistError:
            raise
        except Exception as error:  # whatever the model raises about a length
            failures.append(first_line(error))
    raise ConfigError(
        "The model cannot be tried: it accepts none of the inputs that were drawn for "
        f"{', '.join(map(str, subject.inputs))}. It said: {failures[0]} Give inputs of your own: "
        "--data FILE.npz, or data={…} in Python."
    )


def _drawn(subject: Subject, lengths: Sequence[int | None]) -> Iterator[Case]:
    rows = subject.rows
    fixed = [each.shape[0] for each in subject.inputs if each.shape and each.shape[0] is not None]
    batches = fixed[:1] or BATCHES
    random = np.random.default_rng(_SEED)
    for batch, length in zip(batches, (*lengths, lengths[0]), strict=False):
        while True:  # with ever fewer rows
            values = {e.name: _draw(e, batch, length, rows, random) for e in subject.inputs}
            try:
                expected = subject.compute(values)
                break
            except Exception as error:
                outside = _OUTSIDE.search(str(error))
                if outside is None or int(outside["rows"]) >= rows:
                    raise
                rows = int(outside["rows"])
        title = f"batch {batch}" + (f", length {length}" if length else "")
        yield Case(values, expected, title)


def _draw(
    each: Input, batch: int, length: int | None, rows: int, random: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Random values of an input's shape.

    Integers are indices from 1 on, with rows that end in zeros as padded sequences do.
    """
    sizes = [batch if n == 0 else length for n in range(len(each.shape))]
    shape = [own or size or 1 for own, size in zip(each.shape, sizes, strict=True)]
    if each.dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if each.dtype == "string":
        return random.choice(np.array([b"a", b"b", b"c"], object), shape)
    if "int" in each.dtype:
        highest = min(rows, np.iinfo(each.dtype).max)
        values = random.integers(min(1, highest - 1), highest, shape)
        for number, row in enumerate(values if values.ndim == 2 else ()):
            row[row.size - number % max(1, row.size // 2) :] = 0
        return values.astype(each.dtype)
    return random.standard_normal(shape).astype(tf.as_dtype(each.dtype).as_numpy_dtype)
