"""The base of all tfdist strategies: what they add to `tf.distribute.Strategy`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdist._tf.data import unordered_steps
from tfdist._tf.distribute import global_seed, is_distributed
from tfdist._tf.graphs import on_one_replica
from tfdist.comm import batch_sharding, host_collectives
from tfdist.comm.replica_collectives import Link, ReplicaLink, alone, sum_over_replicas
from tfdist.config.gradient_options import PLAIN, GradientOptions
from tfdist.config.mesh import DATA, Axis, LayoutRule, Mesh
from tfdist.config.sharding_options import Checkpoints
from tfdist.config.strategy_config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.gradients.step_profiler import Meter
from tfdist.keras import updating
from tfdist.keras.building import on_built_model
from tfdist.keras.feeding import batches_by_keras, is_feeding_keras, no_more_than_read
from tfdist.keras.input_comparison import show_first_batch
from tfdist.keras.logs import is_agreed
from tfdist.keras.replica_attributes import Turns
from tfdist.keras.replica_context import keras_state
from tfdist.keras.replica_step import (
    keras_step,
    on_only_replica,
    predicting,
    run_keras_step,
    run_prediction,
)
from tfdist.strategies.scope import Scope
from tfdist.types import Dataset, Model, Strategy, Structure
from tfdist.utils.messages import logger, warn

_Policy = tf.data.experimental.AutoShardPolicy


if TYPE_CHECKING:
    from tensorflow.distribute import Strategy as _TensorFlowStrategy
else:  # Each strategy brings its own class of TensorFlow's.
    _TensorFlowStrategy = object


class StrategyMixin(_TensorFlowStrategy):  # type: ignore[misc]
    """Makes unmodified Keras programs run on a `tf.distribute.Strategy` and equal one process.

    Mixed into TensorFlow's own classes, so that all of `tf.distribute` works on it.
    """

    #: The name that `--strategy` takes.
    name: str = ""

    #: The configuration that the strategy was made from, if `tfdist.strategy` made it.
    config: StrategyConfig | None = None

    #: The treatment of gradients before the optimizer applies them.
    rule: GradientOptions = PLAIN

    #: ZeRO's stage: the part of the model's state that is divided over the processes.
    zero: int = 0

    #: The form of saved models: ordinary files, or directories with a part of each process.
    checkpoints: Checkpoints = "whole"

    #: The axes of the processes; None if all of them are data.
    mesh: Mesh | None = None

    #: The rules by which weights are divided along the model axis; None if the kind of their layer
    #: decides. And those without a distribution of Keras's.
    layouts: Collection[LayoutRule] | None = None
    default_layouts: Collection[LayoutRule] | None = ()

    _meter: Meter | None = None
    _policy_reported = False

    # Of TensorFlow's strategies.
    extended: Any
    num_replicas_in_sync: int
    gather: Callable[..., Any]
    experimental_local_results: Callable[[Any], tuple[Any, ...]]
    experimental_distribute_values_from_function: Callable[..., Any]
    _scale_loss_for_estimator_enabled: Callable[..., Any]

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The strategy's scope, in which Keras is hooked; see `tf.distribute.Strategy.scope`."""
        return Scope(self, super().scope)  # type: ignore[misc]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`.

        A Keras model's `train_step` or `test_step` runs as a Keras step, whose losses and gradients
        are weighted by examples (`tfdist.keras.replica_context`).
        """
        inner = super().run  # type: ignore[misc]
        model, fn = keras_step(fn)
        if self.num_replicas_in_sync == 1 and self.rule.is_plain:
            if model is None:
                return inner(fn, args, kwargs, options)

            def run(step: Callable[..., Any]) -> object:
                return inner(on_only_replica(model, step), args, kwargs, options)

            return on_built_model(model, fn, run, sized=False)
        if predicting.value is not None:
            return run_prediction(inner, fn, args, kwargs, options)
        if model is None:
            return inner(on_one_replica(fn, keras_state(Turns(self))), args, kwargs, options)
        return run_keras_step(self, inner, model, fn, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset: Dataset, options: object = None) -> Dataset:
        """Spreads a data set of global batches over the replicas.

        Each replica gets a contiguous slice of each batch; slice sizes differ by one at most. With
        the auto-shard policies FILE, HINT and OFF the sharding is TensorFlow's own.

        Args:
            dataset: a `tf.data.Dataset` of global batches.
            options: a `tf.distribute.InputOptions`.

        Returns:
            A distributed data set.
        """
        policy = batch_sharding.policy_of(dataset)
        if policy not in (_Policy.AUTO, _Policy.DATA):
            self._check_policy(policy)
            self._report_policy(getattr(policy, "name", str(policy)))
            return super().experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
        self._warn_of_order(dataset)
        dataset = no_more_than_read(dataset)
        with self._steps_known(dataset) as known:
            shares = known and is_feeding_keras() and self.num_replicas_in_sync > 1
            preview = is_feeding_keras() and self.world.workers > 1

            def local(context: object = None) -> tf.data.Dataset:
                del context
                return batch_sharding.local_dataset(dataset, self.shard, shares, preview)

            if known and is_feeding_keras() and self._is_one_cpu:
                made = local()
            else:
                made = self.distribute_datasets_from_function(local, options)  # type: ignore[attr-defined]
            if not preview:
                return made
            return show_first_batch(made, batch_sharding.preview_reads(dataset, self.shard))

    @property
    def _is_one_cpu(self) -> bool:
        """Whether this process has one device, to which no examples need be sent.

        A data set for Keras is then one of `tf.data`: a distributed iterator costs about half a
        millisecond of Python in each step, and several times as long to make for each epoch.
        """
        devices = self.extended.worker_devices
        return len(devices) == 1 and "CPU" in devices[0]

    def _warn_of_order(self, dataset: Dataset) -> None:
        unordered = unordered_steps(dataset) if self.world.workers > 1 else []
        if unordered:
            warn(
                f"The data set has steps with deterministic=False ({', '.join(unordered)}). Each "
                "worker then reads the batches in another order, and slices of different batches "
                "leave some examples out and repeat others. Take deterministic=False out, or set "
                "the auto-shard policy FILE or OFF."
            )

    def _check_policy(self, policy: tf.data.experimental.AutoShardPolicy) -> None:
        """Refuses data that processes along the model axis may read differently."""
        if self.parted is not None and policy is not _Policy.FILE:
            raise ConfigError(
                f"mesh='{self.mesh}' conflicts with the auto-shard policy {policy.name}, by which "
                "each process reads what it likes: those along the model axis must read the same "
                "examples. Leave the policy out: tfdist slices the batches; or choose FILE."
            )

    def _report_policy(self, name: str) -> None:
        if self.shard.workers > 1 and self.is_chief and not self._policy_reported:
            self._policy_reported = True
            text = f"TensorFlow shards the data (auto-shard policy {name})"
            logger.info(text)

    @contextlib.contextmanager
    def _steps_known(self, dataset: Dataset) -> Iterator[bool]:
        """Checks that all workers will take the same number of steps, if it is known.

        Data sets made in the block then need no word from the other workers before each step.

        Raises:
            ConfigError: if the workers' data sets have different lengths.
        """
        known = True  # Each replica of one process has a slice of each batch.
        if self.world.workers > 1:
            steps = int(dataset.cardinality().numpy())
            if steps == tf.data.UNKNOWN_CARDINALITY:
                steps = batches_by_keras() or steps
            counts = host_collectives.all_gather_json(
                self, steps, "the number of steps of a data set"
            )
            if len(set(counts)) > 1:
                raise ConfigError(_unequal(counts))
            known = steps != tf.data.UNKNOWN_CARDINALITY
        extended = self.extended
        before = getattr(extended, "experimental_enable_get_next_as_optional", False)
        extended.experimental_enable_get_next_as_optional = before and not known
        try:
            yield known
        finally:
            extended.experimental_enable_get_next_as_optional = before

    def reduce(self, reduce_op: object, value: Structure, axis: int | None = None) -> Any:
        """Reduces a value over the replicas; see `tf.distribute.Strategy.reduce`.

        Accepts, besides what TensorFlow accepts, a scalar with `axis=0`, as Keras 3's trainer calls
        it for the logs of a step (keras#20585).
        """
        if axis is not None and is_agreed(value):
            return value
        if axis is not None and _is_scalar(value):
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]

    def sum_gradients(self, values: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas. Must be called in a replica context.

        Args:
            values: dense tensors and `IndexedSlices`, already weighted, one for each weight.

        Returns:
            The sums, in the order of `values`; how they come about is the strategy's.
        """
        return sum_over_replicas(list(values))

    def first_sent(self, values: Sequence[Any]) -> list[Any]:
        """Those gradients that are there when their exchange by `sum_gradients` begins.

        Args:
            values: dense tensors and `IndexedSlices`, in the order in which they are computed.
        """
        large = alone(values)
        return [values[large[0]]] if large else list(values)

    @property
    def meter(self) -> Meter | None:
        """The measurement of the steps of training; None if the rule does not report."""
        if self.rule.report and self._meter is None:
            self._meter = Meter()
        return self._meter if self.rule.report else None

    def link(self, axis: str = DATA) -> Link:
        """The replicas as the calling one sees them. Must be called in a replica context.

        Args:
            axis: the axis of the mesh along which the processes are.
        """
        del axis
        return ReplicaLink(self)

    def lay_out(self, mesh: Mesh, layouts: Collection[LayoutRule] | None) -> None:
        """Arranges the processes along the axes of a mesh.

        Args:
            mesh: the mesh.
            layouts: the rules by which the weights that are made from now on are divided.

        Raises:
            ConfigError: if the strategy has no mesh, and more is asked for than one device, or than
                data parallel training on its replicas.
        """
        by_replicas = mesh.processes == mesh.size(DATA) == self.num_replicas_in_sync
        if mesh.processes > 1 and (layouts or not by_replicas):
            raise ConfigError(
                f"keras.distribution asks for the mesh '{mesh}', which conflicts with "
                f"strategy={self.name!r}. Choose strategy='multi_worker'."
            )

    @property
    def parted(self) -> Axis | None:
        """The axis of the mesh along which layers are divided; None if they are whole."""
        return None

    @property
    def world(self) -> batch_sharding.Shard:
        """This process among all that train together; `shard` is among those with other data."""
        return self.shard

    def among_all(self) -> contextlib.AbstractContextManager[None]:
        """A block in which all processes are replicas, whatever the mesh is."""
        return contextlib.nullcontext()

    def flush(self, model: Model) -> None:
        """Applies the gradients that are on their way, and averages weights that differ.

        `fit`, `evaluate`, `predict` and Keras's savers do it by themselves; a loop of
        `train_on_batch`, or of the program's own steps, does it before it looks at weights. All
        workers must call it.

        Args:
            model: the Keras model.
        """
        with self.scope():
            updating.flush(model, batches=True)

    @property
    def cluster_resolver(self) -> Any:
        """The cluster and this task's place in it; of one process, a cluster without tasks.

        Programs for several workers ask it for their task's type and index, also on one.
        """
        known = super().cluster_resolver  # type: ignore[misc]
        if known is not None:
            return known
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that only one process should write."""
        return self.world.worker == 0

    @property
    def shard(self) -> batch_sharding.Shard:
        """This process's part of the data."""
        return batch_sharding.Shard(workers=1, worker=0, local=len(self.extended.worker_devices))


def agree_on_seed(strategy: Strategy) -> None:
    """Gives all workers the chief's seed, so that they shuffle alike.

    A seed that the program has set already is kept.
    """
    seeds = host_collectives.all_gather_json(strategy, global_seed(), "the seeds at the start")
    if any(seed is None for seed in seeds):
        drawn = secrets.randbelow(2**32)
        keras.utils.set_random_seed(
            host_collectives.from_chief(strategy, drawn, "the chief's seed")
        )


def _is_scalar(value: Any) -> bool:
    if is_distributed(value):
        return all(v.shape.rank == 0 for v in value.values)
    return bool(tf.is_tensor(value) and value.shape.rank == 0)


def _unequal(counts: list[int]) -> str:
    special = {tf.data.INFINITE_CARDINALITY: "infinite", tf.data.UNKNOWN_CARDINALITY: "unknown"}
    each = ", ".join(
        f"worker {worker}: {special.get(count, count)}" for worker, count in enumerate(counts)
    )
    return (
        f"The workers' data sets have different numbers of batches ({each}). A worker that runs "
        "out would leave the others waiting, so nothing was trained. Give every worker the same "
        "data set of global batches (tfdist slices it), or use the auto-shard policy FILE for "
        "files that are not equally large."
    )
