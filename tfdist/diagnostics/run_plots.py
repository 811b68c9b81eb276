"""The plots of a run, as SVG for a page.

Colours are variables of the page's style sheet, so that one picture suits light and dark screens.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tfdist.diagnostics.run_data import Run, Sample, TaskRun
from tfdist.diagnostics.run_parts import COMPUTATION, EXCHANGE, INPUT, REST, WAIT, WITH_WAIT, Parts
from tfdist.utils.imports import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = [
    "examples",
    "memory",
    "metric",
    "parts_by_epoch",
    "parts_by_task",
    "staleness",
    "step_times",
]

#: Colours that stand in the pictures for variables of the style sheet.
_INK, _MUTED, _GRID, _BAD = "#010101", "#010102", "#010103", "#010104"
_SERIES = tuple(f"#01010{digit}" for digit in "56789abc")
_VARIABLES = {
    **{_INK: "ink", _MUTED: "muted", _GRID: "grid", _BAD: "bad"},
    **{colour: f"s{number}" for number, colour in enumerate(_SERIES)},
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tfdist",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
_WIDTH, _HEIGHT = 6.2, 2.5
#: Tasks that have a line of a colour of their own each, at most.
_NAMED = 8
#: The ratio of values from which on a logarithmic scale shows more.
_RATIO = 20
#: Points that are drawn as dots, at most: each is an element of the page.
_DOTS = 200
#: Places for bars, at least.
_PLACES = 4
#: The colours of the parts of a step.
_OF_PARTS = {
    INPUT: _SERIES[0],
    COMPUTATION: _SERIES[1],
    WAIT: _SERIES[5],
    **dict.fromkeys((EXCHANGE, WITH_WAIT), _SERIES[2]),
    REST: _GRID,
}
_PURPOSE = "The report of a run"

#: Points of a line: times and values.
_Points = tuple[list[float], list[float]]


class _Picture:
    """A figure that becomes SVG.

    Args:
        height: in inches.
    """

    def __init__(self, height: float = _HEIGHT) -> None:
        figure = matplotlib("figure", _PURPOSE).Figure(
            figsize=(_WIDTH, height), layout="constrained"
        )
        self.figure = figure
        self.axes: Axes = figure.add_subplot()

    def svg(self) -> str:
        """The picture as an element of a page."""
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(text, format="svg", metadata=nothing, transparent=True)
        return _for_page(text.getvalue())


_counter = itertools.count()


def _for_page(text: str) -> str:
    """A picture without what belongs to a file of its own, with names that no other has."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    number = next(_counter)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1p{number}-", text)
    text = re.sub(r"#01010[0-9a-f]", lambda match: f"var(--{_VARIABLES[match[0]]})", text)
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', _SVG, text, count=1)


_SVG = (
    r'<svg \1 role="img" xmlns="http://www.w3.org/2000/svg" '
    r'xmlns:xlink="http://www.w3.org/1999/xlink">'
)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    with matplotlib("", _PURPOSE).rc_context(_STYLE):
        yield


def metric(run: Run, name: str) -> str | None:
    """A metric over time: within epochs, at their ends, and of the validation.

    Returns:
        SVG; None if there is no finite value.
    """
    chief = run.chief
    if chief is None:
        return None
    within = _values([*chief.windows, *chief.epochs], name)
    ends, checked = _values(chief.epochs, name), _values(chief.epochs, f"val_{name}")
    if not any(map(math.isfinite, (*within[1], *checked[1]))):
        return None
    with _style():
        picture, scale = _over_time(run)
        axes = picture.axes
        line = _scaled(within, scale)
        axes.plot(*line, color=_SERIES[0], label="training")
        axes.plot(*_alone(line), marker="o", color=_SERIES[0], linestyle="")
        axes.plot(*_scaled(ends, scale), marker=_dots(ends), color=_SERIES[0], linestyle="")
        if any(map(math.isfinite, checked[1])):
            dots = _dots(checked)
            axes.plot(*_scaled(checked, scale), marker=dots, color=_SERIES[1], label="validation")
            axes.legend(loc="best")
        _mark_lost_numbers(axes, within, scale)
        later = _values([each for each in chief.windows if not each.first], name)
        _choose_scale(axes, [*later[1], *ends[1], *checked[1]])
        return picture.svg()


