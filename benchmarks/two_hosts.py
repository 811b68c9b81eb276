"""Compares gradient exchanges between two hosts whose network is slow."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer
from bench.lines import read_lines, write_lines
from bench.two_hosts.job import BATCH, BLOCK, PEERS
from bench.two_hosts.network import RATES, lacking
from bench.two_hosts.report import draw, markdown
from bench.two_hosts.run import Measured, measure
from rich.console import Console
from rich.markup import escape

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "two_hosts.md"
_PICTURE = _ROOT / "docs" / "pictures" / "two_hosts.png"
_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "torch")

_HELP = f"""
Trains the same models on the same data on two hosts with one core each, and compares what they
exchange and when, with PyTorch's DistributedDataParallel over Gloo beside it. The hosts are network
namespaces; `tc tbf` limits the cable between them to {" and ".join(RATES)}. Needs root.

All start from the same weights and take the same batches, with Adam at 1e-3. The models are an MLP
(dense 1024-1536-1536-10) and a small decoder on the help texts that ship with Python. A run times
blocks of {BLOCK} updates, after one that it does not time, and computes the loss on held-out
examples after each. Bytes are those of the host's network device, headers included.

Examples:

- everything: `python benchmarks/two_hosts.py`

- one look: `python benchmarks/two_hosts.py --only "multi_worker sync" --only "torch sync"
  --network "100 Mbit/s" --model mlp --blocks 1`

The peers need `tfdist build-horovod` and `pip install -r benchmarks/requirements.txt`.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    only: Annotated[
        list[str] | None, typer.Option("--only", help=f"{', '.join(PEERS)}. Repeatable.")
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"{', '.join(BATCH)}. Repeatable.")
    ] = None,
    networks: Annotated[
        list[str] | None, typer.Option("--network", help=f"{', '.join(RATES)}. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each peer takes its turn.")] = 1,
    blocks: Annotated[int, typer.Option(min=1, help="Timed blocks of a run.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a run is killed and counts as failed.")
    ] = 240.0,
    output: Annotated[
        Path, typer.Option(help="Markdown file; raw figures go beside it as .jsonl.")
    ] = _RESULTS,
    picture: Annotated[Path, typer.Option(help="The picture, as .png.")] = _PICTURE,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Runs nothing; reports on the .jsonl there is.")
    ] = False,
) -> None:
    """Runs all rounds and writes what is known after each run; see `_HELP`."""
    raw = output.with_suffix(".jsonl")
    if redraw:
        _write([Measured(**line) for line in read_lines(raw)], output, picture)
        return
    reason = lacking()
    if reason:
        console.print(f"Skipped: this benchmark {reason}.")
        raise typer.Exit(0)
    runs: list[Measured] = []
    todo = [
        (number, network, model, peer)
        for number in range(rounds)
        for network in networks or RATES
        for model in models or BATCH
        for peer in only or PEERS
    ]
    for done, (number, network, model, peer) in enumerate(todo, 1):
        found = measure(peer, model, network, number, blocks, timeout)
        runs.append(found)
        said = escape(found.error) if found.error else f"{found.rate:.2f} updates/s"
        console.print(f"{done}/{len(todo)}  {network:10}  {model:11}  {peer:22}  {said}")
        write_lines(runs, raw)
    _write(runs, output, picture)


def _write(runs: list[Measured], output: Path, picture: Path) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    rounds = 1 + max(run.round for run in runs)
    about = [
        "By `python benchmarks/two_hosts.py`. Two network namespaces on one machine, a core each, "
        f"joined by a cable of the rate that is said. Versions: {versions}. Medians of {rounds} "
        f"round{'s' if rounds > 1 else ''}; MB are what one host sends for an update, measured at "
        "its device. Ratios are to `sync` of the same library, and to PyTorch's. The last column "
        "is the loss in half of the time that `sync` takes for all updates.",
    ]
    output.write_text(markdown(runs, about))
    draw(runs, picture)
    console.print(f"{output}, {picture}")


if __name__ == "__main__":
    app()
