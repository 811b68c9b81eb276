"""The context of one replica while it runs a Keras step: its share of the global batch.

A replica computes its loss as if it were alone, as the mean over its own examples. The gradients
of the replicas are then averaged, each weighted by the share of the examples it saw::

    g = sum_r (n_r / N) g_r        n_r examples on replica r, N in the global batch

which is the gradient that one process computes on the whole batch, whatever the n_r are, and for
losses written by hand in a `train_step` too. Stock Keras divides every loss by the number of
replicas and sums, which is the mean of the replicas' means (keras#19969).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._keras import global_state
from tfdist._tf.collectives import gather_alike
from tfdist._tf.distribute import is_distributed
from tfdist.comm.batch_dependence import Dependence, is_symbolic
from tfdist.comm.batch_sharding import Slice
from tfdist.comm.replica_collectives import is_sparse, sum_over_replicas
from tfdist.errors import EquivalenceWarning
from tfdist.keras.example_pairs import ROWS, Examples, Meeting
from tfdist.keras.replica_attributes import Turns
from tfdist.types import (
    DType,
    Gradient,
    Layer,
    Model,
    Optimizer,
    SomeGradient,
    Structure,
    Tensor,
)
from tfdist.utils.messages import warn
from tfdist.utils.thread_state import Current

#: Places in which examples may meet, beside layers of the program's own; see `Step.note_meeting`.
LOSS, PREDICTED = "the loss", "the predictions"
KEPT = "a value that the step gives to a weight, a metric or a log"
GRADIENT = "a gradient function (tf.custom_gradient)"
COMPUTED = "the values that the step computes for the model, a loss, a metric or an optimizer"
_LAYER = "layer"
_GATHER = "tf.distribute.get_replica_context().all_gather({}, axis=0)"
#: For each place, in what else examples meet there, and what to do.
_MEETINGS = {
    LOSS: (
        "in contrastive losses and in those with statistics of the batch",
        "Use a compiled loss, or a keras.losses.Loss in the train_step, which tfdist calls with "
        "the whole batch; or gather what they are computed from first: "
        f"{_GATHER.format('embeddings')}.",
    ),
    COMPUTED: (
        "in those that are divided by the batch's mean, its largest value or their number",
        "Compute them in the data set, by a map after its batch, or in a compiled loss; or gather "
        f"what they are computed from first: {_GATHER.format('x')}.",
    ),
    KEPT: (
        "in memory banks, and in statistics of pairs",
        "Compute it of values that are gathered first: "
        f"{_GATHER.format('x')}, or train on one replica.",
    ),
    GRADIENT: (
        "in a norm of all gradients, in those of weights that are clipped, and in those that are "
        "divided by the number of examples",
        "Change each example's gradients by themselves, as tf.clip_by_norm does with axes=[1], "
        "those of weights in the optimizer (clipnorm, global_clipnorm), and take the mean in the "
        "loss.",
    ),
    PREDICTED: (
        "in ranks, and in shares of a sum over the batch",
        "Compute these of what predict returns, which is the whole batch's.",
    ),
    _LAYER: (
        "in a normalization by statistics of the batch",
        f"Gather the inputs first: {_GATHER.format('inputs')}; for normalization take "
        "keras.layers.BatchNormalization(synchronized=True).",
    ),
}


class Call(NamedTuple):
    """A call of a loss, or of a metric's function, which can be made again on other examples.

    Attributes:
        compute: the function of labels and predictions.
        dtype: the type that its arguments are converted to.
        arguments: the labels and predictions of this replica.
    """

    compute: Callable[[Any, Any], Any]
    dtype: str | None
    arguments: tuple[Structure, Structure]

    @property
    def name(self) -> str:
        """The name of the function, or of the loss that it is a method of."""
        function = getattr(self.compute, "func", self.compute)
        owner = getattr(function, "__self__", None)
        return str(getattr(owner, "name", None) or getattr(function, "__name__", "a function"))


@dataclasses.dataclass(frozen=True)
class Step:
    """A replica's share of one Keras step.

    Attributes:
        model: the Keras model whose `train_step` or `test_step` runs.
        count: examples on this replica, a scalar int64 tensor; may be 0.
        total: examples in the global batch, a scalar int64 tensor.
        size: the number of examples of each replica if it is known when the step is traced, and
            the same on all.
        replicas: number of replicas.
        is_static: whether that size is a constant of the step's graph: see `open_batch`.
        assigned: layer weights that were assigned in this step, by `id`, in order, each with the
            value that it was given last.
        final_losses: losses of Keras's own `train_step`, of which an optimizer takes the gradients
            as they are, by `id`, each with the optimizer.
        scaled_losses: losses that are weighed before their gradients are taken, such as those that
            an optimizer has scaled, by `id`, each with the optimizer.
        means: tensors, by `id`, whose average over the replicas is the whole batch's value.
        depends: whether a tensor of the step's graph depends on the batch.
        held: tensors, by `id`, each with how it holds the examples: the batch, and what is known of
            others, such as those of the rows of all replicas. A search goes no further.
        gathered: the tensors that the program has gathered over the replicas.
        outputs: the outputs of layers, by `id`.
        settled: those of Keras's layers, and of layers that are known to mix a batch, by `id`, each
            with how it holds the examples.
        calls: the losses, and the functions of metrics, that are being computed, the innermost
            last.
        exchanges_at_tape: whether gradients are exchanged where a tape returns them, since the step
            changes them before it applies them.
        index: the number of this part of the batch, if it is not the replica's.
    """

    model: Model
    count: Tensor
    total: Tensor
    size: int | None
    replicas: int
    assigned: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    final_losses: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    scaled_losses: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    means: dict[int, Any] = dataclasses.field(default_factory=dict)
    depends: Dependence = dataclasses.field(default_factory=Dependence)
    held: dict[int, tuple[Any, Examples]] = dataclasses.field(default_factory=dict)
    gathered: list[Any] = dataclasses.field(default_factory=list)
    outputs: dict[int, Any] = dataclasses.field(default_factory=dict)
    settled: dict[int, tuple[Any, Examples]] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    exchanges_at_tape: bool = False
    index: Tensor | int | None = None
    is_static: bool = False

    @property
    def gradients(self) -> dict[int, Any]:
        """Gradients of weights that tapes have returned, by `id`: no example is in them alone."""
        return self.depends.reduced

    def beside_gathered(self) -> Step:
        """The step for values that are assigned: what was gathered is the same on all replicas.

        In a loss it has gradients, which are each replica's own.
        """
        if not self.gathered:
            return self
        return dataclasses.replace(self, depends=self.depends.beside(self.gathered))

    def averages(self) -> dict[int, Any]:
        """Tensors, by `id`, whose average over the replicas is the whole batch's value.

        Losses are brought into a form whose gradients are means, but one that is scaled is weighed.
        """
        return self.means if self.scaled_losses else {**self.means, **self.gradients}

    def share(self, dtype: DType | str = tf.float32) -> Tensor:
        """`count / total`: the weight of this replica in an average over examples."""
        if self.even:
            return tf.constant(1.0 / self.replicas, dtype)
        return tf.cast(self.count / self.total, dtype)

    def per_share(self, dtype: DType | str) -> Tensor:
        """`total / count`; zero if this replica has no examples."""
        return tf.math.divide_no_nan(tf.ones([], dtype), self.share(dtype))

    def weigh(self, value: SomeGradient) -> SomeGradient:
        """`value * share`; exactly zero if this replica has no examples, even of NaN."""
        return self._times(value, self.share(value.dtype))

    def unweigh(self, value: SomeGradient | None) -> SomeGradient | None:
        """`value / share`; exactly zero if this replica has no examples, and None of None."""
        return None if value is None else self._times(value, self.per_share(value.dtype))

    def scale_gradient(self, value: Tensor, *, inverse: bool = False) -> Tensor:
        """A tensor as it is, whose gradient is multiplied by the replica's share, or divided by it.

        The gradient of what is exchanged between replicas is the sum of their gradients. A
        replica's loss counts by its share `w` of the examples, so on replica `s` that gradient is
        `sum_r w_r u_r / w_s`: the exchange of gradients multiplies by `w_s` again. A loss that an
        optimizer has scaled is weighed by then, and its gradients are not (see `weigh_scaled`).
        """

        def identity(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            def grad(upstream: Tensor) -> Tensor:
                if self.scaled_losses:
                    return upstream
                share = self.share(upstream.dtype)
                if inverse:
                    return tf.math.divide_no_nan(upstream, share)
                return tf.math.multiply_no_nan(upstream, share)

            return tf.identity(x), grad

        return tf.custom_gradient(identity)(value)

    def note_mean(self, tensor: Tensor) -> Tensor:
        """Notes that a tensor's average over the replicas is its value on the whole batch."""
        self.means[id(tensor)] = tensor
        return tensor

    @property
    def even(self) -> bool:
        """Whether all replicas are known to hold the same number of examples."""
        return self.size is not None

    def added_once(self, value: Tensor) -> Tensor:
        """A replica's part of a tensor that is the same on all, so that the parts add up to it.

        The first replica has all of a whole number. Its value is computed on the others too: they
        may have to take part in an exchange for it.
        """
        return self.weigh(value) if value.dtype.is_floating else self.of_first(value)

    def of_first(self, value: Tensor) -> Tensor:
        """The first replica's part of a sum that is its value; zeros on the others."""
        index = self.index
        if index is None:
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.control_dependencies([value]):
            return tf.where(tf.equal(index, 0), value, tf.zeros_like(value))

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the batch."""
        return self.replicas == 1

    def note_meeting(self, found: Meeting, place: Layer | str = LOSS) -> None:
        """Notes that examples of the batch meet, of which a replica has its own only.

        Args:
            found: where they meet.
            place: the layer of the program's own in which that is, or one of the places above.
        """
        if isinstance(place, str):
            subject, such, remedy = place, *_MEETINGS[place]
        else:
            subject, (such, remedy) = f"the layer {place.name!r}", _MEETINGS[_LAYER]
        if found.by_place:
            such = (
                "in MixUp, in groups of neighbours, and where examples are chosen by their places"
            )
            if place == LOSS:
                remedy = (
                    "Mix or choose them in the data set, by a map after its batch, which sees the "
                    f"whole batch; or gather them first: {_GATHER.format('x')}."
                )
        meet, cannot = "meet", "is not"
        if found.hidden:
            meet, cannot = "may meet", "may not be"
            such = "a function of Python hides what it computes"
        warn(
            f"The examples of a batch {meet} in {subject} (at {found.where}), as {such}. Each of "
            f"the {self.replicas} replicas sees its own examples only, so this {cannot} what one "
            f"process computes. {remedy}",
            EquivalenceWarning,
        )

    def note_held(self, tensor: Tensor, examples: Examples) -> None:
        """Notes how a tensor holds the examples."""
        self.held[id(tensor)] = (tensor, examples)

    @property
    def known(self) -> dict[int, Examples]:
        """For tensors, by `id`, how they hold the examples."""
        return {key: examples for key, (_, examples) in self.held.items()}

    def note_batch(self, batch: Structure) -> None:
        """Notes the tensors of the batch, in whose making no examples meet.

        An example of a ragged tensor has any number of its flat values.
        """
        for leaf in tf.nest.flatten(batch):
            if isinstance(leaf, tf.RaggedTensor):
                self.depends.note_chosen(leaf.flat_values)
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                parts = tf.nest.flatten(leaf, expand_composites=True)
                self.depends.components.update((id(each), each) for each in parts)
                for part in parts:
                    self.note_held(part, Examples(ROWS, in_order=False))
            elif isinstance(leaf, tf.Tensor) and leaf.shape.rank:
                self.note_held(leaf, Examples(ROWS))

    def gather(self, rows: list[Any], where: str) -> tuple[list[Any], Tensor]:
        """Gathers the examples of all replicas, with gradients.

        Args:
            rows: tensors of one row for each of this replica's examples.
            where: the op that needs them.

        Returns:
            The tensors of one row for each example of the batch, and the number of the first row
            that is this replica's.
        """
        del where
        context = tf.distribute.get_replica_context()
        size = tf.shape(rows[0])[0] * self.present(tf.int32)
        if self.even:
            start = size * tf.cast(context.replica_id_in_sync_group, tf.int32)
        else:
            rows = [each[:size] for each in rows]
            for each in rows:  # All that count.
                self.note_held(each, Examples(ROWS))
            sizes = context.all_gather(size[None], axis=0)
            start = tf.cumsum(sizes, exclusive=True)[context.replica_id_in_sync_group]
        return [context.all_gather(each, axis=0) for each in rows], start

    def largest(self, numbers: Tensor, where: str) -> Tensor:
        """The largest over the replicas of each number of a vector.

        Args:
            numbers: integers that this replica's examples give.
            where: the op that needs them.
        """
        del where
        every = gather_alike(tf.distribute.get_strategy(), numbers[None])
        result = tf.reduce_max(every, axis=0)
        if is_symbolic(result):
            self.depends.note_shared(result)
        return result

    def weigh_scaled(self, loss: Tensor, optimizer: Optimizer) -> Tensor:
        """A loss that an optimizer has scaled, weighed before its gradients are computed.

        The gradients in half precision are then those of the whole batch's mean, so that they
        overflow at the same scale as on one device; those of a replica's own mean are larger.
        """
        scaled = self.note_mean(self.weigh(loss))
        self.scaled_losses[id(scaled)] = (scaled, optimizer)
        return scaled

    def weigh_final(self, targets: Sequence[Tensor]) -> Tensor | None:
        """The weight that the gradient of a loss begins with; None if the gradients are weighed.

        A number is multiplied so in place of each weight's gradient, which takes as long as to
        read and write them all.

        Args:
            targets: the tensors whose gradient is taken.
        """
        final = [self.final_losses.get(id(each)) for each in targets]
        if len(final) != 1 or final[0] is None or self.scaled_losses:
            return None
        self.scaled_losses[id(targets[0])] = final[0]
        return self.share(targets[0].dtype)

    def weigh_gradient(self, gradient: Gradient, optimizer: Optimizer | None) -> Gradient:
        """A gradient of the replica's own mean, weighed; see `weigh`.

        If the optimizer has scaled the loss, that has been weighed, and the gradient with it.
        """
        if any(by is optimizer for _, by in self.scaled_losses.values()):
            return gradient if self.even else self._times(gradient, self.present(gradient.dtype))
        return self.weigh(gradient)

    def _times(self, value: SomeGradient, factor: Tensor) -> SomeGradient:
        if is_sparse(value):
            return tf.IndexedSlices(value.values * factor, value.indices, value.dense_shape)
        return value * factor if self.even else tf.math.multiply_no_nan(value, factor)

    def present(self, dtype: DType | str = tf.float32) -> Tensor:
        """1 on a replica that has examples in this step, 0 on one that has none."""
        return tf.constant(1, dtype) if self.even else tf.cast(self.count > 0, dtype)

    def sum(self, values: Structure) -> Any:
        """Sums tensors over the replicas, in the middle of the step.

        Args:
            values: a tensor or a list of tensors.
        """
        return tf.nest.pack_sequence_as(values, sum_over_replicas(tf.nest.flatten(values)))

    def keep_if_empty(self, new: Tensor, old: Tensor) -> Tensor:
        """`new`, or `old` on a replica that has no examples in this step."""
        if self.even:
            return new
        return tf.where(self.count > 0, new, old)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def keras_state(
    turns: Turns | None = None,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which a replica has the calling thread's state of Keras, and its own of layers.

    Keras keeps its dtype policy, custom objects and more for each thread. TensorFlow runs a replica
    on a thread of its own, where layers that are made in the first step would have none of it.

    Args:
        turns: keep the attributes of layers apart, too.
    """
    state, caller = dict(vars(global_state.GLOBAL_STATE_TRACKER)), threading.get_ident()

    @contextlib.contextmanager
    def carried() -> Iterator[None]:
        if threading.get_ident() != caller:
            # Lists are stacks, such as that of name scopes: each replica has its own.
            own = {key: list(v) if isinstance(v, list) else v for key, v in state.items()}
            vars(global_state.GLOBAL_STATE_TRACKER).update(own)
        with contextlib.nullcontext() if turns is None else turns.replica():
            yield

    return carried


