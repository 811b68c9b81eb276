"""The target whose weights are divided, however small they are."""

from __future__ import annotations

from typing import Any

from tfdist.keras import layouts
from tfdist.strategies.multi_worker.strategy import MultiWorker


def make(**options: Any) -> Any:
    """The strategy of a process whose TF_CONFIG lists its peers."""
    layouts.SMALLEST = layouts.SMALLEST_GATHERED = 1
    return MultiWorker(**options)
