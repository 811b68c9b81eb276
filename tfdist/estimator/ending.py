"""Detects the end of the training in an evaluator, also if that is before `max_steps`.

The chief leaves a note beside the checkpoints. It names the cluster, so that the note of another
job, which trained the same model before, is not mistaken for this job's.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.estimator.run_config import RunConfig

__all__ = ["clear", "note_of", "write"]

_NAME = "training-ended.json"


def clear(config: RunConfig) -> None:
    """Removes the note of an earlier training; the chief calls this before it trains."""
    path = _path(config)
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def write(config: RunConfig) -> None:
    """Notes that the training has ended and all checkpoints are written."""
    note = {"cluster": _cluster(config), "end": uuid.uuid4().hex}
    tf.io.gfile.makedirs(str(config.model_dir))
    with tf.io.gfile.GFile(_path(config), "w") as file:
        file.write(json.dumps(note))


def note_of(config: RunConfig) -> str | None:
    """The note of this job's training, or None as long as it goes on."""
    try:
        with tf.io.gfile.GFile(_path(config), "r") as file:
            note: dict[str, Any] = json.loads(file.read())
    except (tf.errors.OpError, ValueError):
        return None
    return str(note.get("end")) if note.get("cluster") == _cluster(config) else None


def _path(config: RunConfig) -> str:
    return str(Path(str(config.model_dir)) / _NAME)


def _cluster(config: RunConfig) -> dict[str, Any]:
    return dict(config.training_cluster)
