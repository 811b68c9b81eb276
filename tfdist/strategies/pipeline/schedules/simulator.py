"""The costs of a schedule: its time, its idle part and the activations it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfdist.strategies.pipeline.schedules.programs import (
    Box,
    Kind,
    Schedule,
    Step,
    check,
    is_synchronous,
)
from tfdist.utils.validation import check_range

__all__ = ["bubble", "dependencies", "ideal_bubble", "live_activations", "simulate"]


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
    places = [0] * schedule.devices
    clocks = [0.0] * schedule.devices
    going = True
    while going:
        going = False  # A round in which no device moves is the last: all is done, or a deadlock.
        for device, program in enumerate(schedule.programs):
            while places[device] < len(program):
                step = program[places[device]]
                ready = _ready(schedule, step, device, done, transfer)
                if ready is None:
                    break
                begin = max(clocks[device], ready)
                clocks[device] = begin + seconds[step.kind][step.chunk]
                done[step] = Box(device, step, begin, clocks[device])
                places[device] += 1
                going = True
    if len(done) < sum(map(len, schedule.programs)):
        raise ValueError(_deadlock(schedule, places))
    return list(done.values())


def _of_each(seconds: float | Sequence[float], count: int) -> list[float]:
    each = list(seconds) if isinstance(seconds, Sequence) else [seconds] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} times do not fit {count} chunks. Give one for each.")
    return each


def _ready(
    schedule: Schedule, step: Step, device: int, done: dict[Step, Box], transfer: float
) -> float | None:
    """When a device has all that a step needs; None if not all of it is done."""
    boxes = [done.get(need) for need in dependencies(schedule, step)]
    ready = 0.0
    for box in boxes:
        if box is None:
            return None
        ready = max(ready, box.end + (0.0 if box.device == device else transfer))
    return ready


def _deadlock(schedule: Schedule, places: Sequence[int]) -> str:
    waiting = [
        f"device {device} at {program[place]}"
        for device, (program, place) in enumerate(zip(schedule.programs, places, strict=True))
        if place < len(program)
    ]
    return (
        f"Schedule {schedule.name!r} cannot go on: {', '.join(waiting)}, each written as "
        "kind(batch, chunk, microbatch). Change the order of their programs."
    )


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

    Args:
        name: a key of `SCHEDULES`.
        stages: the number of pipeline devices.
        microbatches: the parts of a global batch.
        virtual: the chunks of the model on each device.
        batches: the global batches between an empty pipeline and the next; `math.inf` if it never
            is empty again. Changes nothing if each batch ends in a flush.

    Returns:
        A number from 0 to 1.

    Raises:
        ConfigError: as `check` does, and for `batches`.
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
    return [_peak(program) for program in schedule.programs]


def _peak(program: Iterable[Step]) -> int:
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0}
    live = peak = 0
    for step in program:
        live += change[step.kind]
        peak = max(peak, live)
    return peak
