"""No warnings about deprecated functions that TensorFlow, or this package, calls by itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import tensorflow as tf

__all__ = ["without_own_deprecations"]

#: Where the calls are that a user cannot change.
_OWN = (
    "/tfdist/estimator/",
    "/tensorflow/python/training/",
    "/tensorflow/python/saved_model/",
    "/tensorflow/python/data/",
    "/tensorflow/python/distribute/",
)


@contextlib.contextmanager
def without_own_deprecations() -> Iterator[None]:
    """Keeps those warnings out of TensorFlow's log; those about the user's own calls stay."""

    def kept(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        first = text.partition("\n")[0]
        return "is deprecated" not in first or not any(place in first for place in _OWN)

    logger = tf.get_logger()
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)
