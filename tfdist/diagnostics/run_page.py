"""The page of a run: one HTML file without links to the network, for light and dark screens."""

from __future__ import annotations

import base64
import datetime
import html
import math
import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from tfdist.diagnostics import run_parts, run_plots
from tfdist.diagnostics.run_data import Run, TaskRun, clean, examples_a_second, pace
from tfdist.strategies.pipeline.trace import draw, read_trace

__all__ = ["page"]

#: Lines of a log that are shown, and the bytes in which they are looked for.
_LINES, _BYTES = 30, 64_000
#: Rows of the table of epochs; of more, the first and the last ones are shown.
_ROWS = 400
_STYLE_SHEET = Path(__file__).with_name("run_page.css")


class Html(str):
    """A text that is HTML already."""


def _tag(name: str, *children: str, **attributes: str) -> Html:
    """An element. Texts that are not `Html` are escaped."""
    words = "".join(
        f' {key.rstrip("_")}="{html.escape(clean(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{words}>{_join(children)}</{name}>")


def _join(parts: Iterable[str]) -> Html:
    texts = (
        part if isinstance(part, Html) else html.escape(clean(str(part)), quote=False)
        for part in parts
    )
    return Html("".join(texts))


def page(run: Run, folder: Path) -> str:
    """The page.

    Args:
        run: what to show.
        folder: the directory that the page goes to, for links to logs.
    """
    title = f"{_script(run)} · tfdist report"
    troubled = run.state in ("failed", "lost") or bool(run.events)
    ends = _ends(run, folder)
    sections = (
        _summary(run),
        ends if troubled else Html(),
        _training(run),
        _speed(run),
        _parts(run),
        _server_updates(run),
        _timeline(run, folder),
        _memory(run),
        _epochs(run),
        Html() if troubled else ends,
        _environment(run),
        _lacks(run),
    )
    now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    where = f"Made {now} by tfdist report from {run.directory}"
    head = _tag(
        "head",
        Html('<meta charset="utf-8"/>'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1"/>'),
        _tag("title", title),
        _tag("style", Html(_STYLE_SHEET.read_text())),
    )
    body = _tag("body", _tag("main", *sections, _tag("footer", where)))
    return f"<!DOCTYPE html>\n{_tag('html', head, body, lang='en')}\n"


def _script(run: Run) -> str:
    words = [str(word) for word in run.job.get("command", ())]
    return next((Path(word).name for word in words if word.endswith(".py")), "a run")


def _section(title: str, *children: str) -> Html:
    """A section; nothing if it is empty."""
    content = _join(children)
    return _tag("section", _tag("h2", title), content) if content else Html()


def _figure(title: str, picture: str | None, note: str = "") -> Html:
    """A picture with its title; nothing without a picture."""
    if picture is None:
        return Html()
    words = [_tag("strong", title), *([_tag("span", note)] if note else [])]
    return _tag("figure", _tag("figcaption", *words), Html(picture))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> Html:
    lines = [_tag("tr", *(_tag("td", cell) for cell in row)) for row in rows]
    if not lines:
        return Html()
    heading = _tag("thead", _tag("tr", *(_tag("th", cell) for cell in head)))
    table = _tag("table", heading, _tag("tbody", *lines), **({"class_": class_} if class_ else {}))
    return _tag("div", table, class_="scroll")


# The summary.

_STATES = {
    "done": "finished",
    "failed": "failed",
    "running": "running",
    "lost": "ended without a word of its launcher",
}


def _summary(run: Run) -> Html:
    words = _STATES[run.state]
    if run.state == "failed":
        stopped = run.message.startswith("Stopped by ")  # By a signal to the launcher.
        words = "stopped" if stopped else f"failed with exit status {run.status}"
    begun = datetime.datetime.fromtimestamp(run.begun)
    cards = [
        ("strategy", run.strategy),
        ("ran for" if run.state != "running" else "runs for", _duration(run.seconds)),
        ("epochs", str(len(run.epochs))),
        *_headline(run),
        *_pace(run),
        ("restarts", str(run.restarts)),
    ]
    listed = (_tag("div", _tag("dt", key), _tag("dd", value)) for key, value in cards if value)
    return _tag(
        "header",
        _tag("h1", _script(run), _tag("span", words, class_=f"badge {run.state}")),
        _tag("p", _tag("code", shlex.join(map(str, run.job.get("command", ()))))),
        _tag("p", f"Begun {begun:%Y-%m-%d %H:%M:%S} on {run.job.get('host')}", class_="muted"),
        _tag("dl", *listed, class_="cards"),
    )


def _headline(run: Run) -> list[tuple[str, str]]:
    """The first metrics of the last epoch."""
    logs = run.epochs[-1].logs if run.epochs else {}
    names = [each for name in run.metrics[:2] for each in (name, f"val_{name}")]
    return [(name, _number(logs[name])) for name in names if name in logs]


def _pace(run: Run) -> list[tuple[str, str]]:
    steps, seconds = pace(run.chief) if run.chief else (0, 0.0)
    rate = examples_a_second(run)
    return [
        ("examples a second", "" if rate is None else f"{rate:,.0f}"),
        ("mean step", _ms(1e3 * seconds / steps if steps else math.nan)),
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


# Faults, restarts and the ends of logs.


def _ends(run: Run, folder: Path) -> Html:
    lost = _lost_numbers(run)
    ends = [(task, number, end) for task in run.tasks for number, end in enumerate(task.ends)]
    rows = [
        (
            task.name,
            str(number + 1),
            _duration(end.at),
            end.in_words.removeprefix(f"{task.name} "),
        )
        for task, number, end in sorted(ends, key=lambda each: each[2].at)
    ]
    logs = sorted(run.tasks, key=lambda task: not task.failed)
    parts = [
        _tag("pre", run.message, class_="bad") if run.message else Html(),
        _tag("p", lost, class_="bad") if lost else Html(),
        _table(("after", "event"), [(_duration(each.at), each.text) for each in run.events]),
        _table(("task", "start", "ended after", "how"), rows),
        *(_log(task, folder) for task in logs),
    ]
    return _section("Ends, faults and logs", *parts)


def _lost_numbers(run: Run) -> str:
    for each in run.epochs:
        bad = [name for name, value in each.logs.items() if not math.isfinite(value)]
        if bad:
            return f"{', '.join(bad)} was not a finite number from epoch {each.epoch + 1} on."
    return ""


def _log(task: TaskRun, folder: Path) -> Html:
    """The end of a task's log, with a link to all of it."""
    try:
        with task.log.open("rb") as file:
            file.seek(max(0, task.log.stat().st_size - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_LINES:]
    except OSError:
        return Html()
    link = quote(os.path.relpath(task.log, folder))
    return _tag(
        "details",
        _tag("summary", f"The end of the log of {task.name}"),
        _tag("p", _tag("a", str(task.log), href=link)),
        _tag("pre", "\n".join(lines)),
        **({"open": "open"} if task.failed else {}),
    )


# Training and speed.


def _training(run: Run) -> Html:
    figures = [_figure(name, run_plots.metric(run, name)) for name in run.metrics[:12]]
    content = _join(figures)
    if not content:
        words = ("No step of ", _tag("code", "fit"), " has been recorded yet.")
        return _section("Training", _tag("p", *words, class_="muted"))
    return _section("Training", _tag("div", content, class_="grid"))


def _speed(run: Run) -> Html:
    known = run.chief and any(each.batch for each in run.chief.samples)
    name = "Examples a second" if known else "Steps a second"
    note = "the global batch times steps a second" if known else ""
    figures = [
        _figure(name, run_plots.examples(run), note),
        _figure("Step time by task", run_plots.step_times(run), "ms, from step to step"),
    ]
    rows = [_speed_row(task) for task in run.tasks if task.windows or task.epochs]
    names = ("task", "steps", "mean step", "first step", "slowest second")
    plots = _tag("div", *figures, class_="grid") if any(figures) else Html()
    return _section("Speed", plots, _table(names, rows, "numbers"))


def _speed_row(task: TaskRun) -> tuple[str, ...]:
    steps, seconds = pace(task)
    first = next((each for each in task.windows if each.first), None)
    slowest = max((each.step_ms for each in task.windows if not each.first), default=math.nan)
    return (
        task.name,
        f"{steps + (first is not None):,}",
        _ms(1e3 * seconds / steps if steps else math.nan),
        _ms(math.nan if first is None else first.step_ms),
        _ms(slowest),
    )


def _parts(run: Run) -> Html:
    """The parts of a step of each task and their meanings, or the reason why there are none."""
    title = "Parts of a step"
    if run.chief is None:
        return Html()
    parts, epochs = run_parts.by_task(run), run_parts.by_epoch(run)
    if not parts:
        return _section(title, _tag("p", run_parts.absence(run), class_="muted"))
    rows = [
        (
            name,
            _ms(each.step),
            *(("≥ " if part == run_parts.WAIT else "") + _ms(v) for part, v in each.shares.items()),
            _ms(each.hidden),
        )
        for name, each in parts.items()
    ]
    head = ("task", "step", *next(iter(parts.values())).shares, "exchange, hidden")
    note = "ms of the mean step, without first steps"
    figures = (
        _figure("By task", run_plots.parts_by_task(parts), note),
        _figure("By epoch", run_plots.parts_by_epoch(epochs), f"ms, of {run.chief.name}"),
    )
    lines = [
        _tag("li", _tag("b", name), f": {text}") for name, text in run_parts.meanings(run, parts)
    ]
    return _section(
        title,
        _tag("div", *figures, class_="grid"),
        _table(head, rows, "numbers"),
        _tag("ul", *lines, class_="muted"),
    )


def _ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.1f} ms"


def _server_updates(run: Run) -> Html:
    """Staleness and the workers' shares, of jobs with parameter servers."""
    chief = run.chief
    if chief is None or not chief.server_epochs:
        return Html()
    rows = [
        (
            str(each["epoch"] + 1),
            f"{each['updates']:,}",
            f"{each['dropped']:,}",
            " · ".join(f"{count:,}" for count in each["steps"].values()),
        )
        for each in chief.server_epochs
    ]
    return _section(
        "Parameter servers",
        _figure("Staleness of the gradients that were applied", run_plots.staleness(chief)),
        _table(("epoch", "updates", "dropped", "steps by worker"), rows[-50:], "numbers"),
    )


def _timeline(run: Run, folder: Path) -> Html:
    """The timeline of a pipeline, if one was recorded since the job began."""
    path = run.timeline
    if path is None:
        return Html()
    link = _tag("a", str(path), href=quote(os.path.relpath(path, folder)))
    try:
        picture = path.read_bytes() if path.suffix == ".png" else _drawn(path, run)
    except ValueError:
        return _section("Timeline", _tag("p", "For chrome://tracing: ", link))
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    image = Html(f'<img alt="Timeline of a step" src="{source}"/>')
    return _section("Timeline", _tag("figure", image, class_="plate"), _tag("p", link))


def _drawn(path: Path, run: Run) -> bytes:
    """A picture of a pipeline's trace.

    Raises:
        ValueError: if it is another program's.
    """
    boxes, names = read_trace(path.read_text())
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "step.png")
        draw(str(target), boxes, title=run.row("schedule").partition(" (")[0], names=names)
        return target.read_bytes()


def _memory(run: Run) -> Html:
    return _section(
        "Memory",
        _figure(
            "Largest resident memory by task", run_plots.memory(run), "of the host, not of GPUs"
        ),
    )


def _epochs(run: Run) -> Html:
    """All numbers of the epochs."""
    epochs = run.epochs
    fits = len({each.fit for each in epochs}) > 1
    names = list(dict.fromkeys(name for each in epochs for name in each.logs))
    rows = [
        (
            *([str(each.fit + 1)] if fits else []),
            str(each.epoch + 1),
            f"{each.steps:,}",
            _ms(each.step_ms),
            *(_number(each.logs[name]) if name in each.logs else "" for name in names),
        )
        for each in epochs
    ]
    left_out = len(rows) - _ROWS
    if left_out > 0:
        gap = ("…", *[""] * (len(rows[0]) - 1))
        rows = [*rows[: _ROWS // 2], gap, *rows[-_ROWS // 2 :]]
    head = (*(["fit"] if fits else []), "epoch", "steps", "mean step", *names)
    return _section("Epochs", _table(head, rows, "numbers epochs"))


# The environment, and the data that is missing.


def _environment(run: Run) -> Html:
    rows = [(_tag("b", key), value) for key, value in run.job.get("rows", ())]
    versions = dict(run.job.get("versions", {}))
    for task in run.tasks:
        for about in task.abouts:
            versions.update(about.get("versions", {}))
    listed = [(_tag("b", name), version) for name, version in versions.items()]
    processes = [
        (
            task.name,
            str(about.get("host", "")),
            str(about.get("cores", "")),
            ", ".join(about.get("devices", ())),
        )
        for task in run.tasks
        for about in task.abouts[-1:]
    ]
    return _section(
        "Environment",
        _tag(
            "div",
            _table(("tfdist run", ""), rows, "rows"),
            _table(("version", ""), listed, "rows"),
            class_="grid",
        ),
        _table(("task", "host", "cores", "devices that TensorFlow sees"), processes),
    )


def _lacks(run: Run) -> Html:
    items = [_tag("li", each) for each in run.lacks]
    return _section("Missing here", _tag("ul", *items)) if items else Html()