def _values(samples: Sequence[Sample], name: str) -> _Points:
    return _points([each for each in samples if name in each.logs], lambda each: each.logs[name])


def _mark_lost_numbers(axes: Axes, points: _Points, scale: float) -> None:
    """Marks the first value that is infinite or NaN."""
    for at, value in zip(*points, strict=True):
        if not math.isfinite(value) and math.isfinite(at):
            axes.axvline(at / scale, color=_BAD, linestyle=":", linewidth=1.2)
            return


def _choose_scale(axes: Axes, values: Sequence[float]) -> None:
    """Makes the scale logarithmic if the values are of several orders of magnitude."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low > 0 and high > _RATIO * low:
        axes.set_yscale("log")
        subs = (1, 2, 5) if high < 1000 * low else (1,)
        axes.yaxis.set_major_locator(matplotlib("ticker", _PURPOSE).LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def examples(run: Run) -> str | None:
    """Examples a second over time; steps a second if the size of a batch is unknown."""
    chief = run.chief
    if chief is None or not chief.samples:
        return None
    with _style():
        picture, scale = _over_time(run)
        points = _points(chief.samples, lambda each: each.rate * (each.batch or 1))
        dots = _dots(points)
        picture.axes.plot(*_scaled(points, scale), color=_SERIES[2], marker=dots, markersize=2)
        picture.axes.set_ylim(bottom=0)
        return picture.svg()


def step_times(run: Run) -> str | None:
    """The mean time of a step in milliseconds over time, for each task."""
    tasks = [task for task in run.tasks if task.samples]
    if not tasks:
        return None
    with _style():
        picture, scale = _over_time(run)
        for number, task in enumerate(tasks):
            points = _points(task.samples, lambda each: each.step_ms)
            few = len(tasks) <= _NAMED
            picture.axes.plot(
                *_scaled(points, scale),
                color=_SERIES[number % len(_SERIES)] if few else _MUTED,
                label=task.name,
                alpha=1.0 if few else 0.5,
                marker=_dots(points),
                markersize=2,
            )
        picture.axes.set_ylim(bottom=0)
        picture.axes.set_ylabel("ms")
        if 1 < len(tasks) <= _NAMED:
            picture.axes.legend(loc="best", ncols=2)
        return picture.svg()


def parts_by_task(parts: Mapping[str, Parts]) -> str | None:
    """The parts of the mean step of each task, a bar for each."""
    if not parts:
        return None
    with _style():
        picture = _Picture(1.0 + 0.3 * len(parts))
        axes, places = picture.axes, range(len(parts))
        left = [0.0] * len(parts)
        for name, colour, values in _layers(list(parts.values())):
            axes.barh(places, values, left=left, color=colour, height=0.65, label=name)
            left = [sum(pair) for pair in zip(left, values, strict=True)]
        axes.set_yticks(places, list(parts))
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.set_xlabel("ms")
        axes.grid(axis="y", visible=False)
        picture.figure.legend(loc="outside upper left", ncols=3)
        return picture.svg()


def parts_by_epoch(epochs: Sequence[Parts]) -> str | None:
    """The parts of the mean step of each epoch, in milliseconds."""
    if not epochs:
        return None
    with _style():
        picture = _Picture()
        axes = picture.axes
        # Steps of an area: a bar for each epoch would be an element of the page each.
        every = -(-len(epochs) // _DOTS)
        starts = range(0, len(epochs), every)
        edges = [edge + 0.5 for start in starts for edge in (start, start + every)]
        layers = _layers([epochs[start] for start in starts for _ in range(2)])
        names, colours, values = zip(*layers, strict=True)
        axes.stackplot(edges, *values, colors=colours, labels=names)
        axes.set_xlim(0.5, len(epochs) + 0.5)
        axes.set_xlabel("epoch")
        axes.set_ylabel("ms")
        axes.grid(axis="x", visible=False)
        _whole_numbers(axes.xaxis)
        picture.figure.legend(loc="outside upper left", ncols=3)
        return picture.svg()


def _layers(parts: Sequence[Parts]) -> list[tuple[str, str, list[float]]]:
    """Names, colours and values of the parts, from the first to the last of a step."""
    shares = [each.shares for each in parts]
    return [(name, _OF_PARTS[name], [each[name] for each in shares]) for name in shares[0]]


def staleness(task: TaskRun) -> str | None:
    """The number of gradients that were applied at each staleness, in all epochs together."""
    counts = [each.get("staleness", []) for each in task.server_epochs]
    sums = [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]
    if not sum(sums):
        return None
    with _style():
        picture = _Picture()
        axes = picture.axes
        bars = axes.bar(range(len(sums)), sums, color=_SERIES[4], width=0.8)
        if len(sums) <= 20:
            axes.bar_label(bars, [str(value) if value else "" for value in sums], color=_MUTED)
        axes.set_xlabel("updates by which a gradient lagged")
        axes.set_ylabel("gradients")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        # A lone bar would fill the picture.
        axes.set_xlim(-0.5, max(len(sums), _PLACES) - 0.5)
        _whole_numbers(axes.xaxis)
        return picture.svg()


def memory(run: Run) -> str | None:
    """The largest resident memory of each task, in MiB."""
    known = [(task.name, task.peak_rss / 2**20) for task in run.tasks if task.peak_rss]
    if not known:
        return None
    with _style():
        picture = _Picture(0.6 + 0.27 * len(known))
        axes = picture.axes
        names, values = zip(*known, strict=True)
        bars = axes.barh(range(len(known)), values, color=_SERIES[3], height=0.65)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, color=_INK)
        axes.set_yticks(range(len(known)), names)
        axes.set_ylim(len(known) - 0.5, -0.5)
        axes.set_xlabel("MiB")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.1)
        return picture.svg()


def _over_time(run: Run) -> tuple[_Picture, float]:
    """A picture with the time from left to right, and the seconds of its unit."""
    unit, scale = next(
        (unit for unit in (("s", 1.0), ("min", 60.0)) if run.seconds < 200 * unit[1]),
        ("h", 3600.0),
    )
    picture = _Picture()
    picture.axes.set_xlabel(f"{unit} since the start")
    picture.axes.set_xlim(0, max(run.seconds, 1e-3) / scale)
    for at in _starts_again(run):
        picture.axes.axvline(at / scale, color=_BAD, linestyle="--", linewidth=1.0)
    return picture, scale


def _starts_again(run: Run) -> list[float]:
    """When the launcher started the chief again."""
    return run.chief.starts[1:] if run.chief else []


def _points(samples: Sequence[Sample], value: Callable[[Sample], float]) -> _Points:
    """The values over time. A line is broken between attempts, and at values that are missing."""
    times: list[float] = []
    values: list[float] = []
    attempt = None
    for each in sorted(samples, key=lambda sample: sample.at):
        if attempt not in (None, each.attempt):
            times.append(math.nan)
            values.append(math.nan)
        attempt = each.attempt
        times.append(each.at)
        values.append(value(each))
    return times, values


def _scaled(points: _Points, scale: float) -> _Points:
    """The points in units of `scale` seconds. Infinite values are left out, as NaN are."""
    values = [value if math.isfinite(value) else math.nan for value in points[1]]
    return [at / scale for at in points[0]], values


def _alone(points: _Points) -> _Points:
    """The points without a neighbour, between which a line would draw nothing."""
    known = [False, *map(math.isfinite, points[1]), False]
    alone = [
        each == (False, True, False) for each in zip(known, known[1:], known[2:], strict=False)
    ]
    times, values = (list(itertools.compress(each, alone)) for each in points)
    return times, values


def _dots(points: _Points) -> str:
    """The marker of points, if they are few."""
    return "o" if len(points[0]) <= _DOTS else ""


def _whole_numbers(axis: Axis) -> None:
    axis.set_major_locator(matplotlib("ticker", _PURPOSE).MaxNLocator(integer=True, min_n_ticks=1))
