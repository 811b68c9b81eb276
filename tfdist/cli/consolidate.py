"""`tfdist consolidate`: a sharded checkpoint as an ordinary file of Keras."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

__all__ = ["consolidate"]

_Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="The directory that a job with --checkpoints sharded has written."
    ),
]
_Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The file to write: *.weights.h5, or *.keras if the whole model was saved.",
    ),
]


def consolidate(directory: _Directory, out: _Out) -> None:
    """Write a sharded checkpoint DIR as the file OUT, which plain Keras loads.

    Copy and paste:

    tfdist run --strategy multi_worker -n 4 --zero 3 --checkpoints sharded train.py

    tfdist consolidate model.keras whole.keras

    tfdist consolidate backup/latest.weights.h5 whole.weights.h5

    One process does it, with neither TensorFlow nor a device, and with one part of one variable in
    memory at a time. The values are those of the job, to the bit. To go on training on another
    number of processes this is not needed: load DIR itself.

    If a part is missing or damaged it is named, nothing is written, and what was there stays. Exit
    status: 0 if OUT is written, 1 if not, 2 for a mistake in the call.
    """
    from tfdist.sharding.consolidation import consolidate as write

    with Console(stderr=True, highlight=False).status("reading ...") as status:
        done = write(directory, out, lambda variable: status.update(f"{variable} ..."))
    print(f"{out}: {done.variables} variables of {done.files} files, {done.size / 1e6:.1f} MB")
