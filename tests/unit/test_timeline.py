"""The steps of a pipeline as a trace and as a picture."""

from __future__ import annotations

import importlib
import json
import random
import sys

import pytest

from tfdist.errors import ConfigError
from tfdist.strategies.pipeline import trace
from tfdist.strategies.pipeline.schedules import Box, Kind, Step, bubble, make, simulate
from tfdist.strategies.pipeline.trace import chrome_trace, draw, row_names, write_trace
from tfdist.utils.atomic_io import SaveError

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE


def boxes_of(name="1f1b", stages=2, microbatches=3, *, start=100.0, virtual=1, batches=1):
    """A schedule's boxes as if measured: later than 0, and in a random order."""
    schedule = make(name, stages, microbatches, virtual=virtual, batches=batches)
    boxes = [
        Box(box.device, box.step, start + box.begin, start + box.end)
        for box in simulate(schedule, 0.25, 0.5, update=0.25)
    ]
    random.Random(0).shuffle(boxes)
    return boxes


def test_a_trace_has_each_box_on_its_device_in_microseconds():
    boxes = boxes_of()
    trace = json.loads(chrome_trace(boxes, ["first"]))
    assert trace["displayTimeUnit"] == "ms"
    threads = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert {event["tid"]: event["args"]["name"] for event in threads} == {0: "first", 1: "device 1"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    found = {
        (
            event["tid"],
            event["cat"],
            event["args"].get("microbatch", -1),
            100 + event["ts"] / 1e6,
            100 + (event["ts"] + event["dur"]) / 1e6,
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    }
    words = {F: "forward", B: "backward", U: "update"}
    assert found == {
        (box.device, words[box.step.kind], box.step.microbatch, box.begin, box.end) for box in boxes
    }


def test_a_trace_tells_what_a_box_is():
    step = Step(B, 7, 3, 5)
    *_, event = json.loads(chrome_trace([Box(1, step, 2.0, 2.5)]))["traceEvents"]
    assert event == {
        "ph": "X",
        "pid": 0,
        "tid": 1,
        "name": "backward 3",
        "cat": "backward",
        "ts": 0.0,
        "dur": 500000.0,
        "args": {"batch": 7, "microbatch": 3, "chunk": 5},
    }
    *_, event = json.loads(chrome_trace([Box(1, Step(U, 7, -1, 1), 2.0, 2.5)]))["traceEvents"]
    assert (event["name"], event["args"]) == ("update", {"batch": 7})


def test_a_trace_is_written_as_a_whole(tmp_path):
    path = tmp_path / "new" / "trace.json"
    write_trace(str(path), boxes_of())
    assert path.read_text() == chrome_trace(boxes_of())
    assert [entry.name for entry in path.parent.iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"Cannot save to .*trace\.json"):
        write_trace(str(tmp_path / "file" / "trace.json"), boxes_of())


def test_devices_without_a_name_have_their_number():
    assert row_names(boxes_of(stages=3), ["gpu"]) == ["gpu", "device 1", "device 2"]
    assert row_names([], ["idle"]) == ["idle"]


def figure_of(monkeypatch, tmp_path, boxes, **options):
    """Draws, and gives the figure too."""
    figures = pytest.importorskip("matplotlib.figure")
    made = []

    class Kept(figures.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(figures, "Figure", Kept)
    path = tmp_path / "steps.png"
    draw(str(path), boxes, title="a title", **options)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps.png"]
    return made[0]


def words_of(figure):
    return [text.get_text() for text in figure.texts]


def test_a_picture_has_each_box_where_it_was(monkeypatch, tmp_path):
    boxes = boxes_of("gpipe", 3, 4)
    figure = figure_of(monkeypatch, tmp_path, boxes, names=["input"], ideal=0.25)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("input", "device 1", "device 2")
    ]
    idle, drawn = axes.containers
    assert [bar.get_width() for bar in idle] == pytest.approx([1e3 * 4.75] * 3)
    for bar, box in zip(drawn, boxes, strict=True):
        assert bar.get_x() == pytest.approx(1e3 * (box.begin - 100))
        assert bar.get_width() == pytest.approx(1e3 * (box.end - box.begin))
        assert bar.get_y() + bar.get_height() / 2 == pytest.approx(box.device)
    colours = {(box.step.kind, bar.get_facecolor()) for bar, box in zip(drawn, boxes, strict=True)}
    assert len(colours) == len({colour for _, colour in colours}) == 3
    assert sorted(label.get_text() for label in axes.texts) == sorted("0123" * 6)
    assert words_of(figure)[:2] == [
        "a title",
        f"bubble {100 * bubble(boxes):.0f} % (ideal 25 %)",
    ]


@pytest.mark.parametrize(
    ("options", "shades", "note"),
    [
        ({}, 1, "numbers: microbatch"),
        ({"name": "2bw", "batches": 3}, 2, "numbers: microbatch; darker and lighter: batches"),
        (
            {"name": "interleaved", "microbatches": 4, "virtual": 3},
            3,
            "numbers: microbatch; darker to lighter: the device's parts",
        ),
        ({"name": "pipedream", "microbatches": 1, "batches": 4}, 2, "numbers: batch; darker"),
    ],
    ids=str,
)
def test_shades_tell_parts_or_batches(monkeypatch, tmp_path, options, shades, note):
    boxes = boxes_of(**options)
    figure = figure_of(monkeypatch, tmp_path, boxes)
    bars = zip(figure.axes[0].containers[1], boxes, strict=True)
    assert len({bar.get_facecolor() for bar, box in bars if box.step.kind is F}) == shades
    assert words_of(figure)[1] == f"bubble {100 * bubble(boxes):.0f} %"
    assert words_of(figure)[2].startswith(note)


def test_numbers_without_room_are_left_out(monkeypatch, tmp_path):
    figure = figure_of(monkeypatch, tmp_path, boxes_of("gpipe", 2, 100))
    assert not figure.axes[0].texts
    assert words_of(figure)[2] == ""


@pytest.mark.parametrize("boxes", [[], [Box(0, Step(F, 0, 0, 0), 3.0, 3.0)]], ids=len)
def test_a_picture_of_nothing(monkeypatch, tmp_path, boxes):
    figure = figure_of(monkeypatch, tmp_path, boxes)
    assert words_of(figure)[1] == "bubble 0 %"


def test_a_picture_needs_a_format(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("steps", "steps.jpeg2000"):
        with pytest.raises(ConfigError, match=r"not a format.*png"):
            draw(str(tmp_path / name), boxes_of(), title="")
    assert not list(tmp_path.iterdir())


def test_a_picture_without_matplotlib_names_the_command(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(trace)
    with pytest.raises(ConfigError, match=r"pip install 'tfdist\[pictures\]'"):
        trace.draw(str(tmp_path / "steps.png"), boxes_of(), title="")
