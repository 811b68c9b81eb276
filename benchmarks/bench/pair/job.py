"""What some processes measure, as a frozen value that travels as JSON to all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bench.lines import Line

__all__ = ["BATCH", "SIZES", "WORKLOADS", "Exchange", "Pair", "Workload"]

#: Examples of an update; each process computes on its share of them.
BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        title: for people.
        shape: of one example; a transformer's are sequences of so many tokens.
        optimizer: `"sgd"` or `"adam"`.
        steps: updates of a block. The first block is not timed.
        kind: `"mlp"`, `"convnet"` or `"transformer"`.
    """

    title: str
    shape: tuple[int, ...]
    optimizer: str
    steps: int
    kind: str


#: The MLP is dense 1024-1536-1536-10; the convnet has 32 and 64 filters of 3 x 3 and a dense layer;
#: the transformer has two blocks of width 64 with 4 heads. `first` is one update of the MLP, for
#: the time to the first step.
WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(title="MLP, Adam", shape=(1024,), optimizer="adam", steps=32, kind="mlp"),
    "mlp_sgd": Workload(title="MLP, SGD", shape=(1024,), optimizer="sgd", steps=32, kind="mlp"),
    "convnet": Workload(
        title="convnet, Adam", shape=(28, 28, 1), optimizer="adam", steps=192, kind="convnet"
    ),
    "transformer": Workload(
        title="transformer, Adam", shape=(32,), optimizer="adam", steps=96, kind="transformer"
    ),
    "first": Workload(title="first step", shape=(1024,), optimizer="adam", steps=1, kind="mlp"),
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
        processes: how many are started.
        environ: more variables for all processes.
        timeout: seconds until all are killed.
    """

    peer: str
    workloads: tuple[str, ...] = ("mlp", "convnet")
    sizes: tuple[str, ...] = tuple(SIZES)
    blocks: int = 2
    processes: int = 2
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 300.0
