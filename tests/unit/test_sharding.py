"""The arithmetic of layouts, and exchanges of shards among replicas that a test stands for."""

from __future__ import annotations

import dataclasses
import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.config.mesh import DATA, Axis, Mesh, parse_layouts
from tfdist.config.strategy_config import StrategyConfig
from tfdist.sharding.exchange import gather, reduce_scatter, slice_of
from tfdist.sharding.gathering import gather_again, gathered, input_before
from tfdist.sharding.layout import Cut, Layout, Owned, cut_for, owners, writers

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


class Room:
    """Replicas on threads of this process: each call returns when all have made it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=30)
        self.said: dict[int, Any] = {}

    def meet(self, index: int, value: Any) -> list[Any]:
        self.said[index] = value
        self.barrier.wait()
        values = [self.said[i] for i in range(self.count)]
        self.barrier.wait()
        return values


@dataclasses.dataclass
class FakeLink:
    """One of the replicas of a `Room`."""

    room: Room
    index: int

    @property
    def count(self) -> int:
        return self.room.count

    def all_to_all(self, tensor: Any) -> Any:
        return tf.stack([each[self.index] for each in self.room.meet(self.index, tensor)])

    def gather(self, tensor: Any) -> Any:
        return tf.concat(self.room.meet(self.index, tensor), 0)

    def sum(self, tensors: Any) -> Any:
        return [tf.add_n(each) for each in zip(*self.room.meet(self.index, tensors), strict=True)]


def on_all(count: int, work: Any) -> list[Any]:
    """The results of `work(link)` on each replica."""
    room, results = Room(count), [None] * count

    def run(index: int) -> None:
        results[index] = work(FakeLink(room, index))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def axis(size: int, index: int) -> Axis:
    return Axis(DATA, tuple(range(size)), index, 0)


@given(SHAPES, st.integers(1, 6))
def test_shards_are_equal_and_cover_the_first_dimension_that_allows_it(
    shape: tuple[int, ...], shards: int
) -> None:
    cuts = [cut_for(shape, axis(shards, index)) for index in range(shards)]
    possible = [d for d, size in enumerate(shape) if size % shards == 0] if shards > 1 else []
    if not possible:
        assert cuts == [None] * shards
        return
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = []
    for cut in cuts:
        assert cut is not None
        assert cut.dimension == possible[0]
        part = slice_of(tf.constant(whole), cut).numpy()
        assert part.shape == cut.shard_shape
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, possible[0]), whole)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_sums_and_wholes_of_shards(shards: int, dtype: str) -> None:
    """Small tensors in one bucket, one of more than a bucket, and all dimensions divided."""
    shapes = [(6,), (5, 12), (6, 7), (7, 5, 18), (1 << 18, 6)]
    rng = np.random.default_rng(0)
    values = [[tf.cast(rng.integers(-9, 9, s), dtype) for s in shapes] for _ in range(shards)]

    def work(link: FakeLink) -> tuple[list[Any], list[Any]]:
        cuts: list[Any] = [cut_for(shape, axis(shards, link.index)) for shape in shapes]
        own = reduce_scatter(link, values[link.index], cuts)
        return own, gather(link, own, cuts)

    sums = [sum(np.float64(each[i]) for each in values) for i in range(len(shapes))]
    for index, (own, wholes) in enumerate(on_all(shards, work)):
        for shape, total, shard, whole in zip(shapes, sums, own, wholes, strict=True):
            cut = cut_for(shape, axis(shards, index))
            assert cut is not None
            np.testing.assert_array_equal(np.float64(whole), total)
            np.testing.assert_array_equal(np.float64(shard), slice_of(total, cut))


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("large", [1 << 18, 1])
def test_sums_at_owners_and_wholes_from_them(shards: int, dtype: str, large: int) -> None:
    """Streams of several rounds; or one tensor that is most of all, or belongs to nobody's row."""
    shapes = [(6,), (5, 12), (large, 7), (7, 5, 18), (1 << 18, 6), (1,)]
    rng = np.random.default_rng(0)
    values = [[tf.cast(rng.integers(-9, 9, s), dtype) for s in shapes] for _ in range(shards)]
    of = owners([math.prod(shape) for shape in shapes], shards)

    def work(link: FakeLink) -> tuple[list[Any], list[Any]]:
        here = axis(shards, link.index)
        cuts = [Owned.of(shape, here, owner) for shape, owner in zip(shapes, of, strict=True)]
        own = reduce_scatter(link, values[link.index], cuts)
        return own, gather(link, own, cuts)

    sums = [sum(np.float64(each[i]) for each in values) for i in range(len(shapes))]
    for index, (own, wholes) in enumerate(on_all(shards, work)):
        for total, shard, whole, owner in zip(sums, own, wholes, of, strict=True):
            np.testing.assert_array_equal(np.float64(whole), total)
            np.testing.assert_array_equal(
                np.float64(shard), total if owner == index else np.zeros([0] * total.ndim)
            )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_owners_have_about_as_much(sizes: list[int], count: int) -> None:
    chosen = owners(sizes, count)
    loads = [sum(s for s, o in zip(sizes, chosen, strict=True) if o == i) for i in range(count)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / count + max(sizes)
    if len(sizes) >= count:
        assert min(loads) > 0


def test_what_has_an_owner_is_written_by_it() -> None:
    cuts = [Owned.of((4, 3), axis(2, index), 1) for index in range(2)]
    layouts = [Layout((cut,)) for cut in cuts]
    assert [layout.shard_shape for layout in layouts] == [(0, 0), (4, 3)]
    assert str(layouts[0]) == "data[1] -"
    assert writers([layout.region for layout in layouts], [0, 0]) == {1: layouts[1].region}


class Doubling:
    """A link whose two replicas have the same shards, within a graph."""

    count = 2

    def gather(self, tensor: Any) -> Any:
        return tf.concat([tensor, tensor], 0)

    def all_to_all(self, tensor: Any) -> Any:
        return tensor


def test_the_backward_pass_reads_a_weight_that_is_gathered_again() -> None:
    """That of the forward pass would be kept until then. The last one is needed at once."""
    strategy: Any = SimpleNamespace(link=Doubling, sum_gradients=list)
    cut = Cut((4, 4), 0, axis(2, 0))
    readers: list[list[str]] = []

    def unweighed(gradient: Any) -> Any:
        return gradient

    @tf.function
    def gradients(shard: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((shard, x))
            first, last = (gathered(strategy, shard, cut, unweighed) for _ in range(2))
            loss = tf.reduce_sum(tf.matmul(tf.matmul(tf.tanh(x), first), last) ** 2)
        wholes = (first, last)
        forward = {each for whole in wholes for each in whole.consumers()}
        with gather_again():
            found = tape.gradient(loss, (shard, x))
        readers[:] = [
            [each.type for each in forward],
            *([x.type for x in whole.consumers() if x not in forward] for whole in wholes),
        ]
        return found

    shard, x = tf.reshape(tf.range(8.0) / 8, [2, 4]), tf.ones([5, 4]) / 3
    of_shard, of_x = gradients(shard, x)
    assert readers[0] == ["MatMul"] * 2
    assert ["MatMul" in each for each in readers[1:]] == [False, True]
    with tf.GradientTape() as tape:
        tape.watch((shard, x))
        whole = tf.concat([shard, shard], 0)
        loss = tf.reduce_sum(tf.matmul(tf.matmul(tf.tanh(x), whole), whole) ** 2)
    for own, expected in zip((of_shard, of_x), tape.gradient(loss, (shard, x)), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5)


def _unweighed(gradient: Any) -> Any:
    return gradient


def _is_after(operation: Any, others: list[Any]) -> bool:
    """Whether an operation runs after one of others."""
    waiting, known = [operation], set()
    while waiting:
        each = waiting.pop()
        if each in others:
            return True
        if each not in known:
            known.add(each)
            waiting += [*(one.op for one in each.inputs), *each.control_inputs]
    return False


@pytest.mark.parametrize(("layers", "early"), [(12, False), (24, True)])
def test_a_small_weight_is_gathered_early_in_the_backward_pass(layers: int, early: bool) -> None:
    """That is before the gradient of the layer behind is exchanged; a large one is after that."""
    strategy: Any = SimpleNamespace(link=Doubling, sum_gradients=list)
    cut = Cut((256, 256), 0, axis(2, 0))
    after: list[bool] = []

    @tf.function(autograph=False)
    def trained(shards: list[tf.Tensor], x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(shards)
            for shard in shards:
                x = tf.tanh(tf.matmul(x, gathered(strategy, shard, cut, _unweighed)))
        with gather_again():
            found = tape.gradient(x, shards)
        readers = [each for each in x.graph.get_operations() if each.type == "MatMul"]
        for number in range(1, layers - 3):
            gather, behind = _second_gather(readers, number), found[number + 1].op
            assert not _is_after(gather, [found[number].op])
            assert _is_after(gather, [found[number + 2].op])
            after.append(_is_after(gather, [behind]))
        return found

    trained([tf.zeros([128, 256])] * layers, tf.ones([3, 256]))
    assert after == [not early] * (layers - 4)


def _second_gather(matmuls: list[Any], layer: int) -> Any:
    """The operation that makes the weight which the backward pass of a layer multiplies by."""
    forward = matmuls[layer]
    (backward,) = [
        each
        for each in matmuls
        if each.get_attr("transpose_b")
        and _shard_of(each.inputs[1].op) is _shard_of(forward.inputs[1].op)
    ]
    return backward.inputs[1].op


def _shard_of(operation: Any) -> Any:
    while operation.type != "Placeholder":
        operation = operation.inputs[0].op
    return operation


def test_a_weight_that_the_backward_pass_gathers_is_not_gathered_again() -> None:
    """A layer that is computed again, as under `keras.RematScope`, calls for it just then."""
    strategy: Any = SimpleNamespace(link=Doubling, sum_gradients=list)
    cut = Cut((4, 4), 0, axis(2, 0))

    @tf.function(autograph=False)
    def called(shard: tf.Tensor, x: tf.Tensor) -> None:
        gathered(strategy, shard, cut, _unweighed)
        with gather_again():
            weights = [gathered(strategy, shard, cut, _unweighed) for _ in range(2)]
            products = [tf.matmul(tf.tanh(x), weight) for weight in weights]
        assert all(p.op.inputs[1] is w for p, w in zip(products, weights, strict=True))

    called(tf.ones([2, 4]), tf.ones([5, 4]))


def test_a_weight_is_gathered_when_the_layer_before_begins() -> None:
    @tf.function(autograph=False)
    def called(x: tf.Tensor) -> None:
        hidden, output = x * 2, x * 3
        with tf.GradientTape():
            assert [input_before(each) is x for each in (x, hidden)] == [True, True]
            assert input_before(output) is hidden
        with gather_again():
            assert input_before(output) is output
        assert input_before(x) is x  # A forward pass behind a backward pass begins anew.

    called(tf.ones([2]))


@pytest.mark.parametrize("dimension", [0, 1])
def test_the_rows_of_a_sparse_gradient_stay_rows(dimension: int) -> None:
    rows = tf.IndexedSlices(tf.reshape(tf.range(16.0), [4, 4]), tf.constant([5, 0, 5, 3]), [6, 4])
    dense = tf.math.unsorted_segment_sum(rows.values, rows.indices, 6)
    for index in range(2):
        cut = Cut((6, 4), dimension, axis(2, index))
        own = slice_of(rows, cut)
        assert isinstance(own, tf.IndexedSlices)
        size = cut.shard_shape[0]
        assert int(tf.reduce_max(own.indices)) < size  # row 3 is the first of the other half
        found = tf.math.unsorted_segment_sum(own.values, own.indices, size)
        np.testing.assert_array_equal(found, slice_of(dense, cut))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"zero": 2, "mode": "stale"}, "zero=2 conflicts with mode='stale'"),
        ({"zero": 1, "mode": "local"}, "zero=1 conflicts with mode='local'"),
        ({"zero": 2, "devices": 2}, "zero=2 conflicts with devices=2"),
        ({"zero": 2, "compression": "bf16"}, "zero=2 conflicts with the options of gradient"),
        ({"zero": 4}, "zero=4"),
        ({"mesh": "model=2", "strategy": "mirrored"}, "mesh='model=2' conflicts with strategy="),
        ({"mesh": "pipe=2"}, "mesh='pipe=2' names an axis 'pipe'. The axes are data"),
        ({"mesh": "model"}, "mesh='model' gives the axis 'model' no size"),
        ({"mesh": "model=0"}, "mesh='model=0' gives the axis 'model' no size"),
        ({"mesh": "model=2,model=1"}, "mesh='model=2,model=1' names an axis twice"),
        ({"mesh": {"data": 2, "model": 2}}, "conflicts with processes=2: its axes make 4"),
        ({"mesh": "model=2", "devices": 2}, "mesh='model=2' conflicts with devices=2"),
        ({"mesh": "model=2", "mode": "stale"}, "mesh='model=2' conflicts with the options of"),
        ({"mesh": "model=2", "accumulate": 2}, "mesh='model=2' conflicts with the options of"),
        ({"layouts": "megatron"}, "of 2 or more, and no mesh is set"),
        (
            {"mesh": "data=2", "layouts": "a=model"},
            "an axis 'model' of 2 or more, and mesh='data=2' has none",
        ),
        ({"mesh": "model=2", "layouts": "kernel"}, "has a rule 'kernel' without a pattern"),
        (
            {"mesh": "model=2", "layouts": "(=model"},
            "the pattern '\\(', which is not a regular",
        ),
        ({"mesh": "model=2", "layouts": "a=batch -"}, "The layout 'a=batch -' names 'batch'"),
        ({"mesh": "model=2", "layouts": "a=model model"}, "names 'model' and 'model'"),
        ({"mesh": "model=2", "layouts": "a=model;a=-"}, "layouts has two rules for 'a'"),
        ({"zero": 1, "strategy": "mirrored"}, "zero=1 conflicts with strategy='mirrored'"),
        (
            {"mesh": "model=2", "processes": 2, "strategy": "horovod", "reduction": "adasum"},
            "mesh='model=2' conflicts with reduction='adasum'",
        ),
        (
            {"zero": 2, "strategy": "horovod", "reduction": "adasum"},
            "zero=2 conflicts with reduction='adasum'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(tfdist.ConfigError, match=error):
        StrategyConfig.of(**{"strategy": "multi_worker", "processes": 2, **options})


def test_stage_1_goes_with_compression() -> None:
    StrategyConfig.of(strategy="multi_worker", processes=2, zero=1, compression="bf16")


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=2), st.booleans())
def test_the_lines_of_a_mesh_meet_once(sizes: list[int], swapped: bool) -> None:
    """Along an axis processes differ by their number on it alone; no two lines have one number."""
    names = ("model", "data") if swapped else ("data", "model")
    mesh = Mesh.parse(",".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True)))
    assert Mesh.parse(str(mesh)) == mesh
    places = [tuple(mesh.axis(name, rank) for name in names) for rank in range(mesh.processes)]
    assert [tuple(each.index for each in place) for place in places] == [
        (i, j) for i in range(sizes[0]) for j in range(sizes[1])
    ]
    for own, other in ((0, 1), (1, 0)):
        lines: dict[int, set[int]] = {}
        for place in places:
            lines.setdefault(place[own].line, set()).add(place[other].index)
        assert all(len(across) == 1 for across in lines.values())
    numbers = [{place[axis].line for place in places} for axis in (0, 1)]
    assert not numbers[0] & numbers[1]
    assert [len(each) for each in numbers] == [sizes[1], sizes[0]]


def test_an_axis_that_a_mesh_does_not_have_has_one_process() -> None:
    axes = [Mesh.parse("model=2").axis("data", rank) for rank in range(2)]
    assert [(each.size, each.index) for each in axes] == [(1, 0), (1, 0)]
    assert axes[0].line != axes[1].line


def test_tables_say_what_flags_say() -> None:
    given = {"mesh": {"data": 2, "model": 2}, "layouts": {"a.*": [None, "model"], "b=c": "model -"}}
    config = StrategyConfig.of(strategy="multi_worker", processes=4, **given)
    assert config.value("mesh") == "data=2,model=2"
    assert config.value("layouts") == "a.*=- model;b=c=model -"
    rules = parse_layouts(config.value("layouts")) or ()
    assert [(each.pattern, each.dimension("model")) for each in rules] == [("a.*", 1), ("b=c", 0)]
    assert StrategyConfig.from_json(config.to_json()) == config
