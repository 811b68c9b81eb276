"""Which tier a test is in, and which strategy's turn it is."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest

from tests.harness import STRATEGIES, TARGETS, tiers, turns

TURNS = pytest.mark.turns("test", "all")


class Item:
    """A collected test, as far as tiers look at it."""

    path = "tests/contract/test_x.py"

    def __init__(self, nodeid: str, *marks: Any, **parameters: Any) -> None:
        self.nodeid = nodeid
        self.stash = pytest.Stash()
        self._marks = [mark.mark for mark in marks]
        if parameters:
            self.callspec = types.SimpleNamespace(params=parameters)

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self._marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next(iter(self.iter_markers(name)), None)


class Config:
    """A run with these options; `deselected` is what it leaves out."""

    def __init__(self, tier: str = "all", rest_of: str | None = None) -> None:
        self._options = {"tier": tier, "rest_of": rest_of}
        self.deselected: list[Any] = []
        self.hook = types.SimpleNamespace(
            pytest_deselected=lambda items: self.deselected.extend(items)
        )

    def getoption(self, name: str) -> str | None:
        return self._options[name]


def cases(count: int, *marks: Any, taking: Any = TURNS, cases_each: int = 1) -> list[Any]:
    path = "tests/contract/test_x.py"
    return [
        Item(
            f"{path}::test_{place // cases_each}[{name}-{place}]",
            taking,
            *marks,
            target=name,
            n=place,
        )
        for place in range(count)
        for name in STRATEGIES
    ]


@pytest.mark.parametrize(
    ("path", "marks", "tier"),
    [
        ("tests/unit/test_a.py::test", [], "fast"),
        ("tests/jobs/test_a.py::test", [], "all"),
        ("tests/fuzz/test_a.py::test", [], "all"),
        ("tests/jobs/test_a.py::test", [pytest.mark.core], "test"),
        ("tests/unit/test_a.py::test", [pytest.mark.slow], "all"),
        ("tests/jobs/test_a.py::test", [pytest.mark.core, pytest.mark.seldom], "everything"),
    ],
)
def test_the_tier_of_a_test(path: str, marks: list[Any], tier: str) -> None:
    assert tiers.tier_of(Item(path, *marks)) == tier  # type: ignore[arg-type]


def run(items: list[Any], tier: str, rest_of: str | None = None) -> list[Any]:
    stay = list(items)
    tiers.select(Config(tier, rest_of), stay)  # type: ignore[arg-type]
    return stay


def test_the_rest_of_a_tier_is_what_the_smaller_one_left_out() -> None:
    items = cases(30)
    turns.take_turns(items)
    assert run(items, "everything") == items
    for less, more in (("fast", "test"), ("test", "all"), ("all", "everything")):
        first, rest = run(items, less), run(items, more, less)
        assert not set(first) & set(rest)
        assert set(first) | set(rest) == set(run(items, more))


def test_strategies_take_as_many_turns_as_they_have() -> None:
    shares = {name: TARGETS[name].turns for name in STRATEGIES}
    items = cases(2 * sum(shares.values()))
    turns.take_turns(items)
    found = collections.Counter(turns.target_of(item) for item in run(items, "test"))
    assert found == {name: 2 * share for name, share in shares.items() if share}
    twice = collections.Counter(item.callspec.params["n"] for item in run(items, "all"))
    assert set(twice.values()) == {2}


def test_a_marker_with_one_tier_gives_one_turn() -> None:
    items = cases(30, taking=pytest.mark.turns("test"))
    turns.take_turns(items)
    assert len(run(items, "test")) == 30
    assert run(items, "all") == run(items, "test")
    assert run(items, "everything") == items


def test_a_core_case_runs_on_every_strategy() -> None:
    items = cases(4, pytest.mark.core("saving"))
    turns.take_turns(items)
    slow = {name for name in STRATEGIES if TARGETS[name].slow}
    assert run(items, "test") == [item for item in items if turns.target_of(item) not in slow]
    rest = collections.Counter(turns.target_of(item) for item in run(items, "all", "test"))
    assert set(rest) == slow
    assert sum(rest.values()) == 4


def test_of_many_cases_of_a_test_the_first_run_often() -> None:
    items = cases(20, cases_each=10)
    turns.take_turns(items)
    prompt = {item.callspec.params["n"] for item in run(items, "test")}
    assert prompt == {0, 10}
    assert {item.callspec.params["n"] for item in run(items, "all")} == {*range(3), *range(10, 13)}
    assert len(run(items, "all")) == 2 * 2 + 4


def test_a_case_that_asks_for_all_has_it_wherever_it_stands() -> None:
    items = cases(20, cases_each=20, taking=pytest.mark.turns("all"))
    turns.take_turns(items)
    assert not run(items, "test")
    assert {item.callspec.params["n"] for item in run(items, "all")} == {*range(20)}
    assert len(run(items, "all")) == 20


def test_a_strategy_that_lacks_something_has_no_turn() -> None:
    items = cases(20, pytest.mark.needs("loops"))
    config = Config()
    turns.leave_out(config, items)  # type: ignore[arg-type]
    lacking = {name for name in STRATEGIES if "loops" in TARGETS[name].lacks}
    assert lacking
    assert {turns.target_of(item) for item in config.deselected} == lacking
    assert not lacking & {turns.target_of(item) for item in items}
    assert len(run(items, "test")) == 20


def test_a_need_that_no_table_describes_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="needs \\['wings'\\], not in CAPABILITIES"):
        turns.leave_out(Config(), cases(1, pytest.mark.needs("wings")))  # type: ignore[arg-type]
