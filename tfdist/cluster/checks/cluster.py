"""Reads the `cluster` of a TF_CONFIG and finds what is wrong with its form."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster.addresses import Address, address_mistake, is_loopback
from tfdist.cluster.checks.finding import Finding, error, quoted, warning
from tfdist.cluster.spec import TASK_TYPES, Task

__all__ = [
    "CLUSTER",
    "SPARSE",
    "Listed",
    "names",
    "old_name",
    "read_cluster",
    "type_of",
    "unknown_type",
]

CLUSTER = "TF_CONFIG.cluster"
#: The key of a job operator for what one task knows of its cluster.
SPARSE = "sparseCluster"
_EXAMPLE = '"cluster": {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}'


@dataclasses.dataclass(frozen=True)
class Listed:
    """A task as the cluster lists it.

    Attributes:
        task: the task.
        where: its place in the TF_CONFIG.
        address: where it listens, or None if that cannot be read.
    """

    task: Task
    where: str
    address: Address | None


def read_cluster(content: Mapping[str, object]) -> tuple[tuple[Listed, ...], list[Finding]]:
    """The tasks of a cluster, as far as they can be read, and the mistakes in its form.

    A job operator whose workers may come and go writes `sparseCluster` instead: what one task must
    know of the cluster, which is itself and the servers.
    """
    jobs = content.get("cluster") or _sparse(content)
    if not jobs:
        return (), [_no_cluster(content, content.get("cluster"))]
    if not isinstance(jobs, dict):
        problem = f"{quoted(jobs)} is not an object of task types."
        return (), [error(CLUSTER, problem, f"Write {_EXAMPLE}")]
    listed: list[Listed] = []
    findings: list[Finding] = []
    for name, entries in jobs.items():
        tasks, mistakes = _read_job(name, entries)
        listed += tasks
        findings += mistakes
    findings += [*_too_many(listed), *_duplicates(listed), *_nobody_computes(jobs)]
    if not listed and not any(finding.severity == "error" for finding in findings):
        findings.append(_no_cluster(content, jobs))
    return tuple(listed), findings


def _sparse(content: Mapping[str, object]) -> object:
    """A `sparseCluster` in the form of a cluster.

    A server finds itself alone in the list of servers, whatever its number is.
    """
    jobs, task = content.get(SPARSE), content.get("task")
    if not isinstance(jobs, dict):
        return jobs
    jobs = {name: entries or {} for name, entries in jobs.items()}
    if isinstance(task, dict):
        kind, index = task.get("type"), task.get("index")
        own = jobs.get(kind) if isinstance(kind, str) else None
        if isinstance(own, list) and len(own) == 1 and isinstance(index, int) and index > 0:
            jobs[str(kind)] = {str(index): own[0]}
    return jobs


def type_of(name: object) -> str | None:
    """The task type that a name stands for; TensorFlow 1 called the chief "master"."""
    if name == "master":
        return "chief"
    return name if isinstance(name, str) and name in TASK_TYPES else None


def unknown_type(where: str, name: object) -> Finding:
    """The finding for a name that is no task type."""
    close = difflib.get_close_matches(str(name).lower(), TASK_TYPES, 1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    return error(
        where,
        f"{quoted(name)} is not a type of task.",
        f"{hint}Use one of {', '.join(TASK_TYPES)}.",
    )


def old_name(where: str) -> Finding:
    """The finding for TensorFlow 1's name of the chief."""
    return warning(
        where,
        '"master" is the name that TensorFlow 1 had for the chief. tfdist reads it as "chief", '
        "TensorFlow 2 refuses it.",
        'Write "chief".',
    )


def names(tasks: Sequence[Task]) -> str:
    """Tasks as text: "worker 0, worker 1"."""
    return ", ".join(str(task) for task in tasks)


def _no_cluster(content: Mapping[str, object], jobs: object) -> Finding:
    problem = f'"cluster" is {quoted(jobs)}.' if "cluster" in content else 'There is no "cluster".'
    close = difflib.get_close_matches("cluster", [str(key) for key in content], 1)
    hint = f'Rename "{close[0]}" to "cluster".' if close and "cluster" not in content else None
    return error(
        CLUSTER,
        f"{problem} Each process would silently train alone, as one replica.",
        hint or f"Write {_EXAMPLE}",
    )


