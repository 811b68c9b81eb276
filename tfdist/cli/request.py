"""The request of a command line, and the job that is about to run."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.spec import ClusterSpec, Task
from tfdist.cluster.tf_config import own_tf_config, parse_tf_config
from tfdist.config.resolution import Resolved
from tfdist.config.strategy_file import StrategyFile
from tfdist.config.strategy_spec import having
from tfdist.config.timeline_options import TimelineOptions
from tfdist.errors import ConfigError
from tfdist.launcher.plan import JobPlan

__all__ = [
    "Job",
    "Request",
    "check_count",
    "cluster_and_task",
    "file_of",
    "hold_ports",
    "settled",
    "use_in",
]

#: Tasks of one machine. If there are many more, the kernel takes minutes to find free ports.
_MOST_TASKS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The request of a command line.

    Attributes:
        script: the script, or the name of a module.
        args: its arguments.
        module: whether `script` is the name of a module.
        strategy: `--strategy`: the name of a strategy, a file, or None.
        file: the strategy file, if `--strategy` names one.
        strategy_options: the strategy's options; None for those that were not given.
        env_only: whether the script makes its own strategy.
        every_task: whether each task of the cluster runs the script itself.
        task_flags: whether each then gets its place as flags.
        evaluator: whether there is a task that evaluates.
        why_every_task: why each task runs the script, if that was not asked for.
        max_restarts: how often failed tasks are started again.
        log_dir: where the logs go, or None for a place of the job's own.
        hosts: the machines, as `a:2,b:2`, or None.
        hostfile: a file that names them, or None.
        ssh_args: arguments of ssh, as on a command line.
        remote_python: the interpreter on the other machines.
        environment: the environment to believe, such as `"slurm"`; None looks for all.
        dry_run: whether the plan is only shown, so that no other machine is asked.
    """

    script: str
    args: tuple[str, ...]
    strategy: str | None
    strategy_options: Mapping[str, Any]
    module: bool = False
    file: StrategyFile | None = None
    env_only: bool = False
    every_task: bool = False
    task_flags: bool = False
    evaluator: bool = False
    why_every_task: str = ""
    max_restarts: int = 0
    log_dir: Path | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    ssh_args: str | None = None
    remote_python: str | None = None
    environment: str | None = None
    dry_run: bool = False

    @property
    def file_name(self) -> str:
        """The script, or the last name of the module: what a job is called after."""
        return self.script.rpartition(".")[2] if self.module else self.script

    @property
    def named(self) -> str | None:
        """The strategy that is named, by the command line or by the file."""
        return self.strategy if self.file is None else self.file.values.get("strategy")

    @property
    def flags(self) -> dict[str, Any]:
        """The options that are given on the command line, with a strategy that is named there."""
        flags = {name: value for name, value in self.strategy_options.items() if value is not None}
        if self.file is None and self.strategy is not None:
            flags["strategy"] = self.strategy
        return flags

    @property
    def written(self) -> set[str]:
        """The options that the file has, and no flag."""
        return set() if self.file is None else self.file.values.keys() - self.flags.keys()

    @property
    def asked(self) -> dict[str, Any]:
        """The options that are given, in the file or by flags, which win."""
        return {**(self.file.values if self.file is not None else {}), **self.flags}


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that is about to run.

    Attributes:
        plan: the commands.
        resolved: the strategy's configuration; None if the script makes its own strategy.
        seed: the job's seed; None if the chief draws it.
        gpus: the GPUs of this machine.
        why: the reason for the plan, if the command line does not give it.
    """

    plan: JobPlan
    resolved: Resolved | None
    seed: int | None
    gpus: tuple[str, ...]
    why: str = ""

    @property
    def timeline(self) -> str | None:
        """The file of the timeline that the job writes, if it writes one."""
        config = None if self.resolved is None else self.resolved.config
        return None if config is None else config.part(TimelineOptions).timeline


def cluster_and_task(text: str) -> tuple[ClusterSpec, Task]:
    """The cluster and the task of a TF_CONFIG that is set in the environment.

    Raises:
        ConfigError: if it has mistakes, or names no task.
    """
    cluster, task = parse_tf_config(text)
    if task is None:
        raise ConfigError(
            f"TF_CONFIG={text!r} does not say which task this process is. Add "
            '"task": {"type": "worker", "index": 0}, or unset TF_CONFIG to run on this machine.'
        )
    return cluster, task


def check_count(name: str, asked: int, option: str, cluster: ClusterSpec) -> None:
    """Compares a number of tasks that was asked for with TF_CONFIG's.

    Args:
        name: `"ps"`, or `"processes"`.
        asked: the number.
        option: the option as it was set, such as `-n 3`.
        cluster: the cluster of TF_CONFIG.

    Raises:
        ConfigError: if they differ.
    """
    if name == "ps":
        kind, count = "parameter server", len(cluster.addresses.get("ps", ()))
    elif "ps" in cluster.addresses:
        kind, count = "worker", len(cluster.addresses.get("worker", ()))
    else:
        kind, count = "task", len(cluster.computing)
    if asked != count:
        raise ConfigError(
            f"{option} conflicts with TF_CONFIG, whose cluster has {count} {kind}"
            f"{'s' * (count != 1)}{' that compute' * (kind == 'task')}. "
            f"Leave it out, or give {'--ps' if name == 'ps' else '-n'} {count}, to run this task "
            "of that cluster; or unset TF_CONFIG to start all processes on this machine."
        )


def hold_ports(count: int) -> HeldPorts:
    """Holds a port of this machine for each of so many tasks.

    Raises:
        ConfigError: if this machine does not give as many.
    """
    if count > _MOST_TASKS:
        raise ConfigError(
            f"{count} tasks on this machine are more than the {_MOST_TASKS} that one command "
            "starts. Start fewer."
        )
    try:
        return HeldPorts(count)
    except OSError as error:
        raise ConfigError(
            f"{count} tasks need {count} ports of this machine at once, which it does not give "
            f"({error.strerror}). Start fewer, or raise `ulimit -n`."
        ) from error


def file_of(module: str) -> str:
    """The file that `python -m` would run for a module; nothing is imported.

    Raises:
        ConfigError: if there is no such module, or only a package that cannot be run.
    """
    spec = _spec_of(module)
    if spec is None:
        raise ConfigError(
            f"There is no module {module!r} in {str(Path.cwd())!r} or among the installed "
            f"packages, which `-m {module}` needs. Start in the directory that holds it, or give "
            "the path of a script without -m."
        )
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{module}.__main__")
    if spec is None:
        raise ConfigError(
            f"-m {module} names a package, of which `python -m` runs the module __main__, and it "
            f"has none. Name one of its modules, such as {module}.train, or add "
            f"{module.replace('.', '/')}/__main__.py."
        )
    return str(spec.origin)


def _spec_of(module: str) -> ModuleSpec | None:
    """The place of a module; None if there is none."""
    names = module.split(".")
    spec = PathFinder.find_spec(names[0], [str(Path.cwd())]) or find_spec(names[0])
    for name in names[1:]:  # By its last name, as no parent is imported.
        folders = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, list(folders)) if folders is not None else None
    return spec


# Jobs of `tfdist.estimator`: each task runs the script, which finds its part in TF_CONFIG.

_ESTIMATOR = "tfdist.estimator"


def settled(request: Request) -> Request:
    """The request, with `every_task` if a job on parameter servers is one of Estimators.

    Raises:
        ConfigError: for `--evaluator` if there is no Estimator that it could evaluate.
    """
    name = request.named
    if name in (None, "auto"):
        text = own_tf_config()
        name = "parameter_server" if text is not None and '"ps"' in text else None
    file = file_of(request.script) if request.module else request.script
    line = None if request.every_task or request.env_only else use_in(file)
    if line is not None and name in having(lambda spec: spec.has_servers):
        why = f"line {line} of {file} uses {_ESTIMATOR}"
        return dataclasses.replace(request, every_task=True, why_every_task=why)
    if request.evaluator and not request.every_task:
        raise ConfigError(
            "--evaluator starts a task that evaluates the checkpoints of an Estimator. It goes "
            f"with --strategy parameter_server and a script that uses {_ESTIMATOR}, or with "
            "--every-task. Leave it out."
        )
    return request


def use_in(script: str) -> int | None:
    """The line on which a script first uses `tfdist.estimator`, or None.

    Only the script's own text is read, not what it imports.
    """
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # The script that runs it reports the mistake.
    aliases = {"tfdist"}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "tfdist" and a.asname}
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        lines += [node.lineno for name in names if f"{name}.".startswith(f"{_ESTIMATOR}.")]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    lines += [each.lineno for each in attributes if _is_it(each, aliases)]
    return min(lines, default=None)


def _is_it(node: ast.Attribute, aliases: set[str]) -> bool:
    value = node.value
    return node.attr == "estimator" and isinstance(value, ast.Name) and value.id in aliases
