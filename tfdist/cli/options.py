"""The options of `tfdist run`, each with its help text."""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist.cluster.environments.detection import ENVIRONMENTS
from tfdist.config.option import Option
from tfdist.config.strategy_config import STRATEGIES, all_options

# The options of engines on the command line, each with its help text.

#: Their place in the help.
_ENGINES: dict[str, Any] = {"rich_help_panel": "Engines that start the job (--on)"}

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help="What starts the tasks: local, ssh, slurm, mpi, kubernetes or ray.",
        show_default="ssh with --hosts, else local",
        **_ENGINES,
    ),
]

EngineArgs = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Arguments of srun, sbatch, mpirun or kubectl, as '--partition=long --time=60'.",
        **_ENGINES,
    ),
]

GpusPerTask = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="GPUs that the engine gives each task that trains.",
        show_default="none asked for",
        **_ENGINES,
    ),
]

Image = Annotated[
    str | None,
    typer.Option(help="Container image of Kubernetes and Compose.", **_ENGINES),
]

Namespace = Annotated[
    str | None,
    typer.Option(help="Kubernetes' namespace.", show_default="the context's", **_ENGINES),
]

JobName = Annotated[
    str | None,
    typer.Option(help="What the engine calls the job.", show_default="SCRIPT's", **_ENGINES),
]

Manifest = Annotated[
    str | None,
    typer.Option(
        help="With kubernetes: plain (indexed Job, StatefulSet, headless service), tfjob "
        "(Kubeflow), or compose (Docker Compose; printed only).",
        show_default="plain",
        **_ENGINES,
    ),
]

Detach = Annotated[
    bool | None,
    typer.Option("--detach", help="With slurm and kubernetes: return when submitted.", **_ENGINES),
]

#: The options of engines; None or False if one is not given.
OF_ENGINES: dict[str, Any] = {
    "on": On,
    "engine_args": EngineArgs,
    "gpus_per_task": GpusPerTask,
    "image": Image,
    "namespace": Namespace,
    "job_name": JobName,
    "manifest": Manifest,
    "detach": Detach,
}

#: The place in the help of options of elastic jobs.
_ELASTIC: dict[str, Any] = {"rich_help_panel": "Elastic jobs (horovod, multi_worker)"}

#: The place in the help of options of jobs on several machines.
_SSH: dict[str, Any] = {"rich_help_panel": "Several machines"}

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The Keras 3 script, or with -m the module.")
]

Module = Annotated[
    bool,
    typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for `python -m`."),
]

Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script, whatever they look like."),
]


def starting(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes the beginning of one of these words in a shell."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def _flag(option: Option) -> Any:
    """The flag of a strategy's option; None if it is not given."""
    about = option.about
    words = ("auto", *STRATEGIES) if option.name == "strategy" else option.choices
    flags = list(option.flags)
    if option.kind is bool:  # A strategy file may switch it on.
        flags[0] += f"/--no-{flags[0].removeprefix('--')}"
    described = typer.Option(
        *flags,
        help=about.help,
        show_default=option.shown or False,
        metavar=about.metavar,
        rich_help_panel=about.panel,
        autocompletion=starting(words) if words else None,
    )
    return Annotated[option.kind | None, described]  # type: ignore[name-defined]


_QUOTES = "'\""
#: A value as Python or TOML writes it; there is no flag for False.
_VALUE = r"""('[^']*'|"[^"]*"|[Tt]rue|-?\d[\d.]*(?:e[+-]?\d+)?(?<![.]))"""


def in_flags(message: str, written: Collection[str] = ()) -> str:
    """A message about the options of strategies in the words of the command line.

    Args:
        message: the text, with options as in Python: `zero=2`, `mode='stale'`, "leave seed out".
        written: the options whose values stand in a strategy file: these stay as they are.
    """
    flags = {name: each.flags[0] for name, each in all_options().items() if name not in written}
    if not flags:
        return message
    names = "|".join(flags)
    before = rf"\b([Ll]eave|[Uu]nknown|needs) ({names})\b(?! ?=)"
    message = re.sub(before, lambda m: f"{m[1]} {flags[m[2]]}", message)
    message = re.sub(rf"^({names})(?= has )", lambda m: flags[m[1]], message)
    return re.sub(rf"\b({names}) ?= ?{_VALUE}", lambda m: _as_typed(flags[m[1]], m[2]), message)


def _as_typed(flag: str, value: str) -> str:
    if value in ("True", "true"):
        return flag
    return f"{flag} {shlex.quote(value.strip(_QUOTES))}"


#: The options of strategies by name.
_OF_STRATEGY = {name: _flag(option) for name, option in all_options().items()}

Strategy = _OF_STRATEGY.pop("strategy")

Grace = Annotated[
    float, typer.Option(min=0, help="Seconds between TERM and KILL for the others of a failure.")
]

LogDir = Annotated[
    Path | None,
    typer.Option(help="Directory of the log files.", show_default="tfdist-logs/TIME-PID"),
]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan, with --zero and --mesh the layouts.")
]

