"""What some processes measure, as a frozen value that travels as JSON to all of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from bench.lines import Line

__all__ = ["BATCH", "CLASSES", "SIZES", "WORKLOADS", "Exchange", "Pair", "Workload"]

#: Examples of an update; each process computes on its share of them.
BATCH = 64
CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        title: for people.
        shape: of one example; a transformer's are sequences of so many tokens.
        optimizer: `"sgd"` or `"adam"`.
        steps: updates of a block. The first block is not timed.
        kind: `"mlp"`, `"convnet"` or `"transformer"`.
        hidden: widths of an MLP's hidden layers.
    """

    title: str
    shape: tuple[int, ...]
    optimizer: str
    steps: int
    kind: str
    hidden: tuple[int, ...] = ()

    @property
    def numbers(self) -> int:
        """The parameters of an MLP."""
        widths = (*self.shape, *self.hidden, CLASSES)
        return sum(before * after + after for before, after in itertools.pairwise(widths))

    @property
    def tensors(self) -> int:
        """The weights of an MLP: a kernel and a bias for each layer."""
        return 2 * (len(self.hidden) + 1)


def _mlp(
    title: str, *hidden: int, inputs: int = 1024, steps: int = 32, optimizer: str = "adam"
) -> Workload:
    return Workload(
        title=title, shape=(inputs,), optimizer=optimizer, steps=steps, kind="mlp", hidden=hidden
    )


#: The MLP is dense 1024-1536-1536-10; the convnet has 32 and 64 filters of 3 x 3 and a dense layer;
#: the transformer has two blocks of width 64 with 4 heads. `first` is one update of the MLP, for
#: the time to the first step. `wide_*` and `deep_*` are MLPs of more and more parameters and
#: tensors.
WORKLOADS: dict[str, Workload] = {
    "mlp": _mlp("MLP, Adam", 1536, 1536),
    "mlp_sgd": _mlp("MLP, SGD", 1536, 1536, optimizer="sgd"),
    "convnet": Workload(
        title="convnet, Adam", shape=(28, 28, 1), optimizer="adam", steps=192, kind="convnet"
    ),
    "transformer": Workload(
        title="transformer, Adam", shape=(32,), optimizer="adam", steps=96, kind="transformer"
    ),
    "first": _mlp("first step", 1536, 1536, steps=1),
    "wide_256": _mlp("two layers of 256", 256, 256, inputs=256, steps=64),
    "wide_1024": _mlp("two layers of 1,024", 1024, 1024, inputs=256),
    "wide_4096": _mlp("two layers of 4,096", 4096, 4096, inputs=256, steps=8),
    "deep_4": _mlp("4 layers of 64", *(4 * (64,)), inputs=64, steps=128),
    "deep_16": _mlp("16 layers of 64", *(16 * (64,)), inputs=64, steps=64),
    "deep_64": _mlp("64 layers of 64", *(64 * (64,)), inputs=64, steps=32),
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
