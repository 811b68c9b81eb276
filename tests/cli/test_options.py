"""Errors about options in the words that the user typed."""

from __future__ import annotations

import pytest

from tfdist.cli import task
from tfdist.cli.options import in_flags
from tfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "staleness=3 conflicts with mode='sync'. Choose mode='stale', or leave staleness out.",
            "--staleness 3 conflicts with --mode sync. Choose --mode stale, or leave --staleness "
            "out.",
        ),
        ("processes=3 is not a power of two.", "-n 3 is not a power of two."),
        ("average_state=True is set.", "--average-state is set."),
        ("report=False is not a flag.", "report=False is not a flag."),
        (
            "ratio=1.5 is too large. As in ratio = 0.5.",
            "--ratio 1.5 is too large. As in --ratio 0.5.",
        ),
        ("mesh='data=2,model=2' makes 4.", "--mesh data=2,model=2 makes 4."),
        ("layouts='a b -> model' is", "--layouts 'a b -> model' is"),
        ("Unknown clip 'befor'.", "Unknown --clip 'befor'."),
        ("layouts has two rules. Its mode has", "--layouts has two rules. Its mode has"),
        (
            "lr_rule='linear' needs base_batch, a number",
            "--lr-rule linear needs --base-batch, a number",
        ),
        ("a number of processes; the mode of it", "a number of processes; the mode of it"),
    ],
)
def test_options_read_as_flags(message: str, words: str) -> None:
    assert in_flags(message) == words


def test_options_of_a_file_stay_as_they_are_written() -> None:
    message = "staleness=3 conflicts with mode='sync'. Leave staleness out."
    assert in_flags(message, {"staleness"}) == (
        "staleness=3 conflicts with --mode sync. Leave staleness out."
    )


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("mesh,strategy", "--zero 3 conflicts with mesh='data=2'."),
        ("", "--zero 3 conflicts with --mesh data=2."),
        (None, "zero=3 conflicts with mesh='data=2'."),
    ],
)
def test_an_error_of_a_task_has_the_words_of_its_command(
    written: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise ConfigError("zero=3 conflicts with mesh='data=2'.")

    if written is not None:
        monkeypatch.setenv("TFDIST_LAUNCHED", "1")
        monkeypatch.setenv("TFDIST_WRITTEN", written)
    assert task.main(["train.py"], refuse) == ConfigError.exit_status
    assert capsys.readouterr().err == f"tfdist: {words}\n"
