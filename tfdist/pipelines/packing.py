"""Many tensors as few: one list of TensorFlow's for each type, which stays on its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Packing", "pack"]

#: What is in no list.
_BARE = (tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How tensors were packed.

    Attributes:
        places: for each tensor its list and its place in it; no list for one that is left as it is.
        shapes: for each tensor its static shape.
        dtypes: the types of the lists, in order.
        count: lists and bare tensors together.
    """

    places: tuple[tuple[int | None, int], ...]
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    count: int

    def unpack(self, packed: Sequence[Any]) -> list[Any]:
        """The tensors, in a graph.

        Args:
            packed: what `pack` has returned.
        """
        lists, bare = packed[: len(self.dtypes)], packed[len(self.dtypes) :]
        found = []
        for (which, place), shape in zip(self.places, self.shapes, strict=True):
            if which is None:
                found.append(bare[place])
                continue
            tensor = tf.raw_ops.TensorListGetItem(
                input_handle=lists[which],
                index=place,
                element_shape=_known(shape),
                element_dtype=self.dtypes[which],
            )
            found.append(tf.ensure_shape(tensor, shape) if shape.rank is not None else tensor)
        return found


def pack(tensors: Sequence[Any]) -> tuple[list[Any], Packing]:
    """Packs tensors of a graph, without copying their memory.

    Returns:
        One variant for each type, then the tensors that cannot be in a list; and how to unpack.
    """
    dtypes = tuple(dict.fromkeys(t.dtype for t in tensors if t.dtype not in _BARE))
    lists = [
        tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=dtype)
        for dtype in dtypes
    ]
    sizes = [0] * len(dtypes)
    bare: list[Any] = []
    places: list[tuple[int | None, int]] = []
    for tensor in tensors:
        if tensor.dtype in _BARE:
            places.append((None, len(bare)))
            bare.append(tensor)
            continue
        which = dtypes.index(tensor.dtype)
        lists[which] = tf.raw_ops.TensorListPushBack(input_handle=lists[which], tensor=tensor)
        places.append((which, sizes[which]))
        sizes[which] += 1
    shapes = tuple(tensor.shape for tensor in tensors)
    return [*lists, *bare], Packing(tuple(places), shapes, dtypes, len(dtypes) + len(bare))


def _known(shape: Any) -> Any:
    """A shape as TensorFlow's lists take it, -1 for what is not known."""
    return -1 if shape.rank is None else [-1 if size is None else size for size in shape]
