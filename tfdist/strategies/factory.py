"""Making a strategy from a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist import environment
from tfdist._tf.distribute import global_seed
from tfdist.cluster.environments import detection
from tfdist.cluster.tf_config import own_tf_config, parse_tf_config
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import SERVED, StrategyConfig
from tfdist.errors import ConfigError, StartError
from tfdist.gradients.rule import rule_from
from tfdist.strategies.devices import (
    check_gpus,
    communication_for,
    connect_tasks,
    prepare_devices,
    prepare_one_of,
)
from tfdist.strategies.horovod import library, rendezvous
from tfdist.strategies.horovod.strategy import GradientSum, Horovod
from tfdist.strategies.membership import Member, join_cluster
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker, resolver_for
from tfdist.strategies.parameter_server.servers import UpdateRule
from tfdist.strategies.parameter_server.strategy import ParameterServer
from tfdist.strategies.pipeline.strategy import Pipeline
from tfdist.strategies.single import Single
from tfdist.utils.watchdog import hard_deadline

# The bounded start of TensorFlow in a task that has joined its cluster.


def start_multi_worker(member: Member, config: StrategyConfig) -> MultiWorker:
    """Makes the strategy of a task that has joined its cluster.

    Args:
        member: the task.
        config: the configuration, the same for all tasks.

    Raises:
        ConfigError: if TensorFlow has started already.
    """
    cluster, task = member.cluster, member.task
    _seed(member)
    devices = prepare_devices(config.devices)
    gpus = sum(device.startswith("GPU") for device in devices)
    implementation = communication_for(gpus, config.communication)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
    )
    with _connecting(member, config):
        try:
            return MultiWorker(resolver_for(cluster, task, gpus), options, len(devices))
        except RuntimeError as error:
            if "program startup" in str(error) or "must be configured" in str(error):
                raise ConfigError(
                    "strategy='multi_worker' was made after TensorFlow had started. Make it before "
                    "any other TensorFlow operation of the program, or start the program with "
                    f"`tfdist run`. TensorFlow says: {error}"
                ) from error
            raise


def start_horovod(member: Member | None, config: StrategyConfig) -> Horovod:
    """Initialises Horovod and makes the strategy of a process that trains with it.

    Args:
        member: the task that has joined its cluster; None where `horovodrun` has set the ranks.
        config: the configuration, the same for all processes.

    Raises:
        ConfigError: if Horovod is missing, or was built for another TensorFlow; or if an option
            conflicts with the environment.
    """
    hvd = library.load()
    cluster, task, offered = (member.cluster, member.task, member.offer) if member else (None,) * 3
    rendezvous.prepare(config, cluster, task, offered or {})
    if member is not None:
        _seed(member)
    with _connecting(member, config):
        hvd.init()
    device = prepare_one_of(hvd.local_rank(), hvd.local_size())
    gradients = GradientSum(reduction=config.reduction, groups=config.groups or 1)
    place = None
    if member is not None:
        place = resolver_for(member.cluster, member.task, int(device.startswith("GPU")))
    return Horovod(device, gradients, place)


def start_parameter_server(member: Member, config: StrategyConfig) -> ParameterServer:
    """Makes the strategy of a chief whose workers and servers have joined.

    Args:
        member: the chief.
        config: the configuration.

    Raises:
        ConfigError: if a worker sees several GPUs.
    """
    _seed(member)
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(member.cluster.as_dict()),
        task_type=member.task.type,
        task_id=member.task.index,
        rpc_layer="grpc",
    )
    with _connecting(member, config):
        return ParameterServer(
            cluster,
            rule_of(config, len(member.cluster.computing) - 1),
            config.wire_dtype,
            config.min_shard_bytes,
            config.max_shards,
            config.step_timeout,
        )


def start_pipeline(member: Member | None, config: StrategyConfig) -> Pipeline:
    """Makes the strategy of a process that trains a model in stages.

    Args:
        member: the chief of several tasks, each of which has joined; None for one process.
        config: the configuration.

    Raises:
        ConfigError: if options conflict, or there are too few devices.
    """
    if member is None:
        devices = prepare_devices(config.devices or config.stages)
    else:
        _seed(member)
        with _connecting(member, config):
            devices = connect_tasks(member.cluster, member.task)
    made = Pipeline(
        devices,
        stages=config.stages,
        microbatches=config.microbatches,
        schedule=config.schedule,
        virtual=config.virtual,
        cuts=None if config.cuts is None else [name.strip() for name in config.cuts.split(",")],
        recompute=config.recompute,
        vertical_sync=config.vertical_sync,
        timeout=config.stage_timeout,
    )
    made.timeline = config.timeline
    return made


def _seed(member: Member) -> None:
    """Gives a program that has set no seed the one that its chief drew for all tasks."""
    if global_seed() is None:
        keras.utils.set_random_seed(member.seed)


def _connecting(
    member: Member | None, config: StrategyConfig
) -> contextlib.AbstractContextManager[None]:
    """Ends the process, with a message, if TensorFlow or Horovod does not connect in time."""
    seconds = config.start_timeout
    if member is None:
        message = (
            f"This process gave up after {seconds:.0f} s: Horovod did not connect to the other "
            "ranks that horovodrun has started. One of them ended, or no network interface "
            "reaches them: name one in HOROVOD_GLOO_IFACE."
        )
        return hard_deadline(seconds, message, StartError.exit_status)
    task = member.task
    peers = ", ".join(f"{t} at {a}" for t, a in member.cluster.tasks() if t != task)
    library_name = "Horovod" if config.strategy == "horovod" else "TensorFlow"
    message = (
        f"{task} gave up after {seconds:.0f} s: all tasks had joined, but {library_name} did not "
        f"connect to {peers}. One of them ended meanwhile, or a firewall closes its ports."
    )
    return hard_deadline(seconds, message, StartError.exit_status)


def rule_of(config: StrategyConfig, workers: int) -> UpdateRule:
    """When a gradient becomes an update, as the configuration says.

    Args:
        config: the configuration.
        workers: how many workers the cluster has.
    """
    return UpdateRule(
        mode=config.mode,
        staleness=config.staleness,
        on_stale=config.on_stale,
        workers=workers,
        backup_workers=config.backup_workers,
    )


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
    with detection.found(environment.snapshot(), config.roles) as found:
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
