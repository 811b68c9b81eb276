"""Horovod's names for programs written for it, as they work with Keras 3.

`import tfdist.horovod as hvd` stands for `import horovod.tensorflow as hvd` and for
`import horovod.tensorflow.keras as hvd`. Names that need Keras 3 are tfdist's; the others are
`horovod.tensorflow`'s. Horovod is imported when one of the names is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

#: The module that defines each name.
_OWN = {
    "BroadcastGlobalVariablesCallback": "callbacks",
    "DistributedGradientTape": "distributed",
    "DistributedOptimizer": "distributed",
    "LearningRateScheduleCallback": "callbacks",
    "LearningRateWarmupCallback": "callbacks",
    "MetricAverageCallback": "callbacks",
    "PartialDistributedGradientTape": "distributed",
    "PartialDistributedOptimizer": "distributed",
    "allgather": "values",
    "allreduce": "values",
    "broadcast": "values",
    "broadcast_variables": "values",
    "init": "program",
    "load_model": "distributed",
    "reducescatter": "values",
    "shutdown": "program",
}

__all__ = [*_OWN, "callbacks"]

#: Names of Horovod that do not work with Keras 3, and what to do.
_LEFT_OUT = {
    "SyncBatchNormalization": "Run the program without Horovod's lines under `tfdist run "
    "--strategy horovod` and use keras.layers.BatchNormalization(synchronized=True).",
    "elastic": "Take Horovod's lines out: `tfdist run --strategy horovod --min-np 1 --max-np 4` "
    "keeps the state of a plain `fit` when workers are lost or added.",
}


def __getattr__(name: str) -> Any:
    if name in _OWN:
        return getattr(importlib.import_module(f"{__name__}.{_OWN[name]}"), name)
    if name in _LEFT_OUT:
        raise AttributeError(
            f"tfdist.horovod has no {name!r}: Horovod's own does not work with Keras 3. "
            f"{_LEFT_OUT[name]}"
        )
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    library = importlib.import_module("tfdist.strategies.horovod.library")
    return getattr(library.load(), name)


def __dir__() -> list[str]:
    return list(__all__)
