"""Compares the rules of tfdist's parameter servers while one of three workers is slow."""

from __future__ import annotations

import importlib.metadata
import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.catalog import missing
from bench.job import Job
from bench.lines import write_lines
from bench.race import RULES, SLOWED, Run, load, median_of, runs_of
from bench.run import run
from rich.console import Console
from rich.markup import escape

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "slow_worker.md"
_PICTURE = _ROOT / "docs" / "pictures" / "slow_worker.png"
_PEER = "tfdist_to_loss"
_WORKERS, _PS, _BATCH, _EPOCH_UPDATES = 3, 1, 192, 30
#: A greater load average than the cluster itself can make.
_TASKS_AT_MOST = 2 * (_WORKERS + _PS + 1)
_PACKAGES = ("tfdist", "tensorflow", "keras")

_HELP = f"""
Trains a convolutional network on scikit-learn's digits to a fixed held-out loss, with {_WORKERS}
workers of which one is slow, and compares the rules by which gradients become updates:

{chr(10).join(f"- `{name}`: {rule.title}" for name, rule in RULES.items())}

All have the same weights at first, data, learning rate (SGD, 0.1) and batches of {_BATCH} for an
update: sync splits each over the workers, async and stale give each to one worker. Each task
computes in one thread. The clock starts after an epoch with a learning rate of 0, and stands while
the chief computes the loss, after every {_EPOCH_UPDATES} updates. The end of such an epoch waits
for all steps, which costs async and stale up to one step of the slow worker. The time to the loss
is interpolated between epochs. The rules take turns.

Examples:

- everything, about 5 minutes: `python benchmarks/slow_worker.py`

- one look at one rule: `python benchmarks/slow_worker.py -r async --rounds 1 --target 1`

The picture needs `pip install -r benchmarks/requirements.txt`.
"""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@app.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
def main(
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", "-r", help=f"Only this rule: {', '.join(RULES)}. Repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each rule takes its turn.")] = 2,
    factor: Annotated[float, typer.Option(min=1, help="How many times slower it is.")] = 4.0,
    target: Annotated[float, typer.Option(min=0.01, help="The loss to reach.")] = 0.25,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a run is killed and counts as failed.")
    ] = 120.0,
    output: Annotated[
        Path, typer.Option(help="Markdown file; raw figures go beside it as .jsonl.")
    ] = _RESULTS,
    picture: Annotated[Path, typer.Option(help="The loss over time, as .png.")] = _PICTURE,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Runs nothing; reports on the .jsonl there is.")
    ] = False,
) -> None:
    """Runs all rounds and writes what is known after each run; see `_HELP`."""
    for name in rules or ():
        if name not in RULES:
            raise typer.BadParameter(f"There is no {name!r}. Choose from: {', '.join(RULES)}.")
    if redraw:
        _write(load(output.with_suffix(".jsonl")), output, picture)
        return
    if missing(_PEER):
        console.print(missing(_PEER), markup=False)
        raise typer.Exit(1)
    runs: list[Run] = []
    failed = False
    for number in range(1, rounds + 1):
        for name in rules or RULES:
            done = Run(name, run(_job(name, factor, target, timeout), number))
            _say(done)
            failed = failed or bool(done.measurement.error)
            runs += [] if done.measurement.error else [done]
            if runs:
                _write(runs, output, picture)
    if failed or not runs:
        raise typer.Exit(1)


def _job(name: str, factor: float, target: float, timeout: float) -> Job:
    return Job(
        peer=_PEER,
        model="digits",
        steps=_EPOCH_UPDATES,
        optimizer="sgd",
        workers=_WORKERS,
        ps=_PS,
        batch=_BATCH,
        slow={SLOWED: factor},
        options=RULES[name].options,
        target=target,
        timeout=timeout,
    )


def _say(done: Run) -> None:
    error = done.measurement.error
    said = f"FAILED: {error}" if error else f"{done.seconds:6.1f} s, {done.updates:5.0f} updates"
    console.print(escape(f"round {done.measurement.round}  {done.rule:7} {said}"))


def _write(runs: list[Run], output: Path, picture: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([_preamble(runs), *_table(runs), "", _limits(runs), ""]))
    write_lines([each.measurement for each in runs], output.with_suffix(".jsonl"))
    console.print(f"Written: {output} and {output.with_suffix('.jsonl').name}")
    try:
        _draw(runs, picture)
    except ModuleNotFoundError as absent:
        console.print(f"No picture: {absent}. pip install -r benchmarks/requirements.txt")
    else:
        console.print(f"Written: {picture}")


