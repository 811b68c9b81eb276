"""Private TensorFlow symbols around the graphs that run, checked on TensorFlow 2.21."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context

__all__ = ["partitioned_graphs"]


@contextlib.contextmanager
def partitioned_graphs() -> Iterator[list[Any]]:
    """Collects the graphs of functions that run in the block for the first time.

    Yields:
        A list that is filled when the block ends: `GraphDef`s after placement and optimization,
        one for each function and device.
    """
    found: list[Any] = []
    context.enable_run_metadata()
    try:
        yield found
    finally:
        metadata = context.export_run_metadata()
        context.disable_run_metadata()
        for function in metadata.function_graphs:
            found.extend(function.partition_graphs)
