"""The documentation's front page in a browser, as `make docs` has built it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import browser

LACKING = browser.missing() or browser.missing_site()


@pytest.mark.core
@pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
@pytest.mark.parametrize("name", ["index", "docs/report", "docs/benchmarks"])
def test_a_page_fits_its_window(name: str, tmp_path: Path) -> None:
    """Compares the page with its window, and looks for pictures that show nothing."""
    page = browser.SITE.parent / f"{name}.html"
    seen = browser.look(page, f"site-{name.replace('/', '-')}", tmp_path)
    assert (seen.width, seen.wide) == (browser.WIDTH, [])
    assert seen.letters > 1000
    assert len(seen.colours) == (0 if name == "index" else 1)
    assert all(count > 20 for count in seen.colours), "a picture is empty"
