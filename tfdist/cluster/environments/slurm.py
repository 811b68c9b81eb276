"""A task of a Slurm step: the variables that `srun` sets for each task.

Slurm's variables are those of the manual page of `srun`, "OUTPUT ENVIRONMENT VARIABLES", and of
"Heterogeneous Job Support". A batch script is not a task of a step: `srun` in it starts them.
SLURM_JOB_ID differs for each job of an array (SLURM_ARRAY_JOB_ID does not), so that ports differ
too; see `first_port`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster.environments.base import (
    Absent,
    ProcessContext,
    Roles,
    TaskAssignment,
    assign_rank,
    check_rank,
    first_port,
    number,
    seen,
)
from tfdist.errors import ConfigError

__all__ = ["MOST_HOSTS", "expand", "expand_counts", "resolve"]


# The number of GPUs that each task of a Slurm step has for itself.

#: Lists of the GPUs of this node, such as 0,1,2,3; then their number, such as 4 or a100:4.
_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_NUMBERS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")


def _gpus_each(environ: Mapping[str, str], tasks: int) -> int | None:
    """GPUs of each of the `tasks` that compute on one node; None if not known.

    Collectives need the same number everywhere, so it is that of the node with the most tasks.
    """
    for name in _PER_TASK:
        if environ.get(name):
            each = _counted(environ, name)
            if each:
                return each
    on_node = _on_this_node(environ)
    if not on_node:
        return None
    name, gpus = on_node
    if gpus < tasks:
        raise ConfigError(
            f"{seen(environ, [name])} gives {gpus} GPUs to a node, but {tasks} tasks that compute "
            "are on one. Start fewer tasks on a node, such as srun "
            f"--ntasks-per-node={gpus}, or ask for more GPUs."
        )
    return gpus // tasks


def _on_this_node(environ: Mapping[str, str]) -> tuple[str, int] | None:
    for name in _LISTS:
        if environ.get(name):
            return name, len(_listed(environ, name))
    for name in _NUMBERS:
        if environ.get(name):
            number = _counted(environ, name)
            return (name, number) if number else None
    return None


def _listed(environ: Mapping[str, str], name: str) -> list[int]:
    """GPUs by number; Slurm also writes ranges, such as 0-3."""
    gpus: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(?:[\w.]+:)*([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
        if match is None:
            raise _gpu_mistake(environ, name, "a list of GPUs such as 0,1")
        gpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return gpus


def _counted(environ: Mapping[str, str], name: str) -> int:
    """The GPUs of `2`, `a100:2`, `a100:1,v100:1`, `cpu:4,gres/gpu:a100:2` or `gres/gpu=2`."""
    total = 0
    for part in environ[name].split(","):
        words = re.split("[:=]", part.strip())
        resource = name == "SLURM_TRES_PER_TASK"
        if resource and words[0] not in ("gres/gpu", "gres:gpu", "gpu"):
            continue
        if not re.fullmatch("[0-9]{1,6}", words[-1]):
            raise _gpu_mistake(environ, name, "a number of GPUs such as 2 or a100:2")
        total += int(words[-1])
    return total


def _gpu_mistake(environ: Mapping[str, str], name: str, form: str) -> ConfigError:
    return ConfigError(
        f"{name}={environ[name]!r} is not {form}, as Slurm sets it. Unset it, or start the tasks "
        "with srun."
    )


# Slurm's short forms: lists of hosts such as `n[001-010,12]-ib`, and counts such as `2(x3),1`.
#
# The syntax is that of the manual page of `scontrol`, show hostnames, and of SLURM_TASKS_PER_NODE
# in that of `sbatch`.

#: No cluster has more hosts; a list that is longer has a mistake in it.
MOST_HOSTS = 1 << 20

_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,7})\))?")
_PLAIN = re.compile(r"[^\s,\[\]]*")


def expand(text: str, name: str = "host list") -> list[str]:
    """The hosts of a list in the order in which Slurm counts them.

    Numbers keep their leading zeros: `n[08-10]` is n08, n09, n10. Of several brackets in one name
    the last counts fastest.

    Args:
        text: the list.
        name: the variable that holds it, for messages.

    Raises:
        ConfigError: if it is not of that form.
    """
    problem = f"{name}={text!r} is not a list of hosts"
    hosts: list[str] = []
    for item in _items(text.strip(), problem):
        pieces = [_piece(piece, problem) for piece in re.split(r"(\[[^\[\]]*\])", item)]
        count = 1
        for alternatives in pieces:
            count *= len(alternatives)
        if len(hosts) + count > MOST_HOSTS:
            raise _hostlist_mistake(problem, f"{item!r} makes it longer than {MOST_HOSTS} hosts")
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def expand_counts(text: str, name: str = "counts") -> list[int]:
    """The numbers of a list with repetitions: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ConfigError: if it is not of that form.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item)
        repeated = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeated <= MOST_HOSTS - len(counts):
            raise ConfigError(
                f"{name}={text!r} is not a list of counts: {item!r} is none. Slurm writes it as "
                "2(x3),1. Unset it, or start the tasks with srun."
            )
        counts += [int(match[1])] * repeated
    return counts


