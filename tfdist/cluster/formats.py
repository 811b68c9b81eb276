"""TF_CONFIG for the tasks of a cluster, as text to paste.

The cluster is written once, not once for each task; the texts of all n tasks together still grow
with n².
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from tfdist.cluster.spec import ClusterSpec, Task

__all__ = ["FORMATS", "LONGEST_VARIABLE", "head_of", "texts", "with_task", "written"]

#: How a TF_CONFIG can be written.
FORMATS = ("json", "export", "kubernetes")

#: Bytes of `TF_CONFIG=…` with its end beyond which Linux starts no program (MAX_ARG_STRLEN).
LONGEST_VARIABLE = 128 * 1024 - len("TF_CONFIG=") - 1


def texts(cluster: ClusterSpec) -> Iterator[tuple[Task, str]]:
    """Each task with its TF_CONFIG: what `ClusterSpec.tf_config` gives for it."""
    head = head_of(cluster)
    for task, _ in cluster.tasks():
        yield task, with_task(head, task)


def head_of(cluster: ClusterSpec) -> str:
    """The beginning of the TF_CONFIG of all tasks, which lists them."""
    return json.dumps({"cluster": cluster.as_dict()}, sort_keys=True).removesuffix("}")


def with_task(head: str, task: Task) -> str:
    """The TF_CONFIG of one task, with a beginning that `head_of` has written."""
    own = json.dumps({"index": task.index, "type": task.type})
    return f'{head}, "task": {own}}}'


def written(task: Task, text: str, form: str) -> str:
    """A task's TF_CONFIG in one of `FORMATS`.

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