def _read_job(name: str, entries: object) -> tuple[list[Listed], list[Finding]]:
    where = f"{CLUSTER}.{name}"
    kind = type_of(name)
    if kind is None:
        return [], [unknown_type(where, name)]
    findings = [old_name(where)] if name == "master" else []
    if entries in ([], {}):
        # A map may be a part of the tasks, and of no task too. A list is all of them.
        make = warning if entries == {} else error
        remedy = f'List its tasks, or remove "{name}".'
        return [], [*findings, make(where, f"{quoted(entries)} lists no task.", remedy)]
    if not isinstance(entries, list | dict):
        remedy = f"Write {quoted({name: _split(entries)})}, even for one task."
        return [], [*findings, error(where, f"{quoted(entries)} is not a list.", remedy)]
    listed: list[Listed] = []
    for key, text in _numbered(entries):
        place = f"{where}[{key}]"
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
            problem = f'"{key}" is not the number of a task.'
            findings.append(error(place, problem, 'Number the tasks "0", "1", …'))
            continue
        address, mistakes = _read_address(place, text)
        listed.append(Listed(Task(kind, int(key)), place, address))
        findings += mistakes
    return listed, findings


def _split(entries: object) -> list[str]:
    return re.split(r"[\s,;]+", entries.strip()) if isinstance(entries, str) else ["10.0.0.1:12345"]


def _numbered(entries: list[object] | dict[str, object]) -> Iterator[tuple[str, object]]:
    if isinstance(entries, dict):
        yield from entries.items()
    else:
        yield from ((str(index), text) for index, text in enumerate(entries))


def _read_address(where: str, text: object) -> tuple[Address | None, list[Finding]]:
    if not isinstance(text, str):
        return None, [error(where, f"{quoted(text)} is not a string.", 'Write "host:port".')]
    mistake = address_mistake(text)
    if mistake is not None:
        return None, [error(where, *mistake)]
    return Address.parse(text), []


def _too_many(listed: Sequence[Listed]) -> Iterator[Finding]:
    chiefs = [entry for entry in listed if entry.task.type == "chief"]
    if len(chiefs) > 1:
        yield error(
            f"{CLUSTER}.chief",
            f"There are {len(chiefs)} chiefs: {_addresses(chiefs)}. A cluster has one at most.",
            'Move the others to "worker".',
        )
    evaluators = [entry for entry in listed if entry.task.type == "evaluator"]
    if len(evaluators) > 1:
        yield error(
            f"{CLUSTER}.evaluator",
            f"There are {len(evaluators)} evaluators: {_addresses(evaluators)}. TensorFlow allows "
            "one.",
            "Keep one.",
        )


def _addresses(entries: Sequence[Listed]) -> str:
    return ", ".join(f'"{entry.address}"' if entry.address else "…" for entry in entries)


def _duplicates(listed: Sequence[Listed]) -> Iterator[Finding]:
    users: defaultdict[tuple[str, int], list[Listed]] = defaultdict(list)
    for entry in listed:
        if entry.address is not None:
            host = "localhost" if is_loopback(entry.address.host) else entry.address.host.lower()
            users[host, entry.address.port].append(entry)
    for entries in users.values():
        if len(entries) > 1:
            yield error(
                entries[-1].where,
                f'"{entries[-1].address}" is the address of {names([e.task for e in entries])}. '
                "They would wait for each other without end.",
                "Give each task an address of its own; on one machine, a port of its own.",
            )


def _nobody_computes(jobs: Mapping[str, object]) -> Iterator[Finding]:
    kinds = {type_of(name) for name in jobs}
    if "ps" in kinds and not kinds & {"chief", "worker"}:
        yield error(
            CLUSTER,
            f"It lists only {', '.join(jobs)}: no task that computes.",
            'List the tasks that compute as "worker".',
        )
