"""Schedules of a pipeline: what each device does in which order, as data, and what that costs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence

from tfdist.config.pipeline_options import SCHEDULES
from tfdist.errors import ConfigError
from tfdist.utils.validation import check_choice, check_number, check_range

__all__ = [
    "SCHEDULES",
    "Box",
    "Kind",
    "Program",
    "Schedule",
    "Shape",
    "Step",
    "bubble",
    "check",
    "dependencies",
    "ideal_bubble",
    "is_synchronous",
    "live_activations",
    "make",
    "simulate",
    "version",
]


# The requirements of schedules.


def is_synchronous(name: str) -> bool:
    """Whether a schedule ends a batch, update included, before the next begins."""
    return name not in ("pipedream", "2bw")


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


def _check_stage(what: str, value: int, stages: int) -> None:
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


# The order of a device's steps.


class Program:
    """A device's steps as batches come, in an order that depends on nothing else.

    `push` gives the steps that one more batch makes possible, `drain` those that are left. If
    batches are separate, `push` gives all steps of its batch, and `drain` none.

    A device runs the forwards of a batch in one order and its backwards in another, and begins to
    alternate between them once it is a number of forwards ahead.
    """

    def __init__(
        self, name: str, stages: int, microbatches: int, device: int, *, virtual: int = 1
    ) -> None:
        """`device` is this device, from 0 to `stages - 1`; for the rest see `check`."""
        check(name, stages, microbatches, virtual)
        _check_stage("device", device, stages)
        # All devices go through their chunks and the microbatches by one rule, so each needs the
        # results of its neighbours in the order in which these make them.
        chunks = range(device, stages * virtual, stages)
        self._device = device
        self._forwards = _order(chunks, microbatches, stages)
        self._backwards = _order(chunks[::-1], microbatches, stages)
        if name == "gpipe":
            self._backwards.reverse()
        self._ahead = _ahead(name, stages, microbatches, device, virtual)
        self._flush = is_synchronous(name)
        self._live = 0
        self._left: collections.deque[list[Step]] = collections.deque()

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


def _ahead(name: str, stages: int, microbatches: int, stage: int, virtual: int) -> int:
    """The forwards that a device is ahead of its backwards before they alternate."""
    # Interleaved as in Megatron-LM: with one group of microbatches, all forwards come first. Else
    # all chunks but the last of one group; then the group's last chunk and its backward each pass
    # the stages that come after this one.
    if name == "gpipe" or (name == "interleaved" and microbatches == stages):
        return microbatches * virtual
    if name == "interleaved":
        return 2 * (stages - 1 - stage) + (virtual - 1) * stages
    return stages - 1 - stage  # Those that the later stages run before a microbatch comes back.


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

    For the other arguments, and for what is raised, see `check`.
    """
    check(name, stages, microbatches, virtual)
    check_number("batches", batches, 1, "It counts the global batches.")
    programs = []
    for device in range(stages):
        program = Program(name, stages, microbatches, device, virtual=virtual)
        steps = [step for batch in range(batches) for step in program.push(batch)]
        programs.append(tuple(steps + program.drain()))
    return Schedule(name, stages, stages * virtual, microbatches, tuple(programs))


