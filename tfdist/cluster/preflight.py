"""What the chief knows of each task before the start, as one table with the culprits first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist.cluster.spec import Address, Task

__all__ = ["CLOCKS_APART", "Report", "table"]

#: Seconds that the clocks of two machines may differ without a word.
CLOCKS_APART = 30.0

#: Tasks without a problem that are listed; of a large cluster the others are counted.
_READY_LISTED = 8
_PROBLEMS_LISTED = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of one task.

    Attributes:
        task: which it is.
        address: where it should listen.
        joined: whether it has reached the chief.
        answers: whether the chief has reached it at its address.
        differs: what it runs that the chief does not, by name.
        apart: seconds that its clock is ahead of the chief's; None where it has not joined.
        problem: what is wrong, in words; empty where nothing is.
    """

    task: Task
    address: Address
    joined: bool
    answers: bool
    differs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    apart: float | None = None
    problem: str = ""

    @property
    def clock(self) -> str:
        """The clock's difference in words; empty where it is small or not known."""
        if self.apart is None or abs(self.apart) <= CLOCKS_APART:
            return ""
        return f"{self.apart:+.0f} s"


_HEADER = ("task", "address", "joined", "answers", "runs", "clock", "")


def table(reports: Sequence[Report]) -> str:
    """Lines for a terminal or a log: tasks with a problem first, then some of the others.

    Args:
        reports: all tasks but the chief, in any order.
    """
    culprits = [each for each in reports if each.problem or each.differs]
    ready = [each for each in reports if not each.problem and not each.differs]
    shown = [*culprits[:_PROBLEMS_LISTED], *ready[:_READY_LISTED]]
    rows = [_HEADER, *(_row(each) for each in shown)]
    used = [i for i in range(len(_HEADER)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]
    left = len(culprits[_PROBLEMS_LISTED:])
    if left:
        lines.append(f"and {left} more tasks with a problem")
    if ready[_READY_LISTED:]:
        lines.append(f"and {len(ready) - _READY_LISTED} more tasks that are ready")
    return "\n".join(f"  {line}" for line in lines)


def _row(report: Report) -> tuple[str, ...]:
    return (
        str(report.task),
        str(report.address),
        "yes" if report.joined else "no",
        "yes" if report.answers else "no",
        ", ".join(f"{name} {value}" for name, value in report.differs.items()),
        report.clock,
        report.problem,
    )
