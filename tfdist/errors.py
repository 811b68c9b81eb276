"""The errors of tfdist that call for different reactions.

Mistakes in what the user set are `ValueError`s: `ConfigError` is one. Each message names what was
set, what it conflicts with, and what to do.
"""

from __future__ import annotations

__all__ = ["ConfigError", "EquivalenceWarning", "StartError", "TaskFailedError", "TfdistError"]

#: TensorFlow comes by an extra, so that tfdist does not replace an image's own.
INSTALL_TENSORFLOW = 'Run: pip install "tfdist[cpu]", or "tfdist[cuda]" for GPUs'


class TfdistError(Exception):
    """Base class: a problem that tfdist found and can explain. The command line prints no trace."""

    #: Exit status of the command that ends with this error.
    exit_status = 1


class ConfigError(TfdistError, ValueError):
    """A setting of the user's is wrong or contradicts another."""

    exit_status = 2


class EquivalenceWarning(UserWarning):
    """A program does not train, or show, on several replicas exactly what it does in one process.

    `warnings.simplefilter("error", tfdist.EquivalenceWarning)` ends such a program instead.
    """


class StartError(TfdistError, TimeoutError):
    """The cluster did not come together before its deadline."""

    exit_status = 3


class TaskFailedError(TfdistError):
    """A task of the job failed.

    Attributes:
        exit_status: the failed task's own exit status, or 128 + n if signal n ended it.
    """

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status
