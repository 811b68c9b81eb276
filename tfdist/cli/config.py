"""`tfdist config`: writes TF_CONFIG for every task of a cluster, or shows which task this is."""

from __future__ import annotations

import enum
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist import environment as variables
from tfdist.cluster import tf_config
from tfdist.cluster.environments import detection, hostfile
from tfdist.cluster.environments.base import (
    DEFAULT_PORT,
    Absent,
    ProcessContext,
    Roles,
    TaskAssignment,
    addresses,
)
from tfdist.cluster.spec import Address, ClusterSpec, Task
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.errors import ConfigError

__all__ = ["config"]


class _Format(enum.StrEnum):
    """The forms of a TF_CONFIG."""

    JSON = "json"
    EXPORT = "export"
    KUBERNETES = "kubernetes"


_BY_HOSTS = {"rich_help_panel": "A cluster by its hosts"}
_BY_ADDRESSES = {"rich_help_panel": "A cluster by its addresses"}
_DETECTION = {"rich_help_panel": "This process"}

_Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="a:2,b:2", help="Hosts with their numbers of tasks.", **_BY_HOSTS
    ),
]
_Hostfile = Annotated[
    Path | None,
    typer.Option(
        "--hostfile", metavar="PATH", help="A file of hosts: lines of `a slots=2`.", **_BY_HOSTS
    ),
]
_Chief = Annotated[bool, typer.Option("--chief", help="The first task is chief.", **_BY_HOSTS)]
_Ps = Annotated[int, typer.Option("--ps", help="So many of the last are ps.", **_BY_HOSTS)]
_Evaluator = Annotated[
    bool, typer.Option("--evaluator", help="The very last task is evaluator.", **_BY_HOSTS)
]
_Port = Annotated[
    int | None,
    typer.Option(
        "--port", help="First port on each host.", show_default=str(DEFAULT_PORT), **_BY_HOSTS
    ),
]
_Worker = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="host:port",
        help="A worker's address; again for each, or several with commas.",
        **_BY_ADDRESSES,
    ),
]
_PsHost = Annotated[
    list[str] | None,
    typer.Option("--ps-host", metavar="host:port", help="A ps's address.", **_BY_ADDRESSES),
]
_ChiefHost = Annotated[
    list[str] | None,
    typer.Option("--chief-host", metavar="host:port", help="The chief's.", **_BY_ADDRESSES),
]
_EvaluatorHost = Annotated[
    list[str] | None,
    typer.Option("--evaluator-host", metavar="host:port", help="The evaluator's.", **_BY_ADDRESSES),
]
_Only = Annotated[
    str | None,
    typer.Option("--task", metavar="TYPE:INDEX", help="Only this task's, such as worker:0."),
]
_Form = Annotated[
    _Format | None,
    typer.Option(
        "--format",
        help="One line of JSON for each task, lines for a shell, or the env of a container.",
        show_default="json",
    ),
]
_Detect = Annotated[
    bool,
    typer.Option("--detect", help="Say who this process is, and why.", **_DETECTION),
]
_Environment = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="NAME",
        help=f"Ask this one alone: {', '.join(detection.ENVIRONMENTS)}.",
        **_DETECTION,
    ),
]


def config(
    hosts: _Hosts = None,
    hosts_file: _Hostfile = None,
    chief: _Chief = False,
    ps: _Ps = 0,
    evaluator: _Evaluator = False,
    port: _Port = None,
    worker: _Worker = None,
    ps_host: _PsHost = None,
    chief_host: _ChiefHost = None,
    evaluator_host: _EvaluatorHost = None,
    only: _Only = None,
    form: _Form = None,
    detect: _Detect = False,
    environment: _Environment = None,
) -> None:
    """Write TF_CONFIG for every task of a cluster, or say who this process is.

    Copy and paste: two workers on host a, a worker and a ps on host b.

    tfdist config --hosts a:2,b:2 --ps 1 --format export

    Ranks go host after host; the first is the chief if asked for, the last are ps. To set the
    TF_CONFIG of one task in a shell:

    export TF_CONFIG="$(tfdist config --worker a:2222,b:2222 --task worker:0)"

    In a job of Slurm, Kubernetes, mpirun and others, this says which task a process is:

    tfdist config --detect
    """
    roles = Roles(chief=chief, ps=ps, evaluator=int(evaluator))
    listed = {"chief": chief_host, "worker": worker, "ps": ps_host, "evaluator": evaluator_host}
    described = {"--hosts": hosts, **{_flag(kind): value for kind, value in listed.items()}}
    _check_one(detect, environment, described, hosts_file, roles, port)
    if detect:
        context = ProcessContext(
            environ=variables.snapshot(),
            hostname=socket.gethostname(),
            hostfile=hosts_file,
            roles=roles,
            port=port,
        )
        _show_assignment(context, environment, form, only)
        return
    if any(listed.values()):
        cluster = _of_addresses(listed)
    else:
        cluster = _of_hosts(hosts, hosts_file, roles, DEFAULT_PORT if port is None else port)
    _print(cluster, form or _Format.JSON, only)


def _flag(kind: str) -> str:
    return "--worker" if kind == "worker" else f"--{kind}-host"


