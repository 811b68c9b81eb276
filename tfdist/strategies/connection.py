"""Connects a task to the others of its cluster, before and while TensorFlow starts."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time

import keras

from tfdist import environment
from tfdist._tf.distribute import global_seed
from tfdist.cluster.environments import detection
from tfdist.cluster.spec import Address, Task
from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError, StartError
from tfdist.strategies.horovod import rendezvous
from tfdist.strategies.membership import Member, join_cluster
from tfdist.utils.messages import logger
from tfdist.utils.watchdog import hard_deadline

__all__ = ["await_chief", "connecting", "join_own_cluster", "seed_from"]


def seed_from(member: Member) -> None:
    """Gives a program that has set no seed the one that its chief drew for all tasks."""
    if global_seed() is None:
        keras.utils.set_random_seed(member.seed)


def connecting(
    member: Member | None, config: StrategyConfig, library: str = "TensorFlow"
) -> contextlib.AbstractContextManager[None]:
    """Ends the process, with a message, if TensorFlow or Horovod does not connect in time.

    Args:
        member: this task; None if another launcher has started it.
        config: the configuration.
        library: the library that connects.

    Raises:
        ConfigError: if this task's own host name does not resolve. TensorFlow would look it up for
            ever, and let no deadline pass meanwhile.
    """
    seconds = config.start_timeout
    if member is None:
        message = (
            f"This process gave up after {seconds:.0f} s: Horovod did not connect to the other "
            "ranks that horovodrun has started. One of them ended, or no network interface "
            "reaches them: name one in HOROVOD_GLOO_IFACE."
        )
        return hard_deadline(seconds, message, StartError.exit_status)
    task = member.task
    _check_own_name(task, member.cluster.address(task))
    peers = ", ".join(f"{t} at {a}" for t, a in member.cluster.tasks() if t != task)
    message = (
        f"{task} gave up after {seconds:.0f} s: all tasks had joined, but {library} did not "
        f"connect to {peers}. One of them ended or was stopped meanwhile (a debugger, SIGSTOP), or "
        "a firewall closes its ports."
    )
    if peers and task == member.cluster.chief:
        _report(f"all tasks have joined; {library} connects to {peers}, then traces the first step")
    return hard_deadline(seconds, message, StartError.exit_status)


def _check_own_name(task: Task, address: Address) -> None:
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"The host {address.host!r} of {task}, this task, does not resolve here: {error}. "
            "Correct the name, or write the IP address (`tfdist doctor` checks all of them)."
        ) from error


def await_chief(member: Member) -> None:
    """Waits until the chief's server listens, in a task that will call it; see `connecting`.

    A call that finds nobody there costs a second: gRPC waits so long before its second try (gRPC's
    connection backoff protocol), and tasks of one machine are ready within a tenth of that.
    """
    if member.task == member.cluster.chief:
        return
    address = member.cluster.address(member.cluster.chief)
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return


def _report(text: str) -> None:
    logger.info(text)


def join_own_cluster(config: StrategyConfig) -> Member:
    """Joins the cluster that TF_CONFIG or a scheduler gives this process.

    Raises:
        ConfigError: if there is none, or it has a mistake.
        StartError: if a task does not join in time.
    """
    offer = rendezvous.offer_of(config)
    text = own_tf_config()
    if text is not None:
        return join_cluster(text, config, offer)
    with detection.current_job(environment.snapshot(), config.roles) as result:
        if result is not None:
            if not spec_of(config.strategy).chief_runs_script:
                count = len(result.cluster.computing)
                config = dataclasses.replace(config, processes=count)
            return join_cluster(result.cluster.tf_config(result.task), config, offer)
    raise ConfigError(
        f"strategy={config.strategy!r} needs TF_CONFIG, which is not set, to know the other "
        f"tasks. Start the program with `tfdist run --strategy {config.strategy} -n 2 SCRIPT`, "
        "or set TF_CONFIG for each task (`tfdist doctor` checks it)."
    )
