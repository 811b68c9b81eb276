"""What all rounds of all peers come to: Markdown, and the picture."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.pair.job import BATCH, SIZES, WORKLOADS
from bench.pair.peers import PEERS
from bench.pair.run import Measured

__all__ = ["draw", "markdown"]

_Value = Callable[[Measured], float]


def markdown(done: Sequence[Measured], against: str, versions: str) -> str:
    """The whole report.

    Args:
        done: what was measured, without what failed.
        against: the peer that ratios are of.
        versions: of the packages.
    """
    loads = [each.load for each in done]
    rounds = max(each.round for each in done)
    parts = [
        f"""# Horovod compared

By `python benchmarks/horovod.py` on {os.cpu_count()} cores; {versions}.
Two processes, one intra-op thread each, float32, batches of {BATCH} for an update, half of one on
each process. Medians (min-max) of {rounds} rounds in turns; ratios are taken within each round.
Load average before the runs: {min(loads):.1f}-{max(loads):.1f}. A peer with fewer runs failed in
the others.
"""
    ]
    parts += [_training(name, done, against) for name in _in_use(WORKLOADS, done, "trainings")]
    parts += [_exchanges(done, against)] if _in_use(SIZES, done, "exchanges") else []
    return "\n".join([*parts, _idle(done)])


def _training(workload: str, done: Sequence[Measured], against: str) -> str:
    def take(field: str) -> _Value:
        return lambda each: each.trainings[workload][field]

    headings = ("peer", "runs", "updates/s", f"x `{against}`", "CPU ms an update (rank 0)", "loss")
    rows = []
    for peer, mine in _by_peer(done):
        rows.append(
            (
                PEERS[peer].title,
                str(len(mine)),
                _spread(map(take("rate"), mine), 1),
                _spread(_ratios(mine, _of(done, against), take("rate")), 2),
                _spread((1e3 * take("cpu")(each) for each in mine), 1),
                _spread(map(take("loss"), mine), 5),
            )
        )
    return f"## {WORKLOADS[workload].title}\n\n{_table(headings, rows)}"


def _exchanges(done: Sequence[Measured], against: str) -> str:
    names = _in_use(SIZES, done, "exchanges")
    headings = ("peer", *(SIZES[name].title for name in names))
    times, ratios = [], []
    for peer, mine in _by_peer(done):
        cells, others = [], []
        for name in names:

            def seconds(each: Measured, name: str = name) -> float:
                return each.exchanges[name]

            size = 4 * SIZES[name].count
            typical = statistics.median(map(seconds, mine))
            spread = _spread((1e3 * seconds(each) for each in mine), 2)
            cells.append(f"{spread} ms, {size / typical / 1e6:.0f} MB/s")
            rate: _Value = lambda each, seconds=seconds: 1 / seconds(each)  # noqa: E731
            others.append(_spread(_ratios(mine, _of(done, against), rate), 2))
        times.append((PEERS[peer].title, *cells))
        ratios.append((PEERS[peer].title, *others))
    return (
        f"## All-reduce\n\n{_table(headings, times)}\n"
        f"Rates as multiples of `{against}`'s:\n\n{_table(headings, ratios)}"
    )


def _idle(done: Sequence[Measured]) -> str:
    rows = [
        (PEERS[peer].title, _spread((100 * each.idle for each in mine), 0))
        for peer, mine in _by_peer(done)
    ]
    return f"## A process that does nothing\n\n{_table(('peer', '% of a core'), rows)}"


def _by_peer(done: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    groups = [(peer, _of(done, peer)) for peer in PEERS]
    return [(peer, mine) for peer, mine in groups if mine]


def _of(done: Sequence[Measured], peer: str) -> list[Measured]:
    return [each for each in done if each.job.peer == peer]


def _in_use(table: Iterable[str], done: Sequence[Measured], field: str) -> list[str]:
    return [name for name in table if any(name in getattr(each, field) for each in done)]


def _ratios(mine: Sequence[Measured], base: Sequence[Measured], value: _Value) -> list[float]:
    by_round = {each.round: each for each in base}
    return [value(e) / value(by_round[e.round]) for e in mine if e.round in by_round]


def _spread(values: Iterable[float], digits: int) -> str:
    known = sorted(values)
    if not known:
        return "-"
    middle, low, high = (f"{v:.{digits}f}" for v in (statistics.median(known), known[0], known[-1]))
    return middle if low == high else f"{middle} ({low}-{high})"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ("---", *["---:"] * (len(headings) - 1)), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(done: Sequence[Measured], path: Path) -> None:
    """Draws updates a second by peer, and the time of an all-reduce by its size.

    Raises:
        ModuleNotFoundError: if there is no matplotlib.
    """
    from matplotlib.figure import Figure

    workloads = _in_use(WORKLOADS, done, "trainings")
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels: Any = figure.subplots(1, len(workloads) + 1, squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=False):
        _draw_rates(axes, workload, _by_peer(done))
    _draw_exchanges(panels[-1], _by_peer(done), _in_use(SIZES, done, "exchanges"))
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_rates(axes: Any, workload: str, peers: Sequence[tuple[str, list[Measured]]]) -> None:
    for place, (_, mine) in enumerate(peers):
        rates = [each.trainings[workload]["rate"] for each in mine]
        middle = statistics.median(rates)
        spread = [[middle - min(rates)], [max(rates) - middle]]
        axes.bar(place, middle, yerr=spread, color=f"C{place}", capsize=3)
    axes.set_title(WORKLOADS[workload].title)
    axes.set_ylabel("updates a second")
    axes.set_xticks([])


def _draw_exchanges(
    axes: Any, peers: Sequence[tuple[str, list[Measured]]], names: Sequence[str]
) -> None:
    sizes = [4 * SIZES[name].count for name in names]
    for place, (peer, mine) in enumerate(peers):
        times = [statistics.median(1e3 * each.exchanges[n] for each in mine) for n in names]
        axes.plot(sizes, times, marker="o", color=f"C{place}", label=PEERS[peer].title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [SIZES[name].title for name in names], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_title("all-reduce")
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
