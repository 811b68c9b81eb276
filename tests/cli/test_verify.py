"""`tfdist verify`: what it says to mistakes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tfdist.cli.main import app


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a script, such as tfdist verify train.py. Give its path, or --demo"),
        (["--demo", "train.py"], "--demo conflicts with the script 'train.py'"),
        (["gone.py"], "The script 'gone.py' does not exist"),
        (["--demo", "-m"], "--demo conflicts with -m: it takes a script"),
        (["-m", "gone.train"], "There is no module 'gone.train'"),
        (["--demo", "-n", "1"], "-n 1 leaves nothing to compare with one process"),
        (["--demo", "--steps", "0"], "--steps 0 is not a number of 1 or more"),
        (["--demo", "--strategy", "parameter_server"], "Choose mirrored, multi_worker, horovod"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["verify", *words])
    assert done.exit_code == 2
    assert message in done.stderr
