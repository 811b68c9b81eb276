"""The handwritten digits of the examples."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

_FILE = pathlib.Path(__file__).parents[2] / "examples/digits.csv.gz"


class Digits(NamedTuple):
    """1,797 digits: rows of 64 grey values from 0 to 16, the same as images, and classes."""

    data: np.ndarray
    images: np.ndarray
    target: np.ndarray


def load_digits() -> Digits:
    table = np.loadtxt(_FILE, delimiter=",")
    data = table[:, :64]
    return Digits(data, data.reshape(-1, 8, 8), table[:, 64].astype("int64"))