def _items(text: str, problem: str) -> Iterator[str]:
    """The items between the commas that are not in brackets."""
    depth = begin = 0
    for end, letter in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if not 0 <= depth <= 1:
            raise _hostlist_mistake(problem, f"the bracket at character {end + 1} has no match")
        if letter == "," and not depth:
            if begin == end:
                raise _hostlist_mistake(problem, f"there is no host before character {end + 1}")
            yield text[begin:end]
            begin = end + 1
    if depth:
        raise _hostlist_mistake(problem, "a bracket is not closed")


def _piece(piece: str, problem: str) -> list[str]:
    """The alternatives of one bracket, or a text outside of brackets as the only one."""
    if not piece.startswith("["):
        if not _PLAIN.fullmatch(piece):
            raise _hostlist_mistake(problem, f"{piece!r} is not part of a name")
        return [piece]
    return [number for part in piece[1:-1].split(",") for number in _numbers(part, problem)]


def _numbers(part: str, problem: str) -> Iterator[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise _hostlist_mistake(problem, f"{part!r} is not a number or a range such as 1-4")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
        raise _hostlist_mistake(
            problem, f"{part!r} does not rise, or is longer than {MOST_HOSTS} hosts"
        )
    for value in range(int(first), int(last) + 1):
        yield str(value).zfill(len(first))


def _hostlist_mistake(problem: str, detail: str) -> ConfigError:
    return ConfigError(
        f"{problem}: {detail}. Slurm writes it as rack[1-2]n[01-04,7]-ib,login. Unset it, or start "
        "the tasks with srun."
    )


_SETTER = "Slurm's srun"
#: Steps from this number on do not run tasks: batch scripts, interactive shells and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Names that Slurm has for one thing in a step, in a job, and in its older versions.
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_GROUPS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
_LEADER = ("SLURM_HET_JOB_ID", "SLURM_PACK_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0")
_ARRAY = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
_OWN = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The hosts of a step's tasks.

    Attributes:
        nodes: the nodes, in Slurm's order.
        by_rank: for each rank the number of its node.
        source: the variable that gives the number of tasks, for messages.
        names: the variables that this is from.
    """

    nodes: Sequence[str]
    by_rank: Sequence[int]
    source: str
    names: tuple[str, ...]


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this process.

    Raises:
        ConfigError: if a variable is missing or cannot be read, or two contradict each other.
    """
    environ = context.environ
    job, step = _set(environ, _JOB), _set(environ, _STEP)
    if job is None:
        return Absent("SLURM_JOB_ID is not set")
    if step is None or number(environ, step, _SETTER) >= _FIRST_SPECIAL_STEP:
        what = seen(environ, [job, *([step] if step else [])])
        return Absent(f"{what}: this process is none of a step's tasks. Start it with srun")
    layout = _layout(environ)
    rank = number(environ, _needed(environ, _OWN[:1]), _SETTER)
    check_rank(rank, len(layout.by_rank), f"SLURM_PROCID={rank}", layout.source)
    _check_own(environ, layout, rank)
    leader = _set(environ, _LEADER) if _groups(environ) > 1 else None
    port = context.port or first_port(
        number(environ, leader or job, _SETTER),
        number(environ, step, _SETTER),
        max(Counter(layout.by_rank).values()),
        seen(environ, layout.names),
    )
    return assign_rank(
        context,
        environment="slurm",
        reason=seen(environ, (job, step, *_ARRAY, *_OWN, *layout.names)),
        source=layout.source,
        hosts=[layout.nodes[node] for node in layout.by_rank],
        rank=rank,
        first_port=port,
        devices=_devices(environ, layout, context.roles),
    )


def _layout(environ: Mapping[str, str]) -> _Layout:
    tasks = _needed(environ, _TASKS)
    size = number(environ, tasks, _SETTER, least=1)
    if _groups(environ) > 1:
        spanning = _layout_of_groups(environ, size)
        if spanning is not None:
            return spanning
    nodes, per_node = _needed(environ, _NODES), _needed(environ, _PER_NODE)
    names = (tasks, nodes, per_node)
    hosts, counts = expand(environ[nodes], nodes), expand_counts(environ[per_node], per_node)
    if len(hosts) != len(counts):
        raise ConfigError(
            f"{nodes}={environ[nodes]!r} lists {len(hosts)} hosts, but "
            f"{per_node}={environ[per_node]!r} counts tasks for {len(counts)}. "
            f"{_remedy(environ)}"
        )
    if sum(counts) != size:
        raise ConfigError(
            f"{per_node}={environ[per_node]!r} adds up to {sum(counts)} tasks, but {tasks} is "
            f"{size}. {_remedy(environ)}"
        )
    return _Layout(hosts, _dealt(environ, counts), f"{tasks}={size}", names)


def _layout_of_groups(environ: Mapping[str, str], size: int) -> _Layout | None:
    """The layout of a step that spans all groups of a heterogeneous job; None if it does not."""
    hosts: list[str] = []
    by_rank: list[int] = []
    names: list[str] = []
    for group in range(_groups(environ)):
        nodes = _set(environ, [f"{name}_HET_GROUP_{group}" for name in reversed(_NODES)])
        per_node = _set(environ, [f"{name}_HET_GROUP_{group}" for name in _PER_NODE])
        if nodes is None or per_node is None:
            return None
        listed, counts = expand(environ[nodes], nodes), expand_counts(environ[per_node], per_node)
        if len(listed) != len(counts):
            return None
        by_rank += [len(hosts) + node for node in _dealt(environ, counts)]
        hosts += listed
        names += [nodes, per_node]
    if len(by_rank) != size:
        return None
    source = f"{_needed(environ, _TASKS)}={size}"
    return _Layout(hosts, by_rank, source, (_GROUPS[0], *names))


def _dealt(environ: Mapping[str, str], counts: Sequence[int]) -> list[int]:
    """The node of each rank, as `--distribution` deals ranks out to nodes."""
    text = environ.get("SLURM_DISTRIBUTION", "block")
    way, _, plane = text.split(":")[0].split(",")[0].partition("=")
    several = [count for count in counts if count > 1]
    if way == "block" or not several or len(counts) == 1:
        return [node for node, count in enumerate(counts) for _ in range(count)]
    if way == "plane":
        size = plane or environ.get("SLURM_DIST_PLANESIZE", "")
    else:
        size = "1" if way == "cyclic" else ""
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(
            f"SLURM_DISTRIBUTION={text!r} does not tell which task is on which node. Start with "
            "srun --distribution=block or cyclic, or name a host file in that order."
        )
    left, by_rank = dict(enumerate(counts)), []
    while left:
        for node in list(left):
            taken = min(int(size), left[node])
            by_rank += [node] * taken
            left[node] -= taken
            if not left[node]:
                del left[node]
    return by_rank


def _check_own(environ: Mapping[str, str], layout: _Layout, rank: int) -> None:
    """Compares this task's node, and its number there, with those that follow from its rank."""
    node = layout.by_rank[rank]
    follows = {"SLURM_LOCALID": list(layout.by_rank[:rank]).count(node)}
    if _groups(environ) < 2:  # Nodes of groups may be counted in each group.
        follows["SLURM_NODEID"] = node
    for name, value in follows.items():
        if name in environ and number(environ, name, _SETTER) != value:
            way = environ.get("SLURM_DISTRIBUTION", "block")
            raise ConfigError(
                f"{name}={environ[name]} of task SLURM_PROCID={rank} should be {value} by "
                f"{seen(environ, layout.names)} and SLURM_DISTRIBUTION={way}. "
                f"{_remedy(environ)}"
            )


def _devices(environ: Mapping[str, str], layout: _Layout, roles: Roles) -> int | None:
    counts = roles.counts(len(layout.by_rank), layout.source)
    computing = counts.get("chief", 0) + counts.get("worker", 0)
    most = max(Counter(layout.by_rank[:computing]).values())
    return _gpus_each(environ, most)


def _groups(environ: Mapping[str, str]) -> int:
    name = _set(environ, _GROUPS)
    return number(environ, name, _SETTER) if name is not None else 1


def _set(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of several names that is set."""
    return next((name for name in names if environ.get(name)), None)


def _needed(environ: Mapping[str, str], names: Sequence[str]) -> str:
    name = _set(environ, names)
    if name is None:
        known = seen(environ, (*_JOB, *_STEP, *_OWN))
        missing = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
        raise ConfigError(
            f"{known}: this is a task of Slurm, but {missing} is {'not ' * (len(names) == 1)}set. "
            f"{_remedy(environ)}"
        )
    return name


def _remedy(environ: Mapping[str, str]) -> str:
    if _groups(environ) > 1:
        return (
            f"The job is heterogeneous ({seen(environ, _GROUPS)}): start tasks in one group, such "
            "as srun --het-group=0, or in all of them from the batch script, such as "
            "srun --het-group=0-1, or name a host file or set TF_CONFIG."
        )
    return "Start the tasks with srun and leave its variables as they are, or set TF_CONFIG."
