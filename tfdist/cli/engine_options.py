"""The options of engines on the command line, each with its help text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

#: Where the help shows them.
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

#: The options of engines; None or False where one is not given.
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