def version(name: str, stages: int, stage: int, batch: int, *, vertical_sync: bool = False) -> int:
    """The version of the weights that a stage uses for a batch, forward and backward.

    Version v of a stage's weights is what it has after v updates. Synchronous schedules use all
    updates. PipeDream (section 3.3) uses those that the stage has done, or with vertical sync those
    that the input stage has done. 2BW uses all but the newest, so that two versions are enough:
    W(t+1) = W(t) - lr * gradient(W(t-1)).

    Args:
        name: a key of `SCHEDULES`.
        stages: the number of pipeline devices.
        stage: this stage, from 0.
        batch: the batch's number since the pipeline was last empty, from 0.
        vertical_sync: whether all stages use the input stage's version.

    Raises:
        ConfigError: if there is no such schedule or stage.
    """
    check_choice("schedule", name, SCHEDULES)
    _check_stage("stage", stage, stages)
    # A stage has run as many forwards ahead as stages follow it (`_ahead`). With PipeDream each is
    # a batch, whose update is still to come when the stage begins this one.
    if name == "pipedream":
        late = stages - 1 - (0 if vertical_sync else stage)
    else:
        late = 0 if is_synchronous(name) else 1
    return max(0, batch - late)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The settings with which a pipeline is built.

    Attributes:
        schedule: a key of `SCHEDULES`.
        stages: devices of a replica of the pipeline.
        microbatches: parts of a batch, over all replicas.
        virtual: chunks of the model on each device.
        replicas: pipelines beside each other, each with a part of the microbatches.
        recompute: chunks whose forward pass is run again in the backward pass.
        vertical_sync: with `"pipedream"`, whether all stages use the first one's version.
        timeout: seconds that a step may wait for another.
    """

    schedule: str
    stages: int
    microbatches: int
    virtual: int
    replicas: int
    recompute: frozenset[int]
    vertical_sync: bool
    timeout: float

    @property
    def in_words(self) -> str:
        """The pipeline in a line, for people."""
        words = [f"{self.schedule}, {self.stages} stages"]
        if self.virtual > 1:
            words.append(f"of {self.virtual} parts each")
        words.append(f"{self.microbatches} microbatches")
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        if self.recompute:
            words.append("recomputed")
        return ", ".join(words)

    @property
    def is_synchronous(self) -> bool:
        """Whether a batch ends, update included, before the next begins."""
        return is_synchronous(self.schedule)

    @property
    def chunks(self) -> int:
        """Parts of the model."""
        return self.stages * self.virtual

    @property
    def old_versions(self) -> int:
        """Versions of the weights besides the newest that some stage needs."""
        if self.schedule == "2bw":
            return 1
        return self.stages - 1 if self.vertical_sync else 0

    @property
    def batches_ahead(self) -> int:
        """Without a flush: batches under way when another is given."""
        return 1 if self.schedule == "2bw" else self.stages

    def program(self, device: int, microbatches: int) -> Program:
        """A device's program for batches of so many microbatches in a replica."""
        return Program(self.schedule, self.stages, microbatches, device, virtual=self.virtual)

    def steps_of(self, device: int, count: int, batch: int) -> list[Step]:
        """A device's steps in a batch of fewer microbatches, if batches are separate."""
        if self.schedule != "interleaved" or count % self.stages == 0:
            return self.program(device, count).push(batch)
        chunks = range(device, self.chunks, self.stages)
        order = [(chunk, number) for chunk in chunks for number in range(count)]
        forwards = [Step(Kind.FORWARD, batch, number, chunk) for chunk, number in order]
        backwards = [Step(Kind.BACKWARD, batch, number, chunk) for chunk, number in order[::-1]]
        return [*forwards, *backwards]


# The costs of a schedule: its time, its idle part and the activations it holds.


