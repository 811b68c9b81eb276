"""The steps of a pipeline over time: as a trace for a browser, and as a picture."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from tfdist.errors import ConfigError
from tfdist.strategies.pipeline.schedules import Box, Kind, Step, bubble
from tfdist.utils.atomic_io import SaveError, replacing
from tfdist.utils.imports import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_installed", "chrome_trace", "draw", "read_trace", "row_names", "write_trace"]

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}

#: Red, green and blue of the darkest shade. Blue and orange differ for all kinds of eyes.
_COLOURS = {
    Kind.FORWARD: (0.16, 0.41, 0.69),
    Kind.BACKWARD: (0.85, 0.43, 0.08),
    Kind.UPDATE: (0.42, 0.42, 0.42),
}
_LIGHTEST = 0.55
_INCHES, _ROW_INCHES, _NAME_POINTS = 12.0, 0.42, 10.0
_ABOVE, _BELOW, _RIGHT = 0.62, 0.52, 0.985
_ROW = 0.82
_LARGEST, _SMALLEST = 9.0, 5.0
#: A digit's width, as a part of the font's size.
_DIGIT = 0.62
#: A kind's numbers are left out if fewer of its boxes than this have room for them.
_MOST = 0.9


def row_names(boxes: Sequence[Box], names: Sequence[str] = ()) -> list[str]:
    """A name for each device, from 0 to the last that has a name or a box.

    Args:
        boxes: the boxes.
        names: the devices' names. Those that are missing become `"device 2"`.
    """
    count = max((box.device + 1 for box in boxes), default=0)
    return [*names, *(f"device {device}" for device in range(len(names), count))]


def chrome_trace(boxes: Sequence[Box], names: Sequence[str] = ()) -> str:
    """The boxes in the Trace Event Format, which Perfetto and chrome://tracing show.

    Each box is a complete event ("X") in microseconds from the first begin; each device is a
    thread.

    Args:
        boxes: the boxes, in any order.
        names: the devices' names.

    Returns:
        JSON.
    """
    boxes = sorted(boxes, key=lambda box: box.begin)
    events: list[dict[str, object]] = []
    for device, name in enumerate(row_names(boxes, names)):
        common = {"ph": "M", "pid": 0, "tid": device}
        events.append({**common, "name": "thread_name", "args": {"name": name}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": device}})
    events += [_event(box, boxes[0].begin) for box in boxes]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(box: Box, start: float) -> dict[str, object]:
    step, word = box.step, _WORDS[box.step.kind]
    what = {"batch": step.batch}
    if step.kind is not Kind.UPDATE:
        what |= {"microbatch": step.microbatch, "chunk": step.chunk}
    return {
        "ph": "X",
        "pid": 0,
        "tid": box.device,
        "name": word if step.kind is Kind.UPDATE else f"{word} {step.microbatch}",
        "cat": word,
        "ts": round((box.begin - start) * 1e6, 3),
        "dur": round((box.end - box.begin) * 1e6, 3),
        "args": what,
    }


def read_trace(text: str) -> tuple[list[Box], list[str]]:
    """The boxes and the names of devices of what `chrome_trace` has made.

    Raises:
        ValueError: if it is something else, such as a timeline of Horovod.
    """
    kinds = {word: kind for kind, word in _WORDS.items()}
    boxes, names = [], []
    try:
        for event in json.loads(text)["traceEvents"]:
            if event.get("name") == "thread_name":
                names.append(str(event["args"]["name"]))
            if event["ph"] == "X":
                what = event["args"]
                fields = what["batch"], what.get("microbatch", -1), what.get("chunk", event["tid"])
                begin = event["ts"] / 1e6
                end = begin + event["dur"] / 1e6
                boxes.append(Box(event["tid"], Step(kinds[event["cat"]], *fields), begin, end))
    except (KeyError, TypeError) as error:
        raise ValueError("not the timeline of a pipeline") from error
    return boxes, names


def write_trace(path: str, boxes: Sequence[Box], names: Sequence[str] = ()) -> None:
    """Writes `chrome_trace` to a file, as a whole or not at all.

    Args:
        path: the file, such as `trace.json`.
        boxes: the boxes, in any order.
        names: the devices' names.

    Raises:
        SaveError: if it cannot be written.
    """
    with _saving(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(chrome_trace(boxes, names))


@contextlib.contextmanager
def _saving(path: str) -> Iterator[str]:
    try:
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise SaveError.of(path, error) from error


def draw(
    path: str,
    boxes: Sequence[Box],
    *,
    title: str,
    names: Sequence[str] = (),
    ideal: float | None = None,
) -> None:
    """Draws one row for each device, with time from left to right.

    Args:
        path: the file to write; its ending chooses the format, such as `.png` or `.svg`.
        boxes: the boxes, in any order.
        title: the first line.
        names: the devices' names.
        ideal: the bubble to compare with, from 0 to 1; left out if None.

    Raises:
        ConfigError: if Matplotlib is not installed, or does not know the format.
        SaveError: if the file cannot be written.
    """
    rows = row_names(boxes, names)
    height = _ABOVE + _BELOW + _ROW_INCHES * len(rows)
    figure = _module("figure").Figure(figsize=(_INCHES, height))
    _check_format(figure, path)
    left = min(0.4, 0.02 + max(map(len, rows), default=0) * _DIGIT * _NAME_POINTS / 72 / _INCHES)
    low, high = _BELOW / height, 1 - _ABOVE / height
    axes = figure.add_axes((left, low, _RIGHT - left, high - low))
    shades, meaning = _shades_of(boxes, len(rows))
    start = min((box.begin for box in boxes), default=0.0)
    boxes = [
        dataclasses.replace(box, begin=1e3 * (box.begin - start), end=1e3 * (box.end - start))
        for box in boxes
    ]
    _bars(axes, boxes, rows, shades)
    # The number that distinguishes a step from its neighbours.
    counted = "microbatch" if any(box.step.microbatch > 0 for box in boxes) else "batch"
    kinds = [
        [box for box in boxes if box.step.kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    numbered = [_label(axes, alike, counted, shades) for alike in kinds]
    words = f"bubble {100 * bubble(boxes):.0f} %"
    if ideal is not None:
        words += f" (ideal {100 * ideal:.0f} %)"
    figure.text(left, 1 - 0.12 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(left, 1 - 0.38 / height, words, fontsize=10.5, va="top")
    _legend(figure, [f"numbers: {counted}" if any(numbered) else "", meaning])
    with _saving(path) as partial:
        figure.savefig(partial, dpi=150)


def check_installed() -> None:
    """Finds out before a training whether a picture could be drawn after it.

    Raises:
        ConfigError: if Matplotlib is not installed.
    """
    _module("figure")


def _module(name: str) -> ModuleType:
    return matplotlib(name, "The picture of a pipeline")


def _check_format(figure: Figure, path: str) -> None:
    known = figure.canvas.get_supported_filetypes()
    ending = path.rpartition(".")[2]
    if "." not in path or ending.lower() not in known:
        raise ConfigError(
            f"The picture {path!r} has an ending that is not a format. Choose one of: "
            f"{', '.join(sorted(known))}."
        )


#: The lightness of a step's box, from 0.
_Shades: TypeAlias = Callable[[Step], float]


def _shades_of(boxes: Sequence[Box], devices: int) -> tuple[_Shades, str]:
    """The rule for lighter boxes of a kind, and its meaning in words; empty if all are alike.

    They are the chunks of a device if it has several, else even and odd batches.
    """
    last = max((box.step.chunk // devices for box in boxes), default=0)
    if last:
        words = "darker to lighter: the device's parts of the model"
        return lambda step: _LIGHTEST * (step.chunk // devices) / last, words
    if len({box.step.batch for box in boxes}) > 1:
        words = "darker and lighter: batches in turn"
        return lambda step: _LIGHTEST * (step.batch % 2), words
    return lambda step: 0.0, ""


def _bars(axes: Axes, boxes: Sequence[Box], rows: Sequence[str], shades: _Shades) -> None:
    """The boxes, on rows that are hatched all along: what boxes leave of them is idle."""
    length = max((box.end for box in boxes), default=0.0) or 1.0
    heights = range(len(rows))
    axes.barh(heights, length, _ROW, color="white", edgecolor="0.87", hatch="////", linewidth=0)
    axes.barh(
        [box.device for box in boxes],
        [box.end - box.begin for box in boxes],
        _ROW,
        left=[box.begin for box in boxes],
        color=[_colour(box.step.kind, shades(box.step)) for box in boxes],
        edgecolor="white",
        linewidth=0.4,
    )
    axes.set_xlim(0, length)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(heights, rows)
    axes.tick_params(axis="y", length=0, labelsize=_NAME_POINTS)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(kind: Kind, whiteness: float) -> tuple[float, float, float]:
    if kind is Kind.UPDATE:
        whiteness = 0.0
    red, green, blue = (part + (1 - part) * whiteness for part in _COLOURS[kind])
    return red, green, blue


def _label(axes: Axes, boxes: Sequence[Box], counted: str, shades: _Shades) -> bool:
    """Writes the numbers of boxes of one kind, in one size, if most have room; whether they do."""
    points = _INCHES * 72 * axes.get_position().width / axes.get_xlim()[1]
    texts = [str(getattr(box.step, counted)) for box in boxes]
    rooms = [
        (box.end - box.begin) * points / (_DIGIT * (len(text) + 0.4))
        for box, text in zip(boxes, texts, strict=True)
    ]
    if not rooms or sum(room >= _SMALLEST for room in rooms) < _MOST * len(rooms):
        return False
    size = min(_LARGEST, max(_SMALLEST, min(rooms)))
    for box, text, room in zip(boxes, texts, rooms, strict=True):
        if room >= size:
            axes.text(
                (box.begin + box.end) / 2,
                box.device,
                text,
                ha="center",
                va="center_baseline",
                fontsize=size,
                color="0.1" if shades(box.step) > _LIGHTEST / 2 else "white",
            )
    return True


def _legend(figure: Figure, notes: Sequence[str]) -> None:
    """The meaning of colours, numbers and shades, above the rows on the right."""
    patches = _module("patches")
    handles = [
        patches.Patch(facecolor=_colour(kind, 0), label=word) for kind, word in _WORDS.items()
    ]
    idle = patches.Patch(facecolor="white", edgecolor="0.75", hatch="////", linewidth=0)
    idle.set_label("idle")
    height = figure.get_figheight()
    figure.legend(
        handles=[*handles, idle],
        loc="upper right",
        bbox_to_anchor=(_RIGHT, 1 - 0.04 / height),
        ncols=len(handles) + 1,
        frameon=False,
        fontsize=10,
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.4,
    )
    note = "; ".join(filter(None, notes))
    figure.text(_RIGHT, 1 - 0.40 / height, note, fontsize=9, color="0.35", ha="right", va="top")
