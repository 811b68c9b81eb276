"""The order of forward and backward steps on each device of a pipeline."""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from tfdist.config.pipeline_options import SCHEDULES
from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice, check_number

__all__ = [
    "RULES",
    "SCHEDULES",
    "Box",
    "Kind",
    "Program",
    "Rule",
    "Schedule",
    "Step",
    "check",
    "check_stage",
    "is_synchronous",
    "make",
    "version",
]


# The table of schedules, and their requirements.

#: From stages, this device's stage, microbatches and chunks per device: how many forwards a device
#: is ahead of its backwards before they alternate.
Ahead: TypeAlias = Callable[[int, int, int, int], int]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The order of the steps of a schedule's devices.

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
    """All forwards of a batch: no backward begins before the last forward."""
    del stages, stage
    return microbatches * virtual


def _interleaved_ahead(stages: int, stage: int, microbatches: int, virtual: int) -> int:
    """The forwards before the first backward comes back through all chunks, as in Megatron-LM."""
    if microbatches == stages:  # With one group of microbatches, all forwards come first.
        return microbatches * virtual
    # All chunks but the last of one group; then the group's last chunk and its backward each pass
    # the stages that come after this one.
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
    """Checks the requirements of a schedule.

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
    """Requires a value to be the number of a stage.

    Raises:
        ConfigError: with the numbers there are.
    """
    check_number(what, value, 0, f"Stages count from 0 to {stages - 1}.")
    if value >= stages:
        raise ConfigError(
            f"{what}={value} conflicts with stages={stages}. Set {what} from 0 to {stages - 1}."
        )


# The work of a pipeline's devices, as values.


class Kind(enum.Enum):
    """The kinds of steps."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The work of a device at a time.

    Attributes:
        kind: forward, backward or update.
        batch: the number of the global batch, from 0.
        microbatch: its number within the batch, from 0; -1 for an update.
        chunk: the part of the model, from 0 at the input. That of an update is the first one of its
            device, whose number is the device's: an update is of all chunks of the device.
    """

    kind: Kind
    batch: int
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        numbers = (self.batch, self.chunk, self.microbatch)[: 2 + (self.kind is not Kind.UPDATE)]
        return f"{self.kind.value}({', '.join(map(str, numbers))})"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of each device of a pipeline, in order.

    Chunk `c` of the model is on device `c % devices`, as Megatron-LM places its virtual stages.

    Attributes:
        name: a key of `SCHEDULES`.
        devices: their number.
        chunks: the number of parts of the model, a multiple of `devices`.
        microbatches: their number in each global batch.
        programs: the steps of each device.
    """

    name: str
    devices: int
    chunks: int
    microbatches: int
    programs: tuple[tuple[Step, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A step with its time, measured or simulated.

    Attributes:
        device: its number, from 0. The boxes of a device do not overlap.
        step: the step.
        begin: when it began, in seconds on a clock that all devices share.
        end: when it ended.
    """

    device: int
    step: Step
    begin: float
    end: float


class Program:
    """A device's steps as batches come, in an order that depends on nothing else.

    `push` gives the steps that one more batch makes possible, `drain` those that are left. If
    batches are separate, `push` gives all steps of its batch, and `drain` none.
    """

    def __init__(
        self, name: str, stages: int, microbatches: int, device: int, *, virtual: int = 1
    ) -> None:
        """For the other arguments, and for what is raised, see `check`.

        Args:
            name: a key of `SCHEDULES`.
            stages: the number of pipeline devices.
            microbatches: the parts of a global batch.
            device: this device, from 0 to `stages - 1`.
            virtual: the chunks of the model on each device.
        """
        check(name, stages, microbatches, virtual)
        check_stage("device", device, stages)
        rule = RULES[name]
        # All devices go through their chunks and the microbatches by one rule, so each needs the
        # results of its neighbours in the order in which these make them.
        chunks = range(device, stages * virtual, stages)
        self._device = device
        self._forwards = _order(chunks, microbatches, stages)
        self._backwards = _order(chunks[::-1], microbatches, stages)
        if rule.reverse:
            self._backwards.reverse()
        self._ahead = rule.ahead(stages, device, microbatches, virtual)
        self._flush = rule.flush
        self._live = 0
        self._left: deque[list[Step]] = deque()

    def push(self, batch: int) -> list[Step]:
        """Feeds a batch.

        Args:
            batch: its number, which only marks its steps.

        Returns:
            The next steps: all forwards of the batch, and the backwards and updates that are due
            before the next batch's first forward.
        """
        backwards = [[Step(Kind.BACKWARD, batch, number, c)] for c, number in self._backwards]
        # The update is taken with the last backward of its batch: no later forward comes between.
        backwards[-1].append(Step(Kind.UPDATE, batch, -1, self._device))
        self._left.extend(backwards)
        steps = []
        for chunk, microbatch in self._forwards:
            steps.append(Step(Kind.FORWARD, batch, microbatch, chunk))
            self._live += 1
            # The oldest backward comes next. Without a flush it may be one of the batch before.
            if self._live > self._ahead:
                steps += self._backward()
        return steps + self.drain() if self._flush else steps

    def drain(self) -> list[Step]:
        """The steps left of all batches that were fed. Afterwards the pipeline is empty."""
        steps = []
        while self._left:
            steps += self._backward()
        return steps

    def _backward(self) -> list[Step]:
        self._live -= 1
        return self._left.popleft()


def _order(chunks: range, microbatches: int, stages: int) -> list[tuple[int, int]]:
    """The (chunk, microbatch) of a batch: by groups of `stages` microbatches, then by chunk."""
    return [
        (chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in chunks
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def make(
    name: str, stages: int, microbatches: int, *, virtual: int = 1, batches: int = 1
) -> Schedule:
    """Makes the schedule of a number of batches: they are fed, then the pipeline is drained.

    Args:
        name: a key of `SCHEDULES`.
        stages: the number of pipeline devices.
        microbatches: the parts of a global batch.
        virtual: the chunks of the model on each device.
        batches: the number of global batches, 1 or more.

    Raises:
        ConfigError: as `check` does, and for `batches`.
    """
    check(name, stages, microbatches, virtual)
    check_number("batches", batches, 1, "It counts the global batches.")
    programs = []
    for device in range(stages):
        program = Program(name, stages, microbatches, device, virtual=virtual)
        steps = [step for batch in range(batches) for step in program.push(batch)]
        programs.append(tuple(steps + program.drain()))
    return Schedule(name, stages, stages * virtual, microbatches, tuple(programs))


def version(
    name: str, stages: int, stage: int, batch: int, *, vertical_sync: bool = False, first: int = 0
) -> int:
    """The version of the weights that a stage uses for a batch, forward and backward.

    Version v of a stage's weights is what it has after v updates. Synchronous schedules use all
    updates. PipeDream (section 3.3) uses those that the stage has done, or with vertical sync those
    that the input stage has done. 2BW uses all but the newest, so that two versions are enough:
    W(t+1) = W(t) - lr * gradient(W(t-1)).

    Args:
        name: a key of `SCHEDULES`.
        stages: the number of pipeline devices.
        stage: this stage, from 0.
        batch: the batch's number, `first` or more.
        vertical_sync: whether all stages use the input stage's version.
        first: the first batch since the pipeline was last empty. Until then there were as many
            updates.

    Raises:
        ConfigError: if there is no such schedule or stage.
    """
    check_choice("schedule", name, SCHEDULES)
    check_stage("stage", stage, stages)
    # A stage has run as many forwards ahead as stages follow it (`_depth_ahead`). With PipeDream
    # each is a batch, whose update is still to come when the stage begins this one.
    if name == "pipedream":
        late = stages - 1 - (0 if vertical_sync else stage)
    else:
        late = 0 if is_synchronous(name) else 1
    return max(first, batch - late)
