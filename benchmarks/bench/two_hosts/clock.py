"""The time, the bytes and the loss of each block of updates."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from bench.two_hosts.network import sent

__all__ = ["Clock"]


class Clock:
    """Takes blocks: the seconds and bytes between `start` and `stop`, and the loss after."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    def start(self) -> None:
        """A block begins."""
        self._began, self._had = time.perf_counter(), sent()

    def stop(self) -> None:
        """A block ends."""
        self.blocks.append(_Block(time.perf_counter() - self._began, sent() - self._had))

    def judge(self, loss: float) -> None:
        """Notes the loss after the last block."""
        self.blocks[-1].loss = loss

    def result(self) -> list[dict[str, Any]]:
        """All blocks, the untimed first one too."""
        return [dataclasses.asdict(block) for block in self.blocks]


@dataclasses.dataclass
class _Block:
    seconds: float
    sent: int
    loss: float = 0.0
