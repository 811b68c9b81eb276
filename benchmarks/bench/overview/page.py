"""What all rounds come to: the page, and its picture."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.overview.plan import GROWTH, PAIRS, STARTS, Plan
from bench.pair.job import BATCH, WORKLOADS
from bench.pair.peers import PEERS
from bench.pair.run import Measured
from bench.run import Measurement

__all__ = ["Found", "draw", "in_short", "page"]

#: The share of cores in use by others from which on a page says that it was measured under load.
_QUIET = 0.1
#: The peer on parameter servers that ratios are of.
_AGAINST = "tf_keras_fit"


@dataclasses.dataclass
class Found:
    """What was measured.

    Attributes:
        pairs: trainings and starts.
        servers: trainings on parameter servers.
        failed: a line for each run that failed.
    """

    pairs: list[Measured] = dataclasses.field(default_factory=list)
    servers: list[Measurement] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)

    def of(self, peer: str, processes: int, workload: str) -> dict[int, Measured]:
        """The runs of a peer that have done a workload, by round."""
        return {
            each.round: each
            for each in self.pairs
            if each.job.peer == peer
            and each.job.processes == processes
            and workload in each.trainings
        }


def page(found: Found, plan: Plan, command: str, versions: str, picture: str) -> str:
    """The page in Markdown.

    Args:
        found: what was measured.
        plan: what was to be run.
        command: the command that wrote it.
        versions: of the packages.
        picture: the path of the picture, from the page.
    """
    parts = [
        _head(found, command, versions),
        f"![Updates a second, and seconds to the first step]({picture})\n",
        _ratios(found, plan),
        *(_throughput(found, plan, name) for name in plan.workloads),
        *([_growth(found, plan)] if plan.growth else []),
        _starts(found),
        _memory(found, plan),
        _servers(found, plan),
    ]
    if found.failed:
        parts.append("## Runs that failed\n\n" + "".join(f"- {line}\n" for line in found.failed))
    return "\n".join(parts)


def in_short(found: Found, plan: Plan) -> str:
    """The table of the README: medians of the ratios, by model."""
    rows = []
    for peer, base, processes in PAIRS:
        by_model = (_pairs(found, peer, base, processes, each) for each in plan.workloads)
        ratios = (f"{_median_ratio(pairs):.2f}" if pairs else "-" for pairs in by_model)
        rows.append((PEERS[peer].title, PEERS[base].title, str(processes), *ratios))
    kinds = (WORKLOADS[workload].kind for workload in plan.workloads)
    table = _table(("", "updates a second, x those of", "processes", *kinds), rows, left=2)
    rounds = len({each.round for each in found.pairs})
    turns = f"Medians of {rounds} rounds" if rounds > 1 else "One round"
    return f"{table}\n{turns} on {os.cpu_count()} cores without GPUs.\n\n"


def _pairs(
    found: Found, peer: str, base: str, processes: int, workload: str
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The trainings of two peers in the same rounds."""
    mine, theirs = (found.of(name, processes, workload) for name in (peer, base))
    return [
        (mine[number].trainings[workload], theirs[number].trainings[workload])
        for number in sorted(mine.keys() & theirs.keys())
    ]


