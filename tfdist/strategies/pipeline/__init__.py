"""A model in stages, each on a device or in a process of its own."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["Pipeline"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"Pipeline": "tfdist.strategies.pipeline.strategy"}
)
