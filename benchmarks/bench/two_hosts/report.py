"""The tables and the picture of what was measured on two hosts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.two_hosts.job import BLOCK, PEERS
from bench.two_hosts.run import Measured

__all__ = ["draw", "markdown"]

_COLOURS = {"multi_worker": "#1f77b4", "horovod": "#2ca02c", "torch": "#d62728"}
_MODELS = {
    "mlp": "MLP of 4 million weights, 64 examples an update",
    "transformer": "transformer of 1.4 million weights on English text, 16 x 64 bytes an update",
}


def markdown(runs: Sequence[Measured], about: Sequence[str]) -> str:
    """A table for each model and network."""
    lines = ["# Gradient exchanges between two hosts", "", *about, ""]
    for model, network in _groups(runs):
        here = [run for run in runs if (run.model, run.network) == (model, network)]
        lines += [f"## {_MODELS[model]}, {network}", "", *_table(here), ""]
    failed = [run for run in runs if run.error]
    if failed:
        lines += ["## Failed", ""]
        lines += [f"- {run.peer}, {run.model}, {run.network}: `{run.error}`" for run in failed]
    return "\n".join(lines)


def _groups(runs: Sequence[Measured]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((run.model, run.network) for run in runs))


def _table(runs: Sequence[Measured]) -> list[str]:
    rows = [
        "| | updates/s | to sync | to PyTorch sync | MB/update | loss after all updates "
        "| loss after sync's time |",
        "|---|---|---|---|---|---|---|",
    ]
    rates = {peer: _median(_of(runs, peer), lambda run: run.rate) for peer in _peers(runs)}
    for peer, rate in rates.items():
        mine = _of(runs, peer)
        sync, torch = rates.get(f"{PEERS[peer].library} sync"), rates.get("torch sync")
        same = _of(runs, f"{PEERS[peer].library} sync")
        cells = [
            PEERS[peer].title,
            f"{rate:.2f}",
            f"{rate / sync:.2f}" if sync else "",
            f"{rate / torch:.2f}" if torch else "",
            f"{_median(mine, lambda run: run.sent) / 1e6:.3f}",
            f"{_median(mine, lambda run: run.blocks[-1]['loss']):.3f}",
            f"{_median(mine, _loss_within(same)):.3f}" if same else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _loss_within(same: Sequence[Measured]) -> Callable[[Measured], float]:
    """The loss in half of the time that all updates of the synchronous run take.

    Half, so that a run which is twice as fast has not ended before.
    """
    whole = statistics.median(sum(b["seconds"] for b in run.blocks[1:]) for run in same)
    return lambda run: run.loss_within(whole / 2)


def _peers(runs: Sequence[Measured]) -> list[str]:
    return [peer for peer in PEERS if _of(runs, peer)]


def _of(runs: Sequence[Measured], peer: str) -> list[Measured]:
    return [run for run in runs if run.peer == peer and not run.error]


def _median(runs: Sequence[Measured], what: Callable[[Measured], float]) -> float:
    return statistics.median(what(run) for run in runs)


def draw(runs: Sequence[Measured], path: Path) -> None:
    """Updates a second as bars, and the loss over time, for each model on the slowest network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups([run for run in runs if not run.error])
    if not groups:
        return
    figure, axes = pyplot.subplots(len(groups), 2, figsize=(12, 3.6 * len(groups)), squeeze=False)
    for (bars, curves), (model, network) in zip(axes, groups, strict=True):
        here = [run for run in runs if (run.model, run.network) == (model, network)]
        _bars(bars, here)
        bars.set_title(f"{model}, {network}", fontsize=10, loc="left")
        _curves(curves, here)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars(axis: Any, runs: Sequence[Measured]) -> None:
    peers = _peers(runs)[::-1]
    rates = [_median(_of(runs, peer), lambda run: run.rate) for peer in peers]
    axis.barh(peers, rates, color=[_COLOURS[PEERS[peer].library] for peer in peers])
    for place, rate in enumerate(rates):
        axis.text(rate, place, f" {rate:.1f}", va="center", fontsize=8)
    axis.set_xlim(0, max(rates) * 1.15)
    axis.set_xlabel("updates a second")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _curves(axis: Any, runs: Sequence[Measured]) -> None:
    for peer in _peers(runs):
        if PEERS[peer].library == "horovod":
            continue
        blocks = _of(runs, peer)[0].blocks
        seconds, passed = [0.0], 0.0
        for block in blocks[1:]:
            passed += block["seconds"]
            seconds.append(passed)
        style = "--" if PEERS[peer].library == "torch" else "-"
        axis.plot(seconds, [b["loss"] for b in blocks], style, marker=".", label=peer, lw=1.2)
    axis.set_xlabel(f"seconds of training, after the first {BLOCK} updates")
    axis.set_ylabel("loss on held-out examples")
    axis.legend(fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
