"""A task of an IBM Spectrum LSF job, started by `jsrun` or `blaunch`.

The hosts are in the file LSB_DJOB_RANKFILE, one line for each slot, or in LSB_MCPU_HOSTS, as in
`hosta 4 hostb 4`. (IBM Spectrum LSF, "Environment variables set for job execution".)

- `jsrun` numbers its tasks in JSM_NAMESPACE_RANK and JSM_NAMESPACE_SIZE. The first host of the job
  is then often a launch node without tasks. If each host has as many tasks as this one, and this
  host is where its rank would be, the addresses follow; else the tasks have to ask each other by
  MPI.
- `blaunch` numbers its tasks in LSF_PM_TASKID, from 1, one on each slot.

Ports follow from LSB_JOBID and, in a job array, LSB_JOBINDEX; see `first_port`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.cluster.environments.base import (
    Absent,
    ProcessContext,
    TaskAssignment,
    assign_rank,
    check_rank,
    first_port,
    number,
    same_host,
    seen,
)
from tfdist.errors import ConfigError

__all__ = ["resolve"]

_JOB, _INDEX, _BLAUNCH = "LSB_JOBID", "LSB_JOBINDEX", "LSF_PM_TASKID"
_RANK, _SIZE = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
_RANKFILE, _MCPU = "LSB_DJOB_RANKFILE", "LSB_MCPU_HOSTS"
_NAMES = (_JOB, _INDEX, _RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _BLAUNCH, _RANKFILE, _MCPU)
_REMEDY = "Start the tasks with jsrun or blaunch and leave their variables as they are."


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this process.

    Raises:
        ConfigError: if a variable is missing or cannot be read, or two contradict each other.
    """
    environ = context.environ
    if not environ.get(_JOB):
        return Absent(f"{_JOB} is not set")
    if environ.get(_RANK):
        return _of_jsrun(context)
    if environ.get(_BLAUNCH):
        return _of_blaunch(context)
    return Absent(
        f"{seen(environ, [_JOB])} is set, but neither {_RANK} nor {_BLAUNCH}: this process is none "
        "of a job's tasks. Start it with jsrun or blaunch"
    )


def _of_jsrun(context: ProcessContext) -> TaskAssignment:
    environ = context.environ
    for name in (_SIZE, _LOCAL_RANK, _LOCAL_SIZE):
        if not environ.get(name):
            raise ConfigError(f"{seen(environ, [_RANK])} is set, but {name} is not. {_REMEDY}")
    rank, local_rank = number(environ, _RANK, "jsrun"), number(environ, _LOCAL_RANK, "jsrun")
    size, local = (number(environ, name, "jsrun", least=1) for name in (_SIZE, _LOCAL_SIZE))
    source = f"{_SIZE}={size}"
    check_rank(rank, size, f"{_RANK}={rank}", source)
    hosts = list(dict.fromkeys(_slots(environ)))
    used = _used(hosts, size, local)
    if used and local_rank == rank % local and same_host(used[rank // local], context.hostname):
        return _assigned(context, [host for host in used for _ in range(local)], rank, source)
    return TaskAssignment(
        environment="lsf",
        reason=f"{seen(environ, _NAMES)}, which do not tell which task is on which host",
        counts=context.roles.counts(size, source),
        task=context.roles.task(rank, size, source),
    )


def _used(hosts: Sequence[str], size: int, local: int) -> Sequence[str]:
    """The hosts that have tasks, if each has as many: all, or all but the launch node."""
    if size % local:
        return ()
    return {len(hosts): hosts, len(hosts) - 1: hosts[1:]}.get(size // local, ())


def _of_blaunch(context: ProcessContext) -> TaskAssignment:
    environ = context.environ
    slots = _slots(environ)
    rank = number(environ, _BLAUNCH, "blaunch", least=1) - 1
    source = f"{_RANKFILE if environ.get(_RANKFILE) else _MCPU}={len(slots)} slots"
    check_rank(rank, len(slots), f"{_BLAUNCH}={rank + 1}, counted from 1,", source)
    if context.hostname and not same_host(slots[rank], context.hostname):
        raise ConfigError(
            f"{_BLAUNCH}={rank + 1} is the task of host {slots[rank]!r} by {source}, but this host "
            f"is {context.hostname!r}. Let blaunch start one task on each slot of the job, or name "
            "a host file."
        )
    return _assigned(context, slots, rank, source)


def _assigned(
    context: ProcessContext, hosts: Sequence[str], rank: int, source: str
) -> TaskAssignment:
    environ = context.environ
    array = number(environ, _INDEX, "LSF") if environ.get(_INDEX) else 0
    most = max(Counter(hosts).values())
    return assign_rank(
        context,
        environment="lsf",
        reason=seen(environ, _NAMES),
        source=source,
        hosts=hosts,
        rank=rank,
        first_port=context.port or first_port(number(environ, _JOB, "LSF"), array, most, source),
    )


def _slots(environ: Mapping[str, str]) -> list[str]:
    """The host of each slot of the job, in LSF's order."""
    path, text = environ.get(_RANKFILE), environ.get(_MCPU)
    if path:
        try:
            slots = Path(path).read_text().split()
        except OSError as error:
            if not text:
                raise ConfigError(
                    f"{_RANKFILE}={path!r} cannot be read: {error.strerror}, and {_MCPU} is not "
                    "set. Make the job's directory readable on all hosts."
                ) from error
        else:
            if slots:
                return slots
    words = (text or "").split()
    counts = words[1::2]
    if not words or len(words) % 2 or not all(word.isdecimal() for word in counts):
        raise ConfigError(
            f"{_MCPU}={text!r} is not a list of hosts and numbers such as 'hosta 4 hostb 4', and "
            f"{_RANKFILE}={path!r} lists none. {_REMEDY}"
        )
    return [
        host for host, count in zip(words[::2], map(int, counts), strict=True) for _ in range(count)
    ]
