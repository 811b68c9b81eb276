"""Prints the figures of the package's shape: `make shape`."""

from __future__ import annotations

import ast
import collections
import statistics
from collections.abc import Iterator

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

#: Most lines and modules, most percent of annotations that are `Any` and nothing else.
AIMS = {"lines": "40,000", "modules": "240", "bare Any": "8 %", "comparisons of strategies": "0"}


def functions() -> Iterator[tuple[int, str]]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}"


def annotations() -> Iterator[str]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                yield ast.unparse(node.annotation)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
                yield ast.unparse(node.returns)


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
    kinds = list(annotations())
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
        "bare Any": f"{100 * sum(k == 'Any' for k in kinds) / len(kinds):.0f} % of {len(kinds):,}",
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
