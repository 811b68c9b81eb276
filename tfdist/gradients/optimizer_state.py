"""The gradient exchanges of an optimizer, what of them is saved, and its learning rate's factor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._keras import KerasSaveable
from tfdist._tf.distribute import outside_of_function
from tfdist.config.gradient_options import GradientOptions
from tfdist.errors import ConfigError
from tfdist.gradients.exchange import Exchange
from tfdist.gradients.modes import Apply
from tfdist.gradients.reducer import make_variable
from tfdist.types import KerasVariable, Optimizer, Scalar, Strategy, Tensor, Variable

__all__ = ["Updater", "optimizers_by_rule", "updater_of"]

#: The attribute of an optimizer under which Keras finds, saves and loads the state.
_ATTRIBUTE = "tfdist_updates"

#: The attribute of a graph that names the exchange of each weight that is averaged now and then.
_AVERAGED = "_tfdist_averaged"

_lock = threading.RLock()

#: For each strategy the optimizers that have an updater, in the order in which they were given it.
_made: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class Updater(KerasSaveable):  # type: ignore[misc]
    """The exchanges of an optimizer: one for each set of weights that it is given gradients of.

    Keras saves it with the optimizer, in a group of its own that plain Keras passes over.

    Args:
        strategy: the strategy.
        optimizer: the optimizer.
        rule: the rule of its exchanges.

    Attributes:
        rule: the rule of its exchanges.
        rate: the learning rate's factor.
        changed: variables that replicas change by themselves, noted when a step is traced.
    """

    def __init__(self, strategy: Strategy, optimizer: Optimizer, rule: GradientOptions) -> None:
        self.rule = rule
        self._strategy = weakref.ref(strategy)
        self._optimizer = weakref.ref(optimizer)
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._flushes: dict[tuple[tuple[int, ...], bool, bool], Callable[[], Any]] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self.rate = Rate(strategy, rule)
        self.changed: dict[int, Any] = {}

    def step(
        self,
        indices: tuple[int, ...],
        weights: Sequence[Any],
        values: Sequence[Any],
        shares: tuple[Any, Any],
        apply: Apply,
    ) -> Tensor:
        """Takes the gradients of one batch, in a replica context; see `Exchange.step`.

        Args:
            indices: which of the optimizer's weights these are.
            weights: TensorFlow's variables.
            values: their gradients, weighted.
            shares: this replica's examples, and those of the batch.
            apply: applies gradients.

        Raises:
            ConfigError: if weights that are averaged now and then have another optimizer as well.
        """
        shaped = [
            value if isinstance(value, tf.IndexedSlices) else tf.ensure_shape(value, weight.shape)
            for weight, value in zip(weights, values, strict=True)
        ]
        exchange = self._exchange(indices, weights, shaped)
        if self.rule.periodic:
            self._check_alone(indices, weights)
        return exchange.step(shaped, *shares, apply)

    def flush(
        self,
        apply: Callable[[tuple[int, ...], list[Any]], None],
        *,
        batches: bool,
        late: bool = True,
    ) -> None:
        """Applies pending updates, outside of any replica; on all workers at the same place.

        Args:
            apply: applies gradients of the weights of some indices.
            batches: make an update of fewer batches than are accumulated.
            late: apply gradients that wait, and average weights that differ.
        """
        strategy = self._strategy()
        for indices, exchange in list(self._exchanges.items()):
            if strategy is None or not exchange.pending(batches=batches, late=late):
                continue
            key = (indices, batches, late)
            if key not in self._flushes:
                self._flushes[key] = _compiled(strategy, exchange, apply, key)
            self._flushes[key]()

    def _check_alone(self, indices: tuple[int, ...], weights: Sequence[Any]) -> None:
        """Refuses weights that another exchange of the same function has, too.

        An exchange averages the changes since its first step after an average. If the steps of
        another one lie between, replicas begin with weights of their own, and keep the difference.
        """
        outermost, graph = None, tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):
            outermost, graph = graph, graph.outer_graph
        if outermost is None:
            return  # Eager steps do not show which belong together.
        with _lock:
            known = getattr(outermost, _AVERAGED, {})
            setattr(outermost, _AVERAGED, known)
            for weight in weights:
                owner = known.setdefault(id(weight), (id(self), indices))
                if owner != (id(self), indices):
                    raise ConfigError(
                        f"mode={self.rule.mode!r} conflicts with two optimizers, or two calls of "
                        f"one, that update {weight.name!r} in a step: each averages the weights "
                        "from where its own steps began. Update a weight once in a step, or choose "
                        "mode='sync'."
                    )

    def _exchange(
        self, indices: tuple[int, ...], weights: Sequence[Any], values: Sequence[Any]
    ) -> Exchange:
        with _lock:
            if indices not in self._exchanges:
                strategy = self._strategy()
                assert strategy is not None
                dense = [i for i, v in enumerate(values) if not isinstance(v, tf.IndexedSlices)]
                pairs = zip(weights, values, strict=True)
                specs = [tf.TensorSpec(weight.shape, value.dtype) for weight, value in pairs]
                made = Exchange(strategy, self.rule, weights, specs, dense, self._extras)
                self._exchanges[indices] = made
                waiting = self._loaded.pop(_key(indices), None)
                if waiting is not None:
                    with outside_of_function(strategy):
                        made.restore(waiting)
            return self._exchanges[indices]

    def _extras(self) -> list[Any]:
        result = list(self.changed.values())
        optimizer = self._optimizer()
        if optimizer is not None and self.rule.average_state:
            result += [v._value for v in optimizer.variables if v is not optimizer.learning_rate]
        elif optimizer is not None and optimizer.use_ema:
            # At the end of `fit` Keras gives the weights these averages of them.
            result += [v._value for v in optimizer._model_variables_moving_average]
        return result

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes the state of an exchange that a flush leaves, such as error feedback."""
        written = False
        for indices, exchange in self._exchanges.items():
            for name, variable in exchange.saved().items():
                store[f"{_key(indices)}.{name}"] = tf.convert_to_tensor(variable).numpy()
                written = True
        if written:
            store["rule"] = np.frombuffer(self.rule.described.encode(), np.uint8)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads the values that `save_own_variables` has written.

        Raises:
            ConfigError: if the rule was another.
        """
        if "rule" not in store.keys():  # noqa: SIM118
            return
        theirs = bytes(np.asarray(store["rule"])).decode()
        if theirs != self.rule.described:
            raise ConfigError(
                f"The checkpoint is of a training with {theirs!r}, and this one is with "
                f"{self.rule.described!r}: what it keeps from step to step does not fit. Give the "
                "same options as then; or load the weights into a model without optimizer, and "
                "compile it afterwards."
            )
        result: dict[str, dict[str, Any]] = {}
        for key in store.keys():  # noqa: SIM118
            group, _, name = key.partition(".")
            if name:
                result.setdefault(group, {})[name] = np.asarray(store[key])
        for indices, exchange in self._exchanges.items():
            exchange.restore(result.pop(_key(indices), {}))
        self._loaded = result


def updater_of(optimizer: Optimizer, strategy: Strategy) -> Updater | None:
    """The updater of an optimizer, made at the first call; None if gradients are plain.

    Args:
        optimizer: a Keras optimizer.
        strategy: the strategy that it trains under.
    """
    rule = getattr(strategy, "rule", None)
    if rule is None or rule.is_plain:
        return None
    with _lock:
        result = vars(optimizer).get(_ATTRIBUTE)
        if not isinstance(result, Updater) or result.rule != rule:
            result = Updater(strategy, optimizer, rule)
            object.__setattr__(optimizer, _ATTRIBUTE, result)
            alive = [each for each in _made.get(strategy, ()) if each() not in (None, optimizer)]
            _made[strategy] = [*alive, weakref.ref(optimizer)]
        return result


def optimizers_by_rule(strategy: Strategy) -> list[Any]:
    """The optimizers with an updater: in the same order on all workers.

    Args:
        strategy: the strategy that they train under.
    """
    alive = (reference() for reference in _made.get(strategy, ()))
    return [each for each in alive if each is not None]


def _key(indices: tuple[int, ...]) -> str:
    """A name of some of an optimizer's weights: their indices, runs of them shortened."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "_".join(f"{first}-{last}" for first, last in runs)


