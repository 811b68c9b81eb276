"""The Python code of the documentation, run as it is written.

The blocks of a page, from top to bottom, are one script. HTML comments, which readers do not see,
hold what the script needs besides, and the command that runs it:

    <!-- run: tfdist run --strategy horovod -n 2 -->

    <!-- python
    model = ...
    -->

A block of code that needs a package which is not installed is left out:

    <!-- needs: mlflow -->
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- needs: (\w+) -->\n+)?(?:^```python\n(.*?)^```$|^<!-- python\n(.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^<!-- run: (.*) -->$", re.MULTILINE)
PAGES = {
    path.name: path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(path.read_text())
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    text = PAGES[page].read_text()
    blocks = [
        shown or hidden
        for package, shown, hidden in BLOCK.findall(text)
        if not package or importlib.util.find_spec(package)
    ]
    (tmp_path / "script.py").write_text("\n\n".join(blocks))
    found = COMMAND.search(text)
    words = shlex.split(found[1]) if found else ["python"]
    commands = {path.name: str(path) for path in Path(sys.executable).parent.iterdir()}
    done = subprocess.run(
        [*(commands.get(word, word) for word in words), "script.py"],
        cwd=tmp_path,
        env=environment.merged({"TF_CONFIG": None, "PYTHONPATH": str(ROOT)}),
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
