"""Breaks one place after the other in a copy of the tree, and lists what no test notices.

    python -m tests.mutants [-k WORD] [--seconds 300] [--list]

A mutant is noticed if its tests fail, and pass without it. Exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import pytest

from tests.harness import zygote
from tests.mutants.table import MUTANTS, Mutant
from tfdist import environment

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "tfdist-logs", "*.egg-info"
)

#: Exit statuses of pytest: tests failed; all passed.
_FAILED, _PASSED = 1, 0


def tested(tree: Path, tests: str, seconds: float) -> str:
    """How tests end on a tree: "passed", "failed", "late" or an exit status of pytest.

    They run in a fork of this process, which has imported TensorFlow.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        zygote.die_with_parent()
        _run(tree, ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {_FAILED: "failed", _PASSED: "passed"}.get(code, f"exit {code}")
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "late"


def _run(tree: Path, arguments: list[str]) -> NoReturn:
    """Runs pytest on a tree; what this process has imported of another is forgotten."""
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    environment.set_for_good({"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"})
    for name in [each for each in sys.modules if each.partition(".")[0] in ("tests", "tfdist")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(each for each in sys.path if each not in ("", str(ROOT)))]
    os._exit(int(pytest.main(arguments)))


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
    if not chosen:
        parser.error(f"-k {given.k!r}: no mutant has this word in its line or its tests")
    if given.list:
        print("\n".join(f"{each.name}  [{each.tests}]" for each in chosen))
        return 0
    survived = []
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.set_for_good({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **quiet})
    zygote.load()
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
