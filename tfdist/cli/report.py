"""`tfdist report`: makes a page of the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfdist.cli import summary
from tfdist.diagnostics import run_data, run_page
from tfdist.utils import imports
from tfdist.utils.atomic_io import SaveError, replacing

__all__ = ["report"]


def report(
    log_dir: Annotated[
        Path, typer.Argument(metavar="[LOGDIR]", help="The log directory of the run.")
    ] = Path("tfdist-logs/latest"),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page; LOGDIR/report.html by default."
        ),
    ] = None,
) -> None:
    """Make one HTML page of a run of `tfdist run`, also while it still runs.

    It shows loss, metrics and speed over time, the time of a step by task, staleness, memory,
    faults, restarts, the ends of logs and the environment. The page needs no network and no other
    file. LOGDIR is tfdist-logs/latest by default, the run that was begun here last.

    Example: tfdist report tfdist-logs/latest -o run.html
    """
    imports.matplotlib("figure", "The report of a run")
    directory = log_dir.resolve() if log_dir.is_symlink() else log_dir
    target = output or directory / "report.html"
    text = run_page.page(run_data.load(directory), target.absolute().parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(str(target)) as partial:
            Path(partial).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SaveError.of(str(target), error) from error
    summary.note(f"the report is in {target}")
