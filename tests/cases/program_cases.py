"""Runs one of the programs as `tfdist run` does: as `__main__`, in the strategy's scope."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import keras
import numpy as np

from tests.cases.common import scope

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def program(strategy: Any, *, name: str) -> Any:
    """What the program leaves in its `RESULT`."""
    path = PROGRAMS / f"{name}.py"
    try:
        with scope(strategy):
            return _plain_data(runpy.run_path(str(path), run_name="__main__")["RESULT"])
    finally:
        keras.config.set_dtype_policy("float32")


def _plain_data(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain_data(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(v) for v in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    return float(np.asarray(value))
