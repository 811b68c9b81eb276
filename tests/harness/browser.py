"""Looks at pages in headless Chromium: what overflows, which pictures are empty, a screenshot."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

__all__ = ["Look", "look", "missing", "missing_site"]

ROOT = Path(__file__).parents[2]
#: Screenshots stay here, for people.
PLACE = ROOT / "build/screenshots"
SITE = ROOT / "site/index.html"
WIDTH = 1280
_SECONDS = 90

#: Nothing is asked of the network, and nothing is kept.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files"),
    *("--hide-scrollbars", "--force-device-scale-factor=1", "--virtual-time-budget=4000"),
)

#: Measures the page once it stands, and leaves what it found as text.
_MEASURE = """
<script id="measure">//<![CDATA[
window.addEventListener("load", function () { setTimeout(function () {
  var edge = document.documentElement.clientWidth, wide = [], pictures = [], broken = [];
  document.querySelectorAll("main *").forEach(function (each) {
    var box = each.getBoundingClientRect();
    var inner = each.closest("svg, pre, .md-typeset__scrollwrap");
    if (each.checkVisibility() && box.right > edge + 1 && (!inner || inner === each))
      wide.push(each.tagName + "." + each.getAttribute("class") + " to " + Math.round(box.right));
  });
  document.querySelectorAll("main td code").forEach(function (each) {
    if (/^--?[\\w-]+$/.test(each.textContent) && each.getClientRects().length > 1)
      broken.push(each.textContent);
  });
  document.querySelectorAll("main svg, main img").forEach(function (each) {
    var box = each.getBoundingClientRect();
    if (box.width > 100 && box.height > 50)
      pictures.push([box.left, box.top + window.scrollY, box.width, box.height].map(Math.round));
  });
  var found = document.createElement("pre");
  found.id = "found";
  found.textContent = JSON.stringify({
    width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    wide: wide.slice(0, 10), broken: broken, pictures: pictures,
    text: document.body.innerText.length
  });
  document.documentElement.appendChild(found);
}, 500); });
//]]></script>
"""


@dataclasses.dataclass(frozen=True)
class Look:
    """A page as it stands in a window of 1280 pixels.

    Attributes:
        width: of the whole page, in pixels.
        wide: elements that reach beyond the window.
        broken: flags in tables that take more than one line.
        colours: for each picture of the page, how many colours a screenshot of it has.
        letters: how much text there is.
        screenshot: the picture of the page.
    """

    width: int
    wide: list[str]
    broken: list[str]
    colours: list[int]
    letters: int
    screenshot: Path


def missing() -> str | None:
    """What the machine lacks for `look`, in words."""
    return None if shutil.which("chromium") else "there is no chromium (Debian: package chromium)"


def missing_site() -> str | None:
    """Why there is no site to look at."""
    return None if SITE.is_file() else f"{SITE.name} is not there: run `make docs`"


def look(page: Path, name: str, folder: Path) -> Look:
    """Opens a page and measures it.

    Args:
        page: an HTML file; what it needs is found beside it.
        name: of the screenshot.
        folder: for the profile of the browser.
    """
    import matplotlib.image

    measured = page.with_name(f".{page.stem}-measured.html")
    text = page.read_text()
    measured.write_text(text.replace("</body>", f"{_MEASURE}</body>", 1))
    try:
        shown = _chromium(folder, f"--window-size={WIDTH},900", "--dump-dom", measured.as_uri())
    finally:
        measured.unlink()
    said = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert said, f"{page} was not measured: {shown[-500:]}"
    found = json.loads(html.unescape(said[1]))
    PLACE.mkdir(parents=True, exist_ok=True)
    screenshot = PLACE / f"{name}.png"
    height = max(900, min(found["height"], 12000))
    size = f"--window-size={WIDTH},{height}"
    _chromium(folder, size, f"--screenshot={screenshot}", page.as_uri())
    print(f"Screenshot: {screenshot}")
    picture = (255 * matplotlib.image.imread(screenshot)[..., :3]).astype(np.uint8)
    colours = [_colours(picture[y : y + h, x : x + w]) for x, y, w, h in found["pictures"]]
    wide, broken = found["wide"], found["broken"]
    return Look(found["width"], wide, broken, colours, found["text"], screenshot)


def _chromium(folder: Path, *words: str) -> str:
    command = ["chromium", *_FLAGS, f"--user-data-dir={folder / 'profile'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _colours(part: np.ndarray) -> int:
    return len(np.unique(part.reshape(-1, 3), axis=0)) if part.size else 0
