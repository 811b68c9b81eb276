"""Horovod's collectives on the values of Keras 3 programs: Keras variables, numbers, lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.horovod.averaging import initialized, native, ring_of
from tfdist.strategies.horovod.collectives import Ring, as_bits, from_bits, not_folded
from tfdist.types import ProcessSet, Structure

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_variables", "reducescatter"]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def allreduce(value: Structure, *args: object, **kwargs: object) -> Structure:
    """Horovod's `allreduce`, by default the average.

    Args:
        value: a tensor, Keras variable, array, number or list of numbers.
        *args: Horovod's; a second argument that is a string is the name, as in `horovod.keras`.
        **kwargs: Horovod's.
    """
    return _call("allreduce", value, *args, **kwargs)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def allgather(value: Structure, *args: object, **kwargs: object) -> Structure:
    """Horovod's `allgather`; see `allreduce`.

    Args:
        value: a tensor, Keras variable, array, number or list of numbers.
        *args: Horovod's.
        **kwargs: Horovod's.
    """
    return _call("allgather", value, *args, **kwargs)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast(value: Structure, root_rank: int, *args: object, **kwargs: object) -> Structure:
    """Horovod's `broadcast`; see `allreduce`.

    Args:
        value: a tensor, Keras variable, array, number or list of numbers.
        root_rank: whose value all get.
        *args: Horovod's.
        **kwargs: Horovod's.
    """
    return _call("broadcast", value, root_rank, *args, **kwargs)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reducescatter(value: Structure, *args: object, **kwargs: object) -> Structure:
    """Horovod's `reducescatter`; see `allreduce`.

    Args:
        value: a tensor, Keras variable, array or list of numbers.
        *args: Horovod's.
        **kwargs: Horovod's.
    """
    return _call("reducescatter", value, *args, **kwargs)


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


def _call(function: str, value: Structure, /, *args: object, **kwargs: object) -> Structure:
    hvd = initialized(f"hvd.{function}")
    if args and isinstance(args[0], str):
        kwargs["name"], args = args[0], args[1:]
    if not isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(native(value))
    return getattr(hvd, function)(value, *args, **kwargs)
