"""Compares tfdist with its peers on one page: `make bench`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from bench.job import Job
from bench.lines import write_lines
from bench.overview.page import Found, draw, in_short, page
from bench.overview.plan import FULL, QUICK, absent, jobs_of
from bench.pair.job import Pair
from bench.pair.run import measure
from bench.run import run
from bench.versions import versions_of
from rich.console import Console
from rich.markup import escape

_ROOT = Path(__file__).parents[1]
_PAGE, _PICTURE = _ROOT / "docs/benchmarks.md", _ROOT / "docs/pictures/benchmarks.png"
_RAW = _ROOT / "benchmarks/results/overview.jsonl"
_README = _ROOT / "README.md"
_BEGIN = "<!-- benchmarks: `make bench` writes this part -->\n"
_END = "<!-- end of benchmarks -->\n"
_QUICK_PAGE = _ROOT / "build/benchmarks.md"
_PACKAGES = ("tfdist", "tensorflow", "keras", "tf_keras", "horovod", "ray", "torch")

_HELP = f"""
Trains the same models with tfdist and its peers on this machine, in turns, and writes one page with
a picture: `fit` beside hand-written loops and other frameworks, throughput at 1, 2, 4 and 8
processes, growth with parameters and tensors, seconds from the command to the first step, peak
memory, parameter servers.

The whole takes up to {FULL.minutes:g} minutes and writes docs/benchmarks.md. `--quick` takes less
than {QUICK.minutes:g}, runs each peer once, and writes build/benchmarks.md. Run it on a machine
that does nothing else; the page says how busy it was. Ended before, it writes what it has.

The peers need `tfdist build-horovod` and `pip install -r benchmarks/requirements.txt`.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Each peer once, fewer models.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Turns of each peer. [default: {FULL.rounds}]")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=1, help=f"No round begins that would last longer. [default: {FULL.minutes:g}]"
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one run.")] = 180.0,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only runs of this peer. Repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown file.")] = None,
) -> None:
    """Runs all rounds and writes what is known after each; see `_HELP`."""
    plan = QUICK if quick else FULL
    rounds, limit = rounds or plan.rounds, 60 * (minutes or plan.minutes)
    output = output or (_QUICK_PAGE if quick else _PAGE)
    picture = _PICTURE if output == _PAGE else output.with_suffix(".png")
    raw = _RAW if output == _PAGE else output.with_suffix(".jsonl")
    for line in absent(plan):
        console.print(line, markup=False)
    jobs = [each for each in jobs_of(plan, timeout) if not only or each.peer in only]
    if not jobs:
        raise typer.BadParameter("There is no such peer, or it is not installed.")
    found = Found()
    try:
        _rounds(jobs, rounds, limit, found)
    finally:  # Also where it is ended before.
        if found.pairs:
            output.parent.mkdir(parents=True, exist_ok=True)
            draw(found, plan, picture)
            command = f"make bench{' QUICK=1' if quick else ''}"
            relative = str(picture.relative_to(output.parent))
            output.write_text(page(found, plan, command, versions_of(_PACKAGES), relative))
            write_lines([*found.pairs, *found.servers], raw)
            console.print(f"Written: {output}")
            if output == _PAGE and not quick:
                _into_readme(in_short(found, plan))
    if found.failed:
        raise typer.Exit(1)


def _into_readme(table: str) -> None:
    """Puts the short table between its marks."""
    before, begin, rest = _README.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        _README.write_text(f"{before}{begin}\n{table}{end}{after}")


def _rounds(jobs: list[Job | Pair], rounds: int, limit: float, found: Found) -> None:
    begun, longest = time.monotonic(), 0.0
    for number in range(1, rounds + 1):
        entered = time.monotonic()
        if entered - begun + longest > limit:
            console.print(f"{number - 1} of {rounds} rounds, as {limit / 60:g} minutes are over.")
            return
        for place, job in enumerate(jobs, 1):
            said = _turn(job, number, found)
            took = f"{(time.monotonic() - begun) / 60:4.1f} min"
            console.print(escape(f"{took}  round {number}/{rounds}  {place:2}/{len(jobs)}  {said}"))
        longest = max(longest, time.monotonic() - entered)


def _turn(job: Job | Pair, number: int, found: Found) -> str:
    """Runs a job, keeps what it measured, and returns a line about it."""
    if isinstance(job, Job):
        on_servers = run(job, number)
        name = f"{job.peer} {job.model}, 2 workers, 1 ps"
        if on_servers.error:
            found.failed.append(f"{name}: {on_servers.error.splitlines()[0]}")
            return f"{name}: FAILED: {on_servers.error}"
        found.servers.append(on_servers)
        return f"{name}: {on_servers.rate:.0f} steps/s"
    done = measure(job, number)
    name = f"{job.peer}, {job.processes}"
    if done.error:
        found.failed.append(f"{name}: {done.error.splitlines()[-1]}")
        return f"{name}: FAILED: {done.error}"
    found.pairs.append(done)
    if not job.blocks:
        return f"{name}: first step after {done.started:.2f} s"
    rates = (f"{kind} {each['rate']:.1f}/s" for kind, each in done.trainings.items())
    return f"{name}: {', '.join(rates)}"


if __name__ == "__main__":
    # Ends like Ctrl-C, so that the running processes are ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    app()
