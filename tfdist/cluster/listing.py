"""A cluster that is too large for an environment variable travels in a file.

Linux starts no program with a variable of more than 128 KiB, which a TF_CONFIG of some thousand
tasks exceeds. Its tasks get the name of a file with the cluster in TFDIST_CLUSTER, and which of
them they are in TFDIST_TASK. tfdist reads both; a script that reads TF_CONFIG itself cannot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tfdist import environment
from tfdist.cluster.formats import LONGEST_VARIABLE, head_of, with_task
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.errors import ConfigError

__all__ = ["Placing", "own_tf_config"]

#: Bytes that the task of a TF_CONFIG may take.
_FOR_THE_TASK = 64


class Placing:
    """How the tasks of a cluster are told their place.

    Attributes:
        files: what must be written before the tasks start: text by path.
    """

    def __init__(self, cluster: ClusterSpec, directory: Path) -> None:
        """Writes the cluster down once.

        Args:
            cluster: all tasks.
            directory: where the file goes, if it takes one.
        """
        self._head = head_of(cluster)
        self.files: dict[Path, str] = {}
        if len(self._head) + _FOR_THE_TASK > LONGEST_VARIABLE:
            self.files[(directory / "cluster.json").absolute()] = f"{self._head}}}"

    def changes(self, task: Task) -> dict[str, str | None]:
        """The changes to a task's environment."""
        if not self.files:
            return {"TF_CONFIG": with_task(self._head, task)}
        return {
            "TF_CONFIG": None,
            "TFDIST_CLUSTER": str(next(iter(self.files))),
            "TFDIST_TASK": f"{task.type}:{task.index}",
        }


def own_tf_config(environ: Mapping[str, str] | None = None) -> str | None:
    """This process's TF_CONFIG, from the variable or from the file; None where there is none.

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
