"""The peers by name: what each is, what it needs, and the command that starts its two processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence

__all__ = ["PEERS", "Peer", "environ_of", "missing"]

Start = Callable[[Sequence[str]], list[str]]


def _tfdist(strategy: str) -> Start:
    code = "from tfdist.cli.main import app; app()"
    return lambda script: [
        *(sys.executable, "-c", code, "run", "--strategy", strategy, "-n", "2"),
        *script,
    ]


def _horovodrun(script: Sequence[str]) -> list[str]:
    launch = ("-m", "horovod.runner.launch", "-np", "2", "--gloo")
    return [sys.executable, *launch, sys.executable, *script]


def _torchrun(script: Sequence[str]) -> list[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [sys.executable, *launch, *script]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train with two processes.

    Attributes:
        title: a few words, for tables.
        module: of `bench.pair`.
        start: from the script and its arguments to the command that starts both processes.
        needs: packages that must be installed.
        tuned: whether Horovod gets the settings that tfdist would give it.
    """

    title: str
    module: str
    start: Start
    needs: tuple[str, ...] = ()
    tuned: bool = False


#: In the order in which they take turns.
PEERS: dict[str, Peer] = {
    "tfdist_horovod": Peer(
        title="tfdist `horovod`, model.fit",
        module="tfdist_fit",
        start=_tfdist("horovod"),
        needs=("horovod",),
    ),
    "horovod_loop": Peer(
        title="hand-written Horovod loop, Horovod's settings",
        module="horovod_loop",
        start=_horovodrun,
        needs=("horovod",),
    ),
    "horovod_loop_tuned": Peer(
        title="hand-written Horovod loop, tfdist's settings",
        module="horovod_loop",
        start=_horovodrun,
        needs=("horovod",),
        tuned=True,
    ),
    "tfdist_multi_worker": Peer(
        title="tfdist `multi_worker`, model.fit",
        module="tfdist_fit",
        start=_tfdist("multi_worker"),
    ),
    "torch_ddp": Peer(
        title="PyTorch DistributedDataParallel, Gloo",
        module="torch_ddp",
        start=_torchrun,
        needs=("torch",),
    ),
}


def environ_of(peer: str) -> Mapping[str, str]:
    """The variables for both processes of a peer."""
    from tfdist.config import horovod_options

    return dict(horovod_options.defaults()) if PEERS[peer].tuned else {}


def missing(name: str) -> str:
    """What a peer lacks to run here, in one line; empty if nothing."""
    lacking = [package for package in PEERS[name].needs if not _installed(package)]
    if not lacking:
        return ""
    return f"{name} is left out: no package {', '.join(lacking)}. See benchmarks/requirements.txt."


def _installed(package: str) -> bool:
    # Not by importing: where this is called, `horovod` is the benchmark itself.
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
