"""One device."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["Single"]

__getattr__, __dir__ = lazy_attributes(__name__, {"Single": "tfdist.strategies.single.strategy"})
