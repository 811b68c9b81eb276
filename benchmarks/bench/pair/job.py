"""What a pair of processes measures, as a frozen value that travels as JSON to both of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bench.lines import Line

__all__ = ["BATCH", "SIZES", "WORKLOADS", "Exchange", "Pair", "Workload"]

#: Examples of an update; each process computes on half of them.
BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        title: for people.
        shape: of one example.
        optimizer: `"sgd"` or `"adam"`.
        steps: updates of a block. The first block is not timed.
    """

    title: str
    shape: tuple[int, ...]
    optimizer: str
    steps: int


#: The MLP is dense 1024-1536-1536-10; the convnet has 32 and 64 filters of 3 x 3 and a dense layer.
WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(title="MLP, Adam", shape=(1024,), optimizer="adam", steps=32),
    "mlp_sgd": Workload(title="MLP, SGD", shape=(1024,), optimizer="sgd", steps=32),
    "convnet": Workload(title="convnet, Adam", shape=(28, 28, 1), optimizer="adam", steps=192),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """All-reduces of one size.

    Attributes:
        title: for people.
        count: float32 numbers.
        repeats: timed calls.
    """

    title: str
    count: int
    repeats: int


SIZES: dict[str, Exchange] = {
    "4K": Exchange(title="4 KB", count=2**10, repeats=200),
    "64K": Exchange(title="64 KB", count=2**14, repeats=200),
    "1M": Exchange(title="1 MB", count=2**18, repeats=60),
    "16M": Exchange(title="16 MB", count=2**22, repeats=12),
    "64M": Exchange(title="64 MB", count=2**24, repeats=6),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(Line):
    """One start of one peer, in which it measures everything that is asked for.

    Attributes:
        peer: a key of `bench.pair.peers.PEERS`.
        workloads: keys of `WORKLOADS`.
        sizes: keys of `SIZES`.
        blocks: timed blocks of steps for each workload.
        environ: more variables for both processes.
        timeout: seconds until both are killed.
    """

    peer: str
    workloads: tuple[str, ...] = ("mlp", "convnet")
    sizes: tuple[str, ...] = tuple(SIZES)
    blocks: int = 2
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 300.0
