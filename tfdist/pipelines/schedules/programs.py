"""The order of forward and backward steps on each device of a pipeline."""

from __future__ import annotations

from collections import deque

from tfdist.option_checks import check_choice, check_number
from tfdist.pipelines.schedules.rules import RULES, SCHEDULES, check, check_stage, is_synchronous
from tfdist.pipelines.schedules.steps import Kind, Schedule, Step

__all__ = ["Program", "make", "version"]


class Program:
    """A device's steps as batches come, in an order that depends on nothing else.

    `push` gives the steps that one more batch makes possible, `drain` those that are left. Where
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
        backwards[-1].append(Step(Kind.UPDATE, batch, -1, self._device))
        self._left.extend(backwards)
        steps = []
        for chunk, microbatch in self._forwards:
            steps.append(Step(Kind.FORWARD, batch, microbatch, chunk))
            self._live += 1
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
    if name == "pipedream":
        late = stages - 1 - (0 if vertical_sync else stage)
    else:
        late = 0 if is_synchronous(name) else 1
    return max(first, batch - late)
