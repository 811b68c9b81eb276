"""Inputs to try a model on: drawn from its signature, or the user's own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import ConfigError, TfdistError
from tfdist.exporting.signature import Input
from tfdist.exporting.subject import Arrays, Subject

__all__ = ["Case", "case_of_data", "cases_of"]

#: Batch sizes to try if the batch is left open.
BATCHES = (1, 3, 8)

#: Two sizes for each dimension that is left open; the first pair that the model accepts is used.
LENGTHS = ((7, 12), (32, 45), (96, 128), (224, 256), (2, 3))

_SEED = 5
_ROWS = 32

#: TensorFlow's message for an index outside of a table of so many rows.
_OUTSIDE = re.compile(r"not in \[0, (?P<rows>\d+)\)")


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


def cases_of(subject: Subject) -> list[Case]:
    """Cases of several batch sizes, and of several lengths if there are open dimensions.

    Args:
        subject: the model.

    Raises:
        ConfigError: if the model accepts none of the inputs that were drawn.
    """
    failures: list[str] = []
    for lengths in LENGTHS if _is_open(subject.inputs) else ((None, None),):
        try:
            return list(_drawn(subject, lengths))
        except TfdistError:
            raise
        except Exception as error:  # whatever the model raises about a length
            failures.append(str(error).strip().splitlines()[0])
    raise ConfigError(
        "The model cannot be tried: it accepts none of the inputs that were drawn for "
        f"{', '.join(map(str, subject.inputs))}. It said: {failures[0]} Give inputs of your own: "
        "--data FILE.npz, or data={…} in Python."
    )


def case_of_data(subject: Subject, inputs: Mapping[str, Any]) -> Case:
    """A case of the first of the user's own examples.

    Args:
        subject: the model.
        inputs: arrays by input name, examples first.
    """
    first = {name: np.asarray(value)[:_ROWS] for name, value in inputs.items()}
    count = len(next(iter(first.values())))
    return Case(first, subject.compute(first), f"{count} examples of the data")


def _is_open(inputs: Sequence[Input]) -> bool:
    return any(None in each.shape[1:] for each in inputs)


def _drawn(subject: Subject, lengths: Sequence[int | None]) -> Iterator[Case]:
    rows = subject.rows
    fixed = [each.shape[0] for each in subject.inputs if each.shape and each.shape[0] is not None]
    batches = fixed[:1] or BATCHES
    random = np.random.default_rng(_SEED)
    for batch, length in zip(batches, (*lengths, lengths[0]), strict=False):
        for _ in range(4):
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
    import tensorflow as tf

    return random.standard_normal(shape).astype(tf.as_dtype(each.dtype).as_numpy_dtype)
