"""The options of `tfdist run`, each with its help text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist.cluster.environments.detection import ENVIRONMENTS
from tfdist.config import COMMUNICATIONS, MODES, STRATEGIES
from tfdist.horovod_options import COMPRESSIONS, DEFAULT_CYCLE_MS, REDUCTIONS
from tfdist.server_options import ON_STALE, WIRE_DTYPES

#: Where the help shows the options of `parameter_server`.
_SERVERS: dict[str, Any] = {"rich_help_panel": "Options of parameter_server"}

#: Where the help shows the options of `horovod`.
_HOROVOD: dict[str, Any] = {"rich_help_panel": "Options of horovod"}

#: Where the help shows the options of elastic jobs.
_ELASTIC: dict[str, Any] = {"rich_help_panel": "Elastic jobs (horovod, multi_worker)"}

#: Where the help shows the options of jobs on several machines.
_SSH: dict[str, Any] = {"rich_help_panel": "Several machines"}

#: Where the help shows the options of engines.
_ENGINES: dict[str, Any] = {"rich_help_panel": "Engines that start the job (--on)"}

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The Keras 3 script.")]

Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script, whatever they look like."),
]

Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        metavar="NAME|FILE",
        help=f"auto, {', '.join(STRATEGIES)}, or a TOML file of options.",
        show_default="auto",
    ),
]

Processes = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--processes",
        help="Processes; workers of parameter_server; devices of mirrored's one process.",
    ),
]

Devices = Annotated[
    int | None,
    typer.Option(help="GPUs of each process, or CPU devices where there are no GPUs."),
]

Mode = Annotated[
    str | None,
    typer.Option(
        help="When a gradient becomes an update: "
        f"{', '.join(dict.fromkeys(mode for modes in MODES.values() for mode in modes))}.",
        show_default="sync",
    ),
]

Communication = Annotated[
    str | None, typer.Option(help=f"{', '.join(COMMUNICATIONS)}.", show_default="auto")
]

Seed = Annotated[int | None, typer.Option(help="Seed of all processes.", show_default="drawn")]

StartTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds until all processes must have joined.", show_default="60"),
]

Grace = Annotated[
    float, typer.Option(min=0, help="Seconds between TERM and KILL for the others of a failure.")
]

LogDir = Annotated[
    Path | None,
    typer.Option(help="Directory of the log files.", show_default="tfdist-logs/TIME-PID"),
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan, start nothing.")]

EnvOnly = Annotated[
    bool, typer.Option("--env-only", help="Only set TF_CONFIG: SCRIPT makes its own strategy.")
]

Ps = Annotated[
    int | None,
    typer.Option(
        "--ps",
        help="Parameter servers, besides -n workers and a chief.",
        show_default="1",
        **_SERVERS,
    ),
]

Staleness = Annotated[
    int | None,
    typer.Option(
        help="With --mode stale: updates that may come between a gradient's read of the weights "
        "and its own.",
        **_SERVERS,
    ),
]

OnStale = Annotated[
    str | None,
    typer.Option(
        help="; ".join(f"{name}: {what}" for name, what in ON_STALE.items()) + ".",
        show_default="wait",
        **_SERVERS,
    ),
]

BackupWorkers = Annotated[
    int | None,
    typer.Option(
        help="With --mode sync: gradients of an update that need not be waited for.",
        show_default="0",
        **_SERVERS,
    ),
]

WireDtype = Annotated[
    str | None,
    typer.Option(
        help=f"Type in which weights and gradients are sent: {', '.join(WIRE_DTYPES)}.",
        show_default="float32",
        **_SERVERS,
    ),
]

MinShardBytes = Annotated[
    int | None,
    typer.Option(
        help="Least size of a part of a split variable.", show_default="1 MiB", **_SERVERS
    ),
]

MaxShards = Annotated[
    int | None,
    typer.Option(help="Most parts of a variable.", show_default="as many as servers", **_SERVERS),
]

Compression = Annotated[
    str | None,
    typer.Option(
        help="; ".join(f"{name}: gradients travel {what}" for name, what in COMPRESSIONS.items())
        + ".",
        show_default="none",
        **_HOROVOD,
    ),
]

Reduction = Annotated[
    str | None,
    typer.Option(
        help="What the gradients become: "
        + "; ".join(f"{name}: {what}" for name, what in REDUCTIONS.items())
        + ".",
        show_default="mean",
        **_HOROVOD,
    ),
]

Groups = Annotated[
    int | None,
    typer.Option(
        help="Groups of gradients; each is exchanged as soon as it is complete.",
        show_default="1",
        **_HOROVOD,
    ),
]

FusionMb = Annotated[
    float | None,
    typer.Option(
        "--fusion-mb",
        help="MiB of tensors that are sent as one (HOROVOD_FUSION_THRESHOLD).",
        show_default="128",
        **_HOROVOD,
    ),
]

CycleMs = Annotated[
    float | None,
    typer.Option(
        "--cycle-ms",
        help="Milliseconds between two looks for tensors that are ready (HOROVOD_CYCLE_TIME).",
        show_default=str(DEFAULT_CYCLE_MS),
        **_HOROVOD,
    ),
]

Hierarchical = Annotated[
    bool | None,
    typer.Option(
        "--hierarchical",
        help="All-reduce within each host first, by NCCL, then between the hosts.",
        show_default=False,
        **_HOROVOD,
    ),
]

Autotune = Annotated[
    bool | None,
    typer.Option(
        "--autotune",
        help="Let Horovod try out its settings while it trains.",
        show_default=False,
        **_HOROVOD,
    ),
]

Timeline = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write Horovod's timeline, for chrome://tracing.", **_HOROVOD
    ),
]

StallTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that a tensor may wait for a rank before the job ends.",
        show_default="600",
        **_HOROVOD,
    ),
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
    str,
    typer.Option(
        help="With kubernetes: plain (indexed Job, StatefulSet, headless service), tfjob "
        "(Kubeflow), or compose (Docker Compose; printed only).",
        **_ENGINES,
    ),
]

Detach = Annotated[
    bool,
    typer.Option("--detach", help="With slurm and kubernetes: return when submitted.", **_ENGINES),
]

EveryTask = Annotated[
    bool,
    typer.Option(
        "--every-task",
        help="Between-graph programs: each of -n workers and --ps servers runs SCRIPT itself, with "
        "TF_CONFIG set.",
    ),
]

TaskFlags = Annotated[
    bool,
    typer.Option(
        "--task-flags",
        help="With --every-task: append --job_name, --task_index, --ps_hosts and --worker_hosts.",
    ),
]

#: The options of `StrategyConfig`; None where one is not given.
OF_STRATEGY: dict[str, Any] = {
    "processes": Processes,
    "devices": Devices,
    "mode": Mode,
    "communication": Communication,
    "ps": Ps,
    "staleness": Staleness,
    "on_stale": OnStale,
    "backup_workers": BackupWorkers,
    "wire_dtype": WireDtype,
    "min_shard_bytes": MinShardBytes,
    "max_shards": MaxShards,
    "compression": Compression,
    "reduction": Reduction,
    "groups": Groups,
    "fusion_mb": FusionMb,
    "cycle_ms": CycleMs,
    "hierarchical": Hierarchical,
    "autotune": Autotune,
    "timeline": Timeline,
    "stall_timeout": StallTimeout,
    "seed": Seed,
    "start_timeout": StartTimeout,
}


def with_strategy(command: Callable[..., None]) -> Callable[..., None]:
    """A command that also takes the options of a strategy; it finds them in `context.params`.

    Args:
        command: takes `context`, its own options, and `**of_strategy`.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    place = 1 + [each.name for each in named].index("strategy")
    added = [
        inspect.Parameter(name, named[0].kind, default=None, annotation=kind)
        for name, kind in OF_STRATEGY.items()
    ]
    taken = [*named[:place], *added, *named[place:]]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        command(*args, **kwargs)

    wrapper.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in taken}
    return wrapper
