"""Workers that compute, and servers that hold the weights."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.distribute import ServerExtended, ServerStrategy, global_seed
from tfdist.config.server_options import ServerOptions
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.keras.feeding import batches_by_keras, is_feeding_keras, no_more_than_read
from tfdist.keras.hooks import STRATEGY, HookSet
from tfdist.strategies.base import StrategyMixin
from tfdist.strategies.connection import connecting, join_own_cluster, seed_from
from tfdist.strategies.membership import Member
from tfdist.strategies.parameter_server import hooks
from tfdist.strategies.parameter_server.feeding import (
    ChiefPass,
    GlobalBatchDataset,
    Reading,
    ShardedDatasets,
    Shards,
    reading_of,
)
from tfdist.strategies.parameter_server.payload import guarded
from tfdist.strategies.parameter_server.reporting import Counted
from tfdist.strategies.parameter_server.scheduler import Dispatcher, gate_of
from tfdist.strategies.parameter_server.servers import Servers, device_of, watch
from tfdist.strategies.parameter_server.step_function import Serving
from tfdist.strategies.scope import Scope
from tfdist.types import Dataset, Variable

#: The attribute of a data set that holds its `Reading`, and the strategy that this belongs to.
_READING = "_tfdist_reading"


class ParameterServer(StrategyMixin, ServerStrategy):
    """Weights on servers, gradients from workers, the program on the chief.

    All tasks of type worker and ps must be running as `tf.distribute.Server`s. This process becomes
    the chief.

    Args:
        cluster_resolver: the cluster, with tasks of type chief, worker and ps; by default read
            from TF_CONFIG.
        rule: when a gradient becomes an update, and how weights lie and travel. The cluster sets
            how many servers there are.

    Raises:
        ConfigError: if a worker sees several GPUs.
    """

    name = "parameter_server"

    def __init__(self, cluster_resolver: Any = None, rule: ServerOptions | None = None) -> None:
        rule = rule or ServerOptions()
        resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        self.servers: Servers

        def make_extended() -> object:
            self.servers = Servers(spec.num_tasks("ps"), spec.num_tasks("worker"), rule)
            return ServerExtended(self, resolver, self.servers.create, self._update)

        ServerStrategy.__init__(self, resolver, make_extended)
        if self.num_replicas_in_sync > 1:
            raise ConfigError(
                f"The workers see {self.num_replicas_in_sync} GPUs each, and each trains on one. "
                "Start a worker for each GPU, with CUDA_VISIBLE_DEVICES set to it."
            )
        self._step_timeout = rule.step_timeout
        watch(self.servers.devices, rule.step_timeout)
        self.serving = Serving(self.servers, self._dispatcher)
        self._hooks = HookSet(lambda: hooks.hooks(self.serving), STRATEGY)
        if global_seed() is None:
            keras.utils.set_random_seed(secrets.randbelow(2**32))

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The strategy's scope, in which Keras is hooked; see `tf.distribute.Strategy.scope`."""
        return Scope(self, lambda: ServerStrategy.scope(self), self._hooks)

    @property
    def epochs(self) -> list[Counted]:
        """The figures of each epoch of the last `fit`: updates, staleness, steps by worker."""
        return list(self.serving.epochs)

    def experimental_distribute_dataset(self, dataset: Dataset, options: object = None) -> Dataset:
        """Spreads a data set of batches over the workers; see `tf.distribute.Strategy`."""
        if not is_feeding_keras():
            return ServerStrategy.experimental_distribute_dataset(self, dataset, options)
        batches = batches_by_keras()
        reading = self._reading_of(dataset, batches)
        if reading is not None:
            return GlobalBatchDataset(dataset, reading.begin)
        read = no_more_than_read(dataset)
        return GlobalBatchDataset(read, lambda: ChiefPass(read, batches))

    def _reading_of(self, dataset: Dataset, batches: int | None) -> Reading | None:
        """Kept with the data set, so that in the next `fit` the workers' copies go on."""
        reading, of = vars(dataset).get(_READING, (None, None))
        if of is not self:
            reading = reading_of(dataset, batches, lambda w: self.serving.dispatcher.recoveries[w])
            vars(dataset)[_READING] = reading, self
        return reading

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: object = None
    ) -> Dataset:
        """One data set for each worker, which reads it by itself; see `tf.distribute.Strategy`.

        Args:
            dataset_fn: makes a worker's data set of a `tf.distribute.InputContext`, whose
                `num_input_pipelines` and `input_pipeline_id` identify the worker's part.
            options: a `tf.distribute.InputOptions`.

        Returns:
            What `fit` and `evaluate` take, and `ClusterCoordinator.create_per_worker_dataset`.
            `fit` raises a ConfigError if the workers cannot read the data sets by themselves.
        """
        stock = ServerStrategy.distribute_datasets_from_function(self, dataset_fn, options)

        def shards() -> Shards:
            dispatcher, rule = self.serving.dispatcher, self.servers.rule
            recovered = dispatcher.recoveries.__getitem__
            return Shards(dataset_fn, dispatcher.workers, rule.mode == "sync", recovered)

        return stock if tf.inside_function() else ShardedDatasets(stock, shards)

    def _update(
        self,
        variable: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> object:
        return guarded(device_of(variable), lambda: self.servers.update(variable, fn, args, kwargs))

    def _dispatcher(self) -> Dispatcher:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        return Dispatcher(coordinator, gate_of(self.servers.rule), self._step_timeout)


def create(config: StrategyConfig, member: Member | None) -> ParameterServer:
    """Makes the strategy of a chief whose workers and servers have joined.

    Args:
        config: the configuration.
        member: the chief, if it has joined its cluster already.

    Raises:
        ConfigError: if a worker sees several GPUs.
    """
    member = member or join_own_cluster(config)
    seed_from(member)
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(member.cluster.as_dict()),
        task_type=member.task.type,
        task_id=member.task.index,
        rpc_layer="grpc",
    )
    with connecting(member, config):
        return ParameterServer(cluster, config.part(ServerOptions))
