"""Compares a model in two stages, on two tasks of a core each, with the whole model on one core."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from bench.pipeline.picture import draw
from bench.pipeline.task import Job, Result
from rich.console import Console

from tfdist import environment
from tfdist.cluster.ports import HeldPorts

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "pipeline.md"
_TASK = _ROOT / "benchmarks" / "bench" / "pipeline" / "task.py"
_SHAPES = (("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("gpipe", 8))
_PICTURE = _ROOT / "docs" / "pictures" / "pipeline_resnet50.png"
#: How many of the shapes are run; all of the others.
_COUNTS = {"resnet50": 4}
_MODELS = {
    "mlp": "MLP of 25 million weights (6 x dense 2048), 512 examples a batch",
    "transformer": "transformer of 6 million weights (8 blocks of 256), 32 x 128 tokens a batch",
    "resnet50": "ResNet-50 in two stages, 32 images of 128 x 128 a batch",
}

_HELP = """
Trains models in two parts of about the same time: whole on one core; and in two stages, on two
processes with a core each that are connected over loopback. m = 1 is naive placement: one stage
works while the other waits. Needs two cores with nothing else on them. Rounds in turns; medians.

Example: `python benchmarks/pipeline.py --rounds 1 --model transformer`
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"{', '.join(_MODELS)}. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often all take their turn.")] = 2,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each.")] = 6,
    timeout: Annotated[float, typer.Option(help="Seconds until a process is killed.")] = 300.0,
    output: Annotated[Path, typer.Option(help="Markdown file.")] = _RESULTS,
    picture: Annotated[Path, typer.Option(help="PNG file of resnet50's bars.")] = _PICTURE,
) -> None:
    """Runs all and writes the table; see `_HELP`."""
    lines = ["# A model in two stages", "", _about(rounds)]
    for model in models or _MODELS:
        found: dict[str, list[Result]] = {}
        for _ in range(rounds):
            for result in [
                *_run(Job(model=model, steps=steps), timeout),
                *_pair(model, steps, timeout),
            ]:
                found.setdefault(result.name, []).append(result)
                console.print(f"{model:12} {result.name:14} {result.seconds:.3f} s a step")
        lines += ["", f"## {_MODELS[model]}", "", *_table(found)]
        if model == "resnet50":
            draw(picture, _MODELS[model], {name: _middle(found[name], "seconds") for name in found})
    output.write_text("\n".join([*lines, ""]))
    console.print(output)


def _about(rounds: int) -> str:
    versions = ", ".join(
        f"{n} {importlib.metadata.version(n)}" for n in ("tfdist", "tensorflow", "keras")
    )
    return (
        f"By `python benchmarks/pipeline.py`; {versions}. A core for each process, float32, SGD. "
        f"Medians of {rounds} round{'s' if rounds > 1 else ''}. Forward and backward are what a "
        "stage spends on a batch."
    )


def _pair(model: str, steps: int, timeout: float) -> list[Result]:
    with HeldPorts(2) as held:
        ports = tuple(held.ports)
    job = {"model": model, "ports": ports, "shapes": _SHAPES[: _COUNTS.get(model)], "steps": steps}
    with _process(Job(role="worker", **job), Path("unused")):
        return _run(Job(**job), timeout)


def _run(job: Job, timeout: float) -> list[Result]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "result.json"
        with _process(job, out) as process:
            process.wait(timeout)
        return [Result(**each) for each in json.loads(out.read_text())]


@contextlib.contextmanager
def _process(job: Job, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, str(_TASK), job.to_json(), str(out)],
        env=environment.merged({"PYTHONPATH": f"{_ROOT / 'benchmarks'}:{_ROOT}"}),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _table(found: dict[str, list[Result]]) -> list[str]:
    def middle(name: str, field: str) -> float:
        return _middle(found[name], field)

    whole, naive = middle("whole", "seconds"), middle("1f1b, m = 1", "seconds")
    rows = [
        "| | s a step | whole / this | naive / this | bubble | ideal | forward s | backward s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in found:
        seconds = middle(name, "seconds")
        cells = [name, f"{seconds:.3f}", f"{whole / seconds:.2f}", f"{naive / seconds:.2f}"]
        if name != "whole":
            cells += [f"{middle(name, field):.0%}" for field in ("bubble", "ideal")]
            cells += [f"{middle(name, field):.3f}" for field in ("forward", "backward")]
        rows.append(f"| {' | '.join([*cells, *[''] * (8 - len(cells))])} |")
    return rows


def _middle(found: list[Result], field: str) -> float:
    return statistics.median(getattr(each, field) for each in found)


if __name__ == "__main__":
    app()
