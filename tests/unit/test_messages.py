"""The logger `tfdist`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tfdist.utils import messages


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level = messages.logger.level
    yield
    messages.logger.setLevel(level)
    messages.name_task("")


def test_a_message_is_a_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("tfdist").info("all is well")
    assert capsys.readouterr() == ("", "tfdist: all is well\n")


def test_a_level_leaves_messages_out(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("tfdist").setLevel("WARNING")
    messages.logger.info("all is well")
    messages.logger.warning("worker 1 is late")
    assert capsys.readouterr().err == "tfdist: worker 1 is late\n"


def test_a_handler_gets_the_task() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    messages.logger.addHandler(handler)
    messages.name_task("worker 1")
    messages.logger.info("all is well")
    messages.logger.removeHandler(handler)
    assert [(each.message, each.levelname, vars(each)["task"]) for each in records] == [
        ("all is well", "INFO", "worker 1")
    ]
