"""Horovod's collectives on the values of Keras 3 programs: Keras variables, numbers, lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.horovod.averaging import initialized, native, ring_of
from tfdist.strategies.horovod.collectives import Ring, as_bits, from_bits, not_folded
from tfdist.types import ProcessSet, Structure

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_variables", "reducescatter"]


def _lenient(function: str) -> Callable[..., Structure]:
    """A function of Horovod that also takes values of Keras 3 programs."""

    def call(value: Structure, *args: object, **kwargs: object) -> Structure:
        hvd = initialized(f"hvd.{function}")
        if args and isinstance(args[0], str):
            kwargs["name"], args = args[0], args[1:]
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(native(value))
        return getattr(hvd, function)(value, *args, **kwargs)

    call.__name__ = call.__qualname__ = function
    call.__doc__ = f"""Horovod's `{function}` of a tensor, Keras variable, array, number or list.

    The other arguments are Horovod's; a second one that is a string is the name, as in
    `horovod.keras`.
    """
    return tf.autograph.experimental.do_not_convert(call)


allgather = _lenient("allgather")
allreduce = _lenient("allreduce")
broadcast = _lenient("broadcast")
reducescatter = _lenient("reducescatter")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet | None = None,
    inplace: bool = False,
) -> None:
    """Gives variables the values that they have on one process.

    `model.variables` of Keras 3 include the states of random generators, so that dropout draws the
    same masks everywhere. `model.weights` do not.

    Args:
        variables: of Keras or TensorFlow, in the same order and of the same shapes everywhere.
        root_rank: the process whose values all get.
        process_set: the processes that take part; by default all.
        inplace: accepted, of no effect.

    Raises:
        ConfigError: before `hvd.init()`, or if the processes give different numbers of variables.
    """
    del inplace
    initialized("hvd.broadcast_variables")
    ring = ring_of(process_set)
    natives = [native(variable) for variable in variables]
    if ring is None or not natives:
        return
    if tf.executing_eagerly():
        _compare_numbers(ring, len(natives))
    for variable, value in zip(natives, _sent(ring, natives, root_rank), strict=True):
        variable.assign(value)


def _compare_numbers(ring: Ring, own: int) -> None:
    numbers = [int(n) for n in ring.gather(tf.constant([own]))]
    if len(set(numbers)) > 1:
        raise ConfigError(
            f"hvd.broadcast_variables was given {numbers} variables, by rank: some would wait for "
            "ever. An optimizer has most of its variables once it is built; call "
            "optimizer.build(model.trainable_variables) on all processes before."
        )


def _sent(ring: Ring, tensors: list[Any], root_rank: int) -> list[Any]:
    hvd = ring.hvd
    bits = [not_folded(as_bits(tf.convert_to_tensor(tensor))) for tensor in tensors]

    def launch(name: str) -> list[Any]:
        return [
            hvd.broadcast(each, root_rank, name=f"{name}.{i}", ignore_name_scope=True)
            for i, each in enumerate(bits)
        ]

    sent = ring.in_order("broadcast", launch)
    return [
        tf.ensure_shape(from_bits(value, tensor.dtype), tensor.shape)
        for value, tensor in zip(sent, tensors, strict=True)
    ]
