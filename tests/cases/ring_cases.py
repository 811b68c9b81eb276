"""What the processes of a Horovod job do for the tests of its collectives."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.gradients.compression import make
from tfdist.strategies.horovod.strategy import GradientSum

TYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)


def _own(strategy: Any, dtype: str = "float32", rows: int = 3) -> Any:
    """A tensor that is another one on each process."""
    values = np.arange(rows * 2).reshape(rows, 2) + 10 * strategy.shard.worker
    return tf.cast(tf.constant(values), dtype)


def _numpy(tensor: Any) -> Any:
    return tf.cast(tensor, tf.float64).numpy()


def sums(strategy: Any, *, graph: bool) -> dict[str, Any]:
    """The sum of each type, from a function's graph or eagerly."""
    ring = strategy._ring

    def add(tensor: Any) -> Any:
        return ring.sum([tensor])[0]

    call = tf.function(add) if graph else add
    return {dtype: _numpy(call(_own(strategy, dtype))) for dtype in TYPES}


def gathers(strategy: Any) -> dict[str, Any]:
    """Uneven rows of each type, gathered, and what rank 0 broadcasts."""
    ring = strategy._ring
    rows = 1 + 2 * strategy.shard.worker
    found = {}
    for dtype in (*TYPES, "bool"):
        found[f"gather {dtype}"] = _numpy(ring.gather(_own(strategy, dtype, rows)))
        found[f"broadcast {dtype}"] = _numpy(ring.broadcast(_own(strategy, dtype)))
    own = _own(strategy, rows=4)
    found["all_to_all"] = _numpy(ring.all_to_all(own, [1, 3]))
    return found


def axis(strategy: Any) -> Any:
    """`strategy.gather` along the second axis, of another length on each process."""
    own = tf.transpose(_own(strategy, rows=1 + strategy.shard.worker))
    value = strategy.run(lambda: own)
    return strategy.gather(value, axis=1).numpy()


def retraced(strategy: Any) -> list[float]:
    """Calls of functions of which one process has traced more than the other."""

    @tf.function
    def inner(tensor: Any) -> Any:
        return strategy._ring.sum([tensor])[0]

    @tf.function(reduce_retracing=False)
    def twice(tensor: Any, times: int) -> Any:
        del times
        return inner(tensor) + inner(2 * tensor) + strategy._ring.sum([3 * tensor])[0]

    found = [float(twice(tf.constant(1.0), i)) for i in range(3)]
    if strategy.shard.worker == 0:
        twice.get_concrete_function(tf.TensorSpec([]), 99)
    found += [float(twice(tf.constant(1.0), i)) for i in (7, 1, 8)]

    @tf.function
    def loop(tensor: Any) -> Any:
        for _ in tf.range(3):
            tensor = inner(tensor)
        return tensor

    return [*found, float(loop(tf.constant(1.0)))]


def side_by_side(strategy: Any, *, seconds: float) -> list[float]:
    """Two sums of a loop, the first of which begins when the second has ended."""
    ring = strategy._ring
    ended = threading.Event()

    def wait(number: Any) -> Any:
        return np.float32(ended.wait(seconds) + 0.0 * number)

    def end(number: Any) -> Any:
        ended.set()
        return number

    @tf.function
    def loop(own: Any) -> Any:
        total = tf.zeros([2])
        for _ in tf.range(3):
            begun = tf.numpy_function(wait, [own], tf.float32, stateful=False)
            first = ring.sum([tf.ensure_shape(begun, [])])[0]
            (second,) = ring.sum([own])
            second = tf.numpy_function(end, [second], tf.float32, stateful=False)
            total += tf.stack([first, tf.ensure_shape(second, [])])
        return total

    return list(loop(tf.constant(1.0)).numpy().tolist())


def constants(strategy: Any) -> list[float]:
    """Collectives of constants, which an optimizer of graphs might compute once."""
    ring = strategy._ring
    own = 1.0 + strategy.shard.worker

    @tf.function
    def step() -> Any:
        return ring.sum([tf.constant(own)])[0]

    return [float(step()), float(step())]


