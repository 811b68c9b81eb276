"""The parts of the gradient exchange that need no second replica."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.comm.replica_collectives import ALONE_BYTES, alone
from tfdist.config.gradient_options import GradientOptions
from tfdist.errors import ConfigError
from tfdist.gradients.exchange import Exchange
from tfdist.gradients.reducer import buckets


class Alone:
    """A strategy of one replica, as an exchange sees it."""

    num_replicas_in_sync = 1


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"mode": "stale"}, ["mode='stale'", "complex64", "mode='sync'"]),
        ({"mode": "local"}, ["mode='local'", "not a floating-point"]),
        ({"accumulate": 2}, ["accumulate", "leave accumulate out"]),
        ({"compression": "topk"}, ["compression='topk'", "complex64", "leave compression out"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [tf.complex64, tf.int32])
def test_a_gradient_that_cannot_be_kept_is_named(rule, words, dtype):
    weight = tf.Variable(tf.zeros([3], dtype), name="phase")
    specs = [tf.TensorSpec([3], dtype)]
    with pytest.raises(ConfigError) as caught:
        Exchange(Alone(), GradientOptions(**rule), [weight], specs, [0], lambda: [])
    for word in ["'phase", *words]:
        assert word.replace("complex64", dtype.name) in str(caught.value)


@pytest.mark.parametrize(("device", "expected"), [("/device:CPU:0", [1]), ("/device:GPU:0", [])])
def test_large_gradients_travel_by_themselves_between_cpus(monkeypatch, device, expected):
    devices = SimpleNamespace(worker_devices=(device,))
    strategy = SimpleNamespace(extended=devices)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    large = tf.zeros([ALONE_BYTES // 4])
    rows = tf.IndexedSlices(large[None], tf.constant([0]), tf.constant([9, ALONE_BYTES // 4]))
    assert alone([large[1:], large, rows]) == expected


def test_buckets_begin_with_the_last_gradients():
    values = [tf.zeros([n]) for n in (100, 10, 10, 200, 1)]
    assert buckets(values, None) == [[4, 3, 2, 1, 0]]
    assert buckets(values, 80) == [[4, 3], [2, 1], [0]]
    assert buckets(values, 4) == [[4], [3], [2], [1], [0]]
    sparse = tf.IndexedSlices(tf.zeros([2, 4]), tf.constant([0, 1]), tf.constant([9, 4]))
    assert buckets([*values, sparse], 80)[0] == [5, 4, 3]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({}, "sync"),
        ({"mode": "stale"}, "stale (gradients are applied 1 update late)"),
        (
            {"mode": "local", "period": 4, "sync_steps": 9, "compression": "int8"},
            "local (each replica's own weights, averaged every 4 updates), after 9 synchronous "
            "updates, int8 compression",
        ),
        ({"accumulate": 2, "clip": "before"}, "sync, 2 batches an update, clipped before"),
    ],
)
def test_a_rule_is_told_in_words(rule, words):
    assert GradientOptions(**rule).in_words.startswith(words)
