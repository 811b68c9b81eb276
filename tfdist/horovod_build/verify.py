"""Tries a Horovod out: an all-reduce of two processes over Gloo on this machine's loopback."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfdist import environment
from tfdist.horovod_build import exchange
from tfdist.horovod_build.commands import Commands

__all__ = ["SECONDS", "verify"]

#: For three processes that import TensorFlow, on a machine that has other things to do.
SECONDS = 180.0


def verify(commands: Commands, folder: Path | None = None, seconds: float = SECONDS) -> None:
    """Lets two processes add up two tensors.

    Args:
        commands: runs them.
        folder: where that Horovod lies; by default the installed one is tried.
        seconds: how long it may take.

    Raises:
        CommandError: if they do not get the right sum in time.
    """
    given = environment.snapshot()
    changes: dict[str, str | None] = {
        name: None for name in given if name.startswith("HOROVOD_") or name == "TF_CONFIG"
    }
    if folder is not None:
        paths = (str(folder), given.get("PYTHONPATH", ""))
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    changes |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    commands.run(
        "The test of Horovod, an all-reduce of two processes,",
        [sys.executable, "-m", exchange.MODULE],
        changes=changes,
        seconds=seconds,
        hint="Nothing was installed.",
    )
