"""The logger `tfdist`."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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


def _in_library(module: str, warn: Callable[..., Any]) -> Callable[[], None]:
    """A function of a module that warns."""
    names: dict[str, Any] = {"__name__": module, "warn": warn}
    exec(compile("def step(text='replicas differ'): warn(text)", f"{module}.py", "exec"), names)
    step: Callable[[], None] = names["step"]
    return step


def test_a_warning_points_at_the_line_of_the_program() -> None:
    step = _in_library("keras.src.losses", _in_library("tfdist.keras.losses", messages.warn))
    with pytest.warns(UserWarning, match="replicas differ") as found:
        step()
    assert [each.filename for each in found] == [__file__]


def test_on_a_thread_of_a_library_that_is_the_line_which_waits() -> None:
    step = _in_library("tensorflow.python.distribute", messages.warn)

    def run() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="replicas differ") as found:
        run()
    assert [each.filename for each in found] == [__file__]


def test_a_line_of_the_program_warns_once() -> None:
    step = _in_library("keras.src.losses", messages.warn)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            step()
    assert len(found) == 1
