"""Fixtures of all tests: the pool of worker processes, time limits, and a check for leaks."""

from __future__ import annotations

import contextlib
import faulthandler
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.harness import Pool, requirements, tiers, turns
from tfdist import environment

#: Nested limits: a call on worker processes (tests/harness/cluster.py) < a test < the whole run
#: (tests/harness/tiers.py).
TEST_SECONDS = 300

# An example may take long on a machine that does other things. `--hypothesis-profile=ci` besides
# draws the same examples in each run.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier` and `--rest-of`: how much to run. `--require`: what may not be missing."""
    tiers.add_options(parser)
    parser.addoption(
        "--require",
        default="",
        metavar=",".join(requirements.CHECKS),
        help="fail where the machine lacks one of these, instead of skipping the tests that use it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the markers known, and looks whether all is there that the run requires."""
    for name, (_, meaning) in tiers.MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "needs(...): keys of CAPABILITIES in harness/targets.py")
    config.addinivalue_line("markers", "turns(tier, ...): see harness/turns.py")
    if missing := requirements.lacking(config.getoption("require")):
        raise pytest.UsageError("\n".join(f"--require={each}" for each in missing))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what no target of a test can run, and what is not in the tier."""
    turns.leave_out(config, items)
    tiers.select(config, items)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """`cluster("multi_worker").call("module:function", **kwargs)`: one result a worker."""
    pool = Pool(tmp_path_factory.mktemp("harness"))
    _pools.append(pool)
    try:
        yield pool
    finally:
        pool.close()


_pools: list[Pool] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ends a test that takes too long."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"{item.nodeid} took more than {TEST_SECONDS} s.")

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TEST_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ends a run that takes too long; the worker processes end with it."""
    limit = tiers.SECONDS[session.config.getoption("tier")]
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lifts the limit of the run."""
    del session
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves variables, threads or processes behind."""
    variables, threads, children = _variables(), _threads(), _children()
    yield
    assert _variables() == variables, "The test changed the environment."
    left = _threads() - threads
    assert not left, f"The test left threads running: {sorted(left)}"
    started = _started_since(children)
    for _ in range(20):
        if not started:
            break
        time.sleep(0.1)
        started = _started_since(children)
    assert not started, f"The test left processes running: {sorted(started)}"


def _started_since(children: set[int]) -> set[int]:
    """New processes other than the pool's, which may be starting some at this moment."""
    return _children() - children - {p for pool in _pools for p in pool.process_ids()}


def _variables() -> dict[str, str]:
    return {k: v for k, v in environment.snapshot().items() if k != "PYTEST_CURRENT_TEST"}


def _threads() -> set[str]:
    return {
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and not thread.name.startswith("harness-")
    }


def _children() -> set[int]:
    found: set[int] = set()
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in path.read_text().split())
    return found
