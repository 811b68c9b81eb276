"""TF_CONFIG: the cluster and this task's place in it, as JSON. Reads and checks it.

All mistakes are found at once and without TensorFlow, which meets the same mistakes with a hang, a
crash or silence. The checks are in `tfdist.cluster.validation`.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cluster.spec import ClusterSpec, ClusterUse, Task, Topology, counted
from tfdist.cluster.validation.finding import Finding
from tfdist.cluster.validation.semantics import (
    Network,
    ThisMachine,
    meaning_findings,
    network_findings,
)
from tfdist.cluster.validation.structure import WHOLE, Reading, read
from tfdist.errors import ConfigError

__all__ = [
    "LONGEST_VARIABLE",
    "PROGRAM_START_HINT",
    "ClusterVariables",
    "Finding",
    "Network",
    "ThisMachine",
    "check_tf_config",
    "own_tf_config",
    "parse_tf_config",
    "refuse_gaps",
    "texts",
    "written",
]

#: The mistakes that no check of a TF_CONFIG can see.
PROGRAM_START_HINT = (
    "No check of TF_CONFIG can see this: a script that `tfdist run` does not start must make its "
    "strategy before it runs any TensorFlow operation (tf.constant, a tf.data.Dataset, a built "
    "model, tf.config.list_logical_devices). "
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
        who: the code that needs all tasks, for the message.

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
    text: str, *, use: ClusterUse | None = None, network: Network | None = None
) -> list[Finding]:
    """Finds every mistake in a TF_CONFIG that can be found without starting TensorFlow.

    Args:
        text: the JSON text.
        use: how the strategy that is to run uses it, or None if the strategy is not known.
        network: whom to ask about host names and ports, such as `ThisMachine()`; None asks nobody.

    Returns:
        The findings. If there is no error, the first has severity "ok" and sums up the cluster.
    """
    reading = read(text)
    findings = [*reading.findings, *meaning_findings(reading, use)]
    if network is not None and (use is None or use.topology is not Topology.ONE_PROCESS):
        findings += network_findings(reading, network)
    if not any(finding.severity == "error" for finding in findings):
        findings.insert(0, Finding("ok", WHOLE, _summary(reading)))
    return findings


def _summary(reading: Reading) -> str:
    counts = Counter(entry.task.type for entry in reading.listed)
    addresses = [str(entry.address) for entry in reading.listed if entry.task == reading.task]
    location = f'at "{addresses[0]}"' if addresses else "outside of the cluster"
    return f"A cluster of {counted(counts)}; this process is {reading.task}, {location}."


# TF_CONFIG for the tasks of a cluster, as text to paste.
#
# The cluster is written once, not once for each task; the texts of all n tasks together still
# grow with n².

#: Bytes of `TF_CONFIG=…` with its end beyond which Linux starts no program (MAX_ARG_STRLEN).
LONGEST_VARIABLE = 128 * 1024 - len("TF_CONFIG=") - 1


def texts(cluster: ClusterSpec) -> Iterator[tuple[Task, str]]:
    """Each task with its TF_CONFIG: what `ClusterSpec.tf_config` gives for it."""
    head = _head_of(cluster)
    for task, _ in cluster.tasks():
        yield task, _with_task(head, task)


def _head_of(cluster: ClusterSpec) -> str:
    """The beginning of the TF_CONFIG of all tasks, which lists them."""
    return json.dumps({"cluster": cluster.as_dict()}, sort_keys=True).removesuffix("}")


def _with_task(head: str, task: Task) -> str:
    """The TF_CONFIG of one task, with a beginning that `_head_of` has written."""
    own = json.dumps({"index": task.index, "type": task.type})
    return f'{head}, "task": {own}}}'


def written(task: Task, text: str, form: str) -> str:
    """A task's TF_CONFIG in one of three forms.

    Args:
        task: the task.
        text: its TF_CONFIG.
        form: `json` for the text on a line of its own, `export` for a line of a shell script,
            `kubernetes` for the `env` of a container.
    """
    if form == "json":
        return text
    if form == "export":
        return f"# {task}\nexport TF_CONFIG={shlex.quote(text)}"
    quoted = text.replace("'", "''")
    return f"---\n# {task}\nenv:\n  - name: TF_CONFIG\n    value: '{quoted}'"


# A cluster that is too large for an environment variable travels in a file.
#
# Linux starts no program with a variable of more than 128 KiB, which a TF_CONFIG of some thousand
# tasks exceeds. Its tasks get the name of a file with the cluster in TFDIST_CLUSTER, and which of
# them they are in TFDIST_TASK. tfdist reads both; a script that reads TF_CONFIG itself cannot.

#: Bytes that the task of a TF_CONFIG may take.
_FOR_THE_TASK = 64


class ClusterVariables:
    """The environment variables and the file by which tasks know their cluster.

    Attributes:
        files: texts that must be written before the tasks start, by path.
    """

    def __init__(self, cluster: ClusterSpec, directory: Path) -> None:
        """Writes the cluster down once.

        Args:
            cluster: all tasks.
            directory: where the file goes, if it takes one.
        """
        self._head = _head_of(cluster)
        self.files: dict[Path, str] = {}
        if len(self._head) + _FOR_THE_TASK > LONGEST_VARIABLE:
            self.files[(directory / "cluster.json").absolute()] = f"{self._head}}}"

    def changes(self, task: Task) -> dict[str, str | None]:
        """The changes to a task's environment."""
        if not self.files:
            return {"TF_CONFIG": _with_task(self._head, task)}
        return {
            "TF_CONFIG": None,
            "TFDIST_CLUSTER": str(next(iter(self.files))),
            "TFDIST_TASK": f"{task.type}:{task.index}",
        }


def own_tf_config(environ: Mapping[str, str] | None = None) -> str | None:
    """This process's TF_CONFIG, from the variable or from the file; None if there is none.

    Args:
        environ: where to look; by default the process's own environment.

    Raises:
        ConfigError: if the file cannot be read.
    """
    text = environment.read("TF_CONFIG", environ)
    path = environment.read("TFDIST_CLUSTER", environ)
    if text is not None or path is None:
        return text
    kind, _, index = (environment.read("TFDIST_TASK", environ) or "").partition(":")
    try:
        cluster = json.loads(Path(path).read_text())["cluster"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"TFDIST_CLUSTER={path!r}, the file that lists the cluster, cannot be read ({error}). "
            "It must be on every host at that path: give --log-dir a directory that all share."
        ) from error
    if not index.isdecimal():
        raise ConfigError(
            f"TFDIST_TASK={kind!r} does not say which task this is. Give one such as worker:0."
        )
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": int(index)}})
