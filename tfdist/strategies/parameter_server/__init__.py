"""Workers that train, and servers that hold the weights."""

from tfdist.utils.imports import lazy_attributes

__all__ = ["ParameterServer"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"ParameterServer": "tfdist.strategies.parameter_server.strategy"}
)
