"""Gradient tapes whose gradients are averaged over the processes of a Horovod job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.averaging import Averager, Averaging
from tfdist.horovod.optimizer import weights_of
from tfdist.types import GradientTape, Layer, Structure

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

_WHO = "hvd.DistributedGradientTape"


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
    return _Tape(gradtape, Averager(Averaging(**averaging), _WHO))


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
    for weight in weights_of(local_layers):
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

        Args:
            target: as of `tf.GradientTape.gradient`.
            sources: as of `tf.GradientTape.gradient`.
            output_gradients: as of `tf.GradientTape.gradient`.
            unconnected_gradients: as of `tf.GradientTape.gradient`.
            use_generic_names: accepted, of no effect: names are always the same on all ranks.
        """
        del use_generic_names
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)
        averages = self._tfdist_averager(tf.nest.flatten(own), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(own, averages)
