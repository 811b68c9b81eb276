"""Medians and ratios of all rounds, as a table for the terminal and as Markdown."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from bench.job import MODELS
from bench.run import Measurement

__all__ = ["Row", "markdown", "rows_of", "show"]

_HEADINGS = (
    "peer",
    "steps/s",
    "x {against}",
    "bytes/step",
    "CPU ms/step",
    "CPU x {against}",
    "chief / ps / workers",
    "updates lost",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One peer on one model, as text."""

    peer: str
    rate: str
    ratio: str
    sent: str
    cpu: str
    cpu_ratio: str
    parts: str
    lost: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's texts, in the order of the headings."""
        return dataclasses.astuple(self)


def rows_of(measurements: Iterable[Measurement], model: str, against: str) -> list[Row]:
    """The rows of a model's table.

    Args:
        measurements: of all models, peers and rounds; failed ones are left out.
        model: which model.
        against: the peer that ratios are of.
    """
    by_peer: dict[str, list[Measurement]] = {}
    for each in measurements:
        if each.job.model == model and not each.error:
            by_peer.setdefault(each.job.peer, []).append(each)
    base = {each.round: each for each in by_peer.get(against, [])}
    return [_row(peer, done, base) for peer, done in by_peer.items()]


def show(console: Console, rows: Sequence[Row], model: str, against: str) -> None:
    """Prints a model's table."""
    table = Table(title=_title(model), title_justify="left")
    for number, heading in enumerate(_HEADINGS):
        align = "left" if number == 0 else "right"
        table.add_column(heading.format(against=against), justify=align)
    for row in rows:
        table.add_row(*row.cells)
    console.print(table)


def markdown(rows: Sequence[Row], model: str, against: str) -> str:
    """A model's table as Markdown."""
    headings = [heading.format(against=f"`{against}`") for heading in _HEADINGS]
    lines = [
        f"## {_title(model)}",
        "",
        _line(headings),
        _line(["---", *["---:"] * (len(_HEADINGS) - 1)]),
    ]
    return "\n".join([*lines, *(_line(row.cells) for row in rows), ""])


def _title(model: str) -> str:
    shape = MODELS[model]
    widths = "-".join(map(str, shape.widths))
    return f"{shape.title}: dense {widths}, {shape.parameters:,} parameters"


def _row(peer: str, done: Sequence[Measurement], base: dict[int, Measurement]) -> Row:
    pairs = [(each, base[each.round]) for each in done if each.round in base]
    parts = (1e3 * _median(e.cpu_per_step(k) for e in done) for k in ("chief", "ps", "worker"))
    sent = [each.bytes_per_step for each in done if each.bytes_per_step is not None]
    lost = _median(each.lost for each in done)
    return Row(
        peer=peer,
        rate=_spread([each.rate for each in done], 1),
        ratio=_spread([each.rate / other.rate for each, other in pairs], 2),
        sent=_bytes(_median(sent)) if sent else "-",
        cpu=_spread([1e3 * each.cpu_per_step() for each in done], 1),
        cpu_ratio=_spread([each.cpu_per_step() / other.cpu_per_step() for each, other in pairs], 2),
        parts=" / ".join(f"{part:.1f}" for part in parts),
        lost=f"{lost:.0%}" if lost else "none",
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle, low, high = statistics.median(values), min(values), max(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
