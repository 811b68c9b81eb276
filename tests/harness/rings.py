"""The target on Horovod: joins the cluster of TF_CONFIG and makes the strategy."""

from __future__ import annotations

from typing import Any

from tfdist import environment
from tfdist.config.strategy_config import StrategyConfig
from tfdist.keras import layouts
from tfdist.strategies.factory import create


def make(**options: Any) -> Any:
    """The strategy of a process whose TF_CONFIG lists its peers; process sets can be added.

    Weights are divided however small they are, if any are.
    """
    layouts.SMALLEST = layouts.SMALLEST_GATHERED = 1
    environment.set_for_good(
        {
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",  # The processes rest between two calls.
        }
    )
    return create(StrategyConfig.of(strategy="horovod", **options))
