"""The peers by name: what each is, what it needs, and the command that starts its processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["OF_HOROVOD", "PEERS", "Peer", "environ_of", "missing"]

#: From the script with its arguments and the number of processes to the command that starts them.
Start = Callable[[Sequence[str], int], list[str]]


def _plain(script: Sequence[str], processes: int) -> list[str]:
    return [sys.executable, *script]


def _tfdist(*words: str) -> Start:
    code = "from tfdist.cli.main import app; app()"
    return lambda script, processes: [
        *(sys.executable, "-c", code, "run", *words, "-n", str(processes)),
        *script,
    ]


def _horovodrun(script: Sequence[str], processes: int) -> list[str]:
    launch = ("-m", "horovod.runner.launch", "-np", str(processes), "--gloo")
    return [sys.executable, *launch, sys.executable, *script]


def _ray(script: Sequence[str], processes: int) -> list[str]:
    launcher = str(Path(__file__).with_name("ray_start.py"))
    return [sys.executable, launcher, str(processes), *script]


def _torchrun(script: Sequence[str], processes: int) -> list[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return [sys.executable, *launch, *script]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train with some processes.

    Attributes:
        title: a few words, for tables.
        module: of `bench.pair`.
        start: gives the command that starts all processes.
        launcher: that command in a word, for tables.
        needs: packages that must be installed.
        tuned: whether Horovod gets the settings that tfdist would give it.
        own_strategy: whether the peer makes a strategy of TensorFlow's own.
        most: so many processes at most.
    """

    title: str
    module: str
    start: Start
    launcher: str = "tfdist run"
    needs: tuple[str, ...] = ()
    tuned: bool = False
    own_strategy: bool = False
    most: int = 64


#: In the order in which they take turns.
PEERS: dict[str, Peer] = {
    "keras_fit": Peer(
        title="Keras, model.fit", module="fit", start=_plain, launcher="python", most=1
    ),
    "keras_loop": Peer(
        title="hand-written loop, Keras model",
        module="strategy_loop",
        start=_plain,
        launcher="python",
        most=1,
    ),
    "tfdist_single": Peer(
        title="tfdist `single`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "single"),
        most=1,
    ),
    "tfdist_mirrored": Peer(
        title="tfdist `mirrored`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "mirrored"),
    ),
    "tfdist_servers": Peer(
        title="tfdist `parameter_server`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "parameter_server", "--ps", "1"),
    ),
    "tfdist_pipeline": Peer(
        title="tfdist `pipeline`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "pipeline"),
    ),
    "tfdist_horovod": Peer(
        title="tfdist `horovod`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "horovod"),
        needs=("horovod",),
    ),
    "horovod_loop": Peer(
        title="hand-written Horovod loop, Horovod's settings",
        module="horovod_loop",
        start=_horovodrun,
        launcher="horovodrun",
        needs=("horovod",),
    ),
    "horovod_loop_tuned": Peer(
        title="hand-written Horovod loop, tfdist's settings",
        module="horovod_loop",
        start=_horovodrun,
        launcher="horovodrun",
        needs=("horovod",),
        tuned=True,
    ),
    "tfdist_multi_worker": Peer(
        title="tfdist `multi_worker`, model.fit",
        module="fit",
        start=_tfdist("--strategy", "multi_worker"),
    ),
    "tfdist_loop": Peer(
        title="hand-written loop on tfdist `multi_worker`",
        module="strategy_loop",
        start=_tfdist("--strategy", "multi_worker"),
    ),
    "tf_loop": Peer(
        title="hand-written loop on TensorFlow's MultiWorkerMirroredStrategy",
        module="strategy_loop",
        start=_tfdist("--strategy", "multi_worker", "--env-only"),
        launcher="tfdist run --env-only",
        own_strategy=True,
    ),
    "tf_keras_fit": Peer(
        title="tf_keras, model.fit on TensorFlow's MultiWorkerMirroredStrategy",
        module="fit",
        start=_tfdist("--strategy", "multi_worker", "--env-only"),
        launcher="tfdist run --env-only",
        needs=("tf_keras",),
        own_strategy=True,
    ),
    "ray_train": Peer(
        title="Ray Train, hand-written loop on TensorFlow's MultiWorkerMirroredStrategy",
        module="strategy_loop",
        start=_ray,
        launcher="Ray Train",
        needs=("ray", "pyarrow"),
        own_strategy=True,
    ),
    "torch_ddp": Peer(
        title="PyTorch DistributedDataParallel, Gloo",
        module="torch_ddp",
        start=_torchrun,
        launcher="torchrun",
        needs=("torch",),
    ),
}

#: Those that `horovod.py` compares.
OF_HOROVOD = (
    *("tfdist_horovod", "horovod_loop", "horovod_loop_tuned", "tfdist_multi_worker"),
    "torch_ddp",
)


def environ_of(peer: str) -> Mapping[str, str]:
    """The variables for all processes of a peer."""
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
