"""Compressions of gradients, on replicas that are threads of this process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.comm.replica_collectives import CountedLink
from tfdist.config.gradient_options import COMPRESSIONS
from tfdist.errors import ConfigError
from tfdist.gradients.compression import KINDS, Compression, make
from tfdist.gradients.compression.base import Layout
from tfdist.gradients.compression.int8 import BLOCK, decoded, encoded
from tfdist.gradients.compression.powersgd import LowRank, matrix_shape
from tfdist.gradients.compression.sparsification import RandomValues

SHAPES = ((64, 40), (11,), (3, 3, 8, 16), (), (7, 5))
FEEDBACK = ("int8", "topk", "randomk", "powersgd")
TRAVEL = {tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64}


class Replicas:
    """Threads that take turns, each a replica, and meet where they exchange something."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent = 0.0
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(count, timeout=60)
        self._brought: list[Any] = [None] * count

    def run(self, replica: Callable[[Any, int], Any]) -> list[Any]:
        """Calls `replica(link, number)` for each, in the graph that is traced if there is one."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def one(number: int) -> Any:
            link = CountedLink(FakeLink(self, number))
            with self._turn:
                try:
                    if graph is None:
                        found = replica(link, number)
                    else:
                        with graph.as_default():
                            found = replica(link, number)
                except BaseException:
                    self._barrier.abort()
                    raise
            self.sent = link.sent
            return found

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(one, number) for number in range(self.count)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def meet(self, number: int, value: Any) -> list[Any]:
        self._brought[number] = value
        self._wait()
        found = list(self._brought)
        self._wait()
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()


class FakeLink:
    def __init__(self, replicas: Replicas, number: int) -> None:
        self._replicas = replicas
        self._number = number
        self.count = replicas.count
        self.index = tf.constant(number)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        assert all(t.dtype in TRAVEL - {tf.float16, tf.bfloat16} for t in tensors)
        brought = self._replicas.meet(self._number, list(tensors))
        return [tf.add_n(each) for each in zip(*brought, strict=True)]

    def gather(self, tensor: Any) -> Any:
        return tf.concat(self._met(tensor), 0)

    def all_to_all(self, tensor: Any) -> Any:
        assert tensor.shape.rank == 2
        assert tensor.shape[0] == self.count
        return tf.stack([each[self._number] for each in self._met(tensor)])

    def _met(self, tensor: Any) -> list[Any]:
        assert tensor.dtype in TRAVEL
        brought = self._replicas.meet(self._number, tensor)
        assert {tuple(each.shape.as_list()) for each in brought} == {tuple(tensor.shape.as_list())}
        return brought


@dataclasses.dataclass
class Outcome:
    sums: list[np.ndarray]
    memory: list[list[Any]]  # of each replica
    sent: float  # bytes of one replica


def array(value: Any) -> np.ndarray:
    """A tensor's values; those of bfloat16, which NumPy has not, as float32."""
    return np.asarray(tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value)


def specs_of(values: Sequence[Any]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(value.shape, value.dtype) for value in values]


