"""Compares training on Horovod with its peers: two processes, updates a second, all-reduces."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.lines import read_lines, write_lines
from bench.pair.job import SIZES, WORKLOADS, Pair
from bench.pair.peers import OF_HOROVOD, PEERS, missing
from bench.pair.report import draw, markdown
from bench.pair.run import Measured, measure
from bench.versions import versions_of
from rich.console import Console
from rich.markup import escape

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "horovod.md"
_PICTURE = _ROOT / "docs" / "pictures" / "horovod.png"
_PACKAGES = ("tfdist", "tensorflow", "keras", "horovod", "torch")
_DEFAULT = Pair(peer="")
_PEERS = {name: PEERS[name] for name in OF_HOROVOD}

_HELP = f"""
Trains the same models on the same data with two processes of this machine, and adds up tensors of
several sizes over them, by:

{chr(10).join(f"- `{name}`: {peer.title}" for name, peer in _PEERS.items())}

All start from the same weights and take the same batches, from memory, so the losses after the last
update show that each trains, and trains the same. Each process computes in one thread. The models
are an MLP, dense 1024-1536-1536-10 (3.9 million parameters), and a small convnet (35 thousand).
A run times blocks of updates, after one that it does not time: epochs of `fit` from the beginning
of one to its end, and as many passes of a loop. The peers take turns.

Examples:

- everything: `python benchmarks/horovod.py --rounds 3`

- one look at one peer: `python benchmarks/horovod.py --rounds 1 --only tfdist_horovod --size 4K`

The peers need `tfdist build-horovod` and `pip install -r benchmarks/requirements.txt`.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this peer. Repeatable.")
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workload", help=f"Only this: {', '.join(WORKLOADS)}. Repeatable."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--size", help=f"Only this: {', '.join(SIZES)}. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each peer takes its turn.")] = 3,
    blocks: Annotated[int, typer.Option(min=1, help="Timed blocks of a run.")] = _DEFAULT.blocks,
    against: Annotated[str, typer.Option(help="The peer that ratios are of.")] = "horovod_loop",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a run is killed and counts as failed.")
    ] = _DEFAULT.timeout,
    output: Annotated[
        Path, typer.Option(help="Markdown file; raw figures go beside it as .jsonl.")
    ] = _RESULTS,
    picture: Annotated[Path, typer.Option(help="The picture, as .png.")] = _PICTURE,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Runs nothing; reports on the .jsonl there is.")
    ] = False,
) -> None:
    """Runs all rounds and writes what is known after each; see `_HELP`."""
    if redraw:
        _write(_load(output.with_suffix(".jsonl")), against, output, picture)
        return
    _check([against], _PEERS, "--against")
    asked = {
        "workloads": tuple(_check(workloads, WORKLOADS, "--workload") or _DEFAULT.workloads),
        "sizes": tuple(_check(sizes, SIZES, "--size") or SIZES),
        "blocks": blocks,
        "timeout": timeout,
    }
    peers = _runnable(_check(only, _PEERS, "--only") or list(_PEERS))
    done: list[Measured] = []
    failed = False
    for number in range(1, rounds + 1):
        for peer in peers:
            found = measure(Pair(peer=peer, **asked), number)
            _say(found)
            failed = failed or bool(found.error)
            done += [] if found.error else [found]
        if done:
            _write(done, against, output, picture)
    if failed or not done:
        raise typer.Exit(1)


def _check(names: list[str] | None, table: dict[str, Any], option: str) -> list[str]:
    for name in names or ():
        if name not in table:
            raise typer.BadParameter(
                f"There is no {name!r}. Choose from: {', '.join(table)}.", param_hint=option
            )
    return names or []


def _runnable(peers: list[str]) -> list[str]:
    for peer in peers:
        if missing(peer):
            console.print(missing(peer), markup=False)
    return [peer for peer in peers if not missing(peer)]


def _say(found: Measured) -> None:
    rates = (f"{name} {each['rate']:.1f}/s" for name, each in found.trainings.items())
    times = (f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.exchanges.items())
    said = f"FAILED: {found.error}" if found.error else ", ".join([*rates, *times])
    console.print(escape(f"round {found.round}  {found.job.peer:20} {said}"))


def _write(done: list[Measured], against: str, output: Path, picture: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(markdown(done, against, versions_of(_PACKAGES)))
    write_lines(done, output.with_suffix(".jsonl"))
    console.print(f"Written: {output} and {output.with_suffix('.jsonl').name}")
    try:
        draw(done, picture)
    except ModuleNotFoundError as absent:
        console.print(f"No picture: {absent}. pip install -r benchmarks/requirements.txt")
    else:
        console.print(f"Written: {picture}")


def _load(path: Path) -> list[Measured]:
    return [Measured(**{**line, "job": Pair(**line["job"])}) for line in read_lines(path)]


if __name__ == "__main__":
    # Ends like Ctrl-C, so that the running pair is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    app()
