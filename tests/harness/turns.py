"""On which strategies a case runs in which tier.

A test with a parameter `target` is a case for each value of its other parameters. A case that is
marked `core` runs on every strategy in `make test`, and in `make test-all` on one of the slow
ones. The others take turns, file by file and in the order in which they are written. A case's
marker `turns` has the tier in which it runs on the strategy that is due, and, if it has two, that
in which it runs on a second one too: on `multi_worker`, or, where that was due, on the next. A
strategy that lacks what a case needs is never due. Of a test with many cases the first does so, the
next `LATER` run in `make test-all`, on one strategy, and the others in `make test-everything`, as
all do on all strategies: the most telling ones come first. A case whose marker says `all` runs
there wherever it stands.

Loops by hand, and checkpoints and reports of a mode, have two tiers. The others have one: the hooks
into steps and losses and the rules of an exchange are one code for all, and neighbours are due on
the other strategies.
What is lost is a fault in one such case that only a certain strategy has, and that has no turn
there; `make test-everything` finds it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from tests.harness import tiers
from tests.harness.targets import CAPABILITIES, TARGETS, Target

#: The second strategy of each case: several processes, and stock Keras's rules.
ALWAYS = "multi_worker"
#: How many cases of one test `make test-all` runs beside its first and those that are core.
LATER = 2

Cases = Mapping[tuple[Any, ...], dict[str, pytest.Item]]

_session_cases = pytest.StashKey[Cases]()


def cases_of(items: Iterable[pytest.Item]) -> Cases:
    """The tests of each case, by target."""
    cases: dict[tuple[Any, ...], dict[str, pytest.Item]] = {}
    for item in items:
        if (case := case_of(item)) is not None:
            cases.setdefault(case, {})[target_of(item)] = item
    return cases


def target_of(item: pytest.Item) -> str:
    """The name of the target of a test that has one."""
    name: str = item.callspec.params["target"]  # type: ignore[attr-defined]
    return name


def case_of(item: pytest.Item) -> tuple[Any, ...] | None:
    """A test and its parameters but for the target; None where there is no target."""
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if parameters.pop("target", None) is None:
        return None
    return item.nodeid.partition("[")[0], repr(sorted((k, repr(v)) for k, v in parameters.items()))


def targets_beside(request: pytest.FixtureRequest) -> list[str]:
    """The targets that the case of a test is going to run on in this session."""
    session = request.session
    if _session_cases not in session.stash:
        session.stash[_session_cases] = cases_of(session.items)
    case = case_of(request.node)
    return [] if case is None else [*session.stash[_session_cases][case]]


def can_run(item: pytest.Item, target: Target) -> bool:
    """Whether a target has what a test needs.

    Raises:
        pytest.UsageError: if the test needs what no table describes.
    """
    needed = {each for mark in item.iter_markers("needs") for each in mark.args}
    if unknown := needed - set(CAPABILITIES):
        raise pytest.UsageError(f"{item.nodeid} needs {sorted(unknown)}, not in CAPABILITIES")
    return not needed & target.lacks


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need what their targets lack, and gives the others their turns."""
    tiers.keep(
        config,
        items,
        lambda item: case_of(item) is None or can_run(item, TARGETS[target_of(item)]),
    )
    for _, of_file in itertools.groupby(items, key=lambda item: item.path):
        take_turns(of_file)


def take_turns(items: Iterable[pytest.Item]) -> None:
    """Gives the tests of one file the tiers of their turns."""
    met: collections.Counter[str] = collections.Counter()
    taken: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    cases = cases_of(item for item in items if item.get_closest_marker("turns"))
    for (test, *_), case in cases.items():
        if any(item.get_closest_marker("core") for item in case.values()):
            places = _places_of_core(case, taken["core"])
        else:
            ranks = _asked(case)
            if ranks[0] == "test":
                met[test] += 1
                ranks = ranks if met[test] == 1 else ("all",)
                ranks = ranks if met[test] <= 1 + LATER else ()
            places = _places(case, ranks, taken[ranks[0]]) if ranks else {}
        for name, item in case.items():
            tiers.give(item, places.get(name, "everything"))


def _asked(case: Mapping[str, pytest.Item]) -> tuple[str, ...]:
    """The tiers that a case's marker has; `everything` where all of it is marked seldom."""
    if all(item.get_closest_marker("seldom") for item in case.values()):
        return ("everything",)
    mark = next(iter(case.values())).get_closest_marker("turns")
    assert mark is not None
    return mark.args


def _places(
    case: Mapping[str, pytest.Item], ranks: tuple[str, ...], taken: collections.Counter[str]
) -> dict[str, str]:
    """The tiers of the strategies that are due at a case."""
    first = _due(case, taken)
    taken[first] += 1
    second = ALWAYS if first != ALWAYS else _due(case.keys() - {first}, taken)
    return dict(zip((first, second), ranks, strict=False))


def _places_of_core(
    case: Mapping[str, pytest.Item], taken: collections.Counter[str]
) -> dict[str, str]:
    """The same of a case that is core: slow strategies take turns at it."""
    slow = [name for name in case if TARGETS[name].slow]
    due = min(slow, key=lambda name: taken[name], default=None)
    if due:
        taken[due] += 1
    return {name: "test" for name in case if name not in slow} | ({due: "all"} if due else {})


def _due(names: Collection[str], taken: Mapping[str, int]) -> str:
    """The target that has had the fewest of its turns, and stands first in `TARGETS`; or none."""
    candidates = [target for target in TARGETS.values() if target.name in names and target.turns]
    found = min(candidates, key=lambda target: taken[target.name] / target.turns, default=None)
    return found.name if found else ""
