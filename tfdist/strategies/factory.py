"""The active strategy of a process, and its creation from a configuration."""

from __future__ import annotations

from typing import Any, Unpack

import tensorflow as tf

from tfdist.cluster.tf_config import own_tf_config, parse_tf_config
from tfdist.config.gradient_options import GradientOptions
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import StrategyConfig, accepted
from tfdist.config.strategy_keywords import StrategyKeywords
from tfdist.config.strategy_spec import resolve_path, spec_of
from tfdist.errors import ConfigError
from tfdist.strategies.base import StrategyMixin
from tfdist.strategies.devices import check_gpus
from tfdist.strategies.membership import Member

_active: list[StrategyMixin] = []


def strategy(name: str | None = None, **options: Unpack[StrategyKeywords]) -> StrategyMixin:
    """The strategy of this program: the active one, or a new one.

    Inside `tfdist run` the strategy exists already and is returned; a name or option that
    contradicts it is an error. A program that was started by hand gets a new strategy, which must
    be made before any other TensorFlow operation.

    Args:
        name: a key of `tfdist.config.STRATEGIES`, or `"auto"`. By default the active strategy's, or
            `"auto"`.
        **options: the options of strategies (docs/options.md).

    Returns:
        The strategy, which is a `tf.distribute.Strategy`.

    Raises:
        ConfigError: for an unknown name or option, or a conflict with the active strategy.
        StartError: if the other tasks of the cluster do not join in time.

    Examples:
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


def create(config: StrategyConfig, member: Member | None = None) -> StrategyMixin:
    """Makes the strategy that `config` describes and keeps it as the active one.

    Args:
        config: the configuration.
        member: the task, if it has joined its cluster already.

    Raises:
        ConfigError: if TensorFlow sees other GPUs than the launcher.
    """
    check_gpus()
    made: StrategyMixin = resolve_path(spec_of(config.strategy).create)(config, member)
    rule = config.find(GradientOptions)
    if rule is not None and made.rule != rule:
        raise ConfigError(
            f"strategy={config.strategy!r} was made without its rule for gradients "
            f"({rule.in_words}). Its function {spec_of(config.strategy).create!r} has to give the "
            "constructor rule=config.part(GradientOptions)."
        )
    return activate(made, config)


def activate(made: StrategyMixin, config: StrategyConfig) -> StrategyMixin:
    """Keeps a strategy, made from a configuration, as the active one of this process."""
    made.config = config
    _active[:] = [made]
    return made


def active() -> StrategyMixin | None:
    """The strategy of this process, or None."""
    return _active[0] if _active else None


def _counts(name: str | None) -> dict[str, Any]:
    """The numbers of workers and servers that TF_CONFIG gives a parameter server's chief."""
    text = own_tf_config()
    if text is None or name in (None, "auto") or not spec_of(name).has_servers:
        return {}
    cluster, _ = parse_tf_config(text)
    kinds = [task.type for task, _ in cluster.tasks()]
    return {"processes": max(1, kinds.count("worker")), "ps": max(1, kinds.count("ps"))}


def _check_same(name: str | None, options: StrategyKeywords) -> None:
    config = _active[0].config
    assert config is not None  # Since `create` made it.
    wanted = {k: v for k, v in {"strategy": name, **options}.items() if v not in (None, "auto")}
    for option, value in wanted.items():
        if accepted(option, value) != config.value(option):
            raise ConfigError(
                f"tfdist.strategy({option}={value!r}) conflicts with the active strategy, whose "
                f"{option} is {config.value(option)!r}. A process has one strategy: "
                "change the flag or the program so that both say the same, or call "
                "tfdist.strategy() without arguments."
            )
