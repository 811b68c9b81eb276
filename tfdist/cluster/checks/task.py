"""Reads the `task` of a TF_CONFIG and finds what is wrong with its form."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.checks.cluster import Listed, old_name, type_of, unknown_type
from tfdist.cluster.checks.finding import Finding, error, quoted, warning
from tfdist.cluster.spec import Task

__all__ = ["TASK", "read_task"]

TASK = "TF_CONFIG.task"
_EXAMPLE = '"task": {"type": "worker", "index": 0}'
#: What people write for "index".
_OTHER_INDICES = ("id", "task_id", "task_index", "rank", "Index")
#: Keys that Google's services add.
_KEYS = ("type", "index", "trial", "cloud", "environment")


def read_task(
    content: Mapping[str, object], listed: Sequence[Listed]
) -> tuple[Task | None, list[Finding]]:
    """This process's task and the mistakes in its form.

    Args:
        content: the TF_CONFIG.
        listed: the tasks of its cluster.

    Returns:
        The task, or None if there is none or it cannot be read. That there is none is no mistake of
        form: a coordinator or a tool may read a cluster that it is not in.
    """
    task = content.get("task")
    if task is None:
        return None, []
    if not isinstance(task, dict):
        return None, [error(TASK, f"{quoted(task)} is not an object.", f"Write {_EXAMPLE}")]
    kind, findings = _read_type(task)
    index, mistakes = _read_index(task)
    findings += [*mistakes, *_unknown_keys(task)]
    if kind is None or index is None:
        return None, findings
    misplaced = _misplaced(Task(kind, index), listed)
    return Task(kind, index), findings + misplaced


def _read_type(task: Mapping[str, object]) -> tuple[str | None, list[Finding]]:
    where = f"{TASK}.type"
    if "type" not in task:
        return None, [error(where, 'The task has no "type".', f"Write {_EXAMPLE}")]
    kind = type_of(task["type"])
    if kind is None:
        return None, [unknown_type(where, task["type"])]
    return kind, [old_name(where)] if task["type"] == "master" else []


def _read_index(task: Mapping[str, object]) -> tuple[int | None, list[Finding]]:
    where = f"{TASK}.index"
    if "index" not in task:
        other = next((key for key in _OTHER_INDICES if key in task), None)
        remedy = f'Rename "{other}" to "index".' if other else f"Write {_EXAMPLE}"
        return None, [error(where, 'The task has no "index".', remedy)]
    index = task["index"]
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index.strip()):
        found = warning(
            where,
            f"{quoted(index)} is a string. TensorFlow reads it as a number, others may not.",
            f'Write "index": {int(index)}.',
        )
        return int(index), [found]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        problem = f"{quoted(index)} is not the number of a task."
        return None, [error(where, problem, "Write a whole number from 0, without quotes.")]
    return index, []


def _unknown_keys(task: Mapping[str, object]) -> list[Finding]:
    findings = []
    for key in task:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, 1)
            remedy = f'Did you mean "{close[0]}"?' if close else "Remove it, or use type and index."
            problem = f'The key "{key}" means nothing to TensorFlow.'
            findings.append(warning(TASK, problem, remedy))
    return findings


def _misplaced(task: Task, listed: Sequence[Listed]) -> list[Finding]:
    indices = [entry.task.index for entry in listed if entry.task.type == task.type]
    if task.index in indices or not listed:
        return []
    if not indices and task.type == "evaluator":
        return []
    if not indices:
        kinds = ", ".join(dict.fromkeys(entry.task.type for entry in listed))
        problem = f'"{task.type}" is not in the cluster, which lists {kinds}.'
        return [error(f"{TASK}.type", problem, "List this task in the cluster, or correct it.")]
    return [
        error(
            f"{TASK}.index",
            f"{task.index} is out of range: the cluster lists {task.type} {_spoken(indices)}.",
            f"Use one of these, or add this task's address to the cluster's {task.type} list.",
        )
    ]


def _spoken(indices: Sequence[int]) -> str:
    if len(indices) > 1 and list(indices) == list(range(len(indices))):
        return f"0 to {indices[-1]}"
    return ", ".join(map(str, indices))
