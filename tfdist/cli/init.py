"""`tfdist init`: writes the files of a first job and of its cluster, or examples."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tfdist.cli import planning
from tfdist.cli.backends.base import EngineOptions, Order
from tfdist.cli.backends.kubernetes import Kubernetes
from tfdist.cli.options import starting
from tfdist.cli.request import Request
from tfdist.config.option import listed
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.config.strategy_file import StrategyFile
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError
from tfdist.launcher import supervisor
from tfdist.launcher.backends.kubernetes import name_of
from tfdist.utils.validation import check_choice

__all__ = ["TRAINING_SCRIPT", "init"]

_TEMPLATES = Path(__file__).with_name("templates")

#: The training script, which runs from an installed package: it makes its data.
TRAINING_SCRIPT = _TEMPLATES / "train.py"

#: The files of the folders of examples, which are links to those of the repository.
_FOLDERS: Mapping[str, Sequence[Path]] = {
    name: sorted((_TEMPLATES / name).glob("*.*")) for name in ("examples", "strategies", "cluster")
}

#: Each example by name, without data and the pages about a folder.
_EXAMPLES: Mapping[str, Path] = {
    path.name: path
    for paths in _FOLDERS.values()
    for path in paths
    if path.suffix not in (".gz", ".md")
}

#: The options that the strategy file sets.
_STRATEGY: Mapping[str, Any] = {"strategy": "multi_worker", "processes": 2}

_RUN = "tfdist run --strategy strategy.toml"

_BY_FOLDER = {
    folder: ", ".join(path.name for path in paths if path.name in _EXAMPLES)
    for folder, paths in _FOLDERS.items()
}

_Example = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"Write this file, or this folder, instead; again for several. {listed(_BY_FOLDER)}",
        autocompletion=starting([*_FOLDERS, *_EXAMPLES]),
    ),
]


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write; made if it is not there.")
    ],
    slurm: Annotated[bool, typer.Option("--slurm", help="Add a batch script for sbatch.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Add a manifest and a Dockerfile.")
    ] = False,
    ssh: Annotated[
        bool, typer.Option("--ssh", help="Add a file of hosts, to start the tasks by ssh.")
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(
            help="With --kubernetes: the container image.", show_default="the name of DIR"
        ),
    ] = None,
    example: _Example = None,
) -> None:
    """Write the files of a first job into DIR, ready to run; or examples.

    Always: train.py, a small Keras 3 script to put your data and model into; strategy.toml, the
    way that it trains; README.md, the commands. The flags add files for a cluster and go together.
    A file that exists is never overwritten: if there is one, nothing is written.

    Example: tfdist init first --slurm

    A program that comes with tfdist: tfdist init first --example gan.py

    Exit status: 0; 2 for a mistake in the call.
    """
    flags = {"--slurm": slurm, "--kubernetes": kubernetes, "--ssh": ssh, "--image": image}
    if example:
        _write_examples(folder, example, [flag for flag, value in flags.items() if value])
        return
    if image is not None and not kubernetes:
        raise ConfigError(
            f"--image {image} names the container image of --kubernetes. Add that, or leave "
            "--image out."
        )
    name = name_of(folder.resolve().name)
    files = _files(name, image or name, slurm=slurm, kubernetes=kubernetes, ssh=ssh)
    _write(folder, files)
    print(f"Wrote {', '.join(files)} to {str(folder)!r}. To train:\n")
    print(f"    cd {shlex.quote(str(folder))}\n    {_RUN} train.py")
    if slurm or kubernetes or ssh:
        print("\nREADME.md has the commands for the cluster.")


def _files(name: str, image: str, *, slurm: bool, kubernetes: bool, ssh: bool) -> Mapping[str, str]:
    """The text of each file by its name."""
    files = {"train.py": TRAINING_SCRIPT.read_text(), "strategy.toml": _strategy_file()}
    sections = [_README]
    if slurm:
        files["train.sbatch"] = _batch_script(name)
        sections.append(_README_SLURM)
    if kubernetes:
        files["kubernetes.yaml"] = _manifest(name, image)
        files["Dockerfile"] = _DOCKERFILE
        sections.append(_README_KUBERNETES.format(image=image, name=name))
    if ssh:
        files["hosts"] = _HOSTS
        sections.append(_README_SSH)
    return {**files, "README.md": "\n".join(sections)}


def _write_examples(folder: Path, names: Sequence[str], others: Sequence[str]) -> None:
    """Writes the examples of these names with the data that they read; no other flag goes along."""
    if others:
        raise ConfigError(
            f"{others[0]} adds to the files of a first job, in whose place --example {names[0]} "
            "writes others. Leave one of them out, or call `tfdist init` twice."
        )
    for name in names:
        check_choice("--example", name, [*_FOLDERS, *_EXAMPLES])
    chosen = [path for name in names for path in _FOLDERS.get(name) or [_EXAMPLES[name]]]
    data = [
        each
        for path in chosen
        for each in path.parent.glob("*.gz")
        if each.name.encode() in path.read_bytes()
    ]
    files = {f"{path.parent.name}/{path.name}": path for path in [*chosen, *data]}
    _write(folder, files)
    print(f"Wrote {', '.join(files)} to {str(folder)!r}.")
    print("The first lines of each file show its use, in that directory.")


def _write(folder: Path, files: Mapping[str, str | Path]) -> None:
    """Writes texts and copies of files, or nothing if one exists."""
    there = [name for name, file in files.items() if _is_in_the_way(folder / name, file)]
    if there:
        raise ConfigError(
            f"{str(folder / there[0])!r} exists, and `tfdist init` overwrites no file: nothing was "
            "written. Move it away, or give another directory."
        )
    try:
        for name, file in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(file, Path):
                shutil.copy(file, folder / name)  # With its mode: scripts can be executed.
                continue
            with (folder / name).open("x", encoding="utf-8") as stream:
                stream.write(file)
    except OSError as error:
        raise ConfigError(
            f"The directory {str(folder)!r} cannot be written: {error.filename}: {error.strerror}. "
            "Give another directory."
        ) from error


def _is_in_the_way(path: Path, file: str | Path) -> bool:
    """Whether there is a file already, other than the very example or data to be copied."""
    if isinstance(file, Path) and path.is_file() and path.read_bytes() == file.read_bytes():
        return False
    return path.exists() or path.is_symlink()


def _strategy_file() -> str:
    """The strategy file: what is set, and the strategy's commonest options with their defaults."""
    name = _STRATEGY["strategy"]
    set_ = [f"{key} = {json.dumps(value)}" for key, value in _STRATEGY.items()]
    spec, blocks = spec_of(name), []
    for key, option in all_options().items():
        of_all = option.name in StrategyConfig.__dataclass_fields__
        if key in _STRATEGY or option.about.panel or not (of_all or spec.has_option(key)):
            continue
        help_ = textwrap.wrap(spec.help_of(option), 96, initial_indent="# ", subsequent_indent="# ")
        blocks.append("\n".join(["", *help_, f"# {key} = {option.example}"]))
    return "\n".join(
        [
            f"# How train.py trains: {_RUN} train.py",
            "# A flag beside it, such as -n 4, wins over this file.",
            *set_,
            "",
            f"# The commonest of the other options; `tfdist run --help {name}` shows all.",
            *blocks,
            "",
        ]
    )


