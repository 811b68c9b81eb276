"""Schedules of a pipeline: their order, their time, their memory, and the weights they use."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import ConfigError
from tfdist.strategies.pipeline.schedules import (
    SCHEDULES,
    Box,
    Kind,
    Program,
    Schedule,
    Step,
    bubble,
    check,
    dependencies,
    ideal_bubble,
    is_synchronous,
    live_activations,
    make,
    simulate,
    version,
)

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE


@st.composite
def shapes(draw, names=tuple(SCHEDULES)):
    """A schedule's name, stages, microbatches, chunks a device and batches."""
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(1, 6))
    virtual = draw(st.integers(2, 4)) if name == "interleaved" else 1
    microbatches = {
        "interleaved": st.integers(1, 4).map(lambda groups: groups * stages),
        "pipedream": st.just(1),
        "2bw": st.integers(stages, 3 * stages),
    }.get(name, st.integers(1, 12))
    return name, stages, draw(microbatches), virtual, draw(st.integers(1, 5))


def made(shape):
    name, stages, microbatches, virtual, batches = shape
    return make(name, stages, microbatches, virtual=virtual, batches=batches)


def short(steps):
    """Such as `F0 F1 B0 U`: kind and microbatch."""
    return " ".join(
        step.kind.value + (str(step.microbatch) if step.kind is not U else "") for step in steps
    )


@given(shapes())
def test_each_step_is_there_once_and_on_its_device(shape):
    _, stages, microbatches, virtual, batches = shape
    schedule = made(shape)
    assert (schedule.devices, schedule.chunks) == (stages, stages * virtual)
    for device, program in enumerate(schedule.programs):
        chunks = range(device, stages * virtual, stages)
        wanted = {
            Step(kind, *numbers)
            for kind in (F, B)
            for numbers in itertools.product(range(batches), range(microbatches), chunks)
        } | {Step(U, batch, -1, device) for batch in range(batches)}
        assert len(program) == len(wanted)
        assert set(program) == wanted


@given(shapes(), st.integers(0, 10**6))
def test_in_a_simulation_each_step_begins_as_soon_as_it_can(shape, seed):
    schedule = made(shape)
    times = random.Random(seed)
    forward, backward = ([times.random() for _ in range(schedule.chunks)] for _ in range(2))
    boxes = simulate(schedule, forward, backward, update=0.3, transfer=0.2)
    by_step = {box.step: box for box in boxes}
    for device, program in enumerate(schedule.programs):
        assert [box.step for box in boxes if box.device == device] == list(program)
    before = [0.0] * schedule.devices
    for box in boxes:
        step, device = box.step, box.device
        needed = [by_step[need] for need in dependencies(schedule, step)]
        arrivals = [need.end + (0.2 if need.device != device else 0.0) for need in needed]
        assert box.begin == max([before[device], *arrivals])
        time = {F: forward[step.chunk], B: backward[step.chunk]}.get(step.kind, 0.3)
        assert box.end == box.begin + time
        before[device] = box.end


def test_dependencies():
    schedule = make("interleaved", 2, 2, virtual=2)
    assert dependencies(schedule, Step(F, 0, 1, 0)) == []
    assert dependencies(schedule, Step(F, 0, 1, 2)) == [Step(F, 0, 1, 1)]
    assert dependencies(schedule, Step(B, 0, 1, 3)) == [Step(F, 0, 1, 3)]
    assert dependencies(schedule, Step(B, 0, 1, 2)) == [Step(B, 0, 1, 3), Step(F, 0, 1, 2)]
    wanted = {Step(B, 0, microbatch, chunk) for microbatch in (0, 1) for chunk in (1, 3)}
    assert set(dependencies(schedule, Step(U, 0, -1, 1))) == wanted


