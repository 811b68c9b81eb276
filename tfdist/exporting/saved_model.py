"""A SavedModel by Keras's own `model.export`, and loaded back to be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tfdist._tf.distribute import eagerly_outside_of_scope
from tfdist.exporting.conversion import strip_devices
from tfdist.exporting.subject import Arrays, ExportError, KerasSubject, first_line

__all__ = ["reloaded", "write"]

#: Devices that every machine has; Keras and TensorFlow name them themselves.
_EVERYWHERE = "/device:CPU:[0*]"


def write(subject: KerasSubject, path: str) -> None:
    """Writes a Keras model as a SavedModel that asks for no device but the CPU.

    A machine that loads it may not have the devices that layers were placed on.

    Raises:
        ExportError: if Keras cannot write it.
    """
    signature = subject.arranged(subject.specs())
    try:
        subject.model.export(
            path, format="tf_saved_model", verbose=False, input_signature=signature
        )
    except Exception as error:
        raise ExportError(
            f"Keras cannot write the model as a SavedModel: {first_line(error)}"
        ) from error
    file = Path(path, "saved_model.pb")
    content = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    stripped = [strip_devices(each.graph_def, _EVERYWHERE) for each in content.meta_graphs]
    if any(stripped):
        file.write_bytes(content.SerializeToString(deterministic=True))
        Path(path, "fingerprint.pb").unlink(missing_ok=True)  # of the graph as it was


def reloaded(subject: KerasSubject, path: str) -> Callable[[Arrays], Arrays]:
    """A function of arrays by name, on a SavedModel that was loaded from `path`.

    Raises:
        ExportError: if it cannot be loaded.
    """
    try:
        with eagerly_outside_of_scope():  # as whoever serves it does, without a strategy
            loaded = tf.saved_model.load(path)
    except Exception as error:
        raise ExportError(f"The SavedModel that was written cannot be loaded: {error}") from error

    def run(values: Arrays) -> Arrays:
        with eagerly_outside_of_scope():
            tensors = [tf.constant(values[each.name], each.dtype) for each in subject.inputs]
            outputs = subject.named(loaded.serve(*subject.arranged(tensors)))
            return {name: np.asarray(value) for name, value in outputs.items()}

    return run
