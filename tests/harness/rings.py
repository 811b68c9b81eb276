"""The target on Horovod: joins the cluster of TF_CONFIG and makes the strategy."""

from __future__ import annotations

from typing import Any

from tfdist.config import StrategyConfig
from tfdist.strategies.factory import create


def make(**options: Any) -> Any:
    """The strategy of a process whose TF_CONFIG lists its peers."""
    return create(StrategyConfig(strategy="horovod", **options))
