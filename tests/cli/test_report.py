"""`tfdist report`: pages of records made by hand, torn, of several attempts, or with odd texts."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.harness import browser
from tfdist import environment
from tfdist.diagnostics import run_data, run_page, run_plots
from tfdist.errors import ConfigError
from tfdist.utils.run_record import Record, read

BEGUN = 1_700_000_000.0
GONE = 2**22 + 1  # above the largest pid of Linux
JOB = {
    "command": ["tfdist", "run", "-n", "2", "train.py"],
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "versions": {"Python": "3.11.7", "Keras": "3.15.1"},
    "rows": [["strategy", "multi_worker (--strategy)"], ["update mode", "sync"]],
    "shown": "worker 0",
    "max_restarts": 3,
    "timeline": None,
    "elsewhere": [],
}
SVG = "{http://www.w3.org/2000/svg}svg"


def task(index: int, host: str | None = None, trains: bool = True) -> dict[str, Any]:
    log = f"worker-{index}.log"
    return {"task": f"worker {index}", "log": log, "host": host, "trains": trains}


def line(kind: str, at: float, **values: Any) -> str:
    return json.dumps({"kind": kind, "t": BEGUN + at, **values}) + "\n"


def end(at: float, name: str, status: int, **more: Any) -> str:
    words = f"{name} failed with exit status {status}" if status else ""
    said = {"returncode": status, "stopped": False, "peak_rss": 700 * 2**20, "words": words}
    return line("end", at, task=name, **{**said, **more})


def starts(at: float) -> str:
    return "".join(line("start", at, task=f"worker {index}", again="") for index in (0, 1))


def launcher(folder: Path, *lines: str, **job: Any) -> None:
    content = {**JOB, "tasks": [task(0), task(1)], **job}
    (folder / "launcher.jsonl").write_text("".join([line("job", 0, **content), *lines]))


def epochs(begin: float, numbers: range, loss: float = 0.5, **more: Any) -> str:
    """A process from its start on: its first step, and for each epoch a second and its end."""
    about = {"host": "here", "cores": 2, "devices": ["CPU:0"], "versions": {}}
    lines = [line("task", begin, **about)]
    common = {"fit": 0, "batch": 64, "peak_rss": 6e8, **more}
    for count, number in enumerate(numbers):
        at = begin + 1 + 2 * count
        logs = {"loss": loss / (1 + number), "mae": 0.1}
        said = {**common, "epoch": number, "logs": logs}
        first = {"steps": 1, "seconds": 0.9, "first": True} if count == 0 else {}
        lines.append(line("steps", at, **{**said, "steps": 10, "seconds": 1.0, **first}))
        logs = {**logs, "val_loss": 0.4}
        lines.append(line("epoch", at + 1, **{**said, "logs": logs, "steps": 20, "seconds": 1.9}))
    return "".join(lines)


def parsed(folder: Path) -> ET.Element:
    """The page of a folder, which must be well-formed and name nothing outside of it."""
    text = run_page.page(run_data.load(folder), folder)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)
    page = ET.fromstring(text)
    ids = [each.get("id") for each in page.iter() if each.get("id")]
    assert len(ids) == len(set(ids))
    return page


def text_of(page: ET.Element) -> str:
    return " ".join("".join(page.find("body").itertext()).split())  # type: ignore[union-attr]


def rows_of(page: ET.Element, title: str) -> list[list[str]]:
    (section,) = [each for each in page.iter("section") if each.findtext("h2") == title]
    rows = [["".join(cell.itertext()) for cell in row] for row in section.iter("tr")]
    return [row for row in rows if row]


def test_a_job_that_has_ended_well(tmp_path: Path) -> None:
    ends = [end(9, f"worker {index}", 0) for index in (0, 1)]
    launcher(tmp_path, *ends, line("done", 9, status=0, message=""))
    for index in (0, 1):
        (tmp_path / f"worker-{index}.jsonl").write_text(epochs(2, range(3)))
    page = parsed(tmp_path)
    assert len(list(page.iter(SVG))) == 5  # loss, mae, examples, steps, memory
    assert [row[0] for row in rows_of(page, "Epochs")] == ["epoch", "1", "2", "3"]
    text = text_of(page)
    for words in ("train.py", "finished", "multi_worker", "Keras", "--report", "700"):
        assert words in text
    run = run_data.load(tmp_path)
    steps, seconds = run_data.pace(run.tasks[0])
    assert (steps, round(seconds, 6)) == (59, 4.8)  # without the first step
    assert "787" in text  # 64 * 59 / 4.8


def test_a_job_that_still_runs_with_a_torn_line(tmp_path: Path) -> None:
    launcher(tmp_path)
    whole = epochs(2, range(2))
    (tmp_path / "worker-0.jsonl").write_text(whole + whole.splitlines()[-1][:40])
    page = parsed(tmp_path)
    assert "running" in text_of(page)
    assert len(rows_of(page, "Epochs")) == 3
    assert "Steps of worker 1: there is no record worker-1.jsonl" in text_of(page)


def test_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher(tmp_path, pid=GONE)
    assert run_data.load(tmp_path).state == "lost"
    launcher(tmp_path, pid=GONE, host="elsewhere")
    assert run_data.load(tmp_path).state == "running"


def test_a_job_that_was_stopped(tmp_path: Path) -> None:
    ends = [end(5, f"worker {index}", -2, stopped=True) for index in (0, 1)]
    launcher(tmp_path, *ends, line("done", 5, status=130, message="Stopped by Ctrl-C."))
    text = text_of(parsed(tmp_path))
    assert "train.pystopped" in text
    assert "Stopped by Ctrl-C." in text
    assert "failed" not in text


def test_nothing_has_been_recorded_yet(tmp_path: Path) -> None:
    launcher(tmp_path)
    page = parsed(tmp_path)
    assert "No step of fit has been recorded yet" in text_of(page)
    assert "Speed" not in [each.text for each in page.iter("h2")]


def test_restarts_of_a_job_that_runs(tmp_path: Path) -> None:
    ends = [end(9, "worker 0", 1), end(9, "worker 1", 0, stopped=True)]
    for lines, restarts in (([], 0), ([starts(0)], 0), ([starts(0), *ends, starts(9)], 1)):
        launcher(tmp_path, *lines)
        run = run_data.load(tmp_path)
        assert (run.state, run.restarts) == ("running", restarts)
        assert f"restarts{restarts}" in text_of(parsed(tmp_path))


def test_a_restart_stands_in_plots_where_the_table_has_it(tmp_path: Path) -> None:
    event = line("event", 9, text="worker 0 failed; starting the job again (restart 1 of 3).")
    launcher(tmp_path, starts(0), end(9, "worker 0", 1), event, starts(9))
    # The second process describes itself only once TensorFlow has been loaded.
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2)) + epochs(20, range(2)))
    run = run_data.load(tmp_path)
    assert run_plots._starts_again(run) == [each.at for each in run.events] == [9.0]


def test_restarts(tmp_path: Path) -> None:
    lines = [starts(0)]
    for attempt, at in enumerate((10, 20)):
        lines += [end(at, "worker 0", 1), end(at, "worker 1", 0, stopped=True)]
        lines.append(line("event", at, text=f"worker 0 failed; again (restart {attempt + 1} of 3)"))
        lines.append(starts(at))
    lines += [end(30, "worker 0", 7), end(30, "worker 1", 0, stopped=True)]
    launcher(tmp_path, *lines, line("done", 30, status=7, message="worker 0 failed at last."))
    record = epochs(2, range(2)) + epochs(12, range(1, 3)) + epochs(22, range(2, 4))
    (tmp_path / "worker-0.jsonl").write_text(record)
    (tmp_path / "worker-0.log").write_text("".join(f"line {n}\n" for n in range(999)))
    page = parsed(tmp_path)
    assert [row[0] for row in rows_of(page, "Epochs")] == ["epoch", "1", "2", "3", "4"]
    text = text_of(page)
    assert "failed with exit status 7" in text
    assert "worker 0 failed at last." in text
    assert "restart 2 of 3" in text
    assert "restarts2" in text
    assert "line 998" in text
    assert "line 900" not in text
    (link,) = page.iter("a")
    assert link.get("href") == "worker-0.log"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_numbers(tmp_path: Path, bad: float) -> None:
    launcher(tmp_path)
    record = epochs(2, range(2)) + epochs(8, range(2, 4), loss=bad)
    (tmp_path / "worker-0.jsonl").write_text(record)
    page = parsed(tmp_path)
    assert "loss was not a finite number from epoch 3 on" in text_of(page)
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2), loss=bad))
    assert "from epoch 1 on" in text_of(parsed(tmp_path))


def test_texts_are_escaped(tmp_path: Path) -> None:
    nasty = "<script>alert('x')</script> & \"y\" \x1b[31m $\\frac"
    lines = [end(5, "worker 0", 1, words=f"worker 0 {nasty}"), line("event", 5, text=nasty)]
    command = ["tfdist", "run", "<b>.py", nasty]
    launcher(tmp_path, *lines, line("done", 5, status=1, message=nasty), command=command)
    record = epochs(2, range(2)).replace('"mae"', json.dumps(nasty))
    (tmp_path / "worker-0.jsonl").write_text(record)
    (tmp_path / "worker-0.log").write_bytes(nasty.encode() + b"\n\xff\x00</pre><script>\n")
    page = parsed(tmp_path)
    assert not list(page.iter("script"))
    assert not list(page.iter("b")) or all(each.text for each in page.iter("b"))
    assert "<script>alert('x')</script>" in text_of(page)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tasks = [task(0), task(1, host="node2")]
    launcher(tmp_path, tasks=tasks, elsewhere=["worker 2"])
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2), batch=None))
    text = text_of(parsed(tmp_path))
    assert "worker 1: it ran on node2, and its record worker-1.jsonl is in the same" in text
    assert "All of worker 2: other launchers" in text
    assert "Examples a second: the data set does not show" in text
    assert "Steps a second" in text


def test_lines_of_an_earlier_job_do_not_count(tmp_path: Path) -> None:
    launcher(tmp_path)
    (tmp_path / "worker-0.jsonl").write_text(epochs(-50, range(5)) + epochs(2, range(1)))
    assert len(run_data.load(tmp_path).epochs) == 1


def test_the_parts_of_a_step_and_staleness(tmp_path: Path) -> None:
    launcher(tmp_path)
    split = {"step_ms": 20.0, "input_ms": 2.0, "compute_ms": 9.0, "exchange_waited_ms": 5.0}
    record = epochs(2, range(2)).replace('"val_loss": 0.4', f'"val_loss": 0.4, {pairs(split)}')
    counts = {"updates": 20, "dropped": 1, "staleness": [15, 4], "steps": {"0": 12, "1": 8}}
    record += line("served", 6, epoch=0, fit=0, seconds=2, **counts)
    (tmp_path / "worker-0.jsonl").write_text(record)
    page = parsed(tmp_path)
    assert "are measured with --report" not in text_of(page)
    assert rows_of(page, "Parts of a step")[1][:2] == ["worker 0", "20.0 ms"]
    assert rows_of(page, "Parameter servers")[1] == ["1", "20", "1", "12 · 8"]


def measured(steps: int, **parts: float) -> str:
    """A piece of the first epoch with its parts in milliseconds; of one step, the first."""
    said = {"fit": 0, "epoch": 0, "steps": steps, "seconds": 0.1 * steps, "first": steps == 1}
    named = {f"{name}_ms": value for name, value in parts.items()}
    return line("steps", 2, **said, parts=named)


#: Worker 1 takes 60 ms longer for its batch, which worker 0 waits for in its exchange.
FIRST = measured(1, step=900, input=0, compute=100, exchange_waited=800)
FAST = measured(9, step=100, input=2, compute=20, exchange_waited=70, exchange_hidden=3)
SLOW = measured(9, step=100, input=62, compute=20, exchange_waited=10, exchange_hidden=3)


def of_epoch(pieces: str) -> str:
    """The same steps as one epoch, whose mean includes the first step."""
    first, later = map(json.loads, pieces.splitlines())
    logs = {
        name: (first["parts"].get(name, 0) + 9 * later["parts"][name]) / 10
        for name in later["parts"]
    }
    return line("epoch", 3, fit=0, epoch=0, steps=10, seconds=2, logs=logs)


@pytest.mark.parametrize("ended", [False, True])
def test_the_parts_of_a_step_by_task(tmp_path: Path, ended: bool) -> None:
    launcher(tmp_path)
    for index, later in enumerate((FAST, SLOW)):
        record = FIRST + later + (of_epoch(FIRST + later) if ended else "")
        (tmp_path / f"worker-{index}.jsonl").write_text(record)
    page = parsed(tmp_path)
    # Step, input, computation, wait, exchange, rest, hidden.
    assert rows_of(page, "Parts of a step")[1:] == [
        [
            *("worker 0", "100.0 ms", "2.0 ms", "20.0 ms"),
            *("\u2265 60.0 ms", "10.0 ms", "8.0 ms", "3.0 ms"),
        ],
        [
            *("worker 1", "100.0 ms", "62.0 ms", "20.0 ms"),
            *("\u2265 0.0 ms", "10.0 ms", "8.0 ms", "3.0 ms"),
        ],
    ]
    assert "wait for other tasks: The time by which" in text_of(page)


def test_a_wait_is_not_told_without_all_tasks(tmp_path: Path) -> None:
    launcher(tmp_path)
    (tmp_path / "worker-0.jsonl").write_text(FIRST + FAST)
    page = parsed(tmp_path)
    (row,) = rows_of(page, "Parts of a step")[1:]
    assert row == ["worker 0", *(f"{each}.0 ms" for each in (100, 2, 20, 70, 8, 3))]
    assert "the record of worker 1 is not here" in text_of(page)
    launcher(tmp_path, tasks=[task(0)])
    assert "here one task computes" in text_of(parsed(tmp_path))
    launcher(tmp_path, tasks=[task(0)], elsewhere=["worker 1"])
    assert "the record of worker 1 is not here" in text_of(parsed(tmp_path))


@pytest.mark.parametrize(
    ("strategy", "words", "timeline"),
    [
        ("horovod", "are measured with --report", "Timeline: none was asked for"),
        (
            "parameter_server",
            "steps that the chief hands out",
            "Timeline: parameter_server records",
        ),
        ("pipeline", "--timeline FILE.png draws a step", "Timeline: none was asked for"),
    ],
)
def test_a_page_states_why_a_part_is_missing(
    tmp_path: Path, strategy: str, words: str, timeline: str
) -> None:
    launcher(tmp_path, rows=[["strategy", strategy]])
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2)))
    page = parsed(tmp_path)
    (section,) = [e for e in page.iter("section") if e.findtext("h2") == "Parts of a step"]
    assert words in "".join(section.itertext())
    assert timeline in text_of(page)
    assert "Staleness: it is counted on parameter_server" in text_of(page)
    launcher(tmp_path, rows=[["strategy", strategy]], timeline=str(tmp_path / "step.png"))
    assert "step.png has not been written" in text_of(parsed(tmp_path))


def test_a_script_s_own_strategy_is_not_described(tmp_path: Path) -> None:
    launcher(tmp_path, rows=[["strategy", "the script's own: every task runs it"]])
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2)))
    assert "are measured with --report" in text_of(parsed(tmp_path))
    assert not [each for each in run_data.load(tmp_path).lacks if each.startswith("Timeline")]


def test_memory_of_tasks_that_run(tmp_path: Path) -> None:
    launcher(tmp_path, end(9, "worker 1", 0))
    assert "Memory of worker 0: it is known once" in text_of(parsed(tmp_path))


def ticks(picture: str) -> list[str]:
    """The numbers along the axis from left to right."""
    axis = picture[picture.index('id="') : picture.index("updates by which")]
    return re.findall(r">([-\u2212]?[0-9.]+)</text>", axis)


@pytest.mark.parametrize(("counts", "last"), [([15], 3), ([15, 4], 3), ([1] * 12, 10)])
def test_staleness_is_counted_in_whole_numbers(counts: list[int], last: int) -> None:
    served = [{"staleness": counts}]
    picture = run_plots.staleness(run_data.TaskRun("chief 0", Path(), server_epochs=served))
    assert picture is not None
    found = [float(each.replace("\u2212", "-")) for each in ticks(picture)]
    assert (found[0], found[-1]) == (0, last)
    assert all(each.is_integer() for each in found)


def test_a_single_sample_of_an_attempt_is_marked(tmp_path: Path) -> None:
    launcher(tmp_path, starts(0))
    begun = epochs(2, range(1)).splitlines(keepends=True)[:2]  # Without the end of the epoch.
    (tmp_path / "worker-0.jsonl").write_text("".join(begun))
    picture = run_plots.metric(run_data.load(tmp_path), "loss")
    assert picture is not None
    assert len(re.findall(r"<use [^>]*var\(--s0\)", picture)) == 1


def pairs(values: dict[str, float]) -> str:
    return json.dumps(values)[1:-1]


def test_a_timeline(tmp_path: Path) -> None:
    from tfdist.strategies.pipeline.schedules import Box, Kind, Step
    from tfdist.strategies.pipeline.trace import read_trace, write_trace

    steps = [Step(Kind.FORWARD, 0, 1, 0), Step(Kind.BACKWARD, 0, 1, 0), Step(Kind.UPDATE, 0, -1, 0)]
    boxes = [Box(0, step, at, at + 1.0) for at, step in enumerate(steps)]
    path = tmp_path / "step.json"
    launcher(tmp_path, timeline=str(path))
    assert not list(parsed(tmp_path).iter("img"))
    write_trace(str(path), boxes, ["stage 0"])
    assert read_trace(path.read_text()) == (boxes, ["stage 0"])
    (image,) = parsed(tmp_path).iter("img")
    assert str(image.get("src")).startswith("data:image/png;base64,")
    path.write_text('{"traceEvents": [{"ph": "B", "pid": 1}, {"ph": "X"}]}')  # Horovod's
    assert "chrome://tracing" in text_of(parsed(tmp_path))


def test_a_task_of_an_elastic_job_that_makes_way(tmp_path: Path) -> None:
    launcher(tmp_path, end(5, "worker 0", 75), end(5, "worker 1", -9), end(9, "worker 2", 0))
    text = text_of(parsed(tmp_path))
    assert "left its state for the next start" in text
    assert [each.failed for each in run_data.load(tmp_path).tasks] == [False, True, False]


def test_many_tasks(tmp_path: Path) -> None:
    launcher(tmp_path, tasks=[task(index) for index in range(12)])
    for index in range(12):
        (tmp_path / f"worker-{index}.jsonl").write_text(epochs(2, range(3)))
    assert len(rows_of(parsed(tmp_path), "Speed")) == 13


def test_a_long_run_makes_no_large_page(tmp_path: Path) -> None:
    launcher(tmp_path)
    record = epochs(2, range(3000)).replace('"mae": 0.1', '"step_ms": 9, "input_ms": 1')
    (tmp_path / "worker-0.jsonl").write_text(record)
    text = run_page.page(run_data.load(tmp_path), tmp_path)
    assert len(text) < 500_000
    assert "2999" in text


def tfdist(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfdist.cli.main", *words]
    environ = environment.merged(variables)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    launcher(tmp_path)
    result = tfdist("report", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    other = tmp_path / "pages/one.html"
    assert tfdist("report", str(tmp_path), "-o", str(other)).returncode == 0
    assert other.read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "file").write_text("")
    refused = tfdist("report", str(tmp_path), "-o", str(tmp_path / "file/one.html"))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr


def test_directories_without_a_record(tmp_path: Path) -> None:
    for place, words in ((tmp_path, "has no record of a run"), (tmp_path / "x", "no directory")):
        result = tfdist("report", str(place))
        assert result.returncode == 2
        assert words in result.stderr
        assert "Traceback" not in result.stderr
    (tmp_path / "launcher.jsonl").write_text("{ torn")
    with pytest.raises(ConfigError, match="has no record"):
        run_data.load(tmp_path)


def test_a_missing_extra_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no')")
    launcher(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(Path(run_data.__file__).parents[2])])
    result = tfdist("report", str(tmp_path), PYTHONPATH=path)
    assert result.returncode == 2
    assert result.stderr.endswith("not installed here. Run `pip install 'tfdist[pictures]'`.\n")


def test_the_command_imports_no_tensorflow() -> None:
    code = (
        "import sys, tfdist.cli.report; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_a_record_that_cannot_be_written_costs_the_record_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = Record(tmp_path / "file/worker-0.jsonl")
    nowhere.add("steps", loss=1.0)
    assert not nowhere.is_open
    full = Record(Path("/dev/full"))
    full.add("steps", loss=1.0)
    assert not full.is_open
    path = tmp_path / "new/worker-0.jsonl"
    Record(path).add("steps", loss=math.nan, task=Path("x"))
    path.write_bytes(path.read_bytes() + b'{"kind": "st')
    Record(path).add("epoch")
    assert [entry["kind"] for entry in read(path)] == ["steps", "epoch"]


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Looks at the page as people do: no part beyond the window, no empty plot."""
    restart = line("event", 12, text="worker 1 failed; starting the job again (restart 1 of 3).")
    ends = [end(30, f"worker {index}", 0) for index in (0, 1)]
    launcher(tmp_path, restart, *ends, line("done", 30, status=0, message=""))
    parts = {"step_ms": 50, "input_ms": 4, "compute_ms": 20, "exchange_waited_ms": 9}
    for index in (0, 1):
        logs = pairs({**parts, "exchange_waited_ms": 9 + 12 * index})
        record = epochs(2, range(12)).replace('"mae": 0.1', f'"mae": 0.1, {logs}')
        (tmp_path / f"worker-{index}.jsonl").write_text(record)
        (tmp_path / f"worker-{index}.log").write_text("a line of a log, " * 40 + "\n")
    (tmp_path / "report.html").write_text(run_page.page(run_data.load(tmp_path), tmp_path))
    seen = browser.look(tmp_path / "report.html", "report", tmp_path)
    assert (seen.width, seen.wide) == (browser.WIDTH, [])
    assert len(seen.colours) == 7
    assert min(seen.colours) > 20, "a plot is empty"


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_cards_show_long_names_whole(tmp_path: Path) -> None:
    launcher(tmp_path, starts(0), rows=[["strategy", "parameter_server (--strategy)"]])
    (tmp_path / "worker-0.jsonl").write_text(epochs(2, range(2)))
    text = run_page.page(run_data.load(tmp_path), tmp_path)
    measure = (
        "<script>document.title = [...document.querySelectorAll('dd')].map("
        "each => each.scrollWidth > each.clientWidth || each.clientHeight > 35).join()</script>"
    )
    (tmp_path / "report.html").write_text(text.replace("</body>", f"{measure}</body>"))
    page = (tmp_path / "report.html").as_uri()
    shown = browser._chromium(tmp_path, f"--window-size={browser.WIDTH},900", "--dump-dom", page)
    (cut,) = re.findall(r"<title>([a-z,]*)</title>", shown)
    assert set(cut.split(",")) == {"false"}