def _check_one(
    detect: bool,
    environment: str | None,
    described: dict[str, str | list[str] | None],
    hosts_file: Path | None,
    roles: Roles,
    port: int | None,
) -> None:
    """Refuses no description of a cluster, and more than one."""
    flags = [name for name, value in described.items() if value]
    by_address = [name for name in flags if name != "--hosts"]
    if environment is not None and not detect:
        raise ConfigError(
            f"--environment {environment} says whom --detect asks. Add --detect, or leave it out."
        )
    if detect and flags:
        raise ConfigError(
            f"--detect says who this process is; {flags[0]} describes another cluster. Give one of "
            "them."
        )
    if not detect and not flags and hosts_file is None:
        raise ConfigError(
            "No cluster is described. Give its hosts, such as --hosts a:2,b:2, or its addresses, "
            "such as --worker a:2222,b:2222, or ask who this process is: --detect."
        )
    if (hosts_file is not None and flags) or (by_address and len(by_address) < len(flags)):
        names = [*flags, *(["--hostfile"] if hosts_file is not None else [])]
        raise ConfigError(f"{' and '.join(names)} describe the cluster twice. Give one of them.")
    if by_address and (roles != Roles() or port is not None):
        raise ConfigError(
            f"--chief, --ps, --evaluator and --port go with --hosts; {by_address[0]} gives whole "
            "addresses. Give those of other tasks with --chief-host, --ps-host and "
            "--evaluator-host."
        )


def _of_addresses(listed: dict[str, list[str] | None]) -> ClusterSpec:
    parts = {
        kind: tuple(Address.parse(one) for entry in entries or () for one in entry.split(","))
        for kind, entries in listed.items()
    }
    return ClusterSpec(parts)


def _of_hosts(hosts: str | None, path: Path | None, roles: Roles, port: int) -> ClusterSpec:
    slots = hostfile.parse_list(hosts) if hosts is not None else hostfile.read(path or Path())
    source = f"--hosts {hosts}" if hosts is not None else f"--hostfile {path}"
    by_rank = [host for host, count in slots.items() for _ in range(count)]
    return roles.cluster(addresses(by_rank, port, source), source)


def _print(cluster: ClusterSpec, form: _Format, only: str | None) -> None:
    """Prints the texts of all tasks, or of one."""
    task = _named(cluster, only) if only is not None else None
    first = True
    for each, text in tf_config.texts(cluster):
        if first:
            parse_tf_config(text)  # Finds mistakes in the cluster itself, such as duplicates.
            _warn_of_length(text, form)
            first = False
        if task is None or task == each:
            print(tf_config.written(each, text, form.value))


def _named(cluster: ClusterSpec, name: str) -> Task:
    kind, _, index = name.partition(":")
    task = Task(kind, int(index)) if index.isdecimal() else None
    if task is None or task not in (each for each, _ in cluster.tasks()):
        counts = [f"{k}:0 to {k}:{len(a) - 1}" for k, a in cluster.addresses.items()]
        raise ConfigError(
            f"--task {name} is not a task of the cluster. Give one of {', '.join(counts)}."
        )
    return task


def _warn_of_length(text: str, form: _Format) -> None:
    length = len(text.encode())
    if length > tf_config.LONGEST_VARIABLE and form != _Format.JSON:
        print(
            f"tfdist: this TF_CONFIG has {length} bytes. Linux starts no program with a variable "
            f"of more than {tf_config.LONGEST_VARIABLE}. Let each task detect its place instead.",
            file=sys.stderr,
        )


def _show_assignment(
    context: ProcessContext, environment: str | None, form: _Format | None, only: str | None
) -> None:
    if only is not None:
        raise ConfigError(f"--task {only} conflicts with --detect, which finds out the task.")
    if form is None:
        console = Console()
        console.print(_table(detection.survey(context)))
        console.print(_described(detection.detect(context, environment)))
        return
    assignment = detection.detect(context, environment)
    if assignment.cluster is None or assignment.task is None:
        raise ConfigError(
            f"This process is {assignment}, and no variable tells the addresses that a TF_CONFIG "
            "needs. `tfdist run` finds them by itself where mpirun or horovodrun has started it."
        )
    text = assignment.cluster.tf_config(assignment.task)
    print(tf_config.written(assignment.task, text, form.value))


def _table(sightings: Sequence[detection.Sighting]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("environment", no_wrap=True)
    table.add_column("task", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    detected = [each for each in sightings if isinstance(each.answer, TaskAssignment)]
    for sighting in sightings:
        answer = sighting.answer
        if sighting.detector.name == "local" and len(detected) > 1:
            row = (Text("-", "dim"), Text("another is found", "dim"))
        elif isinstance(answer, TaskAssignment):
            task = Text(str(answer.task or "?"), "green")
            row = (task, Text(f"{answer.reason}; {answer.counted}"))
        elif isinstance(answer, Absent):
            row = (Text("-", "dim"), Text(answer.reason, "dim"))
        else:
            row = (Text("mistake", "bold red"), Text(str(answer)))
        table.add_row(Text(sighting.detector.name), *row)
    return table


def _described(assignment: TaskAssignment) -> Text:
    lines = [
        f"This process is {assignment.task or 'no task'} of {assignment.counted}, "
        f"by {assignment.environment}."
    ]
    if assignment.cluster is not None and assignment.task is not None:
        listed = dict(assignment.cluster.tasks())
        where = listed.get(assignment.task)
        chief = assignment.cluster.chief
        if where is not None:
            lines.append(f"Its address is {where}; {chief} is at {listed[chief]}.")
    if assignment.gathers:
        lines.append("No variable tells the addresses: the tasks ask each other when they start.")
    if assignment.devices is not None:
        lines.append(f"GPUs of each task that computes: {assignment.devices}.")
    return Text("\n".join(lines), "bold")
