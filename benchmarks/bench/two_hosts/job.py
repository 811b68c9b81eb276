"""What one start of one peer on two hosts measures."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.lines import Line

__all__ = ["BATCH", "BLOCK", "PEERS", "Job", "Peer"]

#: Examples, or sequences, of an update; each host computes on half of them.
BATCH = {"mlp": 64, "transformer": 16}

#: Updates of a block, after which the loss is computed. The first block is not timed.
BLOCK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train on two hosts.

    Attributes:
        title: a few words, for tables.
        library: `"multi_worker"`, `"horovod"` or `"torch"`.
        options: of `tfdist.strategy`; for PyTorch its hook.
    """

    title: str
    library: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_RULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd"},
    "stale 1": {"mode": "stale", "staleness": 1},
    "local 8": {"mode": "local", "period": 8},
}


def _tfdist(library: str) -> dict[str, Peer]:
    return {
        f"{library} {name}": Peer(
            title=f"tfdist {library}, {name}", library=library, options=dict(rule)
        )
        for name, rule in _RULES.items()
    }


PEERS: dict[str, Peer] = {
    **_tfdist("multi_worker"),
    **_tfdist("horovod"),
    **{
        f"torch {name}": Peer(title=f"PyTorch DDP, {name}", library="torch", options={"hook": name})
        for name in ("sync", "fp16", "bf16", "powersgd")
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Line):
    """One start.

    Attributes:
        peer: a key of `PEERS`.
        model: a key of `BATCH`.
        rank: which host this is.
        ports: of the two processes.
        blocks: timed blocks.
        result: the file to which rank 0 writes what it has measured.
    """

    peer: str
    model: str
    rank: int
    ports: tuple[int, int]
    blocks: int
    result: str
