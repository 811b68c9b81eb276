"""What the doctor says."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.cluster.checks.finding import Finding, Severity

__all__ = ["Report"]


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnosis.

    Attributes:
        findings: all that was looked at, first the machine, then the TF_CONFIG.
        source: where the TF_CONFIG came from; empty where there is none.
        hints: what to think of that no check can see.
    """

    findings: tuple[Finding, ...]
    source: str = ""
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing must be changed. There may be warnings."""
        return self.count("error") == 0

    def count(self, severity: Severity) -> int:
        """How many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        return {"ok": self.ok, **dataclasses.asdict(self)}
