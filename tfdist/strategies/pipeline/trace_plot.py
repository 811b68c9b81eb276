"""A picture of a pipeline's steps. The one place that imports Matplotlib, which is optional."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tfdist.errors import ConfigError
from tfdist.strategies.pipeline.schedules.programs import Box, Kind, Step
from tfdist.strategies.pipeline.schedules.simulator import bubble
from tfdist.strategies.pipeline.trace import WORDS, numbers, row_names, saving, span

__all__ = ["check_installed", "draw"]

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


@dataclasses.dataclass(frozen=True)
class _Shades:
    """The rule for lighter boxes of a kind.

    Attributes:
        count: the number of shades.
        words: their meaning; empty if there is one.
        by_chunk: whether they are the chunks of a device, or else even and odd batches.
        devices: the number of devices.
    """

    count: int
    words: str
    by_chunk: bool
    devices: int

    @classmethod
    def of(cls, boxes: Sequence[Box], devices: int) -> _Shades:
        """Chunks if a device has several, else batches if there are several."""
        parts = 1 + max((box.step.chunk // devices for box in boxes), default=0)
        if parts > 1:
            return cls(parts, "darker to lighter: the device's parts of the model", True, devices)
        if len({box.step.batch for box in boxes}) > 1:
            return cls(2, "darker and lighter: batches in turn", False, devices)
        return cls(1, "", False, devices)

    def whiteness(self, step: Step) -> float:
        """The lightness of a step's box, from 0."""
        if step.kind is Kind.UPDATE or self.count == 1:
            return 0.0
        place = step.chunk // self.devices if self.by_chunk else step.batch % 2
        return _LIGHTEST * place / (self.count - 1)


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
    figure = _module("matplotlib.figure").Figure(figsize=(_INCHES, height))
    _check_format(figure, path)
    left = min(0.4, 0.02 + max(map(len, rows), default=0) * _DIGIT * _NAME_POINTS / 72 / _INCHES)
    low, high = _BELOW / height, 1 - _ABOVE / height
    axes = figure.add_axes((left, low, _RIGHT - left, high - low))
    shades = _Shades.of(boxes, len(rows))
    counted, of = numbers(boxes)
    boxes = _in_ms(boxes)
    _prepare(axes, boxes, rows)
    _bars(axes, boxes, shades)
    kinds = [
        [box for box in boxes if box.step.kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    numbered = [_label(axes, alike, of, shades) for alike in kinds]
    figure.text(left, 1 - 0.12 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(left, 1 - 0.38 / height, _subtitle(boxes, ideal), fontsize=10.5, va="top")
    _legend(figure, [f"numbers: {counted}" if any(numbered) else "", shades.words])
    with saving(path) as partial:
        figure.savefig(partial, dpi=150)


def check_installed() -> None:
    """Finds out before a training whether a picture could be drawn after it.

    Raises:
        ConfigError: if Matplotlib is not installed.
    """
    _module("matplotlib.figure")


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "The picture of a pipeline needs Matplotlib, which is not installed here. Run "
            "`pip install 'tfdist[pictures]'`, or leave the picture out."
        ) from error


def _check_format(figure: Any, path: str) -> None:
    known = figure.canvas.get_supported_filetypes()
    ending = path.rpartition(".")[2]
    if "." not in path or ending.lower() not in known:
        raise ConfigError(
            f"The picture {path!r} has an ending that is no format. Choose one of: "
            f"{', '.join(sorted(known))}."
        )


def _subtitle(boxes: Sequence[Box], ideal: float | None) -> str:
    words = f"bubble {100 * bubble(boxes):.0f} %"
    return words if ideal is None else f"{words} (ideal {100 * ideal:.0f} %)"


def _in_ms(boxes: Sequence[Box]) -> list[Box]:
    """Boxes in milliseconds from the first begin."""
    start, _ = span(boxes)
    return [
        dataclasses.replace(box, begin=1e3 * (box.begin - start), end=1e3 * (box.end - start))
        for box in boxes
    ]


def _prepare(axes: Any, boxes: Sequence[Box], rows: Sequence[str]) -> None:
    """The axes, and each row hatched all along: what boxes leave of it is idle."""
    length = span(boxes)[1] or 1.0
    places = range(len(rows))
    axes.barh(places, length, _ROW, color="white", edgecolor="0.87", hatch="////", linewidth=0)
    axes.set_xlim(0, length)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(places, rows)
    axes.tick_params(axis="y", length=0, labelsize=_NAME_POINTS)
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, boxes: Sequence[Box], shades: _Shades) -> None:
    axes.barh(
        [box.device for box in boxes],
        [box.end - box.begin for box in boxes],
        _ROW,
        left=[box.begin for box in boxes],
        color=[_colour(box.step.kind, shades.whiteness(box.step)) for box in boxes],
        edgecolor="white",
        linewidth=0.4,
    )


def _colour(kind: Kind, whiteness: float) -> tuple[float, float, float]:
    red, green, blue = (part + (1 - part) * whiteness for part in _COLOURS[kind])
    return red, green, blue


def _label(axes: Any, boxes: Sequence[Box], of: dict[Step, int], shades: _Shades) -> bool:
    """Writes the numbers of boxes of one kind, in one size, if most have room; whether they do."""
    points = _INCHES * 72 * axes.get_position().width / axes.get_xlim()[1]
    texts = [str(of[box.step]) for box in boxes]
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
                color="0.1" if shades.whiteness(box.step) > _LIGHTEST / 2 else "white",
            )
    return True


def _legend(figure: Any, notes: Sequence[str]) -> None:
    """The meaning of colours, numbers and shades, above the rows on the right."""
    patches = _module("matplotlib.patches")
    handles = [
        patches.Patch(facecolor=_colour(kind, 0), label=word) for kind, word in WORDS.items()
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
