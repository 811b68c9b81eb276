"""The bounded start of TensorFlow in a task that has joined its cluster."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tfdist._tensorflow import global_seed
from tfdist.config import StrategyConfig
from tfdist.deadline import hard_deadline
from tfdist.errors import ConfigError, StartError
from tfdist.horovod import library, rendezvous
from tfdist.horovod.gradients import GradientSum
from tfdist.joining import Member
from tfdist.servers.cluster import UpdateRule
from tfdist.strategies.devices import (
    communication_for,
    connect_tasks,
    prepare_devices,
    prepare_one_of,
)
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.multi_worker import MultiWorker, resolver_for
from tfdist.strategies.parameter_server import ParameterServer
from tfdist.strategies.pipeline import Pipeline


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
