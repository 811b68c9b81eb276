"""What `make test` is certain to run on each strategy, whatever tests are added or renamed."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.harness import STRATEGIES, TARGETS
from tests.harness.turns import target_of
from tfdist import environment

#: What each strategy must show in `make test`: the arguments of the marker `core`.
CORE = {
    "accumulation",
    "large weights",
    "mixed precision",
    "optimizers",
    "predict and evaluate",
    "saving",
    "sessions",
    "shared lookups",
    "uneven batches",
}

#: The fewest cases that run in `make test` on a strategy that takes turns.
FEWEST = 15


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prints the table: where this module is a plugin of the run below."""
    rows = [(target_of(i), _core(i)) for i in session.items if "target" in _parameters(i)]
    print(f"\nTABLE {json.dumps(rows)}")


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _core(item: pytest.Item) -> list[str]:
    return [str(word) for mark in item.iter_markers("core") for word in mark.args]


@pytest.fixture(scope="module")
def table() -> list[tuple[str, list[str]]]:
    """The target and the core capabilities of each case of this folder that `make test` runs."""
    folder = pathlib.Path(__file__).parent
    words = ("--collect-only", "-q", "--tier=test", "-p", __name__, str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *words],
        cwd=folder.parents[1],
        env=environment.merged({"PYTEST_ADDOPTS": None, "PYTEST_XDIST_WORKER": None}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TABLE ")]
    return [(target, words) for target, words in json.loads(line.removeprefix("TABLE "))]


@pytest.mark.core
def test_each_strategy_runs_all_that_is_core(table: list[tuple[str, list[str]]]) -> None:
    shown: dict[str, set[str]] = collections.defaultdict(set)
    for target, words in table:
        shown[target].update(words)
    prompt = [name for name in STRATEGIES if not TARGETS[name].slow]
    assert shown == dict.fromkeys(prompt, CORE)


@pytest.mark.core
def test_no_strategy_runs_fewer_cases_than_the_minimum(
    table: list[tuple[str, list[str]]],
) -> None:
    counts = collections.Counter(target for target, _ in table)
    few = {n: counts[n] for n in STRATEGIES if TARGETS[n].turns and counts[n] < FEWEST}
    assert not few, f"fewer than {FEWEST} cases"
