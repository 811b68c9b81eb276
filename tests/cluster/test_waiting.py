"""The line that says what a job waits for: on a terminal of its own, with records by hand."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.launcher import waiting
from tfdist.launcher.plan import JobPlan, Program, local_cluster, plan_local
from tfdist.utils.run_record import Record

ERASED = "\r\x1b[K"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def plan(tmp_path: Path) -> JobPlan:
    program = Program(script="train.py", config="{}", seed=1)
    return plan_local(program, cluster=local_cluster([1, 2]), log_dir=tmp_path, environ={})


@pytest.fixture
def records(plan: JobPlan) -> list[Record]:
    return [Record(Path(each.environ["TFDIST_RECORD"] or "")) for each in plan.tasks]


@pytest.fixture
def line(
    terminal: tuple[int, int], plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> waiting.Waiting:
    monkeypatch.setattr(waiting, "_PERIOD", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    made = waiting.Waiting(terminal[1], plan)
    made.begin()
    return made


def shown(terminal: tuple[int, int]) -> str:
    ready, _, _ = select.select([terminal[0]], [], [], 0.0)
    return os.read(terminal[0], 4096).decode() if ready else ""


def test_the_line_names_what_the_last_tasks_wait_for(terminal, line, records):
    line.redraw()
    assert shown(terminal) == f"{ERASED}waiting for Python to start: 0 s"
    for record in records:
        record.add("imports")
    line.redraw()
    assert "waiting for TensorFlow to start: 0 s" in shown(terminal)
    records[0].add("joins")
    line.redraw()
    assert "waiting for TensorFlow to start (worker 1): 0 s" in shown(terminal)
    records[1].add("joins")
    line.redraw()
    assert "waiting to meet the other tasks: 0 s" in shown(terminal)
    records[0].add("steps")
    line.redraw()
    assert shown(terminal) == ERASED
    line.redraw()
    assert shown(terminal) == ""


def test_the_line_makes_way_for_output(terminal, line, records):
    line.redraw()
    shown(terminal)
    with line.aside(b"half a li"):
        assert shown(terminal) == ERASED
    line.redraw()
    assert shown(terminal) == ""  # The cursor is within a line.
    with line.aside(b"ne\n"):
        pass
    line.redraw()
    assert "waiting" in shown(terminal)


def test_a_program_that_prints_is_left_alone_until_its_fit(terminal, line, records):
    for record in records:
        record.add("task")
    with line.aside(b"tfdist: all tasks have joined\n"):
        pass
    line.redraw()
    assert "waiting for the script, which has not called fit yet: 0 s" in shown(terminal)
    with line.aside(b"reading files\n"):
        pass
    shown(terminal)
    line.redraw()
    assert shown(terminal) == ""
    for record in records:
        record.add("traces")
    line.redraw()
    assert "for the first batch" in shown(terminal)


def test_lines_of_an_earlier_start_do_not_count(terminal, line, records, monkeypatch):
    for record in records:
        record.add("steps")
    now = waiting.time.time() + 60
    monkeypatch.setattr(waiting.time, "time", lambda: now)
    line.begin()
    line.redraw()
    assert "waiting for Python to start" in shown(terminal)


def test_a_narrow_terminal_has_one_line(terminal, line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    line.redraw()
    assert shown(terminal) == f"{ERASED}waiting for Python "


def test_without_a_terminal_nothing_is_drawn(plan, capfd):
    line = waiting.Waiting(None, plan)
    line.begin()
    line.redraw()
    line.end()
    assert capfd.readouterr() == ("", "")


def test_the_line_follows_a_job_that_gets_another_number_of_tasks(
    terminal, tmp_path, plan, monkeypatch
):
    monkeypatch.setattr(waiting, "_PERIOD", 0.0)
    line = waiting.Waiting(terminal[1])
    line.begin()
    line.redraw()
    assert shown(terminal) == ""  # Nothing is known of the tasks yet.
    program = Program(script="train.py", config="{}", seed=1)
    smaller = plan_local(program, cluster=None, log_dir=tmp_path / "b", environ={})
    for each in (plan, smaller):
        line.follow(each)
        line.begin()
        Record(Path(each.tasks[0].environ["TFDIST_RECORD"] or "")).add("joins")
        line.redraw()
        ahead = "to meet the other tasks: 0 s" if each is smaller else "for Python to start (worker"
        assert f"waiting {ahead}" in shown(terminal)
        line.end()
        assert shown(terminal) == ERASED


def test_a_note_within_a_note_does_not_hang(line):
    with line.aside(), line.aside():
        pass
