"""One strategy flag takes a Keras 3 script from one device to a cluster."""

from tfdist.utils.lazy import lazy_attributes

__all__ = [
    "ConfigError",
    "EquivalenceWarning",
    "Horovod",
    "Mirrored",
    "MultiWorker",
    "ParameterServer",
    "Pipeline",
    "Single",
    "StartError",
    "TfdistError",
    "estimator",
    "export",
    "place",
    "plan_placement",
    "strategy",
]

__getattr__, __dir__ = lazy_attributes(
    __all__,
    {
        "ConfigError": "tfdist.errors",
        "EquivalenceWarning": "tfdist.errors",
        "Horovod": "tfdist.strategies.horovod.strategy",
        "Mirrored": "tfdist.strategies.mirrored.strategy",
        "MultiWorker": "tfdist.strategies.multi_worker.strategy",
        "ParameterServer": "tfdist.strategies.parameter_server.strategy",
        "Pipeline": "tfdist.strategies.pipeline.strategy",
        "Single": "tfdist.strategies.single.strategy",
        "StartError": "tfdist.errors",
        "TfdistError": "tfdist.errors",
        "estimator": "tfdist.estimator",
        "place": "tfdist.placement.place",
        "plan_placement": "tfdist.placement.plan",
        "export": "tfdist.exporting.exporter",
        "strategy": "tfdist.strategies.factory",
    },
)
