"""Values as lines of JSON: jobs for other processes, and what was measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Line", "read_lines", "write_lines"]


class Line:
    """A dataclass that can be written as one line."""

    def to_json(self: DataclassInstance) -> str:
        """The value as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; lists are as tuples."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def write_lines(values: Iterable[DataclassInstance], path: Path) -> None:
    """Writes dataclasses, one a line."""
    path.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in values))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The fields of what `write_lines` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]