_current: Current[Step | None] = Current(None)

#: The step whose layers are called, for a strategy that does not make it the current one.
settling: Current[Step | None] = Current(None)


def current_step() -> Step | None:
    """The step that the calling replica runs, or None outside of a Keras step."""
    return _current.value


def weighed(grads: list[Any], optimizer: Optimizer | None) -> list[Any]:
    """Gradients times this replica's share of the examples, so that their sum is the average.

    Outside of a Keras step, where a training loop scales its own loss, they are left alone.
    """
    step = current_step()
    return grads if step is None else [step.weigh_gradient(grad, optimizer) for grad in grads]


def entered(step: Step | None) -> contextlib.AbstractContextManager[None]:
    """Makes `step` the current one on this thread; None as if outside of a Keras step."""
    return _current.set(step)


#: The attribute of a graph that holds what loops written by hand have exchanged in it.
_EXCHANGED = "_tfdist_exchanged"


def note_exchanged(tensors: Sequence[Tensor]) -> None:
    """Notes that tensors of a graph have the values of the whole batch."""
    graph = tf.compat.v1.get_default_graph()
    setattr(graph, _EXCHANGED, [*exchanged_in_loop(), *tensors])


def exchanged_in_loop() -> list[Tensor]:
    """The tensors of the graph that is traced whose values are those of the whole batch."""
    return list(getattr(tf.compat.v1.get_default_graph(), _EXCHANGED, ()))


