"""Making a strategy from a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist import environment
from tfdist.cluster.environments import finding
from tfdist.cluster.listing import own_tf_config
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.config import SERVED, StrategyConfig
from tfdist.errors import ConfigError
from tfdist.horovod import library, rendezvous
from tfdist.joining import Member, join_cluster
from tfdist.resolution import resolve
from tfdist.strategies.devices import check_gpus, prepare_devices
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.single import Single
from tfdist.strategies.start import (
    start_horovod,
    start_multi_worker,
    start_parameter_server,
    start_pipeline,
)
from tfdist.updates.rule import rule_from

_active: list[Any] = []


def strategy(name: str | None = None, **options: Any) -> Any:
    """The strategy of this program: the active one, or a new one.

    Inside `tfdist run` the strategy exists already and is returned; a name or option that
    contradicts it is an error. A program that was started by hand gets a new strategy, which must
    be made before any other TensorFlow operation.

    Args:
        name: a key of `tfdist.config.STRATEGIES`, or `"auto"`. By default the active strategy's, or
            `"auto"`.
        **options: fields of `tfdist.config.StrategyConfig`.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        ConfigError: for an unknown name or option, or a conflict with the active strategy.
        StartError: if the other tasks of the cluster do not join in time.

    Example:
        >>> strategy = tfdist.strategy("mirrored", devices=2)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
    """
    if _active:
        _check_same(name, options)
        return _active[0]
    gpus = len(tf.config.list_physical_devices("GPU"))
    resolved = resolve({"strategy": name, **_counts(name), **options}, gpus=gpus)
    return create(resolved.config)


def create(config: StrategyConfig, member: Member | None = None) -> Any:
    """Makes the strategy that `config` describes and keeps it as the active one.

    Args:
        config: the configuration.
        member: the task, where it has joined its cluster already.

    Raises:
        ConfigError: if TensorFlow sees other GPUs than the launcher.
    """
    check_gpus()
    if config.strategy == "multi_worker":
        made: Any = start_multi_worker(member or _join(config), config)
    elif config.strategy == "horovod":
        library.load()  # Before anybody is waited for.
        alone = rendezvous.started_by_horovodrun() and own_tf_config() is None
        made = start_horovod(member or (None if alone else _join(config)), config)
    elif config.strategy == "parameter_server":
        made = start_parameter_server(member or _join(config), config)
    elif config.strategy == "pipeline":
        alone = config.processes == 1 and own_tf_config() is None
        made = start_pipeline(member or (None if alone else _join(config)), config)
    else:
        devices = prepare_devices(config.devices)
        made = Single(devices[0]) if config.strategy == "single" else Mirrored(devices)
    made.config = config
    if config.strategy != "parameter_server":
        made.rule = rule_from(config)
    _active[:] = [made]
    return made


def active() -> Any:
    """The strategy of this process, or None."""
    return _active[0] if _active else None


def _join(config: StrategyConfig) -> Member:
    offer = rendezvous.offer_of(config)
    text = own_tf_config()
    if text is not None:
        return join_cluster(text, config, offer)
    with finding.found(environment.snapshot(), config.roles) as found:
        if found is not None:
            if config.strategy not in SERVED:
                count = len(found.cluster.computing)
                config = dataclasses.replace(config, processes=count)
            return join_cluster(found.cluster.tf_config(found.task), config, offer)
    raise ConfigError(
        f"strategy={config.strategy!r} needs TF_CONFIG, which is not set, to know the other "
        f"tasks. Start the program with `tfdist run --strategy {config.strategy} -n 2 SCRIPT`, "
        "or set TF_CONFIG for each task (`tfdist doctor` checks it)."
    )


def _counts(name: str | None) -> dict[str, Any]:
    """The numbers of workers and servers that TF_CONFIG gives a parameter server's chief."""
    text = own_tf_config()
    if name != "parameter_server" or text is None:
        return {}
    cluster, _ = parse_tf_config(text)
    kinds = [task.type for task, _ in cluster.tasks()]
    return {"processes": max(1, kinds.count("worker")), "ps": max(1, kinds.count("ps"))}


def _check_same(name: str | None, options: dict[str, Any]) -> None:
    config = _active[0].config
    wanted = {k: v for k, v in {"strategy": name, **options}.items() if v not in (None, "auto")}
    for option, value in wanted.items():
        if getattr(config, option, None) != value:
            raise ConfigError(
                f"tfdist.strategy({option}={value!r}) conflicts with the active strategy, whose "
                f"{option} is {getattr(config, option, None)!r}. A process has one strategy: "
                "change the flag or the program so that both say the same, or call "
                "tfdist.strategy() without arguments."
            )
