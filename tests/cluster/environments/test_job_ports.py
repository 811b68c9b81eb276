from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.environments.base import first_port
from tfdist.errors import ConfigError

jobs = st.integers(0, 1 << 31)
on_a_host = st.integers(1, 128)


def ports(job: int, step: int, count: int) -> set[int]:
    first = first_port(job, step, count, "X=1")
    return set(range(first, first + count))


@given(jobs, st.integers(0, 5000), on_a_host)
def test_ports_are_in_the_range(job: int, step: int, count: int) -> None:
    used = ports(job, step, count)
    assert min(used) >= 12288
    assert max(used) <= 32767


@given(jobs, st.integers(1, 31), on_a_host, on_a_host)
def test_jobs_that_are_near_each_other_share_no_port(job, apart, one, other) -> None:
    assert not ports(job, 0, one) & ports(job + apart, 0, other)


@given(jobs, st.integers(1, 1023), st.integers(1, 16), st.integers(1, 16))
def test_small_jobs_share_no_port_within_1024_jobs(job, apart, one, other) -> None:
    assert not ports(job, 0, one) & ports(job + apart, 0, other)


@given(jobs, st.integers(0, 31), st.integers(0, 31), on_a_host, on_a_host)
def test_steps_of_a_job_share_no_port(job, step, other_step, one, other) -> None:
    if step != other_step:
        assert not ports(job, step, one) & ports(job, other_step, other)


@given(jobs, jobs)
def test_jobs_of_the_two_kinds_never_share_a_port(job: int, other: int) -> None:
    assert not ports(job, 0, 16) & ports(other, 0, 17)


@given(jobs, st.integers(1, 92), st.integers(0, 7), st.integers(0, 7))
def test_steps_of_near_jobs_share_no_port(job, apart, step, other_step) -> None:
    assert not ports(job, step, 16) & ports(job + apart, other_step, 16)


def test_the_formula_is_the_documented_one() -> None:
    assert first_port(4711, 0, 4, "") == 12288 + 16 * (4711 % 1024)
    assert first_port(4711, 3, 4, "") == 12288 + 16 * ((4711 + 633 * 3) % 1024)
    assert first_port(4711, 3, 17, "") == 28672 + 128 * ((4711 + 633 * 3) % 32)


def test_too_many_tasks_on_a_host() -> None:
    with pytest.raises(
        ConfigError, match=r"SLURM_NTASKS=129 puts 129 tasks on one host.*port=20000"
    ):
        first_port(1, 0, 129, "SLURM_NTASKS=129")
