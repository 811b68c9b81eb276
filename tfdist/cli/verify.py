"""`tfdist verify`: do N processes train what one process trains, on the user's own script?"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tfdist import environment
from tfdist.cli import planning
from tfdist.cli.init import TRAINING_SCRIPT
from tfdist.cli.options import Module, starting
from tfdist.cli.request import file_of, hold_ports
from tfdist.cluster import resources as gpu_lists
from tfdist.config.strategy_config import StrategyConfig
from tfdist.config.strategy_spec import having, spec_of
from tfdist.diagnostics.equivalence import Comparison, Row, compare, read
from tfdist.errors import ConfigError, TaskFailedError
from tfdist.launcher import supervisor
from tfdist.launcher.plan import JobPlan, Program, local_cluster, plan_local

_SEED = 20_161

_Script = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="The Keras 3 script, or with -m the module.")
]


def verify(
    script: _Script = None,
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Module = False,
    processes: Annotated[int, typer.Option("-n", help="Processes to compare with one.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps to compare.")] = 20,
    strategy: Annotated[
        str,
        typer.Option(
            help="multi_worker, horovod, mirrored or pipeline.",
            autocompletion=starting(having(lambda spec: spec.verified_by)),
        ),
    ] = "multi_worker",
    tolerance: Annotated[float, typer.Option(help="What a weight may differ.")] = 1e-5,
    demo: Annotated[
        bool, typer.Option("--demo", help="Take a small script that comes with tfdist.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run SCRIPT on one process and on N, and compare what they train.

    Both runs get the same seed and stop after the given number of training steps. The table shows
    the loss of each step, the largest difference of any weight, and whether every example was seen
    as often by the N processes together as by one.

    Example: tfdist verify -n 2 --steps 20 examples/digits.py

    Without a script of your own: tfdist verify --demo

    Exit status: 0 if they agree, 1 if they differ, 2 for a mistake in the call.
    """
    script = _chosen(script, module, demo)
    _check(script, module, processes, steps)
    config, tasks = _many(strategy, processes)
    parts = f"{processes} {'stages' if spec_of(config.strategy).has_stages else 'replicas'}"
    program = Program(script=script, args=tuple(args or ()), module=module, config="", seed=_SEED)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="tfdist-verify-") as folder:
        with console.status("one process …"):
            alone = StrategyConfig.of(strategy="single")
            one = _observe(program, alone, 1, Path(folder, "one"), steps)
        with console.status(f"{parts} ({strategy}) …"):
            many = _observe(program, config, tasks, Path(folder, "many"), steps)
    comparison = compare(one[0], many, tolerance)
    if as_json:
        print(json.dumps(_as_dict(comparison), indent=2))
    else:
        _show(comparison, processes, parts, Console())
    raise typer.Exit(0 if comparison.ok else 1)


def _chosen(script: str | None, module: bool, demo: bool) -> str:
    if demo and (module or script is not None):
        other = "-m" if module else f"the script {script!r}"
        raise ConfigError(
            f"--demo conflicts with {other}: it takes a script that comes with tfdist. Leave one "
            "of them out."
        )
    if not demo and script is None:
        raise ConfigError(
            "tfdist verify needs a script, such as tfdist verify train.py. Give its path, or "
            "--demo for a small one that comes with tfdist."
        )
    return str(TRAINING_SCRIPT) if script is None else script


def _check(script: str, module: bool, processes: int, steps: int) -> None:
    if not Path(file_of(script) if module else script).is_file():
        raise ConfigError(f"The script {script!r} does not exist. Give the path of a Python file.")
    if processes < 2:
        raise ConfigError(
            f"-n {processes} leaves nothing to compare with one process. Give 2 or more."
        )
    if steps < 1:
        raise ConfigError(f"--steps {steps} is not a number of 1 or more.")


