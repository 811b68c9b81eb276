"""The directory of an elastic job, through which its launcher and its tasks speak.

Its tasks leave the state of their training there; the launcher asks them there to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RESUME_STATUS", "ElasticDirectory", "Position"]

#: The exit status of a task whose job goes on in another world: EX_TEMPFAIL of sysexits.h.
RESUME_STATUS = 75

_STOP = "stop"
_KEPT = 2


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """The position of a training.

    Attributes:
        fit: how many calls of `fit` have finished.
        epoch: the epoch of the present one, from 0.
        step: how many steps of that epoch are done.
    """

    fit: int
    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step}" + f" of fit {self.fit + 1}" * bool(
            self.fit
        )


@dataclasses.dataclass(frozen=True)
class ElasticDirectory:
    """The directory of one elastic job.

    Attributes:
        path: where it is.
    """

    path: Path

    def request_stop(self) -> None:
        """Asks the tasks to leave their state and exit; called by the launcher."""
        (self.path / _STOP).touch()

    def begin(self) -> None:
        """Takes back what was asked of earlier tasks, and forgets all but the newest states."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _STOP).unlink(missing_ok=True)
        for _, path in sorted(self._states())[:-_KEPT]:
            path.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        """Whether the launcher wants the tasks to stop."""
        return (self.path / _STOP).exists()

    def write(self, position: Position, rank: int, content: bytes) -> None:
        """Leaves a state.

        Raises:
            OSError: if it cannot be written.
        """
        name = f"state-{position.fit:06d}-{position.epoch:08d}-{position.step:012d}-{rank}"
        draft = self.path / f".{name}"
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / name)

    def newest(self) -> tuple[Position, Path] | None:
        """The state of the training that is furthest, or None."""
        return max(self._states(), default=None)

    def _states(self) -> Iterator[tuple[Position, Path]]:
        for path in self.path.glob("state-*"):
            with contextlib.suppress(ValueError):
                fit, epoch, step, _ = map(int, path.name.split("-")[1:])
                yield Position(fit, epoch, step), path
