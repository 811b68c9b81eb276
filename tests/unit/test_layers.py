"""Imports never point up, and the sizes that keep the code readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist"
FILES = sorted(PACKAGE.rglob("*.py"))

#: From the ground up. A room may import its own and those before it.
ROOMS = (
    ("errors", "environment", "_lazy", "deadline"),
    ("cluster",),
    ("option_checks", "server_options", "horovod_options", "update_options", "pipeline_options"),
    (
        "config",
        "_tensorflow",
        "_tensorflow_checkpoints",
        "_tensorflow_columns",
        "_tensorflow_data",
        "_tensorflow_graphs",
        "_tensorflow_sessions",
        "files",
        "logs",
        "resolution",
    ),
    ("agreement", "joining"),
    ("data", "servers", "updates", "placement"),
    ("keras",),
    ("pipelines",),
    ("horovod",),
    ("strategies",),
    ("estimator",),
    ("verify", "exporting", "doctor", "horovod_build"),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_never_point_up(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    assert own in LEVEL, f"{own} is not a room: add it to ROOMS where it belongs"
    for name in imported(ast.parse(path.read_text())):
        if name.startswith("tfdist.") and (other := room_of(name)) in LEVEL:
            assert LEVEL[other] <= LEVEL[own], f"{path}: {own} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert text.count("\n") <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{path}: {node.name} is too long"


@pytest.mark.parametrize("path", sorted((PACKAGE / "cluster").rglob("*.py")), ids=lambda p: p.name)
def test_cluster_needs_no_tensorflow(path):
    for name in imported(ast.parse(path.read_text())):
        assert name.split(".")[0] not in ("tensorflow", "keras"), f"{path} imports {name}"


def test_private_tensorflow_is_in_one_file():
    for path in FILES:
        if not path.name.startswith("_tensorflow"):
            assert "tensorflow.python" not in path.read_text(), path


def test_only_one_module_touches_the_environment():
    for path in FILES:
        if path.name != "environment.py":
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path
