"""Which tests a run takes: `--tier=fast`, `test`, `all` or `everything`.

Each tier holds the one before. The tier of a test is that of its marker, else that of its folder.
Tests that run the same case on several strategies take turns (`tests.harness.turns`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

TIERS: Final = ("fast", "test", "all", "everything")

#: After so long a run of the tier is ended: three times the aims in CONTRIBUTING.md, or more.
SECONDS: Final = {"fast": 900, "test": 2400, "all": 6300, "everything": 5 * 3600}

#: The tier of the tests in a folder of `tests`; `all` where it has no entry.
FOLDERS: Final = {
    "unit": "fast",
    "cluster": "fast",
    "cli": "fast",
    "doctor": "fast",
}

#: The tier that a marker gives, whatever the folder is, and what the marker says.
MARKERS: Final = {
    "core": ("test", "what must hold before each commit: it runs in `make test`"),
    "slow": ("all", "runs in `make test-all`, since it takes long or repeats much of another test"),
    "seldom": ("everything", "runs in `make test-everything` only"),
}

_turn = pytest.StashKey[str]()


def give(item: pytest.Item, tier: str) -> None:
    """Sets the tier of a test that has come by its turn; its markers come first."""
    item.stash[_turn] = tier


def tier_of(item: pytest.Item) -> str:
    """The smallest tier that runs a test."""
    marked = [tier for name, (tier, _) in MARKERS.items() if item.get_closest_marker(name)]
    turn = item.stash.get(_turn, None)
    found = [*marked, *([turn] if turn else [])]
    if found:
        # A seldom parameter of a core test is seldom.
        return max(found, key=TIERS.index)
    folder = item.nodeid.removeprefix("tests/").partition("/")[0]
    return FOLDERS.get(folder, "all")


def seldom(*values: object) -> list[object]:
    """Values of one parameter, or tuples of several, that are marked seldom."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.seldom) for row in rows]


def add_options(parser: pytest.Parser) -> None:
    """Adds `--tier` and `--rest-of`."""
    parser.addoption("--tier", choices=TIERS, default="all", help="how much to run")
    parser.addoption(
        "--rest-of", choices=TIERS, help="leave out what a run of this smaller tier has run already"
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not in the tier, or in that of `--rest-of`."""
    most = TIERS.index(config.getoption("tier"))
    done = config.getoption("rest_of")
    least = TIERS.index(done) + 1 if done else 0
    keep(config, items, lambda item: least <= TIERS.index(tier_of(item)) <= most)


def keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]
) -> None:
    """Leaves out the tests that are not wanted, and reports them to pytest."""
    stay: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (stay if wanted(item) else left).append(item)
    items[:] = stay
    if left:
        config.hook.pytest_deselected(items=left)
