"""Compares tfdist's parameter server with its peers: steps, bytes and CPU of the same training."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from bench.catalog import PEERS, missing
from bench.job import MODELS, Job
from bench.lines import write_lines
from bench.network import isolation
from bench.report import markdown, rows_of, show
from bench.run import Measurement, run
from bench.versions import versions_of
from rich.console import Console
from rich.markup import escape

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("tfdist", "tensorflow", "keras", "tf_keras")


def _peer_list() -> str:
    return "\n".join(f"- `{name}`: {peer.title}" for name, peer in PEERS.items())


def _steps_by_default() -> str:
    return ", ".join(f"{name} {model.steps}" for name, model in MODELS.items())


_HELP = f"""
Trains the same models on the same data with several parameter servers and compares them.

Each peer gets a cluster of its own for each run: a chief, two workers and one ps, as processes of
this machine, asynchronous, Adam, batches of 32. It does K steps that are not timed and then K that
are; start-up and tracing are in the first. The peers take turns (A B C A B C ...), so that other
work on the machine hits all alike. Trust the ratios, not the steps per second.

The peers:

{_peer_list()}

What is measured around the timed steps: wall-clock; user and system CPU of all tasks, from /proc;
bytes through `lo`, for which the cluster runs in a network namespace of its own (`unshare`, as root
or where users may have namespaces; else there is a "-"). "updates lost" compares the optimizer's
count with the steps that were scheduled.

Examples:

- everything, about 20 minutes: `python benchmarks/parameter_server.py`

- one look at one peer: `python benchmarks/parameter_server.py -p tf_keras_fit -m small --rounds 1`

Peers other than tfdist need `pip install -r benchmarks/requirements.txt`.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    peers: Annotated[
        list[str] | None, typer.Option("--peer", "-p", help="Only this peer. Repeatable.")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help=f"Only this model: {', '.join(MODELS)}. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each peer takes its turn.")] = 5,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Timed steps. [default: {_steps_by_default()}]")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    steps_per_execution: Annotated[
        int, typer.Option(min=1, help="Keras's option of `compile`, for peers that use `fit`.")
    ] = 1,
    against: Annotated[str, typer.Option(help="The peer that ratios are of.")] = "tf_keras_fit",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a run is killed and counts as failed.")
    ] = 120.0,
    output: Annotated[
        Path | None,
        typer.Option(help="Markdown file for the tables; raw figures go beside it as .jsonl."),
    ] = None,
) -> None:
    """Runs all rounds, prints the tables, and writes them; see `_HELP`."""
    shapes = _chosen(models, MODELS, "--model")
    _chosen([against], PEERS, "--against")
    _chosen([optimizer], {"adam": 0, "sgd": 0}, "--optimizer")
    options = {
        "optimizer": optimizer,
        "steps_per_execution": steps_per_execution,
        "timeout": timeout,
    }
    runnable = _runnable(_chosen(peers, PEERS, "--peer"))
    jobs = [
        Job(peer=peer, model=model, steps=steps or MODELS[model].steps, **options)
        for model in shapes
        for peer in runnable
    ]
    if not isolation().own_network:
        console.print(f"Bytes are not measured: {isolation().reason}.")
    done = [_run(job, number) for number in range(1, rounds + 1) for job in jobs]
    _report(done, shapes, against, output)
    if not done or any(each.error for each in done):
        raise typer.Exit(1)


def _chosen(names: list[str] | None, table: dict[str, object], option: str) -> list[str]:
    for name in names or ():
        if name not in table:
            raise typer.BadParameter(
                f"There is no {name!r}. Choose from: {', '.join(table)}.", param_hint=option
            )
    return names or list(table)


def _runnable(peers: list[str]) -> list[str]:
    for peer in peers:
        if missing(peer):
            console.print(missing(peer), markup=False)
    return [peer for peer in peers if not missing(peer)]


def _run(job: Job, number: int) -> Measurement:
    result = run(job, number)
    said = f"{result.rate:8.1f} steps/s" if not result.error else f"FAILED: {result.error}"
    console.print(escape(f"round {number}  {job.model:6} {job.peer:14} {said}"))
    return result


def _report(done: list[Measurement], models: list[str], against: str, output: Path | None) -> None:
    parts = [_preamble(done)]
    for model in models:
        rows = rows_of(done, model, against)
        if rows:
            show(console, rows, model, against)
            parts.append(markdown(rows, model, against))
    if len(parts) > 1:
        path = output or _RESULTS / "parameter_server.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts))
        write_lines(done, path.with_suffix(".jsonl"))
        console.print(f"Written: {path} and {path.with_suffix('.jsonl').name}")


def _preamble(done: list[Measurement]) -> str:
    rounds = max((each.round for each in done), default=0)
    optimizer = done[0].job.optimizer if done else "-"
    per_execution = done[0].job.steps_per_execution if done else 1
    bytes_note = "" if isolation().own_network else f" Bytes: {isolation().reason}."
    return f"""# Parameter servers compared

By `python benchmarks/parameter_server.py` on {os.cpu_count()} cores; {versions_of(_PACKAGES)}.
Asynchronous, 2 workers, 1 ps, {optimizer}, batch 32, steps_per_execution {per_execution}; {rounds}
rounds in turns: median (min-max). Ratios are taken within each round. CPU is user and system
time of all tasks, of which those of the chief, the ps and both workers.{bytes_note}

{_peer_list()}
"""


if __name__ == "__main__":
    # Ends like Ctrl-C, so that the running cluster is killed too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    app()
