"""Finds the tensors of a traced step that depend on the batch, by the structure of its graph.

Replicas run the same graph, on other examples. A tensor that does not depend on what the step is
called with is therefore the same on all of them; one that does depend is each replica's own. That
is decided by the structure of the graph alone: values that happen to be equal decide nothing.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import tensorflow as tf

from tfdist._tf.graphs import body_of, branches_of
from tfdist.types import Graph, Tensor

__all__ = [
    "WEIGHT",
    "Dependence",
    "Kind",
    "Rows",
    "are_distinct",
    "common_rows",
    "is_symbolic",
    "is_weight",
    "of_kind",
    "rows_of",
]

#: The attribute of a vector whose kind its graph does not show.
_KIND = "_tfdist_kind"

#: The name of placeholders that stand for weights.
WEIGHT = "tfdist_weight"

#: Stateful ops that read or make room: their results depend on the batch if their inputs do.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp", "Empty"})
#: Collectives whose results are the same on all replicas: of each only the first input is data.
_SHARED = frozenset({"CollectiveGatherV2", "CollectiveReduceV2"})
#: Ops that pass a tensor's rows on, whatever else they change.
_SAME_ROWS = frozenset({"Identity", "StopGradient", "Cast", "PreventGradient", "EnsureShape"})
#: Ops that make the rows of a batch unique, and which output these are.
_UNIQUE = {
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), 0),
    **dict.fromkeys((f"SparseSegment{how}GradV2" for how in ("Sum", "Mean", "SqrtN")), 1),
}
#: Ops that compute each element of a vector from the same element of others, or from scalars.
_BY_ELEMENT = frozenset(
    {
        *("SelectV2", "Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"),
        *("AddV2", "Sub", "Mul", "FloorMod", "FloorDiv", "Maximum", "Minimum", "Neg", "Abs"),
        *("LogicalAnd", "LogicalOr", "LogicalNot"),
    }
)


class Dependence:
    """Answers whether tensors depend on the arguments of the functions that are being traced.

    A placeholder that a function captured stands for a tensor of the graph around it; every other
    one is an argument, such as the batch. Random numbers count as dependent, since each replica
    draws its own. A length that is read off an argument does not, unless it is that of the first
    dimension: replicas hold other examples, which are padded alike.

    Args:
        independent: arguments that are the same on all replicas, such as values of weights.

    Attributes:
        reduced: tensors, by `id`, that are known to hold no example by itself, such as gradients.
        rows: tensors, by `id`, that are known to have a row for each example, such as the outputs
            of Keras's layers.
        axes: tensors, by `id`, each with the axis along which it was found to hold the examples.
        chosen: tensors, by `id`, of which an example has any number of rows, such as the flat
            values of a ragged batch.
        components: tensors, by `id`, that a ragged or sparse batch is made of.
    """

    def __init__(self, independent: Sequence[Any] = ()) -> None:
        self.reduced: dict[int, Any] = {}
        self.rows: dict[int, Tensor] = {}
        self.axes: dict[int, tuple[Tensor, int | None]] = {}
        self.chosen: dict[int, Any] = {}
        self.components: dict[int, Any] = {}
        self._known: dict[int, tuple[Any, bool]] = {id(t): (t, False) for t in independent}

    def note_shared(self, tensor: Tensor) -> None:
        """Notes that a tensor is the same on all replicas, whatever it was computed from."""
        self._known[id(tensor)] = (tensor, False)

    def beside(
        self, shared: Iterable[Tensor], reduced: Mapping[int, Tensor] = MappingProxyType({})
    ) -> Dependence:
        """The same dependence but for some tensors, which are the same on all replicas.

        Args:
            shared: these tensors.
            reduced: more tensors that hold no example by itself, by `id`.
        """
        other = copy.copy(self)
        other.axes = {}
        other.reduced = {**self.reduced, **reduced} if reduced else self.reduced
        other._known = {key: known for key, known in self._known.items() if not known[1]}
        for tensor in shared:
            other.note_shared(tensor)
        return other

    def note_chosen(self, rows: Tensor) -> None:
        """Notes that an example may have none or several of a tensor's rows."""
        self.chosen[id(rows)] = rows

    def is_component(self, tensor: Tensor) -> bool:
        """Whether a ragged or sparse batch is made of a tensor, or of what it was captured from."""
        current: Tensor | None = tensor
        while current is not None and id(current) not in self.components:
            pairs = _captures(current.op.graph) if is_symbolic(current) else []
            current = next((outer for outer, inner in pairs if inner is current), None)
        return current is not None

    def __call__(self, tensor: Tensor) -> bool:
        """Whether a symbolic tensor depends on an argument; False for an eager one."""
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            if id(current) in self._known:
                waiting.pop()
                continue
            unknown = [t for t in _sources(current) if id(t) not in self._known]
            if unknown:
                waiting.extend(unknown)
                continue
            result = _is_own(current) or any(self._known[id(t)][1] for t in _sources(current))
            # The tensor is kept with its answer: another one could be given its `id` otherwise.
            self._known[id(current)] = (current, result)
            waiting.pop()
        return self._known[id(tensor)][1]


