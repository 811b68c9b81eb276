"""What `overview.py` runs in a round, and what it compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from bench import catalog
from bench.job import MODELS, Job
from bench.pair import peers
from bench.pair.job import Pair

__all__ = ["FULL", "GROWTH", "MODES", "PAIRS", "QUICK", "STARTS", "Plan", "absent", "jobs_of"]

#: Rows of the first table: a peer, what it is compared with, and the number of processes.
PAIRS = (
    ("tfdist_single", "keras_loop", 1),
    ("tfdist_single", "keras_fit", 1),
    ("tfdist_multi_worker", "tfdist_loop", 2),
    ("tfdist_multi_worker", "tf_loop", 2),
    ("tfdist_multi_worker", "tf_keras_fit", 2),
    ("tfdist_horovod", "horovod_loop", 2),
    ("tfdist_multi_worker", "ray_train", 2),
    ("tfdist_multi_worker", "torch_ddp", 2),
    ("tfdist_horovod", "torch_ddp", 2),
)

#: The peers that train models of more and more parameters and tensors, with two processes.
GROWTH = ("tfdist_multi_worker", "tf_loop", "tfdist_horovod", "horovod_loop", "torch_ddp")

#: What is started for one update only, with the number of processes. Plain Python is the first.
STARTS = (
    ("keras_fit", 1),
    ("tfdist_single", 1),
    ("tfdist_mirrored", 2),
    ("tfdist_multi_worker", 2),
    ("tfdist_horovod", 2),
    ("tfdist_servers", 1),
    ("tfdist_servers", 2),
    ("tfdist_pipeline", 2),
    ("horovod_loop", 2),
    ("ray_train", 2),
    ("torch_ddp", 2),
)

#: The peers on parameter servers. `loop_keras` is stock TensorFlow's coordinator with Keras 3.
MODES = ("tf_keras_fit", "loop_tf_keras", "loop_keras", "tfdist_fit")

_TWO = (
    *("tfdist_multi_worker", "tfdist_loop", "tf_loop", "tf_keras_fit"),
    *("tfdist_horovod", "horovod_loop", "ray_train", "torch_ddp"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run.

    Attributes:
        rounds: how often each peer takes its turn, at most.
        minutes: no round is begun that would not be done by then.
        workloads: keys of `bench.pair.job.WORKLOADS`.
        peers: by the number of processes.
        models: keys of `bench.job.MODELS`, for parameter servers.
        growth: keys of `bench.pair.job.WORKLOADS`, for the peers of `GROWTH`.
    """

    rounds: int
    minutes: float
    workloads: tuple[str, ...]
    peers: Mapping[int, tuple[str, ...]]
    models: tuple[str, ...]
    growth: tuple[str, ...] = ()


FULL = Plan(
    rounds=3,
    minutes=50,
    workloads=("mlp", "convnet", "transformer"),
    peers={
        1: ("keras_fit", "keras_loop", "tfdist_single", "torch_ddp"),
        2: _TWO,
        4: ("tfdist_multi_worker", "tfdist_horovod", "horovod_loop", "torch_ddp"),
        8: ("tfdist_multi_worker", "tfdist_horovod", "torch_ddp"),
    },
    models=("small", "big"),
    growth=("wide_256", "wide_1024", "wide_4096", "deep_4", "deep_16", "deep_64"),
)
QUICK = Plan(
    rounds=1,
    minutes=5,
    workloads=("mlp", "transformer"),
    peers={1: FULL.peers[1], 2: _TWO},
    models=("small",),
)


def jobs_of(plan: Plan, timeout: float) -> Iterator[Pair | Job]:
    """The runs of a round, in the order in which they take turns.

    Args:
        plan: the plan.
        timeout: seconds until a run is ended and counts as failed.
    """
    for peer, processes in STARTS:
        if not peers.missing(peer):
            once = {"workloads": ("first",), "sizes": (), "blocks": 0}
            yield Pair(peer=peer, processes=processes, timeout=timeout, **once)
    for processes, names in plan.peers.items():
        for peer in names:
            if not peers.missing(peer):
                asked = {"workloads": plan.workloads, "sizes": (), "blocks": 1}
                yield Pair(peer=peer, processes=processes, timeout=timeout, **asked)
    for peer in GROWTH if plan.growth else ():
        if not peers.missing(peer):
            yield Pair(peer=peer, workloads=plan.growth, sizes=(), blocks=1, timeout=timeout)
    for model in plan.models:
        for peer in MODES:
            if not catalog.missing(peer):
                yield Job(peer=peer, model=model, steps=MODELS[model].steps, timeout=timeout)


def absent(plan: Plan) -> list[str]:
    """A line for each peer that is not installed."""
    names = {name for each in plan.peers.values() for name in each} | {name for name, _ in STARTS}
    found = [*map(peers.missing, sorted(names)), *map(catalog.missing, MODES)]
    return [line for line in found if line]
