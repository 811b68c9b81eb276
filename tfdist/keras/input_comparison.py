"""The first batch of each data set, compared between the workers before anything is done with it.

Every worker reads all global batches and takes its slice of each. If one worker's batches are
others, or in another order, slices of different batches are put together: some examples are left
out and others repeated. So each worker shows the others the first global batch that its iterator
reads: the SHA-256 of its bytes. Random states are not looked at: equal ones do not prove equal
batches, nor do different ones prove different batches. Processes that are one replica of a mesh
take one seed at this place, with which they draw the same numbers in their steps.

The batch comes through the iterator that Keras trains from, ahead of its slices
(`tfdist.comm.batch_sharding.local_dataset`). Nothing is read twice, so a generator that can be read
once, or a shuffle that differs from one iteration to the next, gives the batches that it gives on
one process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import types
from tfdist._keras import EpochIterator
from tfdist._tf.data import next_of_this_process
from tfdist._tf.distribute import global_seed, input_lib
from tfdist.comm import host_collectives
from tfdist.config.mesh import MODEL
from tfdist.errors import ConfigError
from tfdist.keras.hooks import Hook
from tfdist.types import Dataset, DatasetIterator, Strategy, Structure, Tensor

__all__ = ["as_tensors", "compare_values", "hooks", "show_first_batch"]

#: Attributes of a distributed data set that begins with a preview: how often a replica reads it;
#: and of an iterator whose preview has been read.
_SHOWN, _READ = "_tfdist_shows_first_batch", "_tfdist_first_batch_read"


def hooks() -> list[Hook]:
    """The seams at which Keras goes through an epoch, and TensorFlow asks whether there is more."""
    return [
        Hook(EpochIterator, "_enumerate_iterator", _compared_first),
        Hook(input_lib, "_calculate_replicas_with_values", _of_equal_lengths),
    ]


def show_first_batch(distributed: Dataset, reads: int) -> Dataset:
    """Notes that a distributed data set shows its first global batch ahead of the slices.

    Args:
        distributed: the data set.
        reads: how often each replica reads until it has passed the batch.
    """
    vars(distributed)[_SHOWN] = reads
    return distributed


def _compared_first(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Workers that read other batches train something else without an error."""

    @functools.wraps(original)
    def enumerate_iterator(self: types.EpochIterator) -> Iterator[Any]:
        reads = getattr(getattr(self, "_distributed_dataset", None), _SHOWN, 0)
        for begin, end, batches in original(self):
            # Keras makes iterators that it never reads, so a preview is read at the first step.
            if reads and not vars(batches).get(_READ):
                vars(batches)[_READ] = True
                _compare(tf.distribute.get_strategy(), batches, reads)
            yield begin, end, batches

    return enumerate_iterator


def _of_equal_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of processes along the model axis, one that is out of data leaves the others waiting.

    TensorFlow asks only about data sets whose lengths are not known.
    """

    @functools.wraps(original)
    def with_values(strategy: Strategy, workers: object, optionals: Sequence[Any]) -> Tensor:
        count: Tensor = original(strategy, workers, optionals)
        if getattr(strategy, "parted", None) is None:
            return count
        link = strategy.link(MODEL)
        have = link.sum([tf.cast(optionals[0][0].has_value(), tf.float32)])[0]
        alike = tf.debugging.Assert(
            (have == 0) | (have == link.count),
            [
                "The workers' data sets have different numbers of batches. Processes along the "
                "model axis of a mesh must read the same batches."
            ],
        )
        with tf.control_dependencies([alike] if alike is not None else []):
            return tf.identity(count)

    return with_values


def _compare(strategy: Strategy, iterator: DatasetIterator, reads: int) -> None:
    """Reads the first global batch, and raises on all workers if it is not the same on all."""

    def read() -> tuple[str | None, int | None]:
        # No exchange may be made in here: a worker whose data set fails leaves it at once.
        previews = [next_of_this_process(iterator) for _ in range(reads)]
        return None if previews[0] is None else digest_of(previews), global_seed()

    _agree(strategy, host_collectives.together(strategy, read, "the first batch of a data set"))


def compare_values(strategy: Strategy, batch: Structure) -> None:
    """Raises on all workers if a global batch of arrays or tensors is not the same on all."""
    own = (digest_of(as_tensors(batch)), global_seed())
    _agree(strategy, host_collectives.all_gather_json(strategy, own, "a batch of values"))


def as_tensors(batch: Structure) -> Structure:
    """A batch of arrays, numbers and tensors as tensors; sparse and ragged ones as they are."""

    def tensor(value: Structure) -> Structure:
        if value is None or isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
            return value
        return tf.convert_to_tensor(value)

    return tf.nest.map_structure(tensor, batch)


def _agree(strategy: Strategy, found: list[tuple[str | None, int | None]]) -> None:
    """Compares the workers' batches; on processes that are one replica the chief's seed counts.

    Its members would draw other numbers in operations of TensorFlow, such as `tf.nn.dropout`, and
    so train other values of the weights that all of them keep.
    """
    digests, seeds = [digest for digest, _ in found], [seed for _, seed in found]
    if len(set(digests)) > 1:
        raise ConfigError(_different(digests))
    if getattr(strategy, "parted", None) is not None and len(set(seeds)) > 1:
        tf.random.set_seed(next(seed for seed in seeds if seed is not None))


def digest_of(nest: Structure) -> str:
    """SHA-256 of all that tensors hold: types, shapes and bytes."""
    sha = hashlib.sha256()
    for leaf in tf.nest.flatten(nest, expand_composites=True):
        if not tf.is_tensor(leaf) or leaf.dtype in (tf.variant, tf.resource):
            continue
        array = leaf.numpy()
        sha.update(f"{leaf.dtype.name} {leaf.shape.as_list()};".encode())
        if leaf.dtype == tf.string:
            for text in np.ravel(array):
                sha.update(len(text).to_bytes(8, "big") + text)
        else:
            sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _different(digests: list[str | None]) -> str:
    alike: dict[str | None, list[int]] = {}
    for worker, digest in enumerate(digests):
        alike.setdefault(digest, []).append(worker)
    groups = [
        f"{'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))}"
        f"{' (no batch at all)' if digest is None else ''}"
        for digest, workers in alike.items()
    ]
    return (
        "The workers read different data: the first global batch is not the same on "
        f"{' and '.join(groups)}. Every worker takes its slice of the same batches, so some "
        "examples would be left out and others repeated; nothing was done with this data set. Read "
        "the same batches in the same order on all workers: give shuffles a seed "
        "(`ds.shuffle(n, seed=1)`), seed generators alike, sort lists of files, and draw random "
        "numbers on all workers or on none. If each worker is to read its own part of the data "
        "(`ds.shard`), set the auto-shard policy OFF."
    )
