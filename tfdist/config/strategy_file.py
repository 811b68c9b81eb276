"""Strategy files: options by name in TOML."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.config.strategy_config import accepted
from tfdist.errors import ConfigError

__all__ = ["StrategyFile", "is_file", "load_file", "read_toml"]


@dataclasses.dataclass(frozen=True)
class StrategyFile:
    """A strategy file that has been read: each value is of its option's type and within bounds.

    Attributes:
        path: the file.
        values: the options by name.
    """

    path: Path
    values: Mapping[str, Any]


def is_file(strategy: str) -> bool:
    """Whether the value of `--strategy` is the path of a file, and not the name of a strategy."""
    return strategy.endswith(".toml") or os.sep in strategy


def load_file(path: Path) -> StrategyFile:
    """Reads a strategy file.

    Args:
        path: a TOML file whose keys are options.

    Raises:
        ConfigError: if it cannot be read, is not TOML, has an unknown key, or a value of a wrong
            type or out of bounds. The message begins with the file, and the line if it is known.
    """
    text = _read(path)
    content = _parse(path, text)
    if "device_map" in content:
        raise ConfigError(
            f"{path}: [device_map] is not an option of a strategy. It says where "
            f"`tfdist.place(model, {str(path)!r})` puts layers, which the script calls itself. Run "
            "the script by `python`, or with --strategy single on GPUs; or with a file that holds "
            "options only."
        )
    values = {}
    for name, value in content.items():
        try:
            values[name] = accepted(name, value)
        except ConfigError as error:
            line = _line_of(name, text)
            where = f"{path}: " if line is None else f"{path}: line {line}: "
            raise ConfigError(f"{where}{error}") from error
    return StrategyFile(path, values)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file, whatever is in it.

    Raises:
        ConfigError: if it cannot be read or is not TOML.
    """
    return _parse(path, _read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Editors of Windows begin with a mark.
    except OSError as error:
        raise ConfigError(f"Cannot read the file {str(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The file {str(path)!r} is not valid TOML: {error}.") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    # Whole numbers of thousands of digits are a plain ValueError, and deep nests recurse.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The file {str(path)!r} is not valid TOML: {error}.") from error


def _line_of(name: str, text: str) -> int | None:
    """The line of a key; None if several lines look like it, as within a text of many lines."""
    key = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[.=\]]""")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if key.match(line)]
    return lines[0] if len(lines) == 1 else None
