"""Private TensorFlow symbols around its own checkpoints, checked on TensorFlow 2.21."""

from __future__ import annotations

from tensorflow.python.checkpoint.checkpoint import TrackableSaver

__all__ = ["TrackableSaver"]
