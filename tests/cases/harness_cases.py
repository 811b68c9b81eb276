"""Cases that test the harness itself."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import tensorflow as tf


def rank(strategy: Any) -> int:
    """This process's rank."""
    return 0 if strategy is None else strategy.world.worker


def describe(strategy: Any) -> dict[str, Any]:
    """Who this process is."""
    return {
        "pid": os.getpid(),
        "rank": rank(strategy),
        "replicas": 1 if strategy is None else strategy.num_replicas_in_sync,
        "random": float(np.random.rand()),
    }


def fail_on_last(strategy: Any, workers: int) -> None:
    """Raises on the last worker; the others wait for it in a collective."""
    if rank(strategy) == workers - 1:
        raise RuntimeError("the last worker fails")
    if workers > 1:
        _all_reduce(strategy)


def exit_on_last(strategy: Any, workers: int) -> None:
    """Ends the last worker's process."""
    if rank(strategy) == workers - 1:
        print("the last words", flush=True)
        os._exit(3)


def sleep(strategy: Any, seconds: float) -> None:
    """Does nothing for a while."""
    del strategy
    time.sleep(seconds)


def _all_reduce(strategy: Any) -> Any:
    def fn() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0))

    return strategy.run(tf.function(fn))
