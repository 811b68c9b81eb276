"""No warnings about deprecated functions that TensorFlow, or this package, calls by itself."""

from __future__ import annotations

import contextlib
import logging

from tfdist.utils.logging import log_without

__all__ = ["without_deprecations", "without_own_deprecations"]

#: Files with the calls that a user cannot change.
_OWN = (
    "/tfdist/estimator/",
    "/tensorflow/python/training/",
    "/tensorflow/python/saved_model/",
    "/tensorflow/python/data/",
    "/tensorflow/python/distribute/",
)


def without_own_deprecations() -> contextlib.AbstractContextManager[None]:
    """Keeps those warnings out of TensorFlow's log; those about the user's own calls stay."""
    return log_without(_is_own)


def without_deprecations() -> contextlib.AbstractContextManager[None]:
    """Keeps all of them out, while a ready-made model is built."""
    return log_without(lambda record: "deprecated" in record.getMessage())


def _is_own(record: logging.LogRecord) -> bool:
    first = record.getMessage().partition("\n")[0]
    return "is deprecated" in first and any(place in first for place in _OWN)