def _sources(tensor: Tensor) -> list[Any]:
    """The tensors from which a tensor is computed."""
    op = getattr(tensor, "op", None) if is_symbolic(tensor) else None
    if op is None or _is_padded_length(op):
        return []
    if op.type == "Placeholder":
        return [outer for outer, inner in _captures(op.graph) if inner is tensor]
    if op.type in _SHARED:
        return [op.inputs[0]]
    if op.type == "IdentityN":  # As of a function with a gradient of its own.
        return [op.inputs[tensor.value_index]]
    if body_of(op) is None:
        return list(op.inputs)
    used, _ = _inside_of_call(tensor)
    return [op.inputs[index] for index in used]


def _inside_of_call(result: Tensor) -> tuple[set[int], bool]:
    """The indices of the arguments that a call's result is computed from; and see `_is_own`."""
    body = body_of(result.op)
    assert body is not None
    index_of = {id(placeholder): index for index, placeholder in enumerate(body.inputs)}
    used: set[int] = set()
    seen: set[int] = set()
    waiting = [body.outputs[result.value_index]]
    while waiting:
        current = waiting.pop()
        if id(current) in index_of:
            used.add(index_of[id(current)])
        elif _is_own(current):
            return used, True
        elif id(current) not in seen:
            seen.add(id(current))
            waiting.extend(_sources(current))
    return used, False


def _is_own(tensor: Tensor) -> bool:
    """Whether a tensor differs from replica to replica by itself: an argument, or a random one."""
    if not is_symbolic(tensor):
        return False
    op = tensor.op
    if op.type == "Placeholder":
        if op.name.rpartition("/")[2].startswith(WEIGHT):
            return False
        return not any(inner is tensor for _, inner in _captures(op.graph))
    if "Random" in op.type or "Multinomial" in op.type:
        return True
    if body_of(op) is not None:
        return _inside_of_call(tensor)[1]
    if branches := branches_of(op):  # They count as stateful, whatever is in them.
        results = [
            each for graph in branches for one in graph.get_operations() for each in one.outputs
        ]
        return any(_is_own(each) for each in results if each.op.type != "Placeholder")
    return bool(op.op_def.is_stateful) and op.type not in _READS | _SHARED


def is_weight(value: object) -> bool:
    """Whether a value is a tensor that stands for a weight."""
    if not is_symbolic(value):
        return False
    op = value.op.inputs[0].op if value.op.type == "Identity" else value.op
    return op.type == "Placeholder" and op.name.rpartition("/")[2].startswith(WEIGHT)


def _is_padded_length(op: Any) -> bool:
    """Whether an op reads the length of one dimension of a tensor, other than the first."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    measured = op.inputs[0].op.inputs[0]
    begin = tf.get_static_value(op.inputs[1])
    if measured.shape.rank is None or begin is None or measured.op.type == "Transpose":
        return False
    return bool(op.get_attr("shrink_axis_mask") == 1 and begin[0] % measured.shape.rank > 0)


def _captures(graph: Graph) -> list[Any]:
    return list(getattr(graph, "captures", ()))


def is_symbolic(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of a graph that is being traced."""
    return isinstance(value, tf.Tensor) and not hasattr(value, "numpy")


