"""Finds phrases that are not plain English in docstrings and comments: `python -m tests.prose`.

The docstring of a command is its help, which users read and other tests pin: it is left out.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: The beginning of a text, a paragraph or a sentence.
_BEGINS = r"(?:\A|(?<=\n\n)|(?<=[.;?!]\s))\s*\b"

#: Phrases, and what to write instead.
RULES: dict[str, str] = {
    _BEGINS + r"(?:What|Whatever|Whoever|Whom|Whose|Who|Which|Why|How)\b": (
        "begin with the noun or the verb: 'The command that …', 'The number of …'"
    ),
    _BEGINS + r"[A-Z]\w+s (?:what|whatever|whoever)\b": "name the thing: 'Reads the output of …'",
    r"(?m)^\s*\w+: (?:what|who)\b(?! to\b)": "name the thing: 'result: the result of …'",
    _BEGINS + r"Where\b": "'If' for a condition, 'The place of …' for a place",
    r"(?<!there )(?<!There )\b(?:is|are|was|were|be|been) no\b(?! longer| more| less)": (
        "'is not a …', 'are not …'"
    ),
    r"\b(?:where|Where) (?:there (?:is|are|was|were)|none|nothing|nobody|neither)\b": "'if'",
    r"\b(?:None|empty|negative|unless|also|only) where (?:it|they|this|that|the|an?)\b": "'if'",
    r"\b[Uu]p where\b": "'set while'",
    r"\b(?:told|[Tt]ells?|telling)\b(?!:)": "'given', 'reports', 'distinguishes', 'sets'",
    r"\b(?:said|[Ss]ays?|saying)\b(?!:)": "'reports', 'sets', 'names', 'means'",
    r"\b[Ll]ets? (?:\S+ ){1,3}be\b": "'sets', 'keeps', or the verb itself",
}


def texts_of(source: str, skipped: str = "") -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, each with its first line's number.

    Args:
        source: the module.
        skipped: the name of a function whose docstring is left out.
    """
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            first = each.value if isinstance(each, ast.Expr) else None
            text = first.value if isinstance(first, ast.Constant) else None
            if isinstance(text, str) and not (skipped and getattr(node, "name", "") == skipped):
                yield each.lineno, text
    yield from comments_of(source)


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """The comments, of which those on lines of their own that follow each other are one."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number, alone = token.start[0], token.line.lstrip().startswith("#")
        if block and not (alone and number == last + 1):
            yield begin, "\n".join(block)
            block = []
        begin = begin if block else number
        block.append(re.sub(r"^#:? ?", "", token.string))
        last = number if alone else 0
    if block:
        yield begin, "\n".join(block)


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """The phrases of a text that a rule finds: lines before, phrase, advice."""
    for pattern, advice in RULES.items():
        for match in re.finditer(pattern, text):
            phrase = match[0].strip()
            yield text[: match.end() - len(phrase)].count("\n"), phrase, advice


def findings(path: Path) -> list[tuple[int, str, str]]:
    """The phrases of a file: line, phrase, advice."""
    command = path.stem if path.parent.name == "cli" else ""
    return sorted(
        (line + before, " ".join(phrase.split()), advice)
        for line, text in texts_of(path.read_text(), command)
        for before, phrase, advice in phrases(text)
    )


def main() -> int:
    found = 0
    for path in sorted((ROOT / "tfdist").rglob("*.py")):
        for line, phrase, advice in findings(path):
            found += 1
            print(f"{path.relative_to(ROOT)}:{line}: {phrase} -> {advice}")
    if found:
        print(f"{found} phrases. Write what a thing is, in sentences that begin with it.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
