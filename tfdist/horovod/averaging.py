"""Gradients averaged over the processes of a Horovod job, as a program asks for it.

Names of collectives and their order are the matter of `Ring`; here is what its values mean.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist._keras import keras_backend as backend
from tfdist._tf.distribute import in_xla
from tfdist.comm.replica_collectives import is_sparse, joined, pieces_of
from tfdist.errors import ConfigError
from tfdist.strategies.horovod import collectives
from tfdist.strategies.horovod.collectives import Members, Ring
from tfdist.strategies.horovod.library import load
from tfdist.types import (
    Gradient,
    KerasVariable,
    LossScaler,
    ProcessSet,
    Variable,
)
from tfdist.utils.thread_state import Flag

__all__ = [
    "Applier",
    "Averager",
    "Averaging",
    "applier_of",
    "average_before_scaling",
    "averaged",
    "initialized",
    "native",
    "refuse_strategy",
    "ring_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging:
    """The options of `DistributedOptimizer` and `DistributedGradientTape`, with Horovod's names.

    Attributes:
        device_dense: where dense gradients are exchanged; empty for where they are.
        device_sparse: where `IndexedSlices` are exchanged.
        compression: in what dense gradients travel: `hvd.Compression.none` or `.fp16`, or a class
            with the same two methods.
        sparse_as_dense: makes `IndexedSlices` dense before they are exchanged.
        op: `hvd.Average` (the default), `hvd.Sum` or `hvd.Adasum`.
        gradient_predivide_factor: under `Average`, gradients are divided by it before they are
            added up, and the rest of the division follows.
        num_groups: the older name of `groups`.
        groups: in how many groups dense gradients travel, each as soon as it is complete; or a list
            of lists of variables that travel together. By default all travel together.
        process_set: the processes among which gradients are averaged; by default all.
        scale_local_gradients: divides gradients of local variables, which are not exchanged, by the
            number of processes.
    """

    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = None
    sparse_as_dense: bool = False
    op: int | None = None
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet | None = None
    scale_local_gradients: bool = True

    @property
    def parts(self) -> int | list[list[int]]:
        """The groups: their number, or keys of the variables of each."""
        groups = self.groups or self.num_groups or 1
        if isinstance(groups, int):
            return groups
        return [[_key(variable) for variable in group] for group in groups]


class Averager:
    """Averages gradients over processes.

    Args:
        settings: how.
        who: the function of Horovod that the program called, for messages.

    Raises:
        ConfigError: if the settings contradict each other, or Horovod has not been initialised.
    """

    def __init__(self, settings: Averaging, who: str) -> None:
        hvd = initialized(who)
        self.settings = settings
        self._who = who
        self._op = hvd.Average if settings.op is None else settings.op
        self._compression = settings.compression or hvd.Compression.none
        self._parts = settings.parts
        self._local: set[int] = set()
        self._check(hvd)

    def keep_local(self, variables: Iterable[Any]) -> None:
        """Leaves the gradients of these variables to each process."""
        self._local.update(_key(variable) for variable in variables)

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The averages.

        Args:
            grads: a dense tensor, `IndexedSlices` or None for each variable.
            variables: the variables of the gradients.

        Returns:
            A gradient for each variable, None if there was None.
        """
        hvd = initialized(self._who)
        refuse_strategy(self._who)
        _refuse_xla(self._who)
        ring = ring_of(self.settings.process_set)
        result: list[Any] = [self._densified(grad) for grad in grads]
        if ring is None:
            return result
        keys = [_key(variable) for variable in variables]
        shared = [i for i, g in enumerate(result) if g is not None and keys[i] not in self._local]
        if self.settings.scale_local_gradients:
            for i in set(range(len(result))).difference(shared):
                result[i] = _scaled(result[i], 1 / ring.size)
        sparse = [i for i in shared if isinstance(result[i], tf.IndexedSlices)]
        dense = [i for i in shared if i not in sparse]
        with tf.device(self.settings.device_dense):
            reduced = self._reduce(hvd, ring, [result[i] for i in dense], [keys[i] for i in dense])
        for i, value in zip(dense, reduced, strict=True):
            result[i] = value
        for i in sparse:
            result[i] = self._gather(hvd, ring, result[i])
        return result

    def _reduce(self, hvd: Any, ring: Ring, values: list[Any], keys: list[int]) -> list[Any]:
        if not values:
            return []
        if self._op == hvd.Adasum:
            return collectives.combine(ring, values)
        before, after = 1.0, 1.0
        if self._op == hvd.Average:
            before = 1 / self.settings.gradient_predivide_factor
            after = self.settings.gradient_predivide_factor / ring.size
        packed = [self._compression.compress(_scaled(value, before)) for value in values]
        sums = self._sum(ring, [tensor for tensor, _ in packed], keys)
        return [
            _scaled(self._compression.decompress(total, context), after)
            for total, (_, context) in zip(sums, packed, strict=True)
        ]

    def _sum(self, ring: Ring, tensors: list[Any], keys: list[int]) -> list[Any]:
        if isinstance(self._parts, int):
            # The last layers' gradients are there first.
            return ring.sum(tensors[::-1], self._parts)[::-1]
        sums: dict[int, Any] = {}
        grouped = {key for part in self._parts for key in part}
        parts = [*self._parts, *[[key] for key in keys if key not in grouped]]
        for part in parts:
            indices = [i for i, key in enumerate(keys) if key in part]
            if indices:
                sums.update(zip(indices, ring.sum([tensors[i] for i in indices]), strict=True))
        return [sums[i] for i in range(len(tensors))]

    def _gather(self, hvd: Any, ring: Ring, grad: Gradient) -> Gradient | None:
        if self._op == hvd.Adasum:
            raise ConfigError(
                f"{self._who}(op=hvd.Adasum) has to combine a sparse gradient, as that of an "
                "Embedding, and Adasum is defined on dense ones. Add sparse_as_dense=True."
            )
        with tf.device(self.settings.device_sparse):
            pieces = pieces_of(grad)
            slices: list[Any] = [piece.value for piece in pieces]
            gathered = [
                tf.IndexedSlices(
                    ring.gather(rows.values), ring.gather(rows.indices), rows.dense_shape
                )
                for rows in slices
            ]
            total = joined(pieces, gathered, ring.size)
        return _scaled(total, 1 / ring.size) if self._op == hvd.Average else total

    def _densified(self, grad: Gradient | None) -> Gradient | None:
        sparse = isinstance(grad, tf.IndexedSlices)
        return tf.convert_to_tensor(grad) if sparse and self.settings.sparse_as_dense else grad

    def _check(self, hvd: Any) -> None:
        settings, who = self.settings, self._who
        if self._op not in (hvd.Average, hvd.Sum, hvd.Adasum):
            raise ConfigError(
                f"{who}(op={settings.op!r}) is no way to combine gradients. Choose hvd.Average, "
                "hvd.Sum or hvd.Adasum."
            )
        if settings.gradient_predivide_factor != 1.0 and self._op != hvd.Average:
            raise ConfigError(
                f"{who}(gradient_predivide_factor={settings.gradient_predivide_factor}) splits the "
                "division of an average, and op is another. Leave one of the two out."
            )
        if self._op == hvd.Adasum and self._compression is not hvd.Compression.none:
            raise ConfigError(
                f"{who}(op=hvd.Adasum) combines gradients in full precision, and compression is "
                "set. Leave one of the two out."
            )
        groups = settings.groups or settings.num_groups
        if isinstance(groups, int) and groups < 0:
            raise ConfigError(
                f"{who}(groups={groups}) is not a number of groups. Give a positive number, or a "
                "list of lists of variables."
            )


