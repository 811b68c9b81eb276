"""Adasum: adds orthogonal gradients and averages parallel ones (Maleki et al., arXiv:2006.02924).

Of two gradients a and b, layer by layer::

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

and of p = 2**k gradients the adasum of the adasums of both halves. Horovod's own kernels need MPI
or NCCL; this one needs an all-gather only, at the price of p gradients in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.horovod.collectives import Ring

__all__ = ["combine"]


def combine(ring: Ring, gradients: Sequence[Any]) -> list[Any]:
    """The Adasum of all processes' gradients.

    Args:
        ring: the processes; their number is a power of two.
        gradients: this process's, one dense floating-point tensor for each weight.

    Raises:
        ConfigError: if the number of processes is no power of two.
    """
    if ring.size & (ring.size - 1):
        raise ConfigError(
            f"Adasum combines gradients in pairs, and {ring.size} processes are no power of two. "
            "Start 2, 4, 8, ... processes, or choose reduction='mean'."
        )
    flat = tf.concat([tf.cast(tf.reshape(g, [-1]), tf.float32) for g in gradients], 0)
    everyone = tf.split(ring.gather(flat), ring.size)
    sizes = [tf.size(g) for g in gradients]
    level = [tf.split(each, sizes) for each in everyone]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [[_of_two(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [
        tf.cast(tf.reshape(combined, tf.shape(g)), g.dtype)
        for combined, g in zip(level[0], gradients, strict=True)
    ]


def _of_two(a: Any, b: Any) -> Any:
    product = tf.reduce_sum(a * b)

    def kept(x: Any) -> Any:
        return 1.0 - tf.math.divide_no_nan(product, 2.0 * tf.reduce_sum(x * x))

    return kept(a) * a + kept(b) * b
