"""A process that another launcher has started: `mpirun` or `horovodrun`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from tfdist import environment
from tfdist.cluster.environments import mpi
from tfdist.config import Resolved, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.horovod import library

__all__ = ["check_horovod", "cluster_of_mpi", "is_rank", "with_size"]


def check_horovod(config: StrategyConfig) -> None:
    """Looks for Horovod before anything is started, where the strategy needs it.

    Raises:
        ConfigError: if it is missing, or was built for another TensorFlow.
    """
    problem = library.problem() if config.strategy == "horovod" else None
    if problem is not None:
        raise ConfigError(problem)


@contextlib.contextmanager
def cluster_of_mpi(
    config: StrategyConfig, environ: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """The environment, with TF_CONFIG where `mpirun` has started this process and its like.

    Args:
        config: the configuration.
        environ: the process's environment.
    """
    found = mpi.detect(environ)
    several = found is not None and found.size > 1
    if found is None or not several or config.strategy not in ("multi_worker", "horovod"):
        yield environ
        return
    if environment.read("TF_CONFIG", environ) is not None:
        yield environ
        return
    with mpi.gathered(found) as (cluster, task):
        told = {"TF_CONFIG": cluster.tf_config(task)}
        environment.set_for_good(told)
        yield {**environ, **told}


def is_rank(config: StrategyConfig, environ: Mapping[str, str]) -> bool:
    """Whether Horovod's own launcher has started this process."""
    return config.strategy == "horovod" and environment.read("HOROVOD_RANK", environ) is not None


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
            f"{resolved.reasons['processes']} {asked} conflicts with HOROVOD_SIZE={size}: "
            f"horovodrun has started {size} processes. Leave it out here, or start with "
            f"`tfdist run` alone."
        )
    return dataclasses.replace(
        resolved, config=dataclasses.replace(resolved.config, processes=size)
    )
