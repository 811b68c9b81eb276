"""One strategy flag takes a Keras 3 script from one device to a cluster."""

from tfdist._lazy import lazy_attributes

__all__ = [
    "ConfigError",
    "Mirrored",
    "MultiWorker",
    "Single",
    "StartError",
    "TfdistError",
    "strategy",
]

__getattr__, __dir__ = lazy_attributes(
    __all__,
    {
        "ConfigError": "tfdist.errors",
        "Mirrored": "tfdist.strategies.mirrored",
        "MultiWorker": "tfdist.strategies.multi_worker",
        "Single": "tfdist.strategies.single",
        "StartError": "tfdist.errors",
        "TfdistError": "tfdist.errors",
        "strategy": "tfdist.strategies.factory",
    },
)
