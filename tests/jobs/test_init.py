"""The files of `tfdist init`, run as their README says."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.harness.tiers import seldom
from tests.jobs.test_jobs import TFDIST, log, run


@pytest.fixture
def first(tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    done = run(tmp_path, *TFDIST, "init", "first", "--ssh")
    assert done.returncode == 0, done.stderr
    return tmp_path / "first"


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    ["--strategy strategy.toml", *seldom("--hostfile hosts")],
)
def test_the_script_trains_as_the_readme_says(first, options):
    (command,) = {
        line
        for line in re.findall(r"^    tfdist (run .+)$", (first / "README.md").read_text(), re.M)
        if "--dry-run" not in line
        and ("--hostfile" in line) == ("--hostfile" in options)
        and options in line
    }
    done = run(first, *TFDIST, *shlex.split(command))
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^validation accuracy (\d+\.\d+)%", done.stdout, re.MULTILINE)
    assert float(accuracy) > 95
    assert f"validation accuracy {accuracy}%" in log(first, "worker-1")
