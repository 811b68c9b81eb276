"""`agree`: runs a case on stock Keras and on a strategy and compares what they return."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness import PLAIN, STRATEGIES, Pool, turns

#: Absolute and relative difference that is allowed between one process and several.
TOLERANCE = 1e-5

Agree = Callable[..., list[Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a case of each test on each strategy; each runs on one, unless a marker says more."""
    if "target" in metafunc.fixturenames and not hasattr(metafunc.module, "target"):
        marked = metafunc.definition.get_closest_marker("turns")
        marks = [] if marked else [pytest.mark.turns("test")]
        targets = [pytest.param(name, marks=marks) for name in STRATEGIES]
        metafunc.parametrize("target", targets, scope="function")


@pytest.fixture
def run(request: pytest.FixtureRequest, cluster: Pool, target: str) -> Agree:
    """Runs a case on the target; on the other targets of this test at the same time."""

    def run_case(function: str, /, plain: bool = False, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        names = [*([PLAIN] if plain else []), *turns.targets_beside(request)]
        cluster.prefetch([*names, target], f"tests.cases.{function}", **kwargs)
        return cluster.results(target, f"tests.cases.{function}", **kwargs)

    return run_case


@pytest.fixture
def agree(cluster: Pool, run: Agree) -> Agree:
    """Runs a case on stock Keras and on the target; every worker must return the same."""

    def compare(function: str, /, tolerance: float = TOLERANCE, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        results = run(function, plain=True, **kwargs)
        reference = cluster.plain(f"tests.cases.{function}", **kwargs)
        for worker, result in enumerate(results):
            assert_same(reference, result, tolerance, f"worker {worker}")
        return results

    return compare


def assert_same(expected: Any, actual: Any, tolerance: float, who: str) -> None:
    """Fails with every place where two nests of numbers and strings differ."""
    __tracebackhide__ = True
    found = [text for text in differences(expected, actual, tolerance) if text]
    if found:
        pytest.fail(f"{who} differs from stock Keras:\n" + "\n".join(found[:20]), pytrace=False)


def differences(expected: Any, actual: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Describes each place where `actual` is not `expected`."""
    if isinstance(expected, dict):
        if sorted(expected) != sorted(actual):
            yield f"{path}: keys {sorted(actual)}, expected {sorted(expected)}"
            return
        for key in expected:
            yield from differences(expected[key], actual[key], tolerance, f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            yield f"{path}: {len(actual)} values, expected {len(expected)}"
            return
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(left, right, tolerance, f"{path}/{i}")
    elif isinstance(expected, (str, bytes, type(None), bool)):
        if expected != actual:
            yield f"{path}: {actual!r}, expected {expected!r}"
    else:
        yield from _different_numbers(np.asarray(expected), np.asarray(actual), tolerance, path)


def _different_numbers(
    expected: np.ndarray, actual: np.ndarray, tolerance: float, path: str
) -> Iterator[str]:
    if expected.shape != actual.shape:
        yield f"{path}: shape {actual.shape}, expected {expected.shape}"
    elif expected.dtype.kind in "OSU":
        if not (expected == actual).all():
            yield f"{path}: {actual!r}, expected {expected!r}"
    elif not np.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = np.abs(actual.astype("float64") - expected).max()
        shown = f"{actual} and {expected}, " if expected.size == 1 else ""
        yield f"{path}: {shown}apart by {worst:.2e}"


@pytest.fixture(scope="module")
def _directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return {"root": tmp_path_factory.mktemp("shared")}


@pytest.fixture
def shared_directory(
    request: pytest.FixtureRequest, _directories: dict[str, pathlib.Path]
) -> pathlib.Path:
    """A directory for this test that is the same for every target it runs on."""
    case = turns.case_of(request.node)
    path = _directories["root"] / hashlib.sha1(repr(case).encode()).hexdigest()[:16]
    path.mkdir(exist_ok=True)
    return path