def _many(strategy: str, processes: int) -> tuple[StrategyConfig, int]:
    by = spec_of(strategy).verified_by
    if by is None:
        *others, last = having(lambda spec: spec.verified_by)
        raise ConfigError(
            f"--strategy {strategy}: verify compares what each process observes with one process, "
            f"and here nothing can be compared. Choose {', '.join(others)} or {last}."
        )
    if by == "devices":
        return StrategyConfig.of(strategy=strategy, devices=processes), 1
    config = StrategyConfig.of(strategy=strategy, processes=processes)
    planning.check_runnable(config)
    return config, processes


def _observe(
    program: Program, config: StrategyConfig, tasks: int, directory: Path, steps: int
) -> list[Any]:
    """Runs one job and reads the records of its tasks."""
    directory.mkdir()
    program = dataclasses.replace(program, config=config.to_json())
    with hold_ports(tasks) as held:
        plan = plan_local(
            program,
            cluster=local_cluster(held.ports) if tasks > 1 else None,
            log_dir=directory,
            environ=environment.snapshot(),
            gpus=gpu_lists.visible(),
            devices=1 if spec_of(config.strategy).one_device else config.devices,
        )
        outcome = supervisor.run(_recording(plan, directory, steps))
    if outcome.status:
        raise TaskFailedError(outcome.message, outcome.status)
    observations = [read(path) for path in sorted(directory.glob("*.json"))]
    if not observations or not observations[0].logs:
        raise ConfigError(
            f"{program.script!r} ended without a training step of `model.fit`, which is what "
            "verify compares. A loop written by hand cannot be verified."
        )
    return observations


def _recording(plan: JobPlan, directory: Path, steps: int) -> JobPlan:
    """The plan, with each task recording to a file of its own."""
    tasks = tuple(
        dataclasses.replace(
            task,
            environ={
                **task.environ,
                "TFDIST_RESULT": str(directory / f"{task.task.index:05d}.json"),
                "TFDIST_VERIFY_STEPS": str(steps),
            },
        )
        for task in plan.tasks
    )
    return dataclasses.replace(plan, tasks=tasks)


def _show(comparison: Comparison, processes: int, parts: str, console: Console) -> None:
    table = Table(title=f"One process and {parts}", title_justify="left")
    for name in ("step", "loss, one", f"loss, {processes}", "largest weight difference", "in"):
        table.add_column(name, justify="left" if name == "in" else "right")
    first = comparison.first_difference
    for row in _picked(comparison):
        style = "red" if first and row.step >= first.step else ""
        table.add_row(
            str(row.step),
            f"{row.one:.6f}",
            f"{row.many:.6f}",
            f"{row.weight_difference:.1e}",
            row.where if row.weight_difference else "",
            style=style,
        )
    console.print(table)
    console.print(
        f"examples: {comparison.examples_one} on one process, {comparison.examples_many} on "
        f"{parts} together, {comparison.missing} missing, "
        f"{comparison.repeated} too many"
    )
    for note in comparison.notes:
        console.print(f"note: {note}")
    _conclude(comparison, console)


def _conclude(comparison: Comparison, console: Console) -> None:
    first = comparison.first_difference
    if comparison.ok:
        console.print(
            f"[green]agree[/] to {comparison.tolerance:g} over {len(comparison.rows)} steps"
        )
        return
    if first is not None:
        console.print(
            f"[red]differ[/] from step {first.step} on: {first.where or 'the loss'} by "
            f"{first.weight_difference:.1e}, more than the tolerance of {comparison.tolerance:g}"
        )
    else:
        console.print("[red]differ[/] in the examples that were seen")


def _picked(comparison: Comparison, most: int = 12) -> list[Row]:
    """The first steps, the last ones, and those around the first difference."""
    rows = list(comparison.rows)
    if len(rows) <= most:
        return rows
    first = comparison.first_difference
    around = range(first.step - 2, first.step + 1) if first else range(0)
    kept = {*range(5), *around, *range(len(rows) - 5, len(rows))}
    return [row for i, row in enumerate(rows) if i in kept]


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    content = dataclasses.asdict(comparison)
    first = comparison.first_difference
    return {"ok": comparison.ok, "first_difference": first.step if first else None, **content}
