"""No warnings about what only this package can change."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import tensorflow as tf

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keeps TensorFlow's log free of deprecation warnings while a ready-made model is built."""

    def kept(record: logging.LogRecord) -> bool:
        return "deprecated" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)
