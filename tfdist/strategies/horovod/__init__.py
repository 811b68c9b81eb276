"""Several processes that exchange gradients by Horovod's ring all-reduce."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["Horovod"]

__getattr__, __dir__ = lazy_attributes(__name__, {"Horovod": "tfdist.strategies.horovod.strategy"})
