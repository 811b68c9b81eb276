"""Pages of the documentation: their contents, and how a browser shows them after `make docs`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.harness import browser

LACKING = browser.missing() or browser.missing_site()
DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(path.read_text() for path in sorted(DOCS.glob("api*.md")))
#: The entries that mkdocstrings makes of docstrings, and the names in tables, which others define.
ENTRIES = set(re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE))
OTHERS = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", REFERENCE, re.MULTILINE))))


@pytest.mark.core
@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
@pytest.mark.parametrize("name", ["index", "docs/report", "docs/benchmarks", "docs/options"])
def test_a_page_fits_its_window(name: str, tmp_path: Path) -> None:
    """Compares the page with its window, and looks for cut flags and for empty pictures."""
    page = browser.SITE.parent / f"{name}.html"
    seen = browser.look(page, f"site-{name.replace('/', '-')}", tmp_path)
    assert (seen.width, seen.wide, seen.broken) == (browser.WIDTH, [], [])
    assert seen.letters > 1000
    assert len(seen.colours) == (1 if name in ("docs/report", "docs/benchmarks") else 0)
    assert all(count > 20 for count in seen.colours), "a picture is empty"


@pytest.mark.parametrize(
    "package", ["tfdist", "tfdist.estimator", "tfdist.exporting", "tfdist.horovod"]
)
def test_each_public_name_has_an_entry(package: str) -> None:
    names = set(importlib.import_module(package).__all__) - OTHERS
    # An entry of `tfdist` serves the package that defines the name, too.
    assert [name for name in names if not {f"{package}.{name}", f"tfdist.{name}"} & ENTRIES] == []


@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
def test_strategies_show_what_they_inherit() -> None:
    page = (browser.SITE.parent / "docs/api.html").read_text()
    for strategy in ("Single", "Mirrored", "MultiWorker", "Horovod", "ParameterServer", "Pipeline"):
        for name in ("is_chief", "flush"):
            assert f'id="tfdist.{strategy}.{name}"' in page


def test_each_picture_stands_on_a_page_and_has_a_text() -> None:
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    shown = re.findall(r"!\[.+\]\(pictures/(.+)\)", pages)
    assert sorted(shown) == sorted(path.name for path in DOCS.glob("pictures/*"))