def batch_size_of(data: Structure) -> tuple[int | None, Any]:
    """Leading dimension of a batch.

    Args:
        data: any nest of dense, ragged or sparse tensors, each of shape `(batch, ...)`; `None`s and
            scalars are passed over.

    Returns:
        The static size, or None if it is not known, and the size as an int64 scalar tensor.

    Raises:
        ValueError: if no component has a batch dimension.
    """
    leaf = _batched(data)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.shape[0], tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.shape[0], tf.cast(leaf.dense_shape[0], tf.int64)
    return leaf.shape[0], tf.shape(leaf, tf.int64)[0]


def static_size_of(data: Structure) -> int | None:
    """The static size that `batch_size_of` gives, without an op in the graph that is traced."""
    size: int | None = _batched(data).shape[0]
    return size


def _batched(data: Structure) -> Any:
    """The first component of a batch that has a batch dimension."""
    for leaf in tf.nest.flatten(data):
        if leaf is None or isinstance(leaf, (str, bytes)) or is_distributed(leaf):
            continue
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        if tensor.shape.rank is None or tensor.shape.rank > 0:
            return tensor
    raise ValueError(
        "The batch has no component with a batch dimension, so tfdist cannot tell how many "
        "examples each replica holds. Let the data set yield batches of shape (batch, ...)."
    )


