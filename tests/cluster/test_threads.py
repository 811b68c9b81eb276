"""The sizes of the servers' thread pools."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.resources import inter_op_threads


@given(workers=st.integers(1, 100), cores=st.integers(1, 256))
def test_waiting_workers_never_hold_all_threads_of_a_server(workers: int, cores: int) -> None:
    servers = inter_op_threads("ps", workers=workers, cores=cores)
    assert servers >= workers + 2
    assert inter_op_threads("worker", workers=workers, cores=cores) >= 4
    assert min(servers, inter_op_threads("worker", workers=workers, cores=cores)) >= cores


def test_a_machine_of_two_cores() -> None:
    assert inter_op_threads("ps", workers=3, cores=2) == 5
    assert inter_op_threads("worker", workers=3, cores=2) == 4
