"""The table of schedules, and what each needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from tfdist.errors import ConfigError
from tfdist.option_checks import check_choice, check_number
from tfdist.pipeline_options import SCHEDULES

__all__ = ["RULES", "SCHEDULES", "Rule", "check", "check_stage", "is_synchronous"]

#: From stages, this device's stage, microbatches and chunks per device: how many forwards a device
#: is ahead of its backwards before they alternate.
Ahead: TypeAlias = Callable[[int, int, int, int], int]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the devices of a schedule order their steps.

    A device runs the forwards of a batch in one order and its backwards in another, and begins to
    alternate between them once it is a number of forwards ahead.

    Attributes:
        ahead: see `Ahead`.
        flush: whether a batch ends with its update before the next begins.
        reverse: whether backwards go through the microbatches in reverse.
    """

    ahead: Ahead
    flush: bool = True
    reverse: bool = False


def _depth_ahead(stages: int, stage: int, microbatches: int, virtual: int) -> int:
    """The forwards that the stages after this one run before a microbatch comes back."""
    del microbatches, virtual
    return stages - 1 - stage


def _all_ahead(stages: int, stage: int, microbatches: int, virtual: int) -> int:
    del stages, stage
    return microbatches * virtual


def _interleaved_ahead(stages: int, stage: int, microbatches: int, virtual: int) -> int:
    if microbatches == stages:
        return microbatches * virtual
    return 2 * (stages - 1 - stage) + (virtual - 1) * stages


RULES: dict[str, Rule] = {
    "gpipe": Rule(_all_ahead, reverse=True),
    "1f1b": Rule(_depth_ahead),
    "interleaved": Rule(_interleaved_ahead),
    "pipedream": Rule(_depth_ahead, flush=False),
    "2bw": Rule(_depth_ahead, flush=False),
}


def is_synchronous(name: str) -> bool:
    """Whether a batch ends, update included, before the next begins.

    Args:
        name: a key of `SCHEDULES`.
    """
    return RULES[name].flush


def check(name: str, stages: int, microbatches: int, virtual: int = 1) -> None:
    """Checks what a schedule needs.

    Args:
        name: a key of `SCHEDULES`.
        stages: the number of pipeline devices, 1 or more.
        microbatches: the parts of a global batch, 1 or more.
        virtual: the chunks of the model on each device: 2 or more if interleaved, else 1.

    Raises:
        ConfigError: if there is no such schedule, or the numbers do not fit it.
    """
    check_choice("schedule", name, SCHEDULES)
    check_number("stages", stages, 1, "It counts the devices of the pipeline.")
    check_number("microbatches", microbatches, 1, "It counts the parts of a global batch.")
    check_number("virtual", virtual, 1, "It counts the parts of the model on each device.")
    if name == "interleaved":
        _check_interleaved(stages, microbatches, virtual)
    elif virtual != 1:
        raise ConfigError(
            f"virtual={virtual} conflicts with schedule={name!r}, which has one part of the model "
            "on each device. Choose schedule='interleaved', or leave virtual out."
        )
    if name == "pipedream" and microbatches != 1:
        raise ConfigError(
            f"microbatches={microbatches} conflicts with schedule='pipedream', which updates the "
            "weights after each backward. Set microbatches=1, or choose schedule='2bw'."
        )
    if name == "2bw" and microbatches < stages:
        raise ConfigError(
            f"microbatches={microbatches} conflicts with stages={stages}: schedule='2bw' needs at "
            "least as many microbatches as stages, or weights would be more than one update late. "
            f"Set microbatches={stages} or more, or choose schedule='1f1b'."
        )


def _check_interleaved(stages: int, microbatches: int, virtual: int) -> None:
    if virtual < 2:
        raise ConfigError(
            f"virtual={virtual} conflicts with schedule='interleaved', which needs 2 or more parts "
            "of the model on each device. Set virtual=2, or choose schedule='1f1b'."
        )
    if microbatches % stages:
        nearest = -(-microbatches // stages) * stages
        raise ConfigError(
            f"microbatches={microbatches} conflicts with stages={stages}: schedule='interleaved' "
            f"needs a multiple of the stages. Set microbatches={nearest}, or choose "
            "schedule='1f1b'."
        )


def check_stage(what: str, value: int, stages: int) -> None:
    """Refuses what is no number of a stage.

    Raises:
        ConfigError: with the numbers there are.
    """
    check_number(what, value, 0, f"Stages count from 0 to {stages - 1}.")
    if value >= stages:
        raise ConfigError(
            f"{what}={value} conflicts with stages={stages}. Set {what} from 0 to {stages - 1}."
        )
