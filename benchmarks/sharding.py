"""Memory and time of a step of divided models, on several processes of this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tfdist import environment

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks/results/sharding.md"
_PACKAGES = ("tfdist", "tensorflow", "keras")
_WIDTH, _STEPS = 1024, 12

_HELP = """
Trains layers of `Dense(1024)` with Adam in one process, and on several by `multi_worker` under each
stage of ZeRO, with a model axis, and with both. TensorFlow's BFC allocator counts the bytes,
exactly. Runs alternate; the table has the medians, and the range of the times.

Examples:

- everything, about 10 minutes: `python benchmarks/sharding.py`

- larger batches, of which an exchange takes less: `python benchmarks/sharding.py -n 2 --batch 256`

- a quick look: `python benchmarks/sharding.py -n 2 --rounds 1 --output /tmp/sharding.md`
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def measure() -> None:
    """The program of each process: trains, and the chief prints a line of JSON."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    count, batch = int(sys.argv[2]), int(sys.argv[3])
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(count)]
    model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(batch * _STEPS, _WIDTH)).astype("float32")
    model.fit(x[: 2 * batch], x[: 2 * batch], batch, verbose=0)
    used = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    begun = time.perf_counter()
    loss = model.fit(x, x, batch, verbose=0).history["loss"][-1]
    seconds = (time.perf_counter() - begun) / _STEPS
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    if tfdist.strategy().is_chief:
        with open(Path(sys.argv[1]) / "result.json", "w") as file:
            json.dump({"rest": used, "peak": peak, "seconds": seconds, "loss": float(loss)}, file)


def _kinds(processes: int) -> list[str]:
    """The flags that divide a model over some processes."""
    stages = [f"--zero {stage}" for stage in range(4)]
    mesh = f"--mesh data={processes // 2},model=2 --zero 3"
    return [*stages, f"--mesh model={processes}", *([mesh] if processes > 2 else [])]


def run(processes: int, flags: str, program: str, directory: str, *arguments: str) -> None:
    """Runs a program, with exact counts of memory.

    Its first argument is a directory, into which it may write.
    """
    words = ["--strategy", "single"]
    if processes > 1:
        words = ["--strategy", "multi_worker", "-n", str(processes), *flags.split()]
    subprocess.run(
        [sys.executable, "-m", "tfdist", "run", *words, program, directory, *arguments],
        cwd=directory,
        env=environment.merged({"TF_CPU_ALLOCATOR_USE_BFC": "true"}),
        check=True,
        capture_output=True,
        timeout=1200,
    )


def _run(processes: int, flags: str, layers: int, batch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        run(processes, flags, __file__, directory, str(layers), str(batch))
        found: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
        return found


def _lines(runs: dict[tuple[int, str], list[dict[str, Any]]]) -> Iterator[str]:
    alone = _median(runs[1, ""], "peak")
    yield (
        "| processes | flags | at rest, MiB | peak, MiB | peak to one process "
        "| seconds a step (range) | loss |"
    )
    yield "|---|---|---|---|---|---|---|"
    for (processes, flags), each in runs.items():
        rest, peak = _median(each, "rest"), _median(each, "peak")
        times = sorted(run["seconds"] for run in each)
        yield (
            f"| {processes} | {flags and f'`{flags}`'} | {rest / 2**20:.0f} "
            f"| {peak / 2**20:.0f} | {peak / alone:.2f} "
            f"| {_median(each, 'seconds'):.3f} ({times[0]:.3f} to {times[-1]:.3f}) "
            f"| {each[0]['loss']:.7f} |"
        )


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


@app.command(help=_HELP)
def main(
    processes: Annotated[
        list[int] | None, typer.Option("-n", help="Processes; several times. By default 2 and 4.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 12,
    batch: Annotated[int, typer.Option(help="Examples of a global batch.", min=4)] = 32,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="The page.")] = _RESULTS,
) -> None:
    """Runs all kinds in turn, and writes the page after every round."""
    kinds = [(1, ""), *((count, each) for count in processes or (2, 4) for each in _kinds(count))]
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    for number in range(rounds):
        for kind in kinds:
            console.print(f"round {number + 1} of {rounds}: {kind[0]} processes {kind[1]}")
            runs[kind].append(_run(*kind, layers, batch))
        text = [
            "# Divided models: memory and time",
            "",
            f"{layers} layers of Dense({_WIDTH}): {4 * layers} MiB of weights; Adam; global "
            f"batches of {batch}; by `python benchmarks/sharding.py`. Medians of {number + 1} "
            f"alternating runs on {os.cpu_count()} cores, without a GPU: more processes than cores "
            "share them. "
            f"{versions}.",
            "",
            *_lines(runs),
            "",
        ]
        output.write_text("\n".join(text))
    console.print(output.read_text())


if __name__ == "__main__":
    if len(sys.argv) == 4 and Path(sys.argv[1]).is_dir():
        measure()
    else:
        app()
