"""A language model under each way to divide it: memory of each process, and the loss.

    python benchmarks/sharding_picture.py

Trains examples/language_model.py, unchanged, and draws docs/pictures/sharding.png. TensorFlow's BFC
allocator counts the bytes exactly, so that one run of each is enough, also on a busy machine.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharding import run

_ROOT = Path(__file__).parents[1]
_EXAMPLE = _ROOT / "examples/language_model.py"
_PICTURE = _ROOT / "docs/pictures/sharding.png"
_OPTIONS = "--steps 12 --epochs 6 --width 512 --blocks 4 --batch-size 16 --length 32"

#: Processes and flags of each way.
_WAYS = (
    (1, ""),
    (2, ""),
    (2, "--zero 1"),
    (2, "--zero 2"),
    (2, "--zero 3"),
    (2, "--mesh model=2"),
    (4, "--zero 3"),
    (4, "--mesh model=4"),
    (4, "--mesh data=2,model=2 --zero 3"),
)
_COLOURS = {1: "#8c8c8c", 2: "#4c72b0", 4: "#55a868"}
_MARKERS = "os^vDPos^"


def measure() -> None:
    """The program of each process: runs the example, and writes what it needed."""
    import tensorflow as tf

    import tfdist

    directory = Path(sys.argv[1])
    sys.argv[1:] = _OPTIONS.split()
    model = runpy.run_path(str(_EXAMPLE), run_name="__main__")["model"]
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    found = {"peak": peak, "losses": model.history.history["loss"]}
    (directory / f"result{tfdist.strategy().world.worker}.json").write_text(json.dumps(found))


def _measured(processes: int, flags: str) -> list[dict[str, Any]]:
    """The results of each process."""
    with tempfile.TemporaryDirectory() as directory:
        run(processes, flags, __file__, directory)
        files = [Path(directory) / f"result{rank}.json" for rank in range(processes)]
        return [json.loads(file.read_text()) for file in files]


def _label(processes: int, flags: str) -> str:
    if processes == 1:
        return "one process"
    return f"{processes} processes\n" + (flags.replace(" --zero", "\n--zero") or "data parallel")


def _draw(results: Mapping[tuple[int, str], list[dict[str, Any]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    memory, loss = figure.subplots(2, height_ratios=[3, 2])
    place, ticks = 0.0, []
    for way, each in results.items():
        peaks = [result["peak"] / 2**20 for result in each]
        places = [place + i * 0.4 for i in range(len(peaks))]
        memory.bar(places, peaks, width=0.36, color=_COLOURS[way[0]], zorder=2)
        ticks.append((sum(places) / len(places), way))
        top = max(peaks)
        memory.annotate(f"{top:.0f}", (ticks[-1][0], top), ha="center", va="bottom", fontsize=8)
        place = places[-1] + 0.9
    memory.set_xticks([x for x, _ in ticks], [_label(*way) for _, way in ticks], fontsize=7)
    memory.set_ylabel("peak memory, MiB")
    memory.set_title("Each bar is a process", fontsize=9, loc="left")
    for number, (way, each) in enumerate(results.items()):
        losses = each[0]["losses"]
        # Beside each other: they would hide one another.
        epochs = [epoch + 0.06 * (number - len(results) / 2) for epoch in range(1, len(losses) + 1)]
        marker, colour = _MARKERS[number], _COLOURS[way[0]]
        label = _label(*way).replace("\n", " ")
        loss.plot(epochs, losses, marker, color=colour, markersize=5, label=label)
    loss.set_xlabel("epoch")
    loss.set_ylabel("loss")
    loss.set_title("Each mark is a way to divide the model", fontsize=9, loc="left")
    loss.legend(fontsize=7, frameon=False, ncols=2)
    for axes in (memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(_PICTURE, dpi=110)


def main() -> None:
    """Measures all ways, draws them, and prints a table."""
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for way in _WAYS:
        print(f"{way[0]} processes {way[1]}", flush=True)
        results[way] = _measured(*way)
    _draw(results)
    alone = results[1, ""][0]
    for (processes, flags), each in results.items():
        peak = max(result["peak"] for result in each)
        off = max(
            abs(a - b) for r in each for a, b in zip(r["losses"], alone["losses"], strict=True)
        )
        ratio = peak / alone["peak"]
        print(f"| {processes} | `{flags}` | {peak / 2**20:.0f} | {ratio:.2f} | {off:.1e} |")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure()
    else:
        main()
