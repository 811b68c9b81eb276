"""One strategy flag takes a Keras 3 script from one device to a cluster."""

from typing import TYPE_CHECKING

from tfdist.utils.imports import lazy_attributes

__version__ = "0.1.0"

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
    "launch",
    "place",
    "plan_placement",
    "strategy",
]

if TYPE_CHECKING:  # Type checkers refuse other names, which they could not with `__getattr__`.
    from tfdist import estimator
    from tfdist.cli.launch import launch
    from tfdist.errors import ConfigError, EquivalenceWarning, StartError, TfdistError
    from tfdist.exporting.exporter import export
    from tfdist.placement.place import place
    from tfdist.placement.plan import plan_placement
    from tfdist.strategies.factory import strategy
    from tfdist.strategies.horovod.strategy import Horovod
    from tfdist.strategies.mirrored.strategy import Mirrored
    from tfdist.strategies.multi_worker.strategy import MultiWorker
    from tfdist.strategies.parameter_server.strategy import ParameterServer
    from tfdist.strategies.pipeline.strategy import Pipeline
    from tfdist.strategies.single.strategy import Single
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
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
            "launch": "tfdist.cli.launch",
            "place": "tfdist.placement.place",
            "plan_placement": "tfdist.placement.plan",
            "export": "tfdist.exporting.exporter",
            "strategy": "tfdist.strategies.factory",
        },
    )