def _batch_script(name: str) -> str:
    """The script for `sbatch`, whose allocation decides on the number of processes."""
    tfdist = shlex.join((sys.executable, "-m", "tfdist"))
    return f"""\
#!/usr/bin/env bash
# train.py as a job of Slurm. In this directory, which all nodes must have at the same path:
#
#     sbatch train.sbatch [ARGUMENTS OF train.py]
#
# The job's size is sbatch's: sbatch --nodes=2 --ntasks=8 --gpus-per-task=1 train.sbatch
#SBATCH --job-name={name}
#SBATCH --ntasks={_STRATEGY["processes"]}
#SBATCH --output=slurm-%j.out
set -euo pipefail
exec {tfdist} run --on slurm --strategy strategy.toml -n "$SLURM_NTASKS" train.py "$@"
"""


def _manifest(name: str, image: str) -> str:
    """The manifest that `tfdist run --on kubernetes --dry-run` prints, and how to write another."""
    request = Request(
        script="train.py",
        args=(),
        strategy="strategy.toml",
        strategy_options={},
        file=StrategyFile(Path("strategy.toml"), _STRATEGY),
    )
    order = Order(
        request=request,
        resolved=planning.resolved_for(request),
        words=("--strategy", "strategy.toml"),
        options=EngineOptions(image=image, job_name=name),
        grace=supervisor.DEFAULT_GRACE,
    )
    command = shlex.join(("--image", image, "--job-name", name, "--dry-run", "train.py"))
    return (
        f"# Written as by\n#     {_RUN} --on kubernetes {command}\n"
        "# For another number of workers, or GPUs, write it again, with -n or --gpus-per-task.\n"
        f"{Kubernetes(order).text()}"
    )


_DOCKERFILE = """\
# The image of kubernetes.yaml. BASE is an image with Python, TensorFlow and tfdist.
ARG BASE
FROM $BASE
WORKDIR /job
COPY train.py strategy.toml ./
"""

_HOSTS = f"""\
# The machines, one a line, each with the number of processes that it runs: one for each GPU, say.
# Put yours here, by the names with which they reach each other:
# node1 slots=2
# node2 slots=2
localhost slots={_STRATEGY["processes"]}
"""

_README = f"""\
# A first job of tfdist

`train.py` is plain Keras 3; `strategy.toml` sets how it trains. In this directory:

    tfdist run --strategy single train.py
    {_RUN} train.py
    tfdist verify train.py

The first trains on one device, the second as `strategy.toml` sets. The third compares, step by
step, what one process and two train.
"""

_README_SLURM = """\
## Slurm

    sbatch train.sbatch

This directory and the Python environment must be at the same path on all nodes.
`sbatch --nodes=2 --ntasks=8 train.sbatch` is a larger job. `slurm-JOB.out` has its output,
`tfdist-logs/latest/` the log of each task.
"""

_README_KUBERNETES = """\
## Kubernetes

    docker build --build-arg BASE=IMAGE-WITH-TFDIST -t {image} .
    kubectl create -f kubernetes.yaml
    kubectl logs --follow -l tfdist-job={name}

IMAGE-WITH-TFDIST is an image in which tfdist is installed. Push {image} to where the nodes fetch it
from. `kubectl delete job,service -l tfdist-job={name}` removes the job. The head of
`kubernetes.yaml` has the command that writes it for another number of workers, or with GPUs;
without `--dry-run` that command makes the job, shows its output and removes it at the end.
"""

_README_SSH = f"""\
## ssh

Put your machines into `hosts`; as it is, all processes run on this one.

    {_RUN} --hostfile hosts --dry-run train.py
    {_RUN} --hostfile hosts train.py

The first shows the plan. ssh must work without a password, and this directory and the Python
environment be at the same path on every machine.
"""