def _compiled(
    strategy: Strategy,
    exchange: Exchange,
    apply: Callable[[tuple[int, ...], list[Any]], None],
    what: tuple[tuple[int, ...], bool, bool],
) -> Callable[[], Any]:
    indices, batches, late = what

    def on_replica() -> None:
        exchange.flush(lambda grads: apply(indices, grads), batches=batches, late=late)

    run: Callable[[], Any] = tf.function(lambda: strategy.run(on_replica), autograph=False)
    return run


class Rate:
    """The factor of an update's learning rate.

    A rule multiplies by the examples of an update over those that the rate was chosen for, or by
    the square root of that. The factor grows from 1 in the first updates (Goyal et al. 2017,
    arXiv:1706.02677). The largest batch so far counts, as the last one of an epoch may be smaller.

    Args:
        strategy: the strategy.
        rule: has the kind of scaling.
    """

    def __init__(self, strategy: Strategy, rule: GradientOptions) -> None:
        self._rule = rule
        self._is_notified = rule.lr_rule == "none"
        self._largest: Variable | None = None
        if rule.lr_rule != "none":
            self._largest = make_variable(strategy, "largest_batch", [], tf.int64, shared=True)

    def note_batch(self, total: Tensor | None) -> None:
        """Notes the examples of a batch, in a replica context.

        Args:
            total: examples on all replicas, a scalar; None if they are not known.

        Raises:
            ConfigError: if they are not known and a rule needs them.
        """
        if self._largest is None:
            return
        if total is None:
            raise ConfigError(
                f"lr_rule={self._rule.lr_rule!r} needs the number of examples of a batch, which "
                "only Keras's own steps tell. Train with `fit` or `train_on_batch`, or multiply "
                "the learning rate in the program."
            )
        larger = tf.maximum(self._largest.read_value(), tf.cast(total, tf.int64))
        self._largest.assign(larger)

    def factor(self, iterations: KerasVariable) -> Scalar | None:
        """The factor of the present update, a scalar; None if it is 1.

        Args:
            iterations: the updates before this one.
        """
        rule = self._rule
        factor: Any = 1 / rule.delay if rule.damp and rule.delay > 1 else None
        if self._largest is None:
            return factor
        grown = _grown(rule, tf.cast(self._largest.read_value(), tf.float32))
        if rule.lr_warmup:
            done = tf.cast(iterations + 1, tf.float32) / rule.lr_warmup
            grown = 1 + (grown - 1) * tf.minimum(1.0, done)
        return grown if factor is None else grown * factor

    def notice(self) -> str:
        """A notice for the user, once the size of a batch is known; asked after each step."""
        if self._is_notified:
            return ""
        self._is_notified = True
        batch = int(tf.convert_to_tensor(self._largest))
        rule = self._rule
        times = f" in each of {rule.accumulate} batches" if rule.accumulate > 1 else ""
        warmup = f", reached after {rule.lr_warmup} updates" if rule.lr_warmup else ""
        grown = float(_grown(rule, float(batch)))
        return (
            f"the learning rate is multiplied by {grown:.4g} (lr_rule={rule.lr_rule}: {batch} "
            f"examples{times} of an update, base_batch={rule.base_batch}{warmup})"
        )


def _grown(rule: GradientOptions, batch: Scalar) -> Scalar:
    assert rule.base_batch is not None
    ratio = batch * rule.accumulate / rule.base_batch
    return ratio**0.5 if rule.lr_rule == "sqrt" else ratio
