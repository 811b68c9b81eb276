"""TensorFlow's own checkpoints, which all workers may write to one place at once.

`tf.train.Checkpoint` writes parts to a directory with a fixed name and moves them from there. If
each of several workers runs the same line, one moves away what another still writes. A worker other
than the chief therefore writes under a name of its own, and moves finished files to where they
belong. All replicas hold the same values, so it does not matter whose files stay. Nobody waits for
the others: the program may save on some workers only, or to another place on each.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf.checkpoints import TrackableSaver
from tfdist.comm import host_collectives
from tfdist.keras.hooks import Hook

__all__ = ["hooks"]


def hooks() -> list[Hook]:
    """The seam below `tf.train.Checkpoint`, its manager and `tf.saved_model.save`."""
    return [Hook(TrackableSaver, "save", _apart)]


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """All workers would write the same files of a checkpoint."""

    @functools.wraps(original)
    def save(
        self: object, file_prefix: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> object:
        rank = host_collectives.rank(tf.distribute.get_strategy())
        if rank == 0 or tf.is_tensor(file_prefix) or not tf.executing_eagerly():
            return original(self, file_prefix, *args, **kwargs)
        target = os.fspath(file_prefix)
        draft = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.worker{rank}")
        written = original(self, draft, *args, **kwargs).numpy().decode()
        target += written.removeprefix(draft)  # The number that the saver has added.
        # The index comes last: a checkpoint that has one is complete.
        for path in [*sorted(tf.io.gfile.glob(f"{written}.data-*")), f"{written}.index"]:
            tf.io.gfile.rename(path, target + path.removeprefix(written), overwrite=True)
        return tf.constant(target)

    return save
