"""The peers by name: what each is and what it needs. The code of each is in `bench.peers`."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping

__all__ = ["PEERS", "Peer", "environ_of", "missing"]

#: What tf_keras asks for before `tensorflow` is imported.
_LEGACY_KERAS = {"TF_USE_LEGACY_KERAS": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train with parameter servers.

    Attributes:
        title: a few words, for tables.
        needs: modules that must be importable.
        environ: variables for its tasks.
    """

    title: str
    needs: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


#: What `parameter_server.py` compares, in the order in which they take turns. Keys are the names
#: of modules in `bench.peers`.
PEERS: dict[str, Peer] = {
    "tf_keras_fit": Peer(title="tf_keras, model.fit", needs=("tf_keras",), environ=_LEGACY_KERAS),
    "loop_tf_keras": Peer(
        title="ClusterCoordinator loop, tf_keras model",
        needs=("tf_keras",),
        environ=_LEGACY_KERAS,
    ),
    "loop_keras": Peer(title="ClusterCoordinator loop, Keras 3 model"),
    "loop_tfdist": Peer(
        title="ClusterCoordinator loop, Keras 3 model, on tfdist",
        needs=("tfdist.strategies.parameter_server",),
    ),
    "tfdist_fit": Peer(title="tfdist, model.fit", needs=("tfdist.strategies.parameter_server",)),
}

#: For `slow_worker.py`. One thread for each task's operations: a worker is then one core's worth.
_RACE = Peer(
    title="tfdist, model.fit to a fixed loss",
    needs=("tfdist.strategies.parameter_server",),
    environ={"TF_NUM_INTRAOP_THREADS": "1"},
)
_ALL = {**PEERS, "tfdist_to_loss": _RACE}


def environ_of(name: str) -> Mapping[str, str]:
    """The variables for the tasks of a peer, whichever benchmark it belongs to."""
    return _ALL[name].environ


def missing(name: str) -> str:
    """What a peer lacks to run here, in one line; empty if nothing."""
    lacking = [module for module in _ALL[name].needs if not _importable(module)]
    if not lacking:
        return ""
    return (
        f"{name} is left out: no module {', '.join(lacking)}. "
        "pip install -r benchmarks/requirements.txt"
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