@given(shapes(), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_is_as_in_theory_if_stages_are_equal(shape, forward, backward):
    name, stages, microbatches, virtual, batches = shape
    boxes = simulate(made(shape), forward, backward)
    ideal = ideal_bubble(name, stages, microbatches, virtual=virtual, batches=batches)
    assert bubble(boxes) == pytest.approx(ideal, abs=1e-9)
    rows = microbatches * virtual * (1 if is_synchronous(name) else batches)
    assert ideal == (stages - 1) / (rows + stages - 1)


def test_transfers_and_uneven_stages_make_the_bubble_larger():
    schedule = make("1f1b", 4, 8)
    ideal = ideal_bubble("1f1b", 4, 8)
    assert ideal == 3 / 11
    assert bubble(simulate(schedule, transfer=0.5)) > ideal + 0.01
    assert bubble(simulate(schedule, [1, 1, 2, 1], [2, 2, 4, 2])) > ideal + 0.01


def test_without_a_flush_the_ideal_bubble_fades():
    assert ideal_bubble("2bw", 4, 8, batches=10) == 3 / 83
    assert ideal_bubble("2bw", 4, 8, batches=math.inf) == 0
    assert ideal_bubble("1f1b", 4, 8, batches=math.inf) == 3 / 11


def test_the_bubble_of_some_boxes():
    step = Step(F, 0, 0, 0)
    assert bubble([Box(0, step, 5, 7), Box(1, step, 6, 9)]) == pytest.approx(3 / 8)
    assert bubble([Box(0, step, 5, 5)]) == 0
    assert bubble([]) == 0


def test_a_deadlock_is_told():
    good = make("1f1b", 2, 2)
    first, last = good.programs
    turned = dataclasses.replace(good, programs=(first, (last[1], last[0], *last[2:])))
    with pytest.raises(ValueError, match=r"device 0 at B\(0, 0, 0\), device 1 at B\(0, 1, 0\)"):
        simulate(turned)
    with pytest.raises(ValueError, match="3 times do not fit 2 chunks"):
        simulate(good, [1, 2, 3])


def megatron(rank, p, m, v):
    """The order in Megatron-LM's `forward_backward_pipelining_with_interleaving`."""
    total = m * v
    warmup = total if m == p else min((p - rank - 1) * 2 + (v - 1) * p, total)

    def step(kind, k):
        chunk = k % (p * v) // p
        chunk = chunk if kind is F else v - chunk - 1
        return Step(kind, 0, k // (p * v) * p + k % p, chunk * p + rank)

    steps = [step(F, k) for k in range(warmup)]
    for k in range(total - warmup):
        steps += [step(F, k + warmup), step(B, k)]
    return [*steps, *(step(B, k) for k in range(total - warmup, total))]


@given(shapes(("interleaved",)))
def test_interleaved_is_in_the_order_of_megatron(shape):
    _, stages, microbatches, virtual, _ = shape
    for device, program in enumerate(make(*shape[:3], virtual=virtual).programs):
        assert list(program[:-1]) == megatron(device, stages, microbatches, virtual)
        assert program[-1].kind is U


def test_small_schedules_in_full():
    gpipe, last = make("gpipe", 2, 3).programs
    assert short(gpipe) == short(last) == "F0 F1 F2 B2 B1 B0 U"
    assert [short(program) for program in make("1f1b", 3, 4).programs] == [
        "F0 F1 F2 B0 F3 B1 B2 B3 U",
        "F0 F1 B0 F2 B1 F3 B2 B3 U",
        "F0 B0 F1 B1 F2 B2 F3 B3 U",
    ]
    assert short(make("2bw", 2, 2, batches=2).programs[0]) == "F0 F1 B0 F0 B1 U F1 B0 B1 U"
    assert " ".join(map(str, make("pipedream", 2, 1, batches=3).programs[0])) == (
        "F(0, 0, 0) F(1, 0, 0) B(0, 0, 0) U(0, 0) F(2, 0, 0) B(1, 0, 0) U(1, 0) B(2, 0, 0) U(2, 0)"
    )


@given(shapes())
def test_live_activations_are_as_in_theory(shape):
    name, p, m, v, batches = shape
    total = m * v * (1 if is_synchronous(name) else batches)
    for stage, live in enumerate(live_activations(made(shape))):
        ahead = {"gpipe": m, "interleaved": m * v if m == p else 2 * (p - 1 - stage) + (v - 1) * p}
        assert live == min(total, ahead.get(name, p - 1 - stage) + 1)


def test_live_activations_where_it_matters():
    assert live_activations(make("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert live_activations(make("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert live_activations(make("1f1b", 4, 2)) == [2, 2, 2, 1]
    assert live_activations(make("pipedream", 4, 1, batches=9)) == [4, 3, 2, 1]
    assert live_activations(make("interleaved", 4, 8, virtual=2)) == [11, 9, 7, 5]


def updates_before(schedule, stage):
    """For each forward of a stage: its batch, and how many updates the stage has done."""
    updates = 0
    for step in schedule.programs[stage]:
        if step.kind is F:
            yield step.batch, updates
        updates += step.kind is U


@given(shapes(tuple(set(SCHEDULES) - {"2bw"})))
def test_versions_are_those_of_a_replay(shape):
    name, stages = shape[:2]
    schedule = made(shape)
    for stage in range(stages):
        for batch, updates in updates_before(schedule, stage):
            assert version(name, stages, stage, batch) == updates


@given(shapes(("pipedream",)))
def test_vertical_sync_uses_the_version_of_the_input_stage(shape):
    name, stages = shape[:2]
    schedule = made(shape)
    for batch, at_input in updates_before(schedule, 0):
        for stage in range(stages):
            assert version(name, stages, stage, batch, vertical_sync=True) == at_input
            assert version(name, stages, stage, batch) == max(0, batch - (stages - 1 - stage))


@given(shapes(("2bw",)))
def test_2bw_uses_a_version_that_all_stages_have(shape):
    name, stages, _, _, batches = shape
    schedule = made(shape)
    replays = [list(updates_before(schedule, stage)) for stage in range(stages)]
    for batch in range(batches):
        counts = {updates for replay in replays for number, updates in replay if number == batch}
        used = {
            version(name, stages, stage, batch, vertical_sync=sync)
            for stage in range(stages)
            for sync in (False, True)
        }
        assert used == {max(0, batch - 1)}
        assert counts <= {max(0, batch - 1), batch}
        if stages > 1:
            assert min(counts) == max(0, batch - 1)


@given(shapes(("2bw",)))
def test_2bw_needs_two_versions_at_a_time(shape):
    """Of each stage: the newest, and those of microbatches between forward and backward."""
    name, stages, _, _, _ = shape
    for stage, program in enumerate(made(shape).programs):
        updates, live = 0, []
        for step in program:
            used = version(name, stages, stage, step.batch)
            if step.kind is F:
                live.append(used)
            elif step.kind is B:
                live.remove(used)
            else:
                updates += 1
            assert {*live} <= {updates - 1, updates}


@given(shapes())
def test_pushes_and_a_drain_are_the_schedule(shape):
    name, stages, microbatches, virtual, batches = shape
    for device, whole in enumerate(made(shape).programs):
        program = Program(name, stages, microbatches, device, virtual=virtual)
        steps = []
        for batch in range(batches):
            more = program.push(batch)
            forwards = [step for step in more if step.kind is F]
            assert {step.batch for step in forwards} == {batch}
            assert len(forwards) == microbatches * virtual
            steps += more
        left = program.drain()
        assert tuple(steps + left) == whole
        assert program.drain() == []
        if is_synchronous(name):
            assert left == []


@given(shapes(("pipedream", "2bw")))
def test_a_drained_program_begins_anew(shape):
    name, stages, microbatches, virtual, batches = shape
    program = Program(name, stages, microbatches, 0, virtual=virtual)
    rounds = []
    for first in (0, batches):
        steps = [step for batch in range(batches) for step in program.push(first + batch)]
        rounds.append(steps + program.drain())
    again = [dataclasses.replace(step, batch=step.batch - batches) for step in rounds[1]]
    assert again == rounds[0]


def test_the_names_of_schedules():
    assert set(SCHEDULES) == {"gpipe", "1f1b", "interleaved", "pipedream", "2bw"}
    assert {name for name in SCHEDULES if not is_synchronous(name)} == {"pipedream", "2bw"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b", 2, 2), ["Unknown schedule '1f2b'", "Did you mean '1f1b'"]),
        (("gpipe", 0, 2), ["stages=0", "1 or more"]),
        (("gpipe", 2, 0), ["microbatches=0", "1 or more"]),
        (("gpipe", 2, 1.5), ["microbatches=1.5"]),
        (("gpipe", 2, 2, 0), ["virtual=0"]),
        (("1f1b", 2, 2, 2), ["virtual=2", "schedule='1f1b'", "schedule='interleaved'"]),
        (("interleaved", 2, 2), ["virtual=1", "schedule='interleaved'", "Set virtual=2"]),
        (("interleaved", 4, 6, 2), ["microbatches=6", "stages=4", "Set microbatches=8"]),
        (("pipedream", 2, 2), ["microbatches=2", "schedule='pipedream'", "Set microbatches=1"]),
        (("2bw", 4, 3), ["microbatches=3", "stages=4", "Set microbatches=4"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(arguments, words):
    name, stages, microbatches, *rest = arguments
    virtual = rest[0] if rest else 1
    calls = [
        lambda: check(*arguments),
        lambda: make(name, stages, microbatches, virtual=virtual),
        lambda: ideal_bubble(name, stages, microbatches, virtual=virtual),
        lambda: Program(name, stages, microbatches, 0, virtual=virtual),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make("gpipe", 2, 2, batches=0), "batches=0"),
        (lambda: ideal_bubble("2bw", 2, 2, batches=0), "batches=0"),
        (lambda: Program("gpipe", 2, 2, 2), "device=2 conflicts with stages=2"),
        (lambda: Program("gpipe", 2, 2, -1), "device=-1"),
        (lambda: version("gpipe", 2, 5, 0), "stage=5 conflicts with stages=2"),
        (lambda: version("zero", 2, 0, 0), "Unknown schedule 'zero'"),
    ],
)
def test_numbers_out_of_range_are_told(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_schedule_is_a_value():
    assert make("2bw", 3, 4, batches=2) == make("2bw", 3, 4, batches=2)
    assert isinstance(hash(make("gpipe", 1, 1)), int)
    assert make("gpipe", 1, 1) == Schedule(
        "gpipe", 1, 1, 1, ((Step(F, 0, 0, 0), Step(B, 0, 0, 0), Step(U, 0, -1, 0)),)
    )