def _median_ratio(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> float:
    return statistics.median(one["rate"] / other["rate"] for one, other in pairs)


def _head(found: Found, command: str, versions: str) -> str:
    busy = statistics.median(each.busy for each in found.pairs)
    rounds = len({each.round for each in found.pairs})
    load = (
        f"**Measured under load: other programs kept {busy:.0%} of the cores busy before a run "
        "(median). The ratios are noisy, and the absolute figures too low.**\n\n"
        if busy > _QUIET
        else ""
    )
    times = f"the median of {rounds} rounds (min-max)" if rounds > 1 else "of one round"
    return f"""# Benchmarks

{load}Written by `{command}` on {_machine()}; {versions}.
Others used {busy:.0%} of the cores before a run (median).

Each figure is {times}. In a round each peer takes its turn, and
ratios are taken within rounds. Every process computes in one thread, in float32; an update is of
{BATCH} examples, divided over the processes. All start from the same weights and take the same
batches, from memory. The models: an MLP, dense 1024-1536-1536-10 (3.9 million parameters); a
convnet of two layers (35 thousand); a transformer of two blocks, width 64, on 32 tokens (107
thousand). The peers' code is in `benchmarks/bench`. No GPU was used.
"""


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = f" ({model})" if model else ""
    return f"{os.cpu_count()} cores{name}, {memory:.0f} GiB, Linux {platform.release()}"


def _ratios(found: Found, plan: Plan) -> str:
    rows = []
    for peer, base, processes in PAIRS:
        for workload in plan.workloads:
            pairs = _pairs(found, peer, base, processes, workload)
            if pairs:
                rates = (one["rate"] / other["rate"] for one, other in pairs)
                names = (PEERS[peer].title, PEERS[base].title, str(processes))
                kind = WORKLOADS[workload].kind
                rows.append((*names, kind, _spread(rates, 2), _limit(pairs)))
    headings = ("", "compared with", "processes", "model", "x its updates/s", "what limits it")
    return f"""## `fit` beside hand-written loops and other frameworks

A ratio under 1 is slower. The last column is measured: how much longer an update takes than the
other's, and how much of that is work of the processor in one process; the rest is waiting, for the
other process or for a core.

{_table(headings, rows, left=2)}"""


def _limit(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> str:
    """The milliseconds of an update by which the first is slower, and where they are spent."""
    if _median_ratio(pairs) >= 1:
        return ""
    longer = 1e3 * statistics.median(1 / one["rate"] - 1 / other["rate"] for one, other in pairs)
    work = 1e3 * statistics.median(one["cpu"] - other["cpu"] for one, other in pairs)
    return f"{longer:+.2f} ms an update; work: {work:+.2f} ms"


def _throughput(found: Found, plan: Plan, workload: str) -> str:
    counts = list(plan.peers)
    rows = []
    for peer in PEERS:
        cells, losses = [], []
        for processes in counts:
            runs = found.of(peer, processes, workload).values()
            cells.append(_spread((BATCH * e.trainings[workload]["rate"] for e in runs), 0))
            losses += [each.trainings[workload]["loss"] for each in runs]
        if losses:
            rows.append((PEERS[peer].title, *cells, _spread(losses, 4)))
    titles = (f"{n} process{'es' if n > 1 else ''}" for n in counts)
    headings = ("examples a second", *titles, "loss at the end")
    cores = os.cpu_count() or 1
    beyond = [str(n) for n in counts if n > cores]
    note = f"With {', '.join(beyond)} processes on {cores} cores, processes wait for cores.\n"
    table = _table(headings, rows)
    return f"## {WORKLOADS[workload].title}\n\n{table}" + (f"\n{note}" if beyond else "")


def _growth(found: Found, plan: Plan) -> str:
    rows = []
    for name in plan.growth:
        workload = WORKLOADS[name]
        runs = (found.of(peer, 2, name).values() for peer in GROWTH)
        cells = (_spread((1e3 / e.trainings[name]["rate"] for e in of_peer), 1) for of_peer in runs)
        size = (f"{workload.numbers:,}", str(workload.tensors))
        rows.append((workload.title, *size, *cells))
    titles = (PEERS[peer].title for peer in GROWTH)
    return f"""## Growth with parameters and tensors

Milliseconds of an update of MLPs with two processes.

{_table(("ms an update", "parameters", "tensors", *titles), rows)}"""


def _starts(found: Found) -> str:
    plain = found.of(*STARTS[0], "first")
    rows = []
    for peer, processes in STARTS:
        runs = found.of(peer, processes, "first")
        if runs:
            times = {number: each.started or 0.0 for number, each in runs.items()}
            rest = (times[number] - each.entered for number, each in runs.items())
            ratios = (times[n] / (plain[n].started or 1.0) for n in times if n in plain)
            rows.append(
                (
                    PEERS[peer].title,
                    PEERS[peer].launcher,
                    str(processes),
                    _spread(times.values(), 2),
                    _spread(ratios, 2),
                    _spread((each.entered for each in runs.values()), 2),
                    _spread(rest, 2),
                )
            )
    headings = (
        *("", "started by", "processes", "seconds", "x plain Python"),
        *("to the program's first line", "from there"),
    )
    return f"""## From the command to the first step

Seconds from the command to the end of the first update of the MLP. `tfdist run` imports TensorFlow
before the program's first line, the others after it.

{_table(headings, rows, left=2)}"""


def _memory(found: Found, plan: Plan) -> str:
    counts = list(plan.peers)
    rows = []
    for peer in PEERS:
        runs = [found.of(peer, processes, "mlp").values() for processes in counts]
        if any(runs):
            cells = (
                _spread((each.trainings["mlp"]["peak"] / 2**20 for each in of_count), 0)
                for of_count in runs
            )
            rows.append((PEERS[peer].title, *cells))
    headings = ("MiB", *(f"{n} process{'es' if n > 1 else ''}" for n in counts))
    return f"""## Peak memory

The largest resident memory of one process that has trained the MLP.

{_table(headings, rows)}"""


def _servers(found: Found, plan: Plan) -> str:
    tables = [
        report.markdown(rows, model, _AGAINST).replace("## ", "### ", 1)
        for model in plan.models
        if (rows := report.rows_of(found.servers, model, _AGAINST))
    ]
    if not tables:
        return ""
    head = (
        "## Parameter servers\n\nTwo workers and one server, asynchronous, Adam, batches of 32. "
        "`loop_*` are hand-written loops on TensorFlow's ClusterCoordinator; with Keras 3 models "
        "they lose updates.\n"
    )
    return "\n".join([head, *tables])


def _spread(values: Iterable[float], digits: int) -> str:
    known = sorted(values)
    if not known:
        return "-"
    shown = [f"{v:,.{digits}f}" for v in (statistics.median(known), known[0], known[-1])]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]}-{shown[2]})"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    marks = ["---"] * left + ["---:"] * (len(headings) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, marks, *rows))


def draw(found: Found, plan: Plan, path: Path) -> None:
    """Draws updates a second with two processes, and seconds to the first step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels: Any = figure.subplots(1, len(plan.workloads) + 1, squeeze=False)[0]
    for axes, workload in zip(panels, plan.workloads, strict=False):

        def rate(each: Measured, workload: str = workload) -> float:
            return each.trainings[workload]["rate"]

        runs = {peer: found.of(peer, 2, workload) for peer in plan.peers[2]}
        _bars(axes, f"{WORKLOADS[workload].kind}, updates a second", runs, rate)
    starts = {peer: found.of(peer, count, "first") for peer, count in STARTS}
    _bars(panels[-1], "seconds to the first step", starts, lambda each: each.started or 0.0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _bars(
    axes: Any,
    title: str,
    runs: dict[str, dict[int, Measured]],
    value: Callable[[Measured], float],
) -> None:
    known = {peer: [value(each) for each in mine.values()] for peer, mine in runs.items() if mine}
    for place, (peer, values) in enumerate(known.items()):
        middle = statistics.median(values)
        reach = [[middle - min(values)], [max(values) - middle]]
        color = "C0" if peer.startswith("tfdist") else "0.7"
        axes.barh(place, middle, xerr=reach, color=color, capsize=2)
    axes.set_yticks(range(len(known)), [name.replace("_", " ") for name in known], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
