"""The command line `tfdist`: `init`, `run`, `report`, `doctor`, `verify`, `export` and others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tfdist.cli.build_horovod import build_horovod
from tfdist.cli.config import config
from tfdist.cli.consolidate import consolidate
from tfdist.cli.doctor import doctor
from tfdist.cli.export import export
from tfdist.cli.help import HelpByTopic
from tfdist.cli.init import init
from tfdist.cli.report import report
from tfdist.cli.run import run
from tfdist.cli.verify import verify
from tfdist.cluster.validation.machine import installed_version
from tfdist.errors import TfdistError

__all__ = ["app"]


class _Commands(TyperGroup):
    """Prints mistakes as one message each, without a trace, and exits with their status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Without any words Typer shows the help, which is not a mistake.
        with _explained() if args else contextlib.nullcontext():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> object:
        with _explained():
            return super().invoke(ctx)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Prints a mistake of the block, tfdist's or the command line's, and exits with its status."""
    try:
        yield
    except TfdistError as error:
        message, status = str(error), error.exit_status
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = "tfdist" if context is None else context.command_path
        message = error.format_message()
        end = "" if message.endswith((".", "?")) else "."
        message = f"{message}{end} `{command} --help` shows what there is."
        status = error.exit_code
    else:
        return
    print(f"tfdist: {message}", file=sys.stderr, flush=True)
    raise typer.Exit(status)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        for package in ("tfdist", "tensorflow", "keras"):
            print(f"{package} {installed_version(package) or 'is not installed'}")
        raise typer.Exit()


@app.callback()
def tfdist(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Take a Keras 3 script from one device to a cluster with one strategy flag."""


app.command()(init)
# Everything after SCRIPT is the script's, even what looks like an option of tfdist.
app.command(cls=HelpByTopic, context_settings={"allow_interspersed_args": False})(run)
app.command()(doctor)
app.command()(config)
app.command()(build_horovod)
app.command()(consolidate)
app.command()(export)
app.command()(report)
app.command(context_settings={"allow_interspersed_args": False})(verify)

if __name__ == "__main__":
    app()