def _preamble(runs: list[Run]) -> str:
    job = runs[0].measurement.job
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    rounds = max(each.measurement.round for each in runs)
    return f"""# One slow worker

By `python benchmarks/slow_worker.py` on {os.cpu_count()} cores; {versions}.
{job.workers} workers, of which {SLOWED} runs 1/{job.slow[SLOWED]:g} of the time, and {job.ps} ps.
A convolutional network on scikit-learn's digits, SGD, batches of {job.batch}, to a held-out loss of
{job.target:g}. Rounds in turns: {rounds}; median (min-max). Ratios are taken within each round.
Time and updates are those to the loss, interpolated between epochs of {job.steps} updates; the
other columns are of whole runs.
"""


def _table(runs: list[Run]) -> list[str]:
    headings = (
        "rule",
        "seconds to the loss",
        "x sync",
        "updates",
        "ms an update",
        "staleness mean / max",
        "dropped",
        f"steps of workers 0, 1, 2 ({SLOWED} is slow)",
        "cores: a fast worker / the slow one",
        "load average",
    )
    lines = [_line(headings), _line(("---", *["---:"] * (len(headings) - 1)))]
    by_round = {each.measurement.round: each.seconds for each in runs_of(runs, "sync")}
    for name in RULES:
        mine = runs_of(runs, name)
        if mine:
            lines.append(_line(_cells(name, mine, by_round)))
    return lines


def _cells(name: str, runs: list[Run], sync: dict[int, float]) -> tuple[str, ...]:
    ratios = [e.seconds / sync[e.measurement.round] for e in runs if e.measurement.round in sync]
    stale = median_of(runs, lambda run: run.staleness_mean)
    longest = max(run.staleness_max for run in runs)
    counted = [run.steps for run in runs if run.steps]
    steps = "; ".join(", ".join(map(str, each)) for each in counted)
    fast, slow = (median_of(runs, lambda run, s=s: run.cores(slowed=s)) for s in (False, True))
    return (
        RULES[name].title,
        _spread([run.seconds for run in runs], 1),
        _spread(ratios, 2),
        _spread([run.updates for run in runs], 0),
        _spread([run.milliseconds for run in runs], 0),
        "-" if name in ("sync", "backup") else f"{stale:.1f} / {longest:.0f}",
        _spread([run.dropped for run in runs], 0),
        steps or "a part of every update each",
        f"{fast:.2f} / {slow:.2f}",
        _spread([run.load for run in runs], 0),
    )


def _limits(runs: list[Run]) -> str:
    shares = []
    for name in RULES:
        mine = runs_of(runs, name)
        if mine:
            fast = median_of(mine, lambda run: run.cores(slowed=False))
            slow = median_of(mine, lambda run: run.cores(slowed=True))
            shares.append(f"{name} {fast / slow:.1f}")
    loads = [run.load for run in runs if not math.isnan(run.load)]
    busy = max(loads, default=0.0)
    cores = os.cpu_count() or 1
    warning = (
        f"**The load average was up to {busy:.0f} on {cores} cores: other programs had most of the "
        "machine, in shares that changed from run to run. Do not compare the seconds of these "
        "rules. Staleness, drops and steps by worker are those under such a load, too.**\n\n"
    )
    return (warning if busy > _TASKS_AT_MOST else "") + (
        f"What limits these figures: {cores} cores carry {_WORKERS} workers, a ps and the chief, "
        "and whatever else the machine does. Workers that could all compute at once share them, so "
        "the fast ones have less than a core each, and the slow one loses less than it seems to, "
        "as it competes only while it runs. A fast worker's CPU over the slow one's was "
        f"{', '.join(shares)}. With a core for each, {runs[0].measurement.job.slow[SLOWED]:g} is "
        "expected under async, and 1 under sync, where all do the same work."
    )


def _spread(values: list[float], digits: int) -> str:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return "-"
    middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
    low, high = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    return f"{middle:.{digits}f}" + ("" if low == high else f" ({low}-{high})")


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _draw(runs: list[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    job = runs[0].measurement.job
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for number, (name, rule) in enumerate(RULES.items()):
        for order, each in enumerate(runs_of(runs, name)):
            axes.plot(
                each.clock,
                each.losses,
                marker="osD^"[number],
                markersize=4,
                color=f"C{number}",
                alpha=1.0 if order == 0 else 0.4,
                label=rule.title if order == 0 else None,
            )
    axes.axhline(job.target, color="gray", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 1.0, 2.0) if tick >= 0.6 * job.target]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlim(left=0)
    axes.set_xlabel("wall-clock seconds of training")
    axes.set_ylabel("held-out loss")
    axes.set_title(f"{job.workers} workers, one of them slowed {job.slow[SLOWED]:g} times")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    # Ends like Ctrl-C, so that the running cluster is killed too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    app()
