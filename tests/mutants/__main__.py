"""Breaks one place after the other in a copy of the tree, and lists what no test notices.

    python -m tests.mutants [-k WORD] [--seconds 300] [--list]

A mutant is noticed if its tests fail, and pass without it. Exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant
from tfdist import environment

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "tfdist-logs", "*.egg-info"
)

#: Exit statuses of pytest: tests failed; all passed.
_FAILED, _PASSED = 1, 0


def tested(tree: Path, tests: str, seconds: float) -> str:
    """How tests end on a tree: "passed", "failed", "late" or an exit status of pytest."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=tree,
            env=environment.merged({"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "late"
    return {_FAILED: "failed", _PASSED: "passed"}.get(done.returncode, f"exit {done.returncode}")


def verdict(tree: Path, mutant: Mutant, seconds: float) -> str:
    """What the tests say to a mutant. The tree is afterwards as it was."""
    path = tree / mutant.path
    before = path.read_text()
    path.write_text(before.replace(mutant.text, mutant.instead, 1))
    try:
        found = tested(tree, mutant.tests, seconds)
    finally:
        path.write_text(before)
    return {"failed": "noticed", "late": "noticed (late)", "passed": "SURVIVED"}.get(found, found)


def main() -> int:
    """Prints a line for each mutant; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.mutants")
    parser.add_argument("-k", default="", help="only mutants whose line or tests have this word")
    parser.add_argument("--seconds", type=float, default=300, help="for the tests of a mutant")
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    given = parser.parse_args()
    chosen = [each for each in MUTANTS if given.k in each.name or given.k in each.tests]
    if given.list:
        print("\n".join(f"{each.name}  [{each.tests}]" for each in chosen))
        return 0
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
        sound: dict[str, str] = {}
        for mutant in chosen:
            if mutant.tests not in sound:
                sound[mutant.tests] = tested(tree, mutant.tests, given.seconds)
            without = sound[mutant.tests]
            said = verdict(tree, mutant, given.seconds)
            said = said if without == "passed" else f"not judged: {without} without it"
            print(f"{said:16} {mutant.name}", flush=True)
            if not said.startswith("noticed"):
                survived.append(mutant)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants were noticed.")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