def measure(model: Model, data: Structure, replicas: int) -> Step:
    """Finds out each replica's share of a batch. Must be called in a replica context.

    A `Slice` holds it. For other batches replicas agree on the total by an all-reduce of one
    number, unless a function is traced with a static batch size: tfdist's own data sets have one
    only if all replicas' batches are alike.
    """
    if isinstance(data, Slice):
        size, _ = batch_size_of(data.batch)
        size = None if tf.executing_eagerly() else size
        return Step(model, data.count, data.total, size, replicas)
    size, count = batch_size_of(data)
    if size is not None and not tf.executing_eagerly():
        total = tf.constant(size * replicas, tf.int64)
        return Step(model, count, total, size, replicas)
    context = tf.distribute.get_replica_context()
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, count)
    return Step(model, count, total, None, replicas)


def at_least_one(batch: Structure, count: Tensor) -> Structure:
    """The batch, or one example of zeros in place of an empty batch.

    Layers are not made for empty batches: TensorFlow's convolution returns a wrong shape for one.
    Values that come from the stand-in count for nothing: its share is 0.

    Args:
        batch: any nest of tensors of shape `(batch, ...)`; ragged and sparse ones are left alone.
        count: the number of examples, a scalar tensor.
    """

    def fill(leaf: Structure) -> Structure:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf

        def stand_in() -> Tensor:
            return tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)

        filled = tf.cond(count > 0, lambda: leaf, stand_in)
        return tf.ensure_shape(filled, [None, *leaf.shape[1:]])

    return tf.nest.map_structure(fill, batch)
