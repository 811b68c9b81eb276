"""`agree`: runs a case on stock Keras and on a strategy and compares what they return."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness import PLAIN, STRATEGIES, Pool

#: Absolute and relative difference that is allowed between one process and several.
TOLERANCE = 1e-5

Agree = Callable[..., list[Any]]


#: One of these runs each case, besides multi_worker; `--everything` runs it on all.
_TURNS = ("horovod", "parameter_server", "mirrored", "horovod", "parameter_server", "single")

#: The strategies whose replicas exchange gradients by collectives.
COLLECTIVE = ("mirrored", "multi_worker", "horovod")

#: Modules that also run on one device, where most of Keras is left as it is.
ON_ONE_DEVICE = ("test_training", "test_batches")

#: Loops that need TensorFlow's coordinator on a parameter server; tests/servers has one with it.
WITHOUT_COORDINATOR = ("test_loop_written_for_tf_distribute", "test_gather_and_reduce")

#: On parameter servers, workers read a data set anew in each `fit` (docs/promise.md).
READ_ON = ("test_passes_that_go_on_in_the_next_fit",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test on the strategies; those of single devices on the basic ones only."""
    module = metafunc.module.__name__.rpartition(".")[2]
    if module == "test_updates" and "target" in metafunc.fixturenames:
        metafunc.parametrize("target", COLLECTIVE, scope="function")
    elif "target" in metafunc.fixturenames and module != "test_three_workers":
        names = [n for n in STRATEGIES if n != "single" or module in ON_ONE_DEVICE]
        if metafunc.function.__name__ in (*WITHOUT_COORDINATOR, *READ_ON):
            names.remove("parameter_server")
        metafunc.parametrize("target", names, scope="function")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each case on several processes; the other strategies take turns, or all run it."""
    if config.getoption("everything"):
        return
    kept, left = [], []
    for item in items:
        target = _target_of(item)
        stays = target is None or target in _strategies_of(item, target)
        (kept if stays else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def _target_of(item: pytest.Item) -> str | None:
    """The strategy that a case of this suite runs on."""
    if "tests/contract/" not in item.nodeid or "test_three_workers" in item.nodeid:
        return None
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    target: str | None = parameters.get("target")
    return target


def _strategies_of(item: pytest.Item, target: str) -> tuple[str, ...]:
    """The strategies whose turn it is at a case."""
    number = zlib.crc32(item.nodeid.replace(target, "").encode())
    if "test_updates" in item.nodeid:
        return (COLLECTIVE[number % len(COLLECTIVE)],)
    return ("multi_worker", _TURNS[number % len(_TURNS)])


@pytest.fixture
def run(request: pytest.FixtureRequest, cluster: Pool, target: str) -> Agree:
    """Runs a case on the target; on the other targets of this test at the same time."""

    def run_case(function: str, /, plain: bool = False, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        names = [*([PLAIN] if plain else []), *targets_of(request)]
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


def targets_of(request: pytest.FixtureRequest) -> list[str]:
    """The targets that the same case is going to run on in this session."""
    case = _case_of(request.node)
    if case is None:
        return []
    items = [item for item in request.session.items if _case_of(item) == case]
    return [item.callspec.params["target"] for item in items]


def _case_of(item: pytest.Item) -> tuple[Any, ...] | None:
    """A test and its parameters but for the target; None where there is no target."""
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if parameters.pop("target", None) is None:
        return None
    return item.nodeid.partition("[")[0], sorted((k, repr(v)) for k, v in parameters.items())


@pytest.fixture(scope="module")
def _directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return {"root": tmp_path_factory.mktemp("shared")}


@pytest.fixture
def shared_directory(
    request: pytest.FixtureRequest, _directories: dict[str, pathlib.Path], target: str
) -> pathlib.Path:
    """A directory for this test that is the same for every target it runs on."""
    name = request.node.name.replace(f"{target}-", "").replace("/", "_")
    path = _directories["root"] / name
    path.mkdir(exist_ok=True)
    return path
