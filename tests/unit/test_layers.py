"""Imports never point up or in a circle, and the sizes that keep the code readable."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.config.strategy_spec import specs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist"
FILES = sorted(PACKAGE.rglob("*.py"))

#: From the ground up. A room may import itself and those before it.
ROOMS = (
    "errors",
    "environment",
    "types",
    "utils",
    "cluster",
    "config",
    "launcher",
    "_tf",
    "_keras",
    "comm",
    "gradients",
    "placement",
    "sharding",
    "keras",
    "strategies",
    "horovod",
    "estimator",
    "exporting",
    "diagnostics",
    "cli",
    "__main__",
)

#: Rooms that every process of a job imports before TensorFlow, or without it.
WITHOUT_TENSORFLOW = ("errors", "environment", "cluster", "config", "launcher")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Full names of what a file imports, also within its functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(path: Path) -> set[str]:
    """The modules of tfdist that a file imports."""
    found = set()
    for name in imported(path):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name not in ("", "tfdist"):
            found.add(name)
    return found


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_never_point_up(path):
    own = room_of(module_of(path))
    if not own:
        return
    assert own in ROOMS, f"{own} is not a room: add it to ROOMS where it belongs"
    for module in modules_imported(path):
        other = room_of(module)
        assert ROOMS.index(other) <= ROOMS.index(own), f"{path}: {own} must not import {module}"


def test_modules_do_not_import_in_a_circle():
    arrows = {module: modules_imported(path) - {module} for module, path in MODULES.items()}
    assert not circle_in(arrows)


@pytest.mark.parametrize("folder", [p for p in PACKAGE.rglob("*") if any(p.glob("*/*.py"))])
def test_the_folders_of_a_room_do_not_import_in_a_circle(folder):
    own = module_of(folder / "__init__.py")
    arrows: dict[str, set[str]] = {}
    for path in folder.glob("*/**/*.py"):
        child = path.relative_to(folder).parts[0]
        others = {
            module[len(own) + 1 :].split(".")[0]
            for module in modules_imported(path)
            if module.startswith(f"{own}.")
        }
        arrows.setdefault(child, set()).update(o for o in others if (folder / o).is_dir())
    assert not circle_in({child: others - {child} for child, others in arrows.items()})


def test_no_room_uses_private_names_of_another():
    for path in FILES:
        own = room_of(module_of(path))
        aliases = {}
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tfdist"):
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                other = room_of(full)
                if other != own and full not in MODULES:
                    assert not alias.name.startswith("_"), f"{path} imports {full}"
                if other != own and full in MODULES:
                    aliases[alias.asname or alias.name] = full
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = node.value.id in aliases and node.attr.startswith("_")
                assert not private, (
                    f"{path}:{node.lineno} uses {aliases[node.value.id]}.{node.attr}"
                )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_small(path):
    assert path.read_text().count("\n") <= 600
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{path}: {node.name} is too long"


@pytest.mark.parametrize("room", WITHOUT_TENSORFLOW)
def test_rooms_that_need_no_tensorflow(room):
    for path in FILES:
        if room_of(module_of(path)) == room:
            for name in imported(path):
                assert name.split(".")[0] not in ("tensorflow", "keras"), f"{path} imports {name}"


def test_private_tensorflow_is_in_one_room():
    for path in FILES:
        if room_of(module_of(path)) != "_tf":
            assert "tensorflow.python" not in path.read_text(), path


def test_private_keras_is_in_one_module():
    for path in FILES:
        if path.name != "_keras.py":
            names = [name for name in imported(path) if name.startswith("keras.src")]
            assert not names, f"{path} imports {names}: take them from tfdist._keras"


def test_only_one_module_touches_the_environment():
    for path in FILES:
        if path.name != "environment.py":
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def test_what_a_thread_keeps_is_listed():
    """In docs/architecture.md, each with the reason why it is no argument."""
    calls = {
        module.removeprefix("tfdist.")
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("threading.local", "Flag", "Current")
    }
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("### What a thread knows")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = {name.strip(" `") for row in rows for name in row.split(",")}
    assert listed == calls | {"keras.hooks"}


def test_the_documentation_names_files_that_exist():
    folders = ("tfdist", "tests", "examples", "benchmarks")
    files = {str(p.relative_to(ROOT)) for each in folders for p in (ROOT / each).rglob("*.py")}
    texts = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        (text.name, name)
        for text in texts
        for name in re.findall(r"`([a-z_/0-9]+\.py)`", text.read_text())
    }
    gone = [each for each in named if not any(f"/{file}".endswith(f"/{each[1]}") for file in files)]
    assert sorted(gone) == []


def comparisons_of_strategies() -> list[str]:
    """Where code outside the strategies compares their names, or has tables of them."""
    found = []
    for path in FILES:
        if room_of(module_of(path)) == "strategies":
            continue
        for node in ast.walk(tree_of(path)):
            parts = list(node.keys) if isinstance(node, ast.Dict) else []
            parts += [node] if isinstance(node, ast.Compare | ast.MatchValue) else []
            words = {
                each.value
                for part in parts
                for each in ast.walk(part or ast.Constant(None))
                if isinstance(each, ast.Constant)
            }
            if words & set(specs()):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    # The name of Horovod's distribution is that of the strategy.
    return [line for line in found if "installed_version('horovod')" not in line]


def test_nothing_but_the_strategies_compares_their_names():
    """What differs between strategies is a field of `StrategySpec`."""
    assert comparisons_of_strategies() == []


def test_every_folder_of_tests_is_run():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {f"tests/{p.parent.name}" for p in (ROOT / "tests").glob("*/test_*.py")}
    assert sorted(folders) == sorted(listed["testpaths"])
