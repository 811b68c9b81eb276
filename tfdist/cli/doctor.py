"""`tfdist doctor`: finds what would keep a training from starting, before TensorFlow does."""

from __future__ import annotations

import enum
import json
import pathlib
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfdist.diagnostics import Report, diagnose
from tfdist.errors import ConfigError

__all__ = ["doctor"]

_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}


class _Strategy(enum.StrEnum):
    """The strategies whose use of TF_CONFIG the doctor knows."""

    SINGLE = "single"
    MIRRORED = "mirrored"
    MULTI_WORKER = "multi_worker"
    HOROVOD = "horovod"
    PARAMETER_SERVER = "parameter_server"
    PIPELINE = "pipeline"


def doctor(
    tf_config: Annotated[
        str | None,
        typer.Option("--tf-config", metavar="TEXT", help="Check this TF_CONFIG."),
    ] = None,
    file: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--file", metavar="PATH", help="Check the TF_CONFIG in this file; - is stdin."
        ),
    ] = None,
    strategy: Annotated[
        _Strategy | None,
        typer.Option("--strategy", help="The strategy that the script will use."),
    ] = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="The TF_CONFIG is for another machine: check neither host names nor ports here.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find what would keep a training from starting, with what to change.

    Looks at versions, devices and variables of this machine, and at a TF_CONFIG: the one given, or
    the environment's. Run it on each machine, with the same environment as the training.
    It takes a second, and some more where there are GPUs: TensorFlow is asked if it sees them.

    Copy and paste, and see what it says about a TF_CONFIG that lacks the task:

    tfdist doctor --tf-config '{"cluster": {"worker": ["localhost:12345"]}}'

    The exit status is 0 if all is well, 1 if something must be changed. Warnings do not count.
    """
    try:
        report = diagnose(
            tf_config, file=file, strategy=strategy and strategy.value, elsewhere=elsewhere
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report, Console())
    if not report.ok:
        raise typer.Exit(1)


def _show(report: Report, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("where", no_wrap=True)
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("what to do", overflow="fold", ratio=1)
    for finding in report.findings:
        status = Text(finding.severity, _STYLES[finding.severity])
        where = finding.where.removeprefix("TF_CONFIG.")
        # An OK finding needs no action; its remedy is information, which goes below.
        remedy = "" if finding.severity == "ok" else finding.remedy
        table.add_row(status, *map(Text, (where, finding.problem, remedy)))
    console.print(table)
    if report.source:
        console.print(Text(f"TF_CONFIG, with its cluster and task, is from {report.source}."))
    notes = [f"{f.where}: {f.remedy}" for f in report.findings if f.severity == "ok" and f.remedy]
    for note in (*notes, *report.hints):
        console.print(Text(note, "dim"))
    console.print(_verdict(report))


def _verdict(report: Report) -> Text:
    errors, warnings = report.count("error"), report.count("warning")
    counted = f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
    if errors:
        return Text(f"Not well: {counted}.", _STYLES["error"])
    return Text(f"All is well: {counted}.", _STYLES["ok"])


def _plural(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
