"""Compressions of gradients, by name."""

from __future__ import annotations

from collections.abc import Callable

from tfdist.gradients.compression.base import Compression, Memory
from tfdist.gradients.compression.half_precision import Bfloat16, ScaledFloat16
from tfdist.gradients.compression.int8 import EightBit
from tfdist.gradients.compression.powersgd import LowRank
from tfdist.gradients.compression.sparsification import RandomValues, TopValues
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = ["KINDS", "Compression", "Memory", "make"]

#: Each kind of compression, made of ratio and rank.
KINDS: dict[str, Callable[[float, int], Compression]] = {
    "bf16": lambda ratio, rank: Bfloat16(),
    "fp16": lambda ratio, rank: ScaledFloat16(),
    "int8": lambda ratio, rank: EightBit(),
    "topk": lambda ratio, rank: TopValues(ratio),
    "randomk": lambda ratio, rank: RandomValues(ratio),
    "powersgd": lambda ratio, rank: LowRank(rank),
}


def make(kind: str, *, ratio: float = 0.01, rank: int = 4) -> Compression:
    """Makes a compression.

    Args:
        kind: a key of `KINDS`.
        ratio: the part of the values that `"topk"` and `"randomk"` send, above 0 and at most 1.
        rank: the columns of the matrices of `"powersgd"`, 1 or more.

    Raises:
        ConfigError: if there is no such kind, or ratio or rank is out of bounds.
    """
    check_choice("compression", kind, KINDS)
    part = "It is the part of the values that 'topk' and 'randomk' send, such as 0.01."
    check_range("ratio", ratio, above=0, most=1, why=part)
    check_number("rank", rank, 1, "It counts the columns of 'powersgd': give a number such as 4.")
    return KINDS[kind](ratio, rank)
