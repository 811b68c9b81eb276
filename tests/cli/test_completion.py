"""What a shell offers at the tab key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import environment


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tfdist ver", ["verify"]),
        ("tfdist run --strat", ["--strategy"]),
        ("tfdist run --strategy mu", ["multi_worker"]),
        ("tfdist run -s p", ["parameter_server", "pipeline"]),
        ("tfdist run -n 2 --mode st", ["stale"]),
        ("tfdist verify --strategy mi", ["mirrored"]),
        ("tfdist run -s my", []),  # No name: the shell offers files.
        ("tfdist run --help strange ", []),
    ],
)
def test_bash_is_offered(tmp_path: Path, line: str, words: list[str]) -> None:
    asked = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TFDIST_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tfdist"],
        cwd=tmp_path,
        env=environment.merged(asked),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (words, "")