def first_memory(compression: Compression, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    needed = compression.memory(specs_of(values[0]))
    for each in needed:
        assert tuple(each.initial().shape) == each.shape
        assert each.initial().dtype == each.dtype
    return [[each.initial() for each in needed] for _ in values]


def exchange(
    compression: Compression,
    values: Sequence[Sequence[Any]],
    memory: list[list[Any]] | None = None,
) -> Outcome:
    """One exchange; asserts what holds for all: equal results, and types and shapes kept."""
    memory = first_memory(compression, values) if memory is None else memory
    replicas = Replicas(len(values))
    found = replicas.run(lambda link, i: compression(link, values[i], memory[i]))
    check_alike(compression, values, found)
    return Outcome([array(x) for x in found[0][0]], [f[1] for f in found], replicas.sent)


def check_alike(compression: Compression, values: Any, found: list[Any]) -> None:
    needed = compression.memory(specs_of(values[0]))
    for sums, kept in found:
        assert [(x.shape, x.dtype) for x in sums] == [(x.shape, x.dtype) for x in values[0]]
        for mine, first in zip(sums, found[0][0], strict=True):
            assert array(mine).tobytes() == array(first).tobytes()
        for mine, first, each in zip(kept, found[0][1], needed, strict=True):
            assert (mine.shape, mine.dtype) == (each.shape, each.dtype)
            assert not each.shared or np.asarray(mine).tobytes() == np.asarray(first).tobytes()


def gradients(
    count: int, seed: int = 0, shapes: Any = SHAPES, dtype: Any = tf.float32
) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    return [
        [tf.constant(random.standard_normal(shape), dtype) for shape in shapes]
        for _ in range(count)
    ]


def true_sums(values: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    return [
        np.sum([array(x).astype(np.float64) for x in each], 0) for each in zip(*values, strict=True)
    ]


def relative(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    off = sum(
        np.sum((array(f).astype(np.float64) - w) ** 2) for f, w in zip(found, wanted, strict=True)
    )
    return float(np.sqrt(off / sum(np.sum(w**2) for w in wanted)))


def as_error(kind: str, compression: Compression, values: Sequence[Any]) -> np.ndarray:
    """Tensors laid out as in the memory of errors."""
    if isinstance(compression, LowRank):
        values = [x for x in values if matrix_shape(x.shape, compression.rank)]
    values = [tf.constant(x, tf.float64) for x in values]
    flat = np.asarray(Layout.of(values, BLOCK if kind == "int8" else 1).join(values))
    length = compression.memory(specs_of(values))[0].shape[0]
    return np.pad(flat, (0, length - len(flat)))


def made(kind: str) -> Compression:
    return make(kind, ratio=0.2, rank=2)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_agree_and_nothing_is_lost(kind, count):
    compression, memory, before = made(kind), None, 0.0
    for step in range(3):
        values = gradients(count, seed=step)
        outcome = exchange(compression, values, memory)
        memory, wanted = outcome.memory, true_sums(values)
        if kind not in FEEDBACK:
            assert relative(outcome.sums, wanted) < 1e-2
            assert memory == [[]] * count
            continue
        assert relative(outcome.sums, wanted) > 0
        after = sum(np.asarray(each[0], np.float64) for each in memory)
        missing = [w - s for w, s in zip(wanted, outcome.sums, strict=True)]
        np.testing.assert_allclose(
            after, before + as_error(kind, compression, missing), atol=1e-5 * count
        )
        before = after


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph(kind):
    compression, values = made(kind), gradients(2)
    memory = first_memory(compression, values)
    shapes: list[Any] = []

    @tf.function(autograph=False)
    def step(values: Any, memory: Any) -> Any:
        replicas = Replicas(2)
        found = replicas.run(lambda link, i: compression(link, values[i], memory[i]))
        shapes.extend(x.shape for sums, kept in found for x in [*sums, *kept])
        return found

    eager = exchange(compression, values, memory)
    found = step(values, memory)
    assert all(shape.is_fully_defined() for shape in shapes)
    check_alike(compression, values, found)
    assert relative(found[0][0], eager.sums) < 1e-5
    following = exchange(compression, values, [kept for _, kept in found])
    assert relative(following.sums, exchange(compression, values, eager.memory).sums) < 1e-4


@pytest.mark.parametrize("kind", FEEDBACK)
def test_what_is_left_out_comes_later(kind):
    values = gradients(2, shapes=((24, 16), (11,)))
    compression, memory, wanted = made(kind), None, true_sums(values)
    total = [0.0, 0.0]
    off = {}
    for step in range(1, 41):
        outcome = exchange(compression, values, memory)
        memory = outcome.memory
        total = [t + s for t, s in zip(total, outcome.sums, strict=True)]
        off[step] = relative([t / step for t in total], wanted)
    assert off[40] < 0.15
    assert off[40] < min(0.6 * off[20], 0.2 * off[1])


@pytest.mark.parametrize(("kind", "bits"), [("bf16", 8), ("fp16", 10)])
def test_halves_round_twice_only(kind, bits):
    values = gradients(8, shapes=((1000,),))
    (found,), (wanted,) = exchange(make(kind), values).sums, true_sums(values)
    parts = np.abs([each[0] for each in values])
    magnitudes, floor = parts.sum(0), 9 * 2.0**-40 * parts.max(1).sum()
    assert np.all(np.abs(found - wanted) <= 2.0**-bits * 1.001 * magnitudes + floor)


def test_scaled_float16_takes_gradients_of_all_magnitudes():
    random = np.random.default_rng(0).uniform(0.5, 1, 100).astype(np.float32)
    factors = (1e-36, 1e-8, 1, 1e6, 1e37, 0)
    values = [[tf.constant(random * factor) for factor in factors]] * 3
    for found, factor in zip(exchange(make("fp16"), values).sums, factors, strict=True):
        np.testing.assert_allclose(found, 3 * random * factor, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_gradients_stay_visible_and_leave_nothing_behind(kind, bad):
    compression, values = made(kind), gradients(2)
    memory = exchange(compression, values).memory
    for place in (0, 1):
        broken = [list(each) for each in values]
        flat = np.array(broken[1][place]).reshape(-1)
        flat[3] = bad
        broken[1][place] = tf.constant(flat.reshape(SHAPES[place]))
        outcome = exchange(compression, broken, memory)
        assert not all(np.isfinite(x).all() for x in outcome.sums)
        for mine, before in zip(outcome.memory, memory, strict=True):
            for x, y in zip(mine, before, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind):
    values = [[tf.zeros(shape) for shape in SHAPES]] * 2
    outcome = exchange(made(kind), values)
    assert not any(x.any() for x in outcome.sums)
    after = exchange(made(kind), gradients(2), outcome.memory)
    assert all(np.isfinite(x).all() for x in after.sums)
    assert any(x.any() for x in after.sums)


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_types(kind, dtype):
    compression = make(kind, ratio=1, rank=2)
    values = [[*a, *b] for a, b in zip(gradients(2, dtype=dtype), gradients(2, 1), strict=True)]
    outcome = exchange(compression, values)
    places = [
        i for i, x in enumerate(values[0]) if kind != "powersgd" or not matrix_shape(x.shape, 2)
    ]
    wanted = true_sums(values)
    assert relative([outcome.sums[i] for i in places], [wanted[i] for i in places]) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", [(), ((),), ((0, 4), (2,)), ((0,),)])
def test_few_values(kind, shapes):
    outcome = exchange(made(kind), gradients(3, shapes=shapes))
    assert all(np.isfinite(x).all() for x in outcome.sums)


@pytest.mark.parametrize("kind", FEEDBACK)
def test_nothing_is_left_out_before_the_first_step(kind):
    specs = specs_of(gradients(1)[0])
    errors = [each for each in made(kind).memory(specs) if not each.shared]
    assert [each.name for each in errors] == ["error"]
    assert not np.any(errors[0].initial())


def test_error_of_eight_bits_in_a_block():
    random = np.random.default_rng(0)
    blocks = random.standard_normal((50, BLOCK)) * 10.0 ** random.uniform(-30, 30, (50, 1))
    blocks = blocks.astype(np.float32)
    words = encoded(tf.constant(blocks))
    assert words.shape == (50, 65)
    bound = np.abs(blocks).max(1, keepdims=True) / 254
    assert np.all(np.abs(decoded(words, tf.float32) - blocks) <= 1.0001 * bound)


def test_all_of_the_largest_values_are_all_values():
    values = gradients(3)
    outcome = exchange(make("topk", ratio=1), values)
    assert relative(outcome.sums, true_sums(values)) < 1e-6
    assert not np.any(outcome.memory)


def test_the_largest_values_are_those_sent():
    values = [[tf.constant([1.0, -5, 2, 3])], [tf.constant([0.5, 4, -6, 3])]]
    outcome = exchange(make("topk", ratio=0.5), values)
    assert outcome.sums[0].tolist() == [0, -1, -6, 3]
    assert np.asarray(outcome.memory)[:, 0].tolist() == [[1, 0, 2, 0], [0.5, 0, 0, 3]]


@pytest.mark.parametrize("ratio", [0.03, 0.1, 0.34, 1])
def test_each_value_has_its_turn_equally_often(ratio):
    values = [[tf.ones([30]), tf.ones([7])]]
    compression, memory = RandomValues(ratio), None
    seen, most = np.zeros(37), int(np.ceil(37 * ratio))
    steps = -(-37 // most)
    orders = []
    for turn in range(1, 4):
        orders.append([])
        for _ in range(steps):
            outcome = exchange(compression, values, memory)
            memory = outcome.memory
            drawn = np.concatenate(outcome.sums) != 0
            assert drawn.sum() <= most
            seen += drawn
            orders[-1].append(np.flatnonzero(drawn).tolist())
        assert (seen == turn).all()
    assert ratio == 1 or orders[0] != orders[1] != orders[2]


def test_low_rank_of_a_matrix_of_rank_one():
    random = np.random.default_rng(0)
    column, rows = random.standard_normal(60), random.standard_normal((2, 50))
    values = [[tf.constant(np.outer(column, row), tf.float32)] for row in rows]
    for rank in (1, 4):
        outcome = exchange(make("powersgd", rank=rank), values)
        assert relative(outcome.sums, true_sums(values)) < 1e-5


@pytest.mark.parametrize(
    ("shape", "rank", "matrix"),
    [
        ((64, 40), 2, (64, 40)),
        ((3, 3, 64, 128), 4, (576, 128)),
        ((512, 8, 64), 4, (512, 512)),
        ((8, 64, 512), 4, (512, 512)),
        ((64, 40), 13, None),
        ((4, 40), 5, None),
        ((1000,), 1, None),
        ((1000, 1), 1, None),
        ((), 1, None),
    ],
)
def test_tensors_as_matrices(shape, rank, matrix):
    assert matrix_shape(shape, rank) == matrix


@pytest.mark.parametrize("count", [1, 2, 4])
def test_bytes_that_a_replica_sends(count):
    shapes = ((64, 64), (64,), (960,))
    values, n = gradients(count, shapes=shapes), 64 * 64 + 64 + 960
    ring = 2 * (count - 1) / count
    sent = {kind: exchange(make(kind, ratio=0.1), values).sent for kind in KINDS}
    blocks = 16 + 1 + 4
    blocks += -blocks % count
    assert sent == {
        "bf16": ring * 2 * n,
        "fp16": ring * (2 * n + 4 * len(shapes)),
        "int8": ring * blocks * (BLOCK + 4),
        "topk": (count - 1) * 8 * (410 + 7 + 96),
        "randomk": ring * 4 * 512,
        "powersgd": ring * 4 * (4 * (64 + 64) + 64 + 960),
    }


def test_make_says_what_is_wrong():
    assert {"none", *KINDS} == set(COMPRESSIONS)
    with pytest.raises(ConfigError, match=r"'zip'.*: bf16, fp16, int8, topk, randomk, powersgd"):
        make("zip")
    for ratio in (0, 1.5, -0.1, float("nan"), "0.1", True):
        with pytest.raises(ConfigError, match=r"^ratio=.*such as 0\.01"):
            make("topk", ratio=ratio)
    for rank in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match=r"^rank=.*such as 4"):
            make("powersgd", rank=rank)
