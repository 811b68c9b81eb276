"""Finds meanings of a well-formed TF_CONFIG that nobody can have intended."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.cluster.spec import ClusterUse, Topology, is_any_address, is_loopback
from tfdist.cluster.validation.finding import Finding, error, quoted, warning
from tfdist.cluster.validation.structure import CLUSTER, TASK, WHOLE, Reading, names

__all__ = ["meaning_findings"]


def meaning_findings(reading: Reading, use: ClusterUse | None) -> Iterator[Finding]:
    """The findings on a TF_CONFIG for the strategy that is to run on it.

    Args:
        reading: the TF_CONFIG.
        use: how the strategy uses it, or None if the strategy is not known.
    """
    topology = None if use is None else use.topology
    if not reading.listed:
        return
    if use is not None and topology is Topology.ONE_PROCESS:
        yield _ignored(use.strategy)
        return
    yield from _no_task(reading)
    yield from _hosts(reading)
    yield from _gaps(reading, use)
    if topology is Topology.SERVERS:
        yield from _parameter_server(reading)
    elif topology is Topology.STAGES:
        yield from _pipeline(reading)
    else:
        yield from _multi_worker(reading, certain=use is not None and use.tensorflow_connects)


def _no_task(reading: Reading) -> Iterator[Finding]:
    if not reading.has_task:
        yield error(
            TASK,
            'There is no "task", so this process does not know which task of the cluster it is.',
            'Add "task": {"type": "worker", "index": 0}, with another index in each process.',
        )


def _hosts(reading: Reading) -> Iterator[Finding]:
    found = [(entry, entry.address) for entry in reading.listed if entry.address is not None]
    for entry, address in found:
        if is_any_address(address.host):
            yield error(
                entry.where,
                f'"{address}" means all interfaces of a machine: no other task can call it.',
                "Write the machine's name or address; 127.0.0.1 if all tasks run on one machine.",
            )
    local = [(e, a) for e, a in found if is_loopback(a.host)]
    others = [a for _, a in found if not is_loopback(a.host) and not is_any_address(a.host)]
    if local and others:
        entry, address = local[0]
        yield error(
            entry.where,
            f'"{address}" means another machine to each task, but there are tasks elsewhere, such '
            f'as "{others[0]}".',
            f"Write the address by which the others reach {names([e.task for e, _ in local])}.",
        )


def _gaps(reading: Reading, use: ClusterUse | None) -> Iterator[Finding]:
    for kind in dict.fromkeys(entry.task.type for entry in reading.listed):
        present = {entry.task.index for entry in reading.of_type(kind)}
        missing = sorted(set(range(max(present) + 1)) - present)
        if missing:
            make = warning if use is None else error
            yield make(
                f"{CLUSTER}.{kind}",
                f"It lists {kind} {', '.join(map(str, sorted(present)))} but not "
                f"{', '.join(map(str, missing[:10]))}. Only programs of TensorFlow 1 allow gaps.",
                "List all tasks, numbered from 0 without gaps, the same in each process.",
            )


def _ignored(strategy: str) -> Finding:
    return warning(
        WHOLE,
        f"It is set, but strategy {quoted(strategy)} uses only this process and ignores it.",
        "Use strategy multi_worker, or unset TF_CONFIG.",
    )


def _multi_worker(reading: Reading, certain: bool) -> Iterator[Finding]:
    """The errors of multi_worker; only a warning if another strategy may be meant."""
    servers = reading.of_type("ps")
    if servers:
        where, remedy = f"{CLUSTER}.ps", 'Remove "ps" from the cluster, in each process.'
        problem = f"{len(servers)} ps task{'s are' if len(servers) > 1 else ' is'} listed."
        if certain:
            yield error(where, f"{problem} multi_worker waits for them without end.", remedy)
        else:
            yield warning(
                where,
                f"{problem} Only parameter-server training uses them; multi_worker waits for them "
                "without end.",
                f"For multi_worker: {remedy[0].lower()}{remedy[1:]}",
            )
    task = reading.task
    if task is None or task.type != "evaluator" or reading.of_type("evaluator"):
        return
    if certain:
        yield error(
            TASK,
            f"{task} is not in the cluster: TensorFlow's multi-worker strategy ends in KeyError: "
            "'evaluator'.",
            "Run the evaluator with strategy single or mirrored, or list its address.",
        )


def _pipeline(reading: Reading) -> Iterator[Finding]:
    if not reading.of_type("chief"):
        yield error(
            CLUSTER,
            "It lists no chief, the task that runs the script and has the first stage.",
            'Add "chief": ["host:port"], a task besides the workers.',
        )
    for kind in ("ps", "evaluator"):
        if reading.of_type(kind):
            yield warning(
                f"{CLUSTER}.{kind}",
                f"pipeline has no stage on a task of type {kind}.",
                f'Remove "{kind}" from the cluster.',
            )


def _parameter_server(reading: Reading) -> Iterator[Finding]:
    for kind in ("ps", "worker"):
        if not reading.of_type(kind):
            yield error(
                CLUSTER,
                f"It lists no {kind}. Parameter-server training needs at least one.",
                f'Add "{kind}": ["host:port"].',
            )
    if not reading.of_type("chief"):
        yield error(
            CLUSTER,
            "It lists no chief, the task that runs the script and gives the workers their steps.",
            'Add "chief": ["host:port"], a task besides the workers.',
        )
    task = reading.task
    if task is not None and task.type == "evaluator":
        yield error(
            TASK,
            f"{task} has nothing to do: with parameter_server `evaluate` runs on the workers.",
            "Start no evaluator. A program that evaluates checkpoints by itself runs with strategy "
            "single, and TF_CONFIG unset.",
        )
    elif reading.of_type("evaluator"):
        yield warning(
            f"{CLUSTER}.evaluator",
            "parameter_server starts no evaluator: `evaluate` runs on the workers.",
            'Remove "evaluator" from the cluster.',
        )
