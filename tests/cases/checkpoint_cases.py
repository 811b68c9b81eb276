"""TensorFlow's own checkpoints, written by several workers at once."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tests.cases.common import scope
from tests.cases.harness_cases import rank

SAVES = 40


def saved(strategy: Any, path: str, where: str) -> dict[str, Any]:
    """Saves again and again: all to one place, each to its own, or on the chief only."""
    with scope(strategy):
        variables = {f"v{i}": tf.Variable(np.full((200, 200), i, "float32")) for i in range(12)}
    folder = os.path.join(path, where if where != "each" else f"each{rank(strategy)}")
    checkpoint = tf.train.Checkpoint(**variables)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    with scope(strategy):
        for _ in range(SAVES):
            for variable in variables.values():
                variable.assign_add(tf.ones((200, 200)))
            if where != "chief":  # A counter of saves is a variable, which all workers make.
                manager.save()
            if where != "chief" or rank(strategy) == 0:
                checkpoint.write(os.path.join(folder, "again"))
    return {"folder": folder, "files": sorted(os.listdir(folder)) if rank(strategy) == 0 else []}


def read(strategy: Any, folder: str, name: str | None = None) -> list[float]:
    """The means of the variables of the newest checkpoint, or of one."""
    del strategy
    prefix = tf.train.latest_checkpoint(folder) if name is None else os.path.join(folder, name)
    reader = tf.train.load_checkpoint(prefix)
    keys = [f"v{i}/.ATTRIBUTES/VARIABLE_VALUE" for i in range(12)]
    return [float(np.mean(reader.get_tensor(key))) for key in keys]
