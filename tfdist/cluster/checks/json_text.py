"""Reads JSON that people, shells and schedulers wrote, and says what they did to it."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable

from tfdist.cluster.checks.finding import Finding, error, quoted

__all__ = ["load"]

_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:12345"]}, "task": {"type": "worker", "index": 0}}'
_AROUND = 20
_TYPOGRAPHIC_QUOTES = "[\u2018-\u201f]"


def load(text: str, where: str) -> tuple[object, list[Finding]]:
    """Reads a JSON object.

    Args:
        text: the JSON text.
        where: what the findings call it.

    Returns:
        The value, or None if it cannot be read, and what is wrong with the text.
    """
    if not text.strip():
        return None, [error(where, f"{quoted(text)} is empty.", f"Unset it, or give {_EXAMPLE}")]
    doubles: list[str] = []
    try:
        value = json.loads(text, object_pairs_hook=_pairs_hook(doubles))
    except json.JSONDecodeError as problem:
        return None, [_syntax_finding(text, where, problem)]
    except RecursionError:
        return None, [error(where, f"{quoted(text)} is nested too deep.", f"Give {_EXAMPLE}")]
    findings = [
        error(where, f'The key "{key}" is given twice; only the last one counts.', "Keep one.")
        for key in dict.fromkeys(doubles)
    ]
    if not isinstance(value, dict):
        return None, [*findings, _not_an_object(value, where)]
    return value, findings


def _pairs_hook(doubles: list[str]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        counts = Counter(key for key, _ in pairs)
        doubles.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    return build


def _not_an_object(value: object, where: str) -> Finding:
    problem = f"{quoted(value)} is not a JSON object."
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return error(where, f"{problem} It is JSON text inside a JSON string.", "Encode it once.")
    return error(where, problem, f"Give an object, such as {_EXAMPLE}")


def _syntax_finding(text: str, where: str, problem: json.JSONDecodeError) -> Finding:
    place = f"line {problem.lineno}, column {problem.colno}"
    near = " ".join(text[max(0, problem.pos - _AROUND) : problem.pos + _AROUND].split())
    what = f"This is not JSON: {problem.msg} at {place}, near `{near}`."
    return error(where, what, _hint(text.strip(), text, problem.pos))


def _hint(stripped: str, text: str, position: int) -> str:
    """The likely cause of a syntax error and its cure."""
    assignment = re.match(r"(export\s+)?TF_CONFIG\s*=", stripped)
    if assignment:
        return f"Give only what follows the equals sign, without `{assignment[0]}`."
    if stripped[0] == stripped[-1] and stripped[0] in "'\"" and stripped[1:2] == "{":
        return (
            f"The shell's quotes ({stripped[0]}) have become part of the value. Remove them; an "
            "env file takes the value without quotes."
        )
    if re.search(_TYPOGRAPHIC_QUOTES, text):
        return 'It contains typographic quotes. Replace them with plain ones (").'
    if '\\"' in stripped:
        return (
            'Backslashes stand before the quotes. Remove them: write "cluster", not \\"cluster\\".'
        )
    python = _as_python(stripped)
    if python is not None:
        return (
            "This is how Python prints a dictionary. Write it with json.dumps; as JSON it is "
            f"{json.dumps(python)}"
        )
    if text[:position].rstrip().endswith(",") and text[position : position + 1] in ("]", "}"):
        return "Remove the comma before the closing bracket."
    if re.match(r"\{\s*\w+\s*:", stripped):
        return (
            "The double quotes are missing. A shell removes them unless the whole value is in "
            f"single quotes: export TF_CONFIG='{_EXAMPLE}'"
        )
    if not text[position:].strip():
        return "The text ends too early: close each bracket and quote."
    return f"Correct it there. A good one: {_EXAMPLE}"


def _as_python(text: str) -> object:
    """The value of a Python literal that JSON can hold, or None."""
    if not re.search(r"'|\bNone\b|\bTrue\b|\bFalse\b", text):
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None