def initialized(who: str) -> ModuleType:
    """The module `horovod.tensorflow`, in a process that is a member of a job.

    Args:
        who: the function of Horovod that the program called.

    Raises:
        ConfigError: if Horovod is missing or has not been initialised.
    """
    hvd = load()
    if not hvd.is_initialized():
        raise ConfigError(
            f"{who} was used before hvd.init(), so this process does not know its rank. Call "
            "hvd.init() at the start of the program."
        )
    return hvd


def refuse_strategy(who: str) -> None:
    """Refuses to average what a strategy averages.

    Raises:
        ConfigError: in the scope of a strategy with several replicas.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        name = getattr(strategy, "name", type(strategy).__name__)
        raise ConfigError(
            f"{who} is used under the strategy {name!r}, which averages over its "
            f"{strategy.num_replicas_in_sync} replicas itself. Take Horovod's lines out of the "
            "program, or keep them and start it by horovodrun, without a strategy."
        )


def ring_of(process_set: ProcessSet | None = None) -> Ring | None:
    """The processes of a process set, or None if there is no other to exchange with.

    Args:
        process_set: by default all processes.

    Raises:
        ConfigError: if the process set has not been made known to Horovod.
    """
    hvd = load()
    members = hvd.global_process_set if process_set is None else process_set
    if members.process_set_id is None:
        raise ConfigError(
            f"{members} is not known to Horovod. Give it to hvd.init(process_sets=[...])."
        )
    if not members.included() or members.size() == 1:
        return None
    return _ring(members, members.size(), hvd.rank())


def native(variable: Any) -> Any:
    """TensorFlow's variable of a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


