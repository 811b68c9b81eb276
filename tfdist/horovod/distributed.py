"""Optimizers and tapes whose gradients are averaged over the processes of a Horovod job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import h5py
import keras
import tensorflow as tf

from tfdist._keras import (
    api_export,
    load_optimizer_weights_from_hdf5_group,
    object_registration,
    unwrapped,
)
from tfdist._keras import keras_ops as ops
from tfdist.errors import ConfigError
from tfdist.horovod import program
from tfdist.horovod.averaging import (
    Applier,
    Averager,
    Averaging,
    applier_of,
    averaged,
    build,
    initialized,
    refuse_strategy,
)
from tfdist.types import (
    Gradient,
    GradientTape,
    KerasVariable,
    Layer,
    Model,
    Optimizer,
    Structure,
    Tensor,
)

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "load_model",
]

_WHO, _TAPE = "hvd.DistributedOptimizer", "hvd.DistributedGradientTape"


def DistributedOptimizer(  # noqa: N802
    optimizer: Optimizer,
    name: str | None = None,
    *,
    use_locking: bool = False,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **averaging: Any,
) -> Optimizer:
    """Makes an optimizer average gradients over all processes before it applies them.

    The optimizer itself is changed and returned, with all its state. Clipping, weight decay, moving
    averages and loss scaling act on the average, as on one device. It is saved as the optimizer
    that it was: a saved model needs neither Horovod nor tfdist.

    Args:
        optimizer: a Keras optimizer; or one of `tf.compat.v1.train`, which Horovod itself wraps.
        name: accepted, of no effect.
        use_locking: for optimizers of `tf.compat.v1.train`.
        backward_passes_per_step: gradients of so many batches are added up in each process, then
            averaged over the processes and applied. `optimizer.iterations` counts updates, and
            learning rate schedules are given the number of batches, as with Keras's own
            `gradient_accumulation_steps`.
        average_aggregated_gradients: divides that sum by the number of batches.
        **averaging: see `tfdist.horovod.averaging.Averaging`.

    Raises:
        ConfigError: before `hvd.init()`, under a strategy that averages itself, for an optimizer
            that has been distributed already, and for settings that contradict each other.
    """
    hvd = initialized(_WHO)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return hvd.DistributedOptimizer(
            optimizer,
            name=name,
            use_locking=use_locking,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            **averaging,
        )
    settings = Averaging(**averaging)
    _distribute(optimizer, settings, backward_passes_per_step, average_aggregated_gradients)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Optimizer,
    *args: Any,
    local_layers: Layer | Sequence[Layer] | None = None,
    **kwargs: Any,
) -> Optimizer:
    """`DistributedOptimizer`, but each process keeps the gradients of some layers to itself.

    Args:
        optimizer: a Keras optimizer.
        *args: as of `DistributedOptimizer`.
        local_layers: one built layer or several.
        **kwargs: as of `DistributedOptimizer`.
    """
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    applier = applier_of(unwrapped(distributed))
    if applier is not None:
        applier.averager.keep_local(_weights_of(local_layers))
    return distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: object = None,
    legacy_opts: bool = False,
) -> Model:
    """Loads a compiled model and distributes its optimizer, which keeps its state.

    Args:
        filepath: a `.keras` or `.h5` file.
        custom_optimizers: the program's own optimizer classes.
        custom_objects: the program's own layers, losses and so on, by name.
        compression: as of `DistributedOptimizer`.
        legacy_opts: accepted, of no effect.
    """
    del legacy_opts
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        _restore_state(model, filepath)
        DistributedOptimizer(model.optimizer, compression=compression)
        model.jit_compile = False
    return model


def _restore_state(model: Model, filepath: str | os.PathLike[str]) -> None:
    """Restores an optimizer from an `.h5` file, of which Keras 3 restores two numbers only.

    It builds the optimizer before the model has its weights; such a model cannot be trained.
    """
    optimizer, weights = model.optimizer, model.trainable_variables
    assert optimizer is not None
    if not optimizer.built or optimizer._trainable_variables or not weights:
        return
    optimizer.built = False
    build(optimizer, weights)
    with h5py.File(filepath, "r") as file:
        if "optimizer_weights" in file:
            optimizer.set_weights(load_optimizer_weights_from_hdf5_group(file))


def _weights_of(layers: Layer | Sequence[Layer] | None) -> list[Any]:
    """The trainable weights of one layer, several or none."""
    listed: Any = [] if layers is None else layers
    if isinstance(listed, keras.Layer):
        listed = [listed]
    for layer in listed:
        if not isinstance(layer, keras.Layer):
            raise ConfigError(f"local_layers has {layer!r}, which is not a Keras layer.")
    return [weight for layer in listed for weight in layer.trainable_weights]


class _Distributed(program.OldNames):
    """The first base of a distributed optimizer's class, before the optimizer's own class."""

    _tfdist_settings: tuple[Averaging, int, bool]
    #: Of Keras's optimizers.
    built: bool
    _trainable_variables: list[Any]
    _iterations: KerasVariable

    @property
    def _tfdist_applier(self) -> Applier:
        result = vars(self).get("_tfdist_made")
        if result is None:
            settings, passes, average_passes = self._tfdist_settings
            result = Applier(Averager(settings, _WHO), passes, average_passes)
            object.__setattr__(self, "_tfdist_made", result)
        return result

    def register_local_var(self, variable: KerasVariable) -> None:
        """Leaves the gradient of a variable to each process."""
        self._tfdist_applier.averager.keep_local([variable])

    @property
    def iterations(self) -> Tensor | KerasVariable:
        """The number of updates."""
        count = super().iterations  # type: ignore[misc]
        passes = self._tfdist_settings[1]
        return count if passes == 1 else ops.floor_divide(count, passes)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> None:
        """Averages gradients, then applies them as the optimizer does."""
        original = super().apply  # type: ignore[misc]
        if averaged.is_up or not grads or (trainable_variables is None and not self.built):
            original(grads, trainable_variables)
            return
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(known)
        build(self, variables)
        self._tfdist_applier(self, list(grads), variables, lambda g: original(g, variables))


def _distribute(
    optimizer: Optimizer, settings: Averaging, passes: int, average_passes: bool
) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"{_WHO} was given a {type(optimizer).__name__}, which is not an optimizer of Keras "
            f"{keras.__version__}. Give an instance, such as keras.optimizers.Adam(0.001)."
        )
    refuse_strategy(_WHO)
    program.adapt_keras()
    # Dynamic loss scaling looks at averages (`average_before_scaling`), and the rest is inside.
    inner = unwrapped(optimizer)
    if applier_of(inner) is not None:
        raise ConfigError(
            f"{_WHO} was given an optimizer that it has distributed already, so its gradients "
            "would be averaged twice. Distribute it once; hvd.load_model does so, too."
        )
    _check_passes(inner, passes)
    averager = Averager(settings, _WHO)
    kind = _distributed_class(type(inner), (settings, passes, average_passes))
    object.__setattr__(inner, "__class__", kind)
    object.__setattr__(inner, "_tfdist_made", Applier(averager, passes, average_passes))


def _check_passes(optimizer: Optimizer, passes: int) -> None:
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes} must be a positive number.")
    accumulates = optimizer.gradient_accumulation_steps
    if passes > 1 and accumulates:
        raise ConfigError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
            f"{accumulates} both add up gradients of several batches. Leave one of the two out."
        )


def _distributed_class(base: type, settings: tuple[Averaging, int, bool]) -> type:
    """A subclass that Keras saves under the name of its base."""
    body = {"_tfdist_settings": settings, "__module__": base.__module__, "__doc__": base.__doc__}
    made = type(base.__name__, (_Distributed, base), body)
    public = api_export.REGISTERED_OBJS_TO_NAMES
    registered = object_registration.GLOBAL_CUSTOM_NAMES
    for names in (public, registered):
        if base in names:
            names[made] = names[base]
    return made


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def DistributedGradientTape(gradtape: GradientTape, **averaging: Any) -> GradientTape:  # noqa: N802
    """A tape whose `gradient` returns averages over all processes.

    It can be made before or after the tape has recorded: both are the same tape from then on.

    Args:
        gradtape: a `tf.GradientTape`, persistent or not.
        **averaging: see `tfdist.horovod.averaging.Averaging`.

    Raises:
        ConfigError: before `hvd.init()`, and for settings that contradict each other. `gradient`
            raises it under a strategy that averages itself.
    """
    return _Tape(gradtape, Averager(Averaging(**averaging), _TAPE))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: GradientTape, *, local_layers: Layer | Sequence[Layer] | None = None, **averaging: Any
) -> GradientTape:
    """`DistributedGradientTape`, but each process keeps the gradients of some layers to itself.

    Args:
        gradtape: a `tf.GradientTape`.
        local_layers: one built layer or several.
        **averaging: see `tfdist.horovod.averaging.Averaging`.
    """
    tape = DistributedGradientTape(gradtape, **averaging)
    for weight in _weights_of(local_layers):
        tape.register_local_source(weight)
    return tape


class _Tape(tf.GradientTape):  # type: ignore[misc]
    """A tape that shares its state with another."""

    _tfdist_averager: Averager

    def __init__(self, gradtape: GradientTape, averager: Averager) -> None:
        self.__dict__ = vars(gradtape)
        self._tfdist_averager = averager

    def register_local_source(self, source: object) -> None:
        """Leaves the gradient with respect to a source to each process."""
        self._tfdist_averager.keep_local([source])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        unconnected_gradients: object = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Structure:
        """The gradients of `tf.GradientTape.gradient`, averaged.

        `use_generic_names` has no effect: names are always the same on all ranks.
        """
        del use_generic_names
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)
        averages = self._tfdist_averager(tf.nest.flatten(own), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(own, averages)
