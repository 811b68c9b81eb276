"""Reads the `cluster` of a TF_CONFIG and finds mistakes in its form."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdist.cluster.spec import TASK_TYPES, Address, ClusterSpec, Task, address_mistake, is_loopback
from tfdist.cluster.validation.finding import Finding, error, quoted, warning

__all__ = ["CLUSTER", "SPARSE", "TASK", "WHOLE", "Listed", "Reading", "names", "read"]

CLUSTER = "TF_CONFIG.cluster"
#: The key of a job operator for the part of the cluster that one task knows.
SPARSE = "sparseCluster"
_CLUSTER_EXAMPLE = '"cluster": {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}'


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


def _read_cluster(content: Mapping[str, object]) -> tuple[tuple[Listed, ...], list[Finding]]:
    """The tasks of a cluster, as far as they can be read, and the mistakes in its form.

    A job operator whose workers may come and go writes `sparseCluster` instead: what one task must
    know of the cluster, which is itself and the servers.
    """
    jobs = content.get("cluster") or _sparse(content)
    if not jobs:
        return (), [_no_cluster(content, content.get("cluster"))]
    if not isinstance(jobs, dict):
        problem = f"{quoted(jobs)} is not an object of task types."
        return (), [error(CLUSTER, problem, f"Write {_CLUSTER_EXAMPLE}")]
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


def _type_of(name: object) -> str | None:
    """The task type that a name stands for; TensorFlow 1 called the chief "master"."""
    if name == "master":
        return "chief"
    return name if isinstance(name, str) and name in TASK_TYPES else None


def _unknown_type(where: str, name: object) -> Finding:
    """The finding for a name that is not a task type."""
    close = difflib.get_close_matches(str(name).lower(), TASK_TYPES, 1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    return error(
        where,
        f"{quoted(name)} is not a type of task.",
        f"{hint}Use one of {', '.join(TASK_TYPES)}.",
    )


def _old_name(where: str) -> Finding:
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
    if isinstance(jobs, dict) and jobs:
        return error(
            CLUSTER,
            f'"cluster" is {quoted(jobs)}, which lists no task. A job operator writes so where '
            "workers come and go.",
            "Have it give each task the whole cluster (enableDynamicWorker: false), or unset "
            "TF_CONFIG to train on this machine alone.",
        )
    problem = f'"cluster" is {quoted(jobs)}.' if "cluster" in content else 'There is no "cluster".'
    close = difflib.get_close_matches("cluster", [str(key) for key in content], 1)
    hint = f'Rename "{close[0]}" to "cluster".' if close and "cluster" not in content else None
    return error(
        CLUSTER,
        f"{problem} Each process would silently train alone, as one replica.",
        hint or f"Write {_CLUSTER_EXAMPLE}",
    )


def _read_job(name: str, entries: object) -> tuple[list[Listed], list[Finding]]:
    where = f"{CLUSTER}.{name}"
    kind = _type_of(name)
    if kind is None:
        return [], [_unknown_type(where, name)]
    findings = [_old_name(where)] if name == "master" else []
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
        key_path = f"{where}[{key}]"
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
            problem = f'"{key}" is not the number of a task.'
            findings.append(error(key_path, problem, 'Number the tasks "0", "1", …'))
            continue
        address, mistakes = _read_address(key_path, text)
        listed.append(Listed(Task(kind, int(key)), key_path, address))
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
    kinds = {_type_of(name) for name in jobs}
    if "ps" in kinds and not kinds & {"chief", "worker"}:
        yield error(
            CLUSTER,
            f"It lists only {', '.join(jobs)}: no task that computes.",
            'List the tasks that compute as "worker".',
        )


# Reads JSON that people, shells and schedulers wrote, and reports quoting damage.

_TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:12345"]}, "task": {"type": "worker", "index": 0}}'
)
_AROUND = 20
_TYPOGRAPHIC_QUOTES = "[\u2018-\u201f]"


def _load(text: str, where: str) -> tuple[object, list[Finding]]:
    """The JSON object in a text, or None if it cannot be read, and the mistakes in the text."""
    if not text.strip():
        return None, [
            error(where, f"{quoted(text)} is empty.", f"Unset it, or give {_TF_CONFIG_EXAMPLE}")
        ]
    doubles: list[str] = []
    try:
        value = json.loads(text, object_pairs_hook=_pairs_hook(doubles))
    except json.JSONDecodeError as problem:
        return None, [_syntax_finding(text, where, problem)]
    except RecursionError:
        return None, [
            error(where, f"{quoted(text)} is nested too deep.", f"Give {_TF_CONFIG_EXAMPLE}")
        ]
    findings = [
        error(where, f'The key "{key}" is given twice; only the last one counts.', "Keep one.")
        for key in dict.fromkeys(doubles)
    ]
    if not isinstance(value, dict):
        return None, [*findings, _not_an_object(value, where)]
    return value, findings


def _pairs_hook(doubles: list[str]) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        counts = Counter(key for key, _ in pairs)
        doubles.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    return build


def _not_an_object(value: object, where: str) -> Finding:
    problem = f"{quoted(value)} is not a JSON object."
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return error(where, f"{problem} It is JSON text inside a JSON string.", "Encode it once.")
    return error(where, problem, f"Give an object, such as {_TF_CONFIG_EXAMPLE}")


def _syntax_finding(text: str, where: str, problem: json.JSONDecodeError) -> Finding:
    position = f"line {problem.lineno}, column {problem.colno}"
    near = " ".join(text[max(0, problem.pos - _AROUND) : problem.pos + _AROUND].split())
    what = f"This is not JSON: {problem.msg} at {position}, near `{near}`."
    return error(where, what, _hint(text.strip(), text, problem.pos))


def _hint(stripped: str, text: str, position: int) -> str:
    """The likely cause of a syntax error and its cure."""
    assignment = re.match(r"(export\s+)?TF_CONFIG\s*=", stripped)
    if assignment:
        return f"Give only what follows the equals sign, without `{assignment[0]}`."
    if stripped[0] == stripped[-1] and stripped[0] in "'\"" and stripped[1:2] == "{":
        return (
            f"The shell's quotes ({stripped[0]}) have become part of the value. Remove them; an "
            "env file takes the value without quotes."
        )
    if re.search(_TYPOGRAPHIC_QUOTES, text):
        return 'It contains typographic quotes. Replace them with plain ones (").'
    if '\\"' in stripped:
        return (
            'Backslashes stand before the quotes. Remove them: write "cluster", not \\"cluster\\".'
        )
    python = _as_python(stripped)
    if python is not None:
        return (
            "This is how Python prints a dictionary. Write it with json.dumps; as JSON it is "
            f"{json.dumps(python)}"
        )
    if text[:position].rstrip().endswith(",") and text[position : position + 1] in ("]", "}"):
        return "Remove the comma before the closing bracket."
    if re.match(r"\{\s*\w+\s*:", stripped):
        return (
            "The double quotes are missing. A shell removes them unless the whole value is in "
            f"single quotes: export TF_CONFIG='{_TF_CONFIG_EXAMPLE}'"
        )
    if not text[position:].strip():
        return "The text ends too early: close each bracket and quote."
    return f"Correct it there. A good one: {_TF_CONFIG_EXAMPLE}"


def _as_python(text: str) -> object:
    """The value of a Python literal that JSON can hold, or None."""
    if not re.search(r"'|\bNone\b|\bTrue\b|\bFalse\b", text):
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


# Reads the `task` of a TF_CONFIG and finds mistakes in its form.

TASK = "TF_CONFIG.task"
_TASK_EXAMPLE = '"task": {"type": "worker", "index": 0}'
#: Keys that people write for "index".
_OTHER_INDICES = ("id", "task_id", "task_index", "rank", "Index")
#: Keys that Google's services add.
_TASK_KEYS = ("type", "index", "trial", "cloud", "environment")


def _read_task(
    content: Mapping[str, object], listed: Sequence[Listed]
) -> tuple[Task | None, list[Finding]]:
    """This process's task, or None if it cannot be read, and the mistakes in its form.

    A missing task is not one: a coordinator or a tool may read a cluster that it is not in.
    """
    task = content.get("task")
    if task is None:
        return None, []
    if not isinstance(task, dict):
        return None, [error(TASK, f"{quoted(task)} is not an object.", f"Write {_TASK_EXAMPLE}")]
    kind, findings = _read_type(task)
    index, mistakes = _read_index(task)
    otherwise = "Remove it, or use type and index."
    findings += [*mistakes, *_unknown_keys(task, _TASK_KEYS, TASK, otherwise)]
    if kind is None or index is None:
        return None, findings
    misplaced = _misplaced(Task(kind, index), listed)
    return Task(kind, index), findings + misplaced


def _read_type(task: Mapping[str, object]) -> tuple[str | None, list[Finding]]:
    where = f"{TASK}.type"
    if "type" not in task:
        return None, [error(where, 'The task has no "type".', f"Write {_TASK_EXAMPLE}")]
    kind = _type_of(task["type"])
    if kind is None:
        return None, [_unknown_type(where, task["type"])]
    return kind, [_old_name(where)] if task["type"] == "master" else []


def _read_index(task: Mapping[str, object]) -> tuple[int | None, list[Finding]]:
    where = f"{TASK}.index"
    if "index" not in task:
        other = next((key for key in _OTHER_INDICES if key in task), None)
        remedy = f'Rename "{other}" to "index".' if other else f"Write {_TASK_EXAMPLE}"
        return None, [error(where, 'The task has no "index".', remedy)]
    index = task["index"]
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index.strip()):
        finding = warning(
            where,
            f"{quoted(index)} is a string. TensorFlow reads it as a number, others may not.",
            f'Write "index": {int(index)}.',
        )
        return int(index), [finding]
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        problem = f"{quoted(index)} is not the number of a task."
        return None, [error(where, problem, "Write a whole number from 0, without quotes.")]
    return index, []


def _unknown_keys(
    content: Mapping[str, object], known: Sequence[str], where: str, otherwise: str
) -> list[Finding]:
    findings = []
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(key.lower(), known, 1)
            remedy = f'Did you mean "{close[0]}"?' if close else otherwise
            problem = f'The key "{key}" means nothing to TensorFlow.'
            findings.append(warning(where, problem, remedy))
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


# Reads a whole TF_CONFIG, as far as it can be read.

WHOLE = "TF_CONFIG"
#: Keys that TensorFlow and Google's services write into a TF_CONFIG.
_KEYS = (
    *("cluster", SPARSE, "task", "environment", "rpc_layer", "session_master", "job"),
    "model_dir",
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The content of a TF_CONFIG.

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
    content, findings = _load(text, WHOLE)
    if not isinstance(content, dict):
        return Reading((), None, False, tuple(findings))
    listed, mistakes = _read_cluster(content)
    task, more = _read_task(content, listed)
    findings += [*_other_keys(content), *mistakes, *more]
    return Reading(listed, task, content.get("task") is not None, tuple(findings))


def _other_keys(content: Mapping[str, object]) -> list[Finding]:
    findings = _unknown_keys(content, _KEYS, WHOLE, "Remove it.")
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