def dependencies(schedule: Schedule, step: Step) -> list[Step]:
    """The steps whose results a step needs.

    A forward needs that of the chunk before; a backward that of the chunk after, and the forward of
    its own; an update all backwards of its batch on its device. That a forward comes after an
    update follows from the order of the device's program alone.

    Args:
        schedule: the schedule.
        step: one of its steps.
    """
    batch, number, chunk = step.batch, step.microbatch, step.chunk
    if step.kind is Kind.FORWARD:
        return [Step(Kind.FORWARD, batch, number, chunk - 1)] if chunk else []
    if step.kind is Kind.BACKWARD:
        forward = Step(Kind.FORWARD, batch, number, chunk)
        last = chunk == schedule.chunks - 1
        return [forward] if last else [Step(Kind.BACKWARD, batch, number, chunk + 1), forward]
    return [
        Step(Kind.BACKWARD, batch, number, chunk)
        for chunk in range(step.chunk, schedule.chunks, schedule.devices)
        for number in range(schedule.microbatches)
    ]


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    *,
    update: float = 0.0,
    transfer: float = 0.0,
) -> list[Box]:
    """The times of all steps if each begins as soon as it can.

    Args:
        schedule: the schedule.
        forward: seconds of a forward, of all chunks or of each.
        backward: seconds of a backward, likewise.
        update: seconds of a device's update.
        transfer: seconds from the end of a step until another device has its result. Devices
            compute meanwhile.

    Returns:
        The boxes, those of a device in order.

    Raises:
        ValueError: if the devices wait for each other for ever, or a step's needs are in no
            program, with the step that each device waits at.
    """
    seconds = {
        Kind.FORWARD: _of_each(forward, schedule.chunks),
        Kind.BACKWARD: _of_each(backward, schedule.chunks),
        Kind.UPDATE: [update] * schedule.devices,
    }
    done: dict[Step, Box] = {}
    left = [collections.deque(program) for program in schedule.programs]
    clocks = [0.0] * schedule.devices
    while any(left):
        before = len(done)
        for device, steps in enumerate(left):
            while steps and all(need in done for need in dependencies(schedule, steps[0])):
                step = steps.popleft()
                needs = [done[need] for need in dependencies(schedule, step)]
                ready = [box.end + (0.0 if box.device == device else transfer) for box in needs]
                begin = max([clocks[device], *ready])
                clocks[device] = begin + seconds[step.kind][step.chunk]
                done[step] = Box(device, step, begin, clocks[device])
        if len(done) == before:
            raise ValueError(_deadlock(schedule.name, left))
    return list(done.values())


def _deadlock(name: str, left: Sequence[Sequence[Step]]) -> str:
    waiting = [f"device {device} at {steps[0]}" for device, steps in enumerate(left) if steps]
    return (
        f"Schedule {name!r} cannot go on: {', '.join(waiting)}, each written as "
        "kind(batch, chunk, microbatch). Change the order of their programs."
    )


def _of_each(seconds: float | Sequence[float], count: int) -> list[float]:
    each = list(seconds) if isinstance(seconds, Sequence) else [seconds] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} times do not fit {count} chunks. Give one for each.")
    return each


def bubble(boxes: Iterable[Box]) -> float:
    """The idle part of the devices' time, from the first begin to the last end.

    Args:
        boxes: of all devices; one without any is not counted.

    Returns:
        A number from 0 to 1; 0 if no time went by.
    """
    boxes = list(boxes)
    if not boxes:
        return 0.0
    busy = sum(box.end - box.begin for box in boxes)
    span = max(box.end for box in boxes) - min(box.begin for box in boxes)
    whole = span * len({box.device for box in boxes})
    return 1 - busy / whole if whole else 0.0


def ideal_bubble(
    name: str, stages: int, microbatches: int, *, virtual: int = 1, batches: float = 1
) -> float:
    """The idle part of a schedule with equal stages, free updates and free transfers.

    With p stages, m microbatches and v chunks a device it is (p - 1) / (m v + p - 1) of the whole
    time. (Megatron-LM, arXiv:2104.04473 section 2.2, has it as a part of the time that is not
    idle: (p - 1) / (m v).) Without a flush, the microbatches of all batches count as one row.

    `batches` is the number of global batches between an empty pipeline and the next; `math.inf` if
    it never is empty again. It changes nothing if each batch ends in a flush. For the other
    arguments, and for what is raised, see `check`.

    Returns:
        A number from 0 to 1.
    """
    check(name, stages, microbatches, virtual)
    check_range("batches", batches, least=1)
    rows = microbatches * virtual * (1 if is_synchronous(name) else batches)
    return (stages - 1) / (rows + stages - 1)


def live_activations(schedule: Schedule) -> list[int]:
    """The most activations that each device holds at a time.

    Returns:
        For each device, the peak number of forwards, of a chunk and a microbatch each, whose
        backward is not done.
    """
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}
    return [
        max(itertools.accumulate((change[step.kind] for step in program), initial=0))
        for program in schedule.programs
    ]
