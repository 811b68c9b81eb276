"""Shuffles that are the same on every worker.

Every worker reads all batches and takes its slice, so all must shuffle alike. They start from one
seed; a program in which one worker draws more random numbers than another (`if rank == 0`) would
from there on see some examples twice and others never. Each `fit` therefore starts with a look at
whether the workers' random states are the same.
"""

from __future__ import annotations

import functools
import hashlib
import random
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist import agreement
from tfdist._tensorflow import eager_seed_state, global_seed
from tfdist.keras.hooks import Hook


def hooks() -> list[Hook]:
    """The seam at which training starts."""
    return [Hook(TensorFlowTrainer, "fit", _agree_first)]


def _agree_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        agree_on_random_states(self.distribute_strategy)
        return original(self, *args, **kwargs)

    return fit


def agree_on_random_states(strategy: Any) -> None:
    """Makes the workers' random states equal where they are not, and says so."""
    if agreement.worker_count(strategy) == 1:
        return
    states = agreement.all_gather_json(strategy, _digests(), "the random states before fit")
    differing = [name for name in states[0] if len({state[name] for state in states}) > 1]
    if not differing:
        return
    seed = agreement.from_chief(strategy, secrets.randbelow(2**32), "a seed before fit")
    warnings.warn(
        f"The workers' random states differ ({', '.join(differing)}), so they would shuffle "
        "differently. They now go on from one new seed. Look for code that only some workers run.",
        stacklevel=4,
    )
    for name in differing:
        _SETTERS[name](seed)


def _digests() -> dict[str, str]:
    states = {
        "Python": random.getstate(),
        "NumPy": [str(part) for part in np.random.get_state()],
        "TensorFlow": (global_seed(), eager_seed_state()),
    }
    return {n: hashlib.sha256(repr(s).encode()).hexdigest()[:16] for n, s in states.items()}


_SETTERS: dict[str, Callable[[int], Any]] = {
    "Python": random.seed,
    "NumPy": np.random.seed,
    "TensorFlow": tf.random.set_seed,
}