AsJson = Annotated[
    bool, typer.Option("--json", help="With --dry-run: print the plan as JSON, for programs.")
]

EnvOnly = Annotated[
    bool, typer.Option("--env-only", help="Only set TF_CONFIG: SCRIPT makes its own strategy.")
]

MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="How often a failed job, or a worker that died, is started again. The script resumes "
        "by its own checkpoints.",
    ),
]

MinNp = Annotated[
    int | None,
    typer.Option(
        "--min-np", help="Fewest processes; below, the job waits.", show_default="1", **_ELASTIC
    ),
]

MaxNp = Annotated[
    int | None,
    typer.Option(
        "--max-np",
        help="Most processes. A lost one is replaced, or the others go on: `fit` resumes at its "
        "step.",
        **_ELASTIC,
    ),
]

HostDiscoveryScript = Annotated[
    Path | None,
    typer.Option(
        help="A program that prints how many processes may run now, as localhost:4.", **_ELASTIC
    ),
]

ElasticTimeout = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for --min-np processes.", **_ELASTIC)
]

Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="a:2,b:2",
        help="Start the processes on these machines by ssh, each with so many slots.",
        **_SSH,
    ),
]

Hostfile = Annotated[
    Path | None,
    typer.Option(help="The same from a file of lines such as `a slots=2`.", **_SSH),
]

SshArgs = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Arguments of ssh, as '-p 2222'.", **_SSH)
]

RemotePython = Annotated[
    str | None,
    typer.Option(help="The interpreter on the hosts.", show_default="this one's path", **_SSH),
]

Environment = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"What started this process: {', '.join(ENVIRONMENTS)}.",
        show_default="found out",
        **_SSH,
    ),
]

EveryTask = Annotated[
    bool,
    typer.Option(
        "--every-task",
        help="Between-graph programs: each of -n workers and --ps servers runs SCRIPT itself, with "
        "TF_CONFIG set. With -s parameter_server the first is the chief, as Estimators need it.",
    ),
]

Evaluator = Annotated[
    bool,
    typer.Option(
        "--evaluator",
        help="Estimators on parameter_server: one more task evaluates checkpoints and exports.",
    ),
]

TaskFlags = Annotated[
    bool,
    typer.Option(
        "--task-flags",
        help="With --every-task: append --job_name, --task_index, --ps_hosts and --worker_hosts.",
    ),
]


def with_all(command: Callable[..., None]) -> Callable[..., None]:
    """A command that also takes the options of strategies and engines, in `context.params`.

    Args:
        command: takes `context`, its own options, and further options by name.
    """
    return _with(OF_ENGINES, "environment", _with(_OF_STRATEGY, "strategy", command))


def _with(table: dict[str, Any], after: str, command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a table behind one of its own."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    position = 1 + [each.name for each in named].index(after)
    added = [
        inspect.Parameter(name, named[0].kind, default=None, annotation=kind)
        for name, kind in table.items()
    ]
    taken = [*named[:position], *added, *named[position:]]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    wrapper.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in taken}
    return wrapper
