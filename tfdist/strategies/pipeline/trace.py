"""The steps of a pipeline over time: as a trace for a browser, and as text.

`tfdist.strategies.pipeline.trace_plot` draws them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from tfdist.strategies.pipeline.schedules.programs import Box, Kind, Step
from tfdist.strategies.pipeline.schedules.simulator import bubble
from tfdist.utils.atomic_io import SaveError, replacing
from tfdist.utils.validation import check_number

__all__ = ["WORDS", "chrome_trace", "numbers", "row_names", "saving", "span", "text", "write_trace"]

#: The kinds of steps in words.
WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}

_SIGNS = {Kind.FORWARD: "0123456789", Kind.BACKWARD: "abcdefghij", Kind.UPDATE: "#"}
_IDLE = "."
_LEAST_BINS = 10


def span(boxes: Sequence[Box]) -> tuple[float, float]:
    """The first begin and the last end, in seconds; zeros if there are no boxes."""
    begins, ends = [box.begin for box in boxes], [box.end for box in boxes]
    return min(begins, default=0.0), max(ends, default=0.0)


def row_names(boxes: Sequence[Box], names: Sequence[str] = ()) -> list[str]:
    """A name for each device, from 0 to the last that has a name or a box.

    Args:
        boxes: the boxes.
        names: the devices' names. Those that are missing become `"device 2"`.
    """
    count = max((box.device + 1 for box in boxes), default=0)
    return [*names, *(f"device {device}" for device in range(len(names), count))]


def numbers(boxes: Sequence[Box]) -> tuple[str, dict[Step, int]]:
    """The number that distinguishes a step from its neighbours, and what it counts.

    Returns:
        `"microbatch"`, or `"batch"` if batches have one microbatch each; and the number of each
        step that is forward or backward.
    """
    steps = [box.step for box in boxes if box.step.kind is not Kind.UPDATE]
    if any(step.microbatch for step in steps):
        return "microbatch", {step: step.microbatch for step in steps}
    return "batch", {step: step.batch for step in steps}


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
    start, _ = span(boxes)
    rows = enumerate(row_names(boxes, names))
    events = [event for device, name in rows for event in _thread(device, name)]
    events += [_event(box, start) for box in sorted(boxes, key=lambda box: box.begin)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _thread(device: int, name: str) -> list[dict[str, object]]:
    """A device's name, and its place among the others."""
    place = {"ph": "M", "pid": 0, "tid": device}
    return [
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": device}},
    ]


def _event(box: Box, start: float) -> dict[str, object]:
    step, word = box.step, WORDS[box.step.kind]
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


def write_trace(path: str, boxes: Sequence[Box], names: Sequence[str] = ()) -> None:
    """Writes `chrome_trace` to a file, as a whole or not at all.

    Args:
        path: the file, such as `trace.json`.
        boxes: the boxes, in any order.
        names: the devices' names.

    Raises:
        SaveError: if it cannot be written.
    """
    with saving(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(chrome_trace(boxes, names))


@contextlib.contextmanager
def saving(path: str) -> Iterator[str]:
    """`tfdist.utils.atomic_io.replacing`, with errors in words.

    Raises:
        SaveError: for an error of the system.
    """
    try:
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise SaveError.of(path, error) from error


def text(boxes: Sequence[Box], width: int = 100, names: Sequence[str] = ()) -> str:
    """The boxes as lines for a terminal or a log.

    A character shows what a device does in the middle of the time it stands for, so a step that is
    shorter than that may be left out.

    Args:
        boxes: the boxes, in any order.
        width: the characters of a row, which are at least the name's and ten more.
        names: the devices' names.

    Returns:
        A line with the bubble and the scale, one for each device, and one that explains the signs.

    Raises:
        ConfigError: if `width` is not a whole number of 1 or more.
    """
    check_number("width", width, 1, "It counts the characters of a row.")
    rows = row_names(boxes, names)
    margin = max(map(len, rows), default=0)
    bins = max(_LEAST_BINS, width - margin - 3)
    start, end = span(boxes)
    counted, of = numbers(boxes)
    lines = [[_IDLE] * bins for _ in rows]
    for box in boxes:
        here = _bins(box, start, (end - start) / bins)
        lines[box.device][here.start : here.stop] = _sign(box.step, of) * len(here)
    head = (
        f"{1e3 * (end - start):.4g} ms, bubble {100 * bubble(boxes):.0f} %; "
        f"a character is {1e3 * (end - start) / bins:.3g} ms"
    )
    body = [f"{row:<{margin}} |{''.join(line)}|" for row, line in zip(rows, lines, strict=True)]
    return "\n".join([head, *body, _legend(counted, max(of.values(), default=0))])


def _sign(step: Step, of: dict[Step, int]) -> str:
    signs = _SIGNS[step.kind]
    return signs[of.get(step, 0) % len(signs)]


def _bins(box: Box, start: float, size: float) -> range:
    """The bins whose middle is in a box."""
    if not size:
        return range(0)
    return range(round((box.begin - start) / size), round((box.end - start) / size))


def _legend(counted: str, most: int) -> str:
    last = min(most, 9)
    digits, letters = (
        signs[0] if not last else f"{signs[0]}-{signs[last]}"
        for signs in (_SIGNS[Kind.FORWARD], _SIGNS[Kind.BACKWARD])
    )
    end = f"; a {counted} shows its last digit" if most > 9 else ""
    return (
        f"{digits} forward of a {counted}, {letters} its backward, {_SIGNS[Kind.UPDATE]} update, "
        f"{_IDLE} idle{end}"
    )
