"""The checker of sentences finds the phrases it is for, and leaves plain English alone."""

from __future__ import annotations

import pytest

from tests.prose import main, phrases, texts_of


@pytest.mark.parametrize(
    "text",
    [
        "What each task that serves a chief runs.",
        "A number.\n\nWhere there is no GPU, the CPU is used.",
        "Refuses a value that is no number.",
        "The devices; None where there are none.",
        "A variable that tells the workers to stop.",
        "A finding. Whoever reads it says more.",
        "Reads what a process prints.",
        "A loss.\n\nArgs:\n    value: what the loss was.",
    ],
)
def test_a_bad_sentence_is_found(text: str) -> None:
    assert list(phrases(text))


@pytest.mark.parametrize(
    "text",
    [
        "The command that each serving task runs.",
        "Whether there is no GPU; if so, the CPU is used.",
        "path: the directory where the logs are.\ntold: the numbers of the step.",
        "Runs the plan, and reports what is left.",
        "A launcher.\n\nArgs:\n    plan: what to run.",
    ],
)
def test_a_good_sentence_is_left_alone(text: str) -> None:
    assert not list(phrases(text))


def test_docstrings_and_blocks_of_comments_are_read() -> None:
    source = """'''A module.'''

def run():
    '''Help.'''

def other():
    '''A docstring.'''
    # One comment
    # in two lines.
    return 1  # Another.
"""
    texts = sorted(texts_of(source, "run"))
    assert [line for line, _ in texts] == [1, 7, 8, 10]
    assert [text for _, text in texts] == [
        *("A module.", "A docstring.", "One comment\nin two lines.", "Another."),
    ]
    assert sorted(texts_of(source))[1] == (4, "Help.")


def test_the_package_has_no_such_phrase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