@functools.lru_cache(maxsize=64)
def _ring(process_set: ProcessSet, size: int, rank: int) -> Ring:
    del size, rank  # They distinguish successive jobs that one process is a member of.
    return Ring(Members(load(), process_set))


def _key(variable: object) -> int:
    return id(native(variable))


def _scaled(grad: Gradient | None, factor: float) -> Gradient | None:
    if grad is None or factor == 1.0:
        return grad
    if is_sparse(grad):
        values = grad.values * tf.cast(factor, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _refuse_xla(who: str) -> None:
    """Refuses a function that XLA compiles: Horovod's operations cannot be part of it.

    Raises:
        ConfigError: while such a function is traced.
    """
    if in_xla():
        raise ConfigError(
            f"{who} is used in a function that was made with jit_compile=True, and XLA cannot "
            "compile Horovod's operations. Compile the model, or decorate the function, with "
            "jit_compile=False."
        )


# Ways of applying averaged gradients: after one backward pass or several.

#: Set while gradients are applied that have been averaged already.
averaged = Flag()

Apply = Callable[[list[Any]], None]


class Counting(Protocol):
    """Counts the batches that an optimizer was given."""

    _iterations: KerasVariable


class Applier:
    """Averages gradients and hands them on.

    Args:
        averager: averages them.
        passes: the number of backward passes whose gradients are added up before.
        average_passes: divides the sum by `passes`.

    Attributes:
        counter: a variable that counts the passes since the last update; None before the first.
    """

    def __init__(self, averager: Averager, passes: int, average_passes: bool) -> None:
        self.averager = averager
        self.passes = passes
        self._factor = 1 / passes if average_passes else 1.0
        self._sums: dict[int, Any] = {}
        self.counter: Variable | None = None

    def __call__(
        self, optimizer: Counting, grads: Sequence[Any], variables: Sequence[Any], apply: Apply
    ) -> None:
        """Applies the averages of gradients, or adds them to those of the passes before.

        Args:
            optimizer: the counter of the passes.
            grads: this process's gradients.
            variables: the variables of the gradients.
            apply: applies the averages.
        """
        if self.passes == 1:
            with averaged.up():
                apply(self.averager(grads, variables))
            return
        sums = self._add(list(grads), variables)
        counter = self.counter
        assert counter is not None

        def update() -> None:
            scaled = [None if s is None else s * tf.cast(self._factor, s.dtype) for s in sums]
            with averaged.up():
                apply(self.averager(scaled, variables))
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            counter.assign(0)

        def wait() -> None:
            optimizer._iterations.assign_add(1)

        tf.cond(tf.equal(self.counter, self.passes), update, wait)

    def _add(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds gradients to the sums, which are variables, and returns these."""
        sums = []
        for grad, variable in zip(grads, variables, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                if not self.averager.settings.sparse_as_dense:
                    raise ConfigError(
                        f"backward_passes_per_step={self.passes} adds up gradients, and that of "
                        f"{variable.name!r} is sparse. Add sparse_as_dense=True."
                    )
                grad = tf.convert_to_tensor(grad)
            sums.append(None if grad is None else self._sum_of(grad, variable))
        if self.counter is None:
            with tf.init_scope():
                self.counter = tf.Variable(0, trainable=False, name="collected_passes")
        for grad, total in zip(grads, sums, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        self.counter.assign_add(1)
        return sums

    def _sum_of(self, grad: Gradient, variable: KerasVariable) -> Variable:
        if id(variable) not in self._sums:
            shape, dtype = variable.shape, grad.dtype
            with tf.init_scope():
                zeros = tf.zeros(shape, dtype)
                self._sums[id(variable)] = tf.Variable(zeros, trainable=False, name="collected")
        return self._sums[id(variable)]


def applier_of(optimizer: object) -> Applier | None:
    """The object that averages an optimizer's gradients, if the optimizer has been distributed."""
    result = getattr(optimizer, "_tfdist_applier", None)
    return result if isinstance(result, Applier) else None


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer's variables, as Keras does with the first gradients."""
    if not optimizer.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def average_before_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets dynamic loss scaling look for infinities in averages, which all processes have alike.

    One that found infinities in its own gradients would skip an update in which the others wait for
    it.
    """

    @functools.wraps(original)
    def apply(
        self: LossScaler,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> object:
        applier = applier_of(self.inner_optimizer)
        if applier is None or averaged.is_up:
            return original(self, grads, trainable_variables)
        variables = list(trainable_variables or self._trainable_variables)
        build(self, variables)
        applier(
            self.inner_optimizer, list(grads), variables, lambda g: original(self, g, variables)
        )
        return None

    return apply
