"""Times a model in Keras, as a SavedModel, and in onnxruntime as float32, float16 and int8."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import keras
import numpy as np
import tensorflow as tf
import typer
from rich.console import Console

import tfdist
from tfdist.exporting.onnx_models import runner

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks/results/export.md"
_PRECISIONS = ("float32", "float16", "int8", "int8_static")
_PACKAGES = ("tfdist", "tensorflow", "keras", "tf2onnx", "onnxruntime")
_TRAINED, _BATCH, _CALIBRATION = 1200, 32, 100

_HELP = """
Trains two small models on scikit-learn's digits, exports them, and times them on the CPU:

- `convnet`: three convolutions on the images, enlarged to 32 x 32

- `transformer`: two blocks of attention over the 64 pixels as tokens

The ways to compute take turns; the table has the medians of all turns. Accuracy is of the 597
digits that were not trained on; those that set the scales of int8_static are among the trained.

Examples:

- everything, about 3 minutes: `python benchmarks/export.py`

- a quick look: `python benchmarks/export.py -m convnet --rounds 3 --output /tmp/export.md`
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)

Run = Callable[[np.ndarray[Any, Any]], Any]


def _convnet() -> tuple[Any, np.ndarray[Any, Any]]:
    layers = keras.layers
    image = keras.Input((32, 32, 1), name="image")
    x = image
    for width in (32, 64, 64):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    pixels = _digits()[0].reshape(-1, 8, 8).astype("float32") / 16
    data = np.kron(pixels, np.ones((4, 4), "float32"))[..., None]
    return keras.Model(image, layers.Dense(10)(x), name="convnet"), data


class Positions(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(64, shape[-1]), name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def _transformer() -> tuple[Any, np.ndarray[Any, Any]]:
    layers = keras.layers
    tokens = keras.Input((64,), dtype="int32", name="tokens")
    x = Positions()(layers.Embedding(17, 96)(tokens))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 24)(x, x))
        wide = layers.Dense(384, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(96)(wide))
    x = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, x, name="transformer"), _digits()[0].astype("int32")


_MODELS = {"convnet": (_convnet, 4), "transformer": (_transformer, 12)}


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help=f"Only this one: {', '.join(_MODELS)}. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way takes its turn.")] = 15,
    output: Annotated[Path, typer.Option(help="Markdown file.")] = _RESULTS,
) -> None:
    """Trains, exports, times and writes; see `_HELP`."""
    for name in models or ():
        if name not in _MODELS:
            raise typer.BadParameter(f"There is no {name!r}. Choose from: {', '.join(_MODELS)}.")
    load = os.getloadavg()[0]
    lines = [_preamble(rounds)]
    for name in models or _MODELS:
        console.print(f"{name}: training and exporting")
        lines += _measured(name, rounds)
    lines.append(_limits(max(load, os.getloadavg()[0])))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines))
    console.print("\n".join(lines), markup=False)
    console.print(f"Written: {output}")


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits of the examples: 64 grey values each, up to 16, and classes."""
    table = np.loadtxt(_ROOT / "examples/digits.csv.gz", delimiter=",", dtype="int64")
    return table[:, :64], table[:, 64]


def _measured(name: str, rounds: int) -> list[str]:
    """The lines of one model's table."""
    make, epochs = _MODELS[name]
    keras.utils.set_random_seed(1)
    model, x = make()
    y = _digits()[1]
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x[:_TRAINED], y[:_TRAINED], epochs=epochs, batch_size=32, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        ways, sizes = _ways(model, x, y, Path(folder))
        times = _times(ways, x[_TRAINED:], rounds)
        right = {way: _accuracy(run, x[_TRAINED:], y[_TRAINED:]) for way, run in ways.items()}
    heads = ("in", "ms, batch 1", f"examples/s, batch {_BATCH}", "x Keras", "accuracy", "size")
    lines = [f"## {name}, {model.count_params():,} parameters", "", _line(heads)]
    lines.append(_line(("---", *["---:"] * (len(heads) - 1))))
    base = times["Keras"][1]
    for way, (alone, batch) in times.items():
        ratios = [one / other for one, other in zip(base, batch, strict=True)]
        cells = (
            _spread([1e3 * each for each in alone], 2),
            _spread([_BATCH / each for each in batch], 0),
            _spread(ratios, 2),
        )
        lines.append(_line((way, *cells, f"{right[way]:.2%}", sizes.get(way, "-"))))
    return [*lines, ""]


def _ways(model: Any, x: Any, y: Any, folder: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """What computes the model, and the size of what was written for it."""
    ways: dict[str, Run] = {"Keras": model.predict_on_batch}
    sizes = {}
    report = tfdist.export(model, folder / "saved")
    served = tf.saved_model.load(str(folder / "saved"))
    ways["SavedModel"] = lambda batch: served.serve(batch).numpy()
    sizes["SavedModel"] = _megabytes(report.size)
    # The first examples set scales; the others are not looked at before `_accuracy`.
    data = {"x": x[:_TRAINED], "y": y[:_TRAINED]}
    for precision in _PRECISIONS:
        path, way = folder / f"{precision}.onnx", f"onnxruntime {precision}"
        report = tfdist.export(
            model, path, precision=precision, data=data, calibration=_CALIBRATION
        )
        run = runner(str(path))
        name = report.inputs[0].name
        ways[way] = lambda batch, run=run, name=name: run({name: batch})["output"]
        sizes[way] = _megabytes(report.size)
    return ways, sizes


def _times(ways: dict[str, Run], x: Any, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """The seconds of a call with one example, and with a batch, in each round."""
    found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    for run in ways.values():
        run(x[:1]), run(x[:_BATCH])
    for _ in range(rounds):
        for way, run in ways.items():
            found[way][0].append(_seconds(run, x[:1], 20))
            found[way][1].append(_seconds(run, x[:_BATCH], 10))
    return found


def _seconds(run: Run, batch: Any, calls: int) -> float:
    time.sleep(0.1)  # threads of the one before stop waiting for more
    run(batch)
    start = time.perf_counter()
    for _ in range(calls):
        run(batch)
    return (time.perf_counter() - start) / calls


def _accuracy(run: Run, x: Any, y: Any) -> float:
    parts = [np.asarray(run(x[n : n + _BATCH])).argmax(-1) for n in range(0, len(x), _BATCH)]
    return float((np.concatenate(parts) == y).mean())


def _preamble(rounds: int) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        ": unknown",
    )
    return f"""# Exported models

By `python benchmarks/export.py` on {os.cpu_count()} cores ({cpu.partition(":")[2].strip()});
{versions}. Medians of {rounds} turns (min-max);
ratios are taken within each. Keras is `predict_on_batch`, with the weights in memory.
"""


def _limits(load: float) -> str:
    return (
        f"What limits these figures: one small machine, with a load average of up to {load:.1f} "
        "from whatever else ran; models so small that calls cost much of a batch of 1; and float16 "
        "models, which onnxruntime computes in float32 on CPUs, with casts between. Accuracy is "
        "of 597 examples: one of them is 0.17 points.\n"
    )


def _spread(values: list[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    app()
