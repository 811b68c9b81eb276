"""Reads a whole TF_CONFIG, as far as it can be read."""

from __future__ import annotations

import dataclasses
import difflib
from collections import defaultdict
from collections.abc import Mapping

from tfdist.cluster.addresses import Address
from tfdist.cluster.checks.cluster import SPARSE, Listed, read_cluster
from tfdist.cluster.checks.finding import Finding, error, quoted, warning
from tfdist.cluster.checks.json_text import load
from tfdist.cluster.checks.task import read_task
from tfdist.cluster.spec import ClusterSpec, Task

__all__ = ["WHOLE", "Reading", "read"]

WHOLE = "TF_CONFIG"
#: What TensorFlow and Google's services write into a TF_CONFIG.
_KEYS = (
    *("cluster", SPARSE, "task", "environment", "rpc_layer", "session_master", "job"),
    "model_dir",
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a TF_CONFIG says.

    Attributes:
        listed: the tasks of the cluster, also those whose address cannot be read.
        task: this process's task, or None if there is none or it cannot be read.
        has_task: whether there is a `task`, readable or not.
        findings: the mistakes of form.
    """

    listed: tuple[Listed, ...]
    task: Task | None
    has_task: bool
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that keep the TF_CONFIG from being used."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def of_type(self, kind: str) -> list[Listed]:
        """The listed tasks of one type."""
        return [entry for entry in self.listed if entry.task.type == kind]

    def spec(self) -> ClusterSpec:
        """The cluster. Only for a reading without errors."""
        numbered: defaultdict[str, dict[int, Address]] = defaultdict(dict)
        for entry in self.listed:
            if entry.address is not None:
                numbered[entry.task.type][entry.task.index] = entry.address
        return ClusterSpec(
            {kind: tuple(a for _, a in sorted(by.items())) for kind, by in numbered.items()},
            {kind: tuple(sorted(by)) for kind, by in numbered.items()},
        )


def read(text: str) -> Reading:
    """Reads the text of a TF_CONFIG and finds all mistakes of its form."""
    content, findings = load(text, WHOLE)
    if not isinstance(content, dict):
        return Reading((), None, False, tuple(findings))
    listed, mistakes = read_cluster(content)
    task, more = read_task(content, listed)
    findings += [*_other_keys(content), *mistakes, *more]
    return Reading(listed, task, content.get("task") is not None, tuple(findings))


def _other_keys(content: Mapping[str, object]) -> list[Finding]:
    findings = []
    for key in content:
        if key not in _KEYS:
            close = difflib.get_close_matches(key.lower(), _KEYS, 1)
            remedy = f'Did you mean "{close[0]}"?' if close else "Remove it."
            problem = f'The key "{key}" means nothing to TensorFlow.'
            findings.append(warning(WHOLE, problem, remedy))
    layer = content.get("rpc_layer")
    if layer not in (None, "", "grpc"):
        findings.append(
            error(
                f"{WHOLE}.rpc_layer",
                f"{quoted(layer)} is not a protocol of this TensorFlow.",
                'Write "grpc", or remove "rpc_layer".',
            )
        )
    return findings
