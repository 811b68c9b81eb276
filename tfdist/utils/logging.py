"""TensorFlow's log, without some of its lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from logging import LogRecord

import tensorflow as tf

__all__ = ["log_without"]


@contextlib.contextmanager
def log_without(unwanted: Callable[[LogRecord], bool]) -> Iterator[None]:
    """Keeps messages that TensorFlow's Python code logs within a block out of its log.

    Args:
        unwanted: whether a record is left out.
    """

    def kept(record: LogRecord) -> bool:
        return not unwanted(record)

    logger = tf.get_logger()
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)