def exchange(strategy: Any, *, options: dict[str, Any]) -> list[Any]:
    """Gradients of several layers, one of them sparse, exchanged in a step."""
    rng = np.random.default_rng(strategy.shard.worker)
    dense = [tf.constant(rng.normal(size=s), tf.float32) for s in ((7, 5), (5,), (300, 3))]
    sparse = tf.IndexedSlices(tf.ones([2, 4]) * (1.0 + strategy.shard.worker), [1, 3], [9, 4])
    gradients = GradientSum(**options)

    @tf.function
    def step() -> Any:
        def on_replica() -> Any:
            summed = gradients(strategy._ring, [*dense[:2], sparse, dense[2]])
            return [tf.convert_to_tensor(value) for value in summed]

        return strategy.run(on_replica)

    return [value.numpy() for value in step()]


def compressed(strategy: Any, *, kind: str) -> list[Any]:
    """Dense gradients of several layers, compressed and exchanged in a step."""
    rng = np.random.default_rng(strategy.shard.worker)
    dense = [tf.constant(rng.normal(size=s), tf.float32) for s in ((7, 5), (5,), (300, 3))]
    compression = make(kind, ratio=1.0, rank=3)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in dense]
    kept = compression.memory(specs)
    memory = [tf.cast(each.initial(), each.dtype) for each in kept]

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: compression(strategy.link(), dense, memory)[0])

    return [value.numpy() for value in step()]


def train(strategy: Any, *, options: dict[str, Any]) -> list[Any]:
    """Thirty steps of a small model with other ways to exchange gradients."""
    before, strategy._gradients = strategy._gradients, GradientSum(**options)
    try:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [keras.Input([4]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(0)
        x = rng.normal(size=(160, 4)).astype("float32")
        y = x[:, :1] * x[:, 1:2]
        losses = model.fit(x, y, batch_size=32, epochs=6, verbose=0).history["loss"]
        return [losses, *[weight.numpy() for weight in model.weights]]
    finally:
        strategy._gradients = before


def beside(strategy: Any) -> dict[str, Any]:
    """Horovod's own functions, called beside the strategy."""
    import tfdist.horovod as hvd

    own = tf.constant([1.0, 2.0]) * (1 + hvd.rank())
    return {
        "rank": (hvd.rank(), hvd.size(), hvd.local_rank()),
        "sum": hvd.allreduce(own, op=hvd.Sum).numpy().tolist(),
        "largest": hvd.allreduce(own, op=hvd.Max).numpy().tolist(),
        "alone": _in_process_set(hvd),
        "objects": hvd.allgather_object({"rank": hvd.rank()}),
        "model": train(strategy, options={})[0][-1],
    }


def _in_process_set(hvd: Any) -> Any:
    """A sum over a set that has only rank 0 in it, made after the start."""
    only = hvd.add_process_set([0])
    summed = hvd.allreduce(tf.ones([2]), op=hvd.Sum, process_set=only) if hvd.rank() == 0 else None
    hvd.remove_process_set(only)
    return None if summed is None else summed.numpy().tolist()


def used_by_one(strategy: Any, *, nested: bool) -> Any:
    """Gathers what rank 0 multiplies by a constant zero, then what both use.

    TensorFlow's optimizer takes out what nothing depends on; that must not be on one rank alone.
    """
    ring, used = strategy._ring, strategy.shard.worker > 0

    def step(own: Any) -> Any:
        first = tf.where(tf.constant([used]), tf.reduce_sum(ring.gather(own)), 0.0)
        return tf.concat([first, tf.reduce_sum(ring.gather(own))[None]], 0)

    inner = tf.function(step, autograph=False)
    call = tf.function(lambda own: inner(own) if nested else step(own), autograph=False)
    return call(tf.ones((3, 4))).numpy()
