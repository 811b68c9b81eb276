"""Reads the metrics of evaluations from event files."""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

__all__ = ["eval_metrics", "eval_metrics_of"]

tf1 = tf.compat.v1


def eval_metrics(eval_dir: str) -> collections.OrderedDict[int, dict[str, float]]:
    """The metrics of each evaluation, by global step, in the order of the steps.

    Args:
        eval_dir: where the evaluation writes; a directory that is not there has no evaluations.
    """
    return eval_metrics_of(sorted(map(str, Path(eval_dir).glob("*.tfevents.*"))))


def eval_metrics_of(paths: list[str]) -> collections.OrderedDict[int, dict[str, float]]:
    """As `eval_metrics`, from certain files."""
    result: dict[int, dict[str, float]] = {}
    for path in paths:
        for event in _events(path):
            values = {
                v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")
            }
            if values:
                result.setdefault(event.step, {}).update(values)
    return collections.OrderedDict(sorted(result.items()))


def _events(path: str) -> Iterator[Any]:
    """The events of a file, as far as it has been written.

    A record is its length, a checksum of that, the data and a checksum of those.
    """
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            data = file.read(length + 4)
            if len(data) < length + 4:  # It is being written.
                return
            yield tf1.Event.FromString(data[:length])
