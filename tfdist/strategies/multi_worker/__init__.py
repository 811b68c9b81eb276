"""Several processes that exchange gradients by TensorFlow's collectives."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["MultiWorker"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"MultiWorker": "tfdist.strategies.multi_worker.strategy"}
)
