"""Horovod's collectives as the strategy uses them, on two and three processes."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from tests.cases import ring_cases
from tests.harness import Pool
from tfdist.cluster.spec import Address, ClusterSpec
from tfdist.strategies.horovod import rendezvous

CASES = "tests.cases.ring_cases"


def own(rank, rows=3):
    return np.arange(rows * 2).reshape(rows, 2) + 10.0 * rank


@pytest.mark.parametrize("graph", [True, False])
def test_every_type_is_summed(cluster: Pool, graph):
    for found in cluster("horovod").call(f"{CASES}:sums", graph=graph):
        assert sorted(found) == sorted(ring_cases.TYPES)
        for dtype, value in found.items():
            np.testing.assert_array_equal(value, own(0) + own(1), err_msg=dtype)


def test_every_type_is_gathered_and_broadcast(cluster: Pool):
    for rank, found in enumerate(cluster("horovod").call(f"{CASES}:gathers")):
        for name, value in found.items():
            kind, _, dtype = name.partition(" ")
            expected = np.concatenate([own(0, 1), own(1, 3)]) if kind == "gather" else own(0)
            if kind == "all_to_all":
                cut = slice(0, 1) if rank == 0 else slice(1, 4)
                expected = np.concatenate([own(0, 4)[cut], own(1, 4)[cut]])
            expected = (expected != 0).astype(float) if dtype == "bool" else expected
            np.testing.assert_array_equal(value, expected, err_msg=name)


def test_gather_along_another_axis(cluster: Pool):
    for value in cluster("horovod").call(f"{CASES}:axis"):
        np.testing.assert_array_equal(value, np.concatenate([own(0, 1).T, own(1, 2).T], 1))


def test_processes_that_traced_other_functions_still_meet(cluster: Pool):
    for found in cluster("horovod").call(f"{CASES}:retraced", deadline=60):
        assert found == [*[12.0] * 6, 8.0]


def test_sums_of_a_loop_do_not_wait_for_each_other(cluster: Pool):
    for found in cluster("horovod").call(f"{CASES}:side_by_side", seconds=20, deadline=90):
        assert found == [6.0, 6.0]


def test_collectives_of_constants_are_not_folded(cluster: Pool):
    for found in cluster("horovod").call(f"{CASES}:constants"):
        assert found == [3.0, 3.0]


@pytest.mark.parametrize("nested", [False, True])
def test_what_only_some_processes_use_is_gathered_by_all(cluster: Pool, nested: bool):
    results = cluster("horovod").call(f"{CASES}:used_by_one", nested=nested)
    assert [list(result) for result in results] == [[0.0, 24.0], [24.0, 24.0]]


def gradients(rank):
    rng = np.random.default_rng(rank)
    dense = [rng.normal(size=s).astype("float32") for s in ((7, 5), (5,), (300, 3))]
    sparse = np.zeros((9, 4), "float32")
    sparse[[1, 3]] = 1 + rank
    return [*dense[:2], sparse, dense[2]]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"groups": 3}, 1e-6),
    ],
)
@pytest.mark.parametrize("target", ["horovod", "horovod3"])
def test_gradients_are_summed(cluster: Pool, options, tolerance, target):
    results = cluster(target).call(f"{CASES}:exchange", options=options)
    expected = [sum(parts) for parts in zip(*map(gradients, range(len(results))), strict=True)]
    for found in results:
        for value, right, first in zip(found, expected, results[0], strict=True):
            np.testing.assert_allclose(value, right, atol=tolerance)
            np.testing.assert_array_equal(value, first, "the same on all processes")


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("fp16", 4e-3), ("bf16", 4e-2), ("int8", 0.1), ("topk", 1e-5), ("randomk", 1e-5)],
)
@pytest.mark.parametrize("target", ["horovod", "horovod3"])
def test_gradients_are_compressed(cluster: Pool, kind, tolerance, target):
    results = cluster(target).call(f"{CASES}:compressed", kind=kind)
    parts = [gradients(rank) for rank in range(len(results))]
    expected = [sum(each) for each in zip(*([a, b, d] for a, b, _, d in parts), strict=True)]
    for found in results:
        for value, right, first in zip(found, expected, results[0], strict=True):
            np.testing.assert_allclose(value, right, atol=tolerance)
            np.testing.assert_array_equal(value, first, "the same on all processes")
    if kind in ("fp16", "bf16", "int8"):
        assert np.abs(results[0][2] - expected[2]).max() > 0, "nothing was compressed"


def adasum(a, b):
    """The formula of arXiv:2006.02924."""
    dot = np.vdot(a, b)
    if not dot:
        return a + b
    return (1 - dot / (2 * np.vdot(a, a))) * a + (1 - dot / (2 * np.vdot(b, b))) * b


def test_adasum_is_the_papers(cluster: Pool):
    results = cluster("horovod").call(f"{CASES}:exchange", options={"reduction": "adasum"})
    # The exchange is given sums' parts: gradients times their share, here a half.
    halves = [[2 * part for part in gradients(rank)] for rank in (0, 1)]
    expected = [adasum(a, b) for a, b in zip(*halves, strict=True)]
    for found in results:
        for value, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5)


def test_adasum_needs_a_power_of_two(cluster: Pool):
    with pytest.raises(AssertionError, match="no power of two"):
        cluster("horovod3").call(f"{CASES}:exchange", options={"reduction": "adasum"})


def test_training_in_groups_is_the_same(cluster: Pool):
    expected = cluster("horovod").call(f"{CASES}:train", options={})[0]
    for found in cluster("horovod").call(f"{CASES}:train", options={"groups": 2}):
        for value, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, right, atol=1e-6)


@pytest.mark.core
def test_adasum_trains(cluster: Pool):
    for found in cluster("horovod").call(f"{CASES}:train", options={"reduction": "adasum"}):
        assert found[0][-1] < 0.9 * found[0][0]


def test_horovods_own_functions_beside_the_strategy(cluster: Pool):
    for rank, found in enumerate(cluster("horovod").call(f"{CASES}:beside")):
        assert found["rank"] == (rank, 2, rank)
        assert found["sum"] == [3.0, 6.0]
        assert found["alone"] == ([1.0, 1.0] if rank == 0 else None)
        assert found["largest"] == [2.0, 4.0]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert np.isfinite(found["model"])


def test_other_interfaces_do_not_see_the_rendezvous_of_a_job_on_loopback() -> None:
    workers = (Address("127.0.0.1", 1001), Address("127.0.0.1", 1002))
    port = int(rendezvous.offer(ClusterSpec({"worker": workers}))[rendezvous.OFFER])
    [server] = rendezvous._servers
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
    finally:
        server.stop()
        server._httpd.server_close()
