"""Prints the figures of the package's shape: `make shape`."""

from __future__ import annotations

import ast
import collections
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.unit.test_layers import (
    FILES,
    MODULES,
    ROOT,
    comparisons_of_strategies,
    modules_imported,
    room_of,
    tree_of,
)

#: Most lines and modules, most percent of annotations that are `Any` by whichever name.
AIMS = {"lines": "40,000", "modules": "240", "bare Any": "8 %", "comparisons of strategies": "0"}


def functions() -> Iterator[tuple[int, str]]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}"


def annotations_of(path: Path) -> Iterator[ast.expr]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns


def is_any(kind: ast.expr, names: set[str]) -> bool:
    """Whether an annotation is `Any` to mypy: by itself, by another name, or as one of several."""
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
        kind = ast.parse(kind.value.strip(), mode="eval").body
    if isinstance(kind, ast.BinOp):
        return is_any(kind.left, names) or is_any(kind.right, names)
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in (
        *("Optional", "Union", "Final", "ClassVar", "Annotated"),
    ):
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        return any(is_any(part, names) for part in parts)
    return ast.unparse(kind) in names


def aliases_of_any(trees: Iterable[ast.Module]) -> set[str]:
    """`Any`, and the names that modules give to it or to a union with it."""
    names, count = {"Any", "typing.Any"}, 0
    trees = list(trees)
    while count != len(names):
        count = len(names)
        for node in itertools.chain.from_iterable(map(ast.walk, trees)):
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname for a in node.names if a.asname and a.name in names}
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _is_alias(node.value, names):
                    names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return names


def _is_alias(value: ast.expr, names: set[str]) -> bool:
    text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    if text and not set(re.findall(r"[\w.]+", value.value)) & names:
        return False
    try:
        return is_any(value, names)
    except SyntaxError:
        return False


def bare_any() -> tuple[int, int]:
    """How many annotations are `Any`, by whichever name, and how many there are."""
    names = aliases_of_any(map(tree_of, FILES))
    kinds = [kind for path in FILES for kind in annotations_of(path)]
    return sum(is_any(kind, names) for kind in kinds), len(kinds)


def names_of_libraries() -> int:
    """Annotations by a name of TensorFlow or Keras, of which mypy knows nothing either."""
    found = 0
    for path in FILES:
        known: set[str] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                known |= {
                    (a.asname or a.name).split(".")[0] for a in node.names if _untyped(a.name)
                }
            elif isinstance(node, ast.ImportFrom) and _untyped(node.module or ""):
                known |= {a.asname or a.name for a in node.names}
        for kind in annotations_of(path):
            found += re.match(r"\w*", ast.unparse(kind))[0] in known
    return found


def _untyped(module: str) -> bool:
    return module.split(".")[0] in ("tensorflow", "keras") or module == "tfdist._keras"


def hooks() -> list[str]:
    """The seam of each hook on Keras and TensorFlow, as the code writes it."""
    return [
        ", ".join(ast.unparse(each) for each in node.args[:2])
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Hook"
    ]


def figures() -> dict[str, str]:
    """The figures by name."""
    lines = {path: path.read_text().count("\n") for path in FILES}
    modules = {path: count for path, count in lines.items() if count}
    names = collections.Counter(p.name for p in modules if p.name != "__init__.py")
    untyped, annotated = bare_any()
    seams = collections.Counter(hooks())
    arrows = {
        (room_of(module), room_of(other))
        for module, path in MODULES.items()
        for other in modules_imported(path)
        if room_of(module) and room_of(module) != room_of(other)
    }
    longest = sorted(functions(), reverse=True)[:3]
    return {
        "lines": f"{sum(lines.values()):,}",
        "modules": f"{len(modules)}",
        "median module": f"{statistics.median(modules.values()):.0f} lines",
        "file names that occur twice or more": f"{sum(n > 1 for n in names.values())}",
        "bare Any": f"{100 * untyped / annotated:.1f} % of {annotated:,}",
        "names of TensorFlow and Keras as types": f"{names_of_libraries()}",
        "comparisons of strategies": f"{len(comparisons_of_strategies())}",
        "hooks": f"{sum(seams.values())} on {len(seams)} seams",
        "seams with several hooks": f"{sum(n > 1 for n in seams.values())}",
        "rooms": f"{len({room_of(module) for module in MODULES} - {''})}",
        "arrows between rooms": f"{len(arrows)}",
        "longest functions": "\n".join(f"{count} {name}" for count, name in longest),
    }


def main() -> None:
    table = Table("figure", "now", "aim", title="shape of tfdist/")
    for name, value in figures().items():
        table.add_row(name, value, AIMS.get(name, ""))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
