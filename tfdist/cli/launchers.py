"""A process that something else has started: a scheduler, `mpirun` or `horovodrun`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from tfdist import environment
from tfdist.cluster.environments import finding
from tfdist.cluster.listing import own_tf_config
from tfdist.config import CLUSTERED, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.horovod import library
from tfdist.horovod.rendezvous import started_by_horovodrun
from tfdist.resolution import Resolved

__all__ = ["Here", "check_horovod", "cluster_here", "is_rank", "with_size"]


def check_horovod(config: StrategyConfig) -> None:
    """Looks for Horovod before anything is started, where the strategy needs it.

    Raises:
        ConfigError: if it is missing, or was built for another TensorFlow.
    """
    problem = library.problem() if config.strategy == "horovod" else None
    if problem is not None:
        raise ConfigError(problem)


@dataclasses.dataclass(frozen=True)
class Here:
    """What is known of this process before anything is planned.

    Attributes:
        environ: its environment, with TF_CONFIG where its cluster is known.
        gpus_each: the GPUs that each task has by the scheduler; None where that does not say.
    """

    environ: Mapping[str, str]
    gpus_each: int | None = None


@contextlib.contextmanager
def cluster_here(
    config: StrategyConfig, environ: Mapping[str, str], chosen: str | None = None
) -> Iterator[Here]:
    """The environment, with TF_CONFIG where a scheduler or `mpirun` has started this process.

    Args:
        config: the configuration.
        environ: the process's environment; one that has TF_CONFIG is left as it is.
        chosen: the name of the environment to believe; None looks for all.

    Raises:
        ConfigError: if two environments contradict each other, or one has a mistake.
    """
    told = own_tf_config(environ) or environment.read("TFDIST_LAUNCHED", environ)
    if told is not None or config.strategy not in CLUSTERED:
        yield Here(environ)
        return
    with finding.found(environ, config.roles, chosen) as found:
        if found is None:
            yield Here(environ)
            return
        text = found.cluster.tf_config(found.task)
        yield Here({**environ, "TF_CONFIG": text}, found.devices)


def is_rank(config: StrategyConfig, environ: Mapping[str, str]) -> bool:
    """Whether Horovod's own launcher has started this process."""
    return config.strategy == "horovod" and started_by_horovodrun(environ)


def with_size(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """The configuration with the number of processes that Horovod's launcher has started.

    Raises:
        ConfigError: if another number was asked for.
    """
    text = environment.read("HOROVOD_SIZE", environ) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"HOROVOD_SIZE={text!r} is no number of processes. Unset it.")
    size, asked = int(text), resolved.config.processes
    if "processes" in resolved.reasons and asked != size:
        raise ConfigError(
            f"{resolved.said('processes')} conflicts with HOROVOD_SIZE={size}: horovodrun has "
            f"started {size} processes. Leave it out here, or give -n {size}, or start with "
            "`tfdist run` alone."
        )
    return dataclasses.replace(
        resolved, config=dataclasses.replace(resolved.config, processes=size)
    )
