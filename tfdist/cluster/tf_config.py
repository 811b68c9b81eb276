"""TF_CONFIG: the cluster and this task's place in it, as JSON. Reads and checks it.

All mistakes are found at once and without TensorFlow, which meets the same mistakes with a hang, a
crash or silence. The checks are in `tfdist.cluster.checks`, one file for each kind.
"""

from __future__ import annotations

from collections import Counter

from tfdist.cluster.checks.finding import Finding
from tfdist.cluster.checks.meaning import IGNORING, STRATEGIES, meaning_findings
from tfdist.cluster.checks.network import Network, ThisMachine, network_findings
from tfdist.cluster.checks.reading import WHOLE, Reading, read
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = [
    "PROGRAM_START_HINT",
    "STRATEGIES",
    "Finding",
    "Network",
    "ThisMachine",
    "check_tf_config",
    "parse_tf_config",
    "refuse_gaps",
]

#: What no check of a TF_CONFIG can see.
PROGRAM_START_HINT = (
    "No check of TF_CONFIG can see this: a script must make its strategy before it runs any "
    "TensorFlow operation (tf.constant, a tf.data.Dataset, a built model, "
    "tf.config.list_logical_devices). "
    'If not, TensorFlow says "Collective ops must be configured at program startup".'
)


def parse_tf_config(text: str) -> tuple[ClusterSpec, Task | None]:
    """Reads a TF_CONFIG: the inverse of `ClusterSpec.tf_config`.

    "master" counts as "chief". The keys `environment` and `rpc_layer` are accepted.

    Args:
        text: the JSON text.

    Returns:
        The cluster, and this process's task or None if the text names none.

    Raises:
        ConfigError: if the text has mistakes of form; the message lists them all.
    """
    reading = read(text)
    if not reading.errors:
        return reading.spec(), reading.task
    count = len(reading.errors)
    lines = "\n".join(f"  {finding}" for finding in reading.errors)
    raise ConfigError(f"TF_CONFIG has {count} mistake{'s' if count > 1 else ''}:\n{lines}")


def refuse_gaps(cluster: ClusterSpec, who: str) -> None:
    """Refuses a cluster that lists some of its tasks only, as each task would train alone.

    Args:
        cluster: the cluster.
        who: what needs all tasks, for the message.

    Raises:
        ConfigError: with the tasks that are listed.
    """
    for kind, indices in cluster.indices.items():
        missing = next(i for i in range(max(indices) + 1) if i not in indices)
        raise ConfigError(
            f"TF_CONFIG lists {kind} {', '.join(map(str, indices))} but not {kind} {missing}, and "
            f"{who} needs all tasks. Give each task the whole cluster; an operator that gives each "
            "worker its own part (enableDynamicWorker) must not do so here. A program that makes "
            "its own tf.train.ClusterSpec runs with --every-task."
        )


def check_tf_config(
    text: str, *, strategy: str | None = None, network: Network | None = None
) -> list[Finding]:
    """Finds every mistake in a TF_CONFIG that can be found without starting TensorFlow.

    Args:
        text: the JSON text.
        strategy: the strategy that is to run on it, one of `STRATEGIES`, or None if not known.
        network: whom to ask about host names and ports, such as `ThisMachine()`; None asks nobody.

    Returns:
        The findings. Where there is no error, the first has severity "ok" and sums up the cluster.

    Raises:
        ConfigError: if the strategy is unknown.
    """
    reading = read(text)
    findings = [*reading.findings, *meaning_findings(reading, strategy)]
    if network is not None and strategy not in IGNORING:
        findings += network_findings(reading, network)
    if not any(finding.severity == "error" for finding in findings):
        findings.insert(0, Finding("ok", WHOLE, _summary(reading)))
    return findings


def _summary(reading: Reading) -> str:
    counts = Counter(entry.task.type for entry in reading.listed)
    tasks = ", ".join(_counted(count, kind) for kind, count in counts.items())
    addresses = [str(entry.address) for entry in reading.listed if entry.task == reading.task]
    place = f'at "{addresses[0]}"' if addresses else "outside of the cluster"
    return f"A cluster of {tasks}; this process is {reading.task}, {place}."


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}" if count == 1 or kind == "ps" else f"{count} {kind}s"