class Kind(enum.Enum):
    """The relation of the rows of a sparse gradient to those that the parts of a batch have.

    Attributes:
        COMMON: all parts have the same rows, which one process has once.
        DISTINCT: one process has each row once, however often it is looked up: the ids of the batch
            are made unique first, as `tf.nn.embedding_lookup_sparse` does.
        OWN: one process has the rows of the parts one after the other.
    """

    COMMON = enum.auto()
    DISTINCT = enum.auto()
    OWN = enum.auto()


class Rows(NamedTuple):
    """Some of the elements of a vector, next to each other.

    Attributes:
        like: a vector of as many elements.
        sources: tensors from which these elements, and no others, are computed.
    """

    like: Tensor
    sources: tuple[Any, ...]

    @property
    def kind(self) -> Kind:
        """Their kind, if they are the places of rows of a sparse gradient."""
        noted: Kind | None = getattr(self.like, _KIND, None)
        if noted is not None:
            return noted
        depends = Dependence()
        if not any(depends(source) for source in self.sources):
            return Kind.COMMON
        is_unique = _UNIQUE.get(self.like.op.type) == self.like.value_index
        return Kind.DISTINCT if is_unique else Kind.OWN


def of_kind(vector: Tensor, kind: Kind) -> Tensor:
    """Notes the kind of the rows that a vector was chosen from; returns the vector."""
    setattr(vector, _KIND, kind)
    return vector


def rows_of(vector: Tensor) -> list[Rows]:
    """The parts that a vector was put together from, in order; one part if it was not.

    Sees through casts, reshapes and what is computed element by element, as `keras.ops.take` does
    with negative indices.

    Args:
        vector: a symbolic tensor of rank 1.
    """
    op = vector.op
    if hasattr(vector, _KIND):
        return [Rows(vector, (vector,))]
    if op.type == "ConcatV2" and all(part.shape.rank == 1 for part in op.inputs[:-1]):
        return [rows for part in op.inputs[:-1] for rows in rows_of(part)]
    outer = next((outer for outer, inner in _captures(op.graph) if inner is vector), None)
    if outer is not None:
        return rows_of(outer)
    if op.type in _SAME_ROWS or (op.type == "Reshape" and op.inputs[0].shape.rank == 1):
        return rows_of(op.inputs[0])
    if op.type not in _BY_ELEMENT or any(x.shape.rank not in (0, 1) for x in op.inputs):
        return [Rows(vector, (vector,))]
    vectors = [rows_of(each) for each in op.inputs if each.shape.rank == 1]
    lengths = {tuple(id(rows.like) for rows in parts) for parts in vectors}
    if len(lengths) != 1:
        return [Rows(vector, (vector,))]
    scalars = tuple(each for each in op.inputs if each.shape.rank == 0)
    return [
        Rows(rows[0].like, tuple(s for each in rows for s in each.sources) + scalars)
        for rows in zip(*vectors, strict=True)
    ]


def common_rows(indices: Tensor) -> Tensor | bool:
    """The rows of a sparse gradient that all replicas have in common, whatever their batches are.

    Args:
        indices: the rows' places in the table, a symbolic tensor of rank 1.

    Returns:
        A bool for all rows, or a tensor of shape `(rows,)`.
    """
    parts = rows_of(indices)
    common = [part.kind is Kind.COMMON for part in parts]
    if len(set(common)) == 1:
        return common[0]
    sizes = [tf.shape(part.like) for part in parts]
    return tf.concat([tf.fill(n, c) for n, c in zip(sizes, common, strict=True)], 0)


def are_distinct(indices: Tensor) -> bool | None:
    """Whether the rows of a sparse gradient are `Kind.DISTINCT`; None if only some are.

    Args:
        indices: the rows' places in the table, a symbolic tensor of rank 1.
    """
    distinct = {part.kind is Kind.DISTINCT for part in rows_of(indices)}
    return None if len(distinct) > 1 else distinct.pop()
