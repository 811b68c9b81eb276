"""Annotations say what things are: the share of those that are `Any` only falls."""

from __future__ import annotations

import ast

import pytest

from tests.shape import aliases_of_any, bare_any, is_any

#: The share that has been reached. Lower it after naming more.
MOST = 0.031


def test_few_annotations_are_any():
    untyped, annotated = bare_any()
    assert annotated > 9000
    assert untyped / annotated <= MOST, (
        f"{untyped} of {annotated} annotations are Any. Name the type (tfdist/types), or `object` "
        "for what is only handed on."
    )


ALIASES = """
from typing import Any
from typing import Any as Whatever
from tfdist.x import Thing as Other
Thing = Any
Hidden: TypeAlias = "Thing | None"
Array: TypeAlias = "np.ndarray[Any, Any]"
text = "Any of these"
"""


def test_any_by_another_name_is_found():
    names = aliases_of_any([ast.parse(ALIASES)])
    assert names == {"Any", "typing.Any", "Whatever", "Thing", "Other", "Hidden"}


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("Any", True),
        ("Any | None", True),
        ("'Any'", True),
        ("Optional[Any]", True),
        ("ClassVar[Any]", True),
        ("typing.Any", True),
        ("list[Any]", False),
        ("Callable[..., Any] | None", False),
        ("object", False),
    ],
)
def test_what_counts_as_any(annotation, expected):
    kind = ast.parse(annotation, mode="eval").body
    assert is_any(kind, {"Any", "typing.Any"}) is expected
