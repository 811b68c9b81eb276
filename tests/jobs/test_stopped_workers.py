"""Jobs of workers that train alike end, and name the worker, when one of them is stopped."""

from __future__ import annotations

import re
import signal

import pytest

from tests.jobs.test_jobs import DEADLINE, left_over
from tests.jobs.test_servers import ENDLESS, kill, started, wait_for

FILES = {"train.py": ENDLESS}


@pytest.mark.parametrize(
    "strategy",
    # Gloo, which the ring is on, gives up after 90 seconds.
    ["multi_worker", pytest.param("horovod", marks=pytest.mark.seldom)],
)
def test_a_stopped_worker_ends_the_job_and_is_named(folder, strategy):
    with started(folder, "--strategy", strategy, "-n", 2, "train.py") as job:
        wait_for(folder / "training")
        kill(folder, "worker", 1, by=signal.SIGSTOP)
        said = job.communicate(timeout=DEADLINE)[0]
    assert job.returncode == 1, said
    assert re.search(r"worker 1 .*(stopped|SIGSTOP)|(Stopped|stopped) by SIGSTOP.*worker 1", said)
    assert left_over(folder) == []
