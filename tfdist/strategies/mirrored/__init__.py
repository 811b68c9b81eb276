"""The devices of one process."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["Mirrored"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"Mirrored": "tfdist.strategies.mirrored.strategy"}
)
