"""What the tests run on: one entry for each strategy, and stock Keras as the reference."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import secrets
import socket
from typing import Any

from tfdist import environment
from tfdist.config.mesh import MODEL, Mesh

#: What some strategies lack by design, and cases ask for with the marker `needs`.
CAPABILITIES = {
    "collectives": "the replicas exchange gradients among themselves, by a rule that can be set",
    "loops": "a loop written for tf.distribute runs without TensorFlow's coordinator",
    "passes": "a pass over a data set goes on in the next `fit` (docs/promise.md)",
    "own data": "each process may read its own part of the data by itself",
    "own steps": "a model has a `train_step` of its own, or is of a subclass",
    "any model": "a model need not be one that can be cut into stages",
    "any optimizer": "an optimizer need not be one of which ZeRO knows how it computes",
    "inner gradients": "a step may ask for gradients of the outputs of a layer",
    "eager": "a step may run eagerly (`run_eagerly=True`)",
    "replicas": "this process sees the copy of a variable of each replica",
    "whole gradients": "a step may change gradients before it applies them",
    "whole batch": "layers and losses see all of a replica's examples at once",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One way to run a case.

    Attributes:
        name: what tests call it.
        strategy: `module:Class` of the strategy, or None for stock Keras without one.
        processes: number of processes.
        devices: logical CPU devices in each process.
        servers: tasks of type worker and ps that run servers beside the process.
        options: arguments of the strategy.
        rests: whether the processes are stopped between two calls, since they would use a CPU also
            while nothing is asked of them.
        turns: how often the target is due, beside others, at cases that run on one strategy; 0
            where it is due at none, and runs those only that run on every strategy.
        contract: whether the contract suite runs on it.
        slow: whether what is core takes turns on it and others in `make test-all`.
        lacks: keys of `CAPABILITIES`: cases that need one of them do not run on it.
    """

    name: str
    strategy: str | None = None
    processes: int = 1
    devices: int = 1
    servers: tuple[tuple[str, int], ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    rests: bool = False
    turns: int = 0
    contract: bool = False
    slow: bool = False
    lacks: frozenset[str] = frozenset()

    @property
    def tasks(self) -> int:
        """The processes that run it, servers included."""
        return self.processes + sum(count for _, count in self.servers)

    @property
    def replicas(self) -> int:
        """Replicas in all processes; along the model axis of a mesh they are one."""
        parts = Mesh.parse(self.options.get("mesh", "model=1")).size(MODEL)
        return self.processes * self.devices // parts


#: What ZeRO lacks at each stage, and what a model axis does.
_BY_ZERO = frozenset({"collectives", "eager", "any optimizer"})
_BY_MESH = frozenset(
    {
        *("any optimizer", "collectives", "eager", "inner gradients", "loops", "own data"),
        "whole gradients",
    }
)

PLAIN = "plain"

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name=PLAIN),
        Target(name="devices", devices=4),
        Target(
            name="multi_worker",
            strategy="tfdist.strategies.multi_worker.strategy:MultiWorker",
            processes=2,
            contract=True,
            turns=2,
        ),
        Target(
            name="zero1",
            strategy="tfdist.strategies.multi_worker.strategy:MultiWorker",
            processes=2,
            options={"zero": 1},
            contract=True,
            slow=True,
            lacks=_BY_ZERO,
        ),
        Target(
            name="zero",
            strategy="tfdist.strategies.multi_worker.strategy:MultiWorker",
            processes=2,
            options={"zero": 2},
            contract=True,
            turns=1,
            lacks=_BY_ZERO,
        ),
        Target(
            name="zero3",
            strategy="tests.harness.sharding:make",
            processes=2,
            options={"zero": 3},
            contract=True,
            turns=1,
            lacks=_BY_ZERO | {"loops", "whole gradients"},
        ),
        Target(
            name="mesh",
            strategy="tests.harness.sharding:make",
            processes=2,
            options={"mesh": "model=2"},
            contract=True,
            turns=1,
            lacks=_BY_MESH,
        ),
        Target(
            name="mesh4",
            strategy="tests.harness.sharding:make",
            processes=4,
            options={"mesh": "data=2,model=2"},
            contract=True,
            slow=True,
            lacks=_BY_MESH,
        ),
        Target(
            name="parameter_server",
            strategy="tests.harness.servers:make",
            servers=(("worker", 2), ("ps", 2)),
            options={"min_shard_bytes": 512},
            contract=True,
            turns=2,
            lacks=frozenset({"collectives", "eager", "loops", "passes", "replicas"}),
        ),
        Target(
            name="horovod",
            strategy="tests.harness.rings:make",
            processes=2,
            options={"cycle_ms": 1.0},
            rests=True,
            contract=True,
            turns=2,
        ),
        Target(
            name="horovod_mesh",
            strategy="tests.harness.rings:make",
            processes=4,
            options={"cycle_ms": 1.0, "mesh": "data=2,model=2", "zero": 3},
            rests=True,
            contract=True,
            slow=True,
            lacks=_BY_ZERO | _BY_MESH,
        ),
        Target(
            name="mirrored",
            strategy="tfdist.strategies.mirrored.strategy:Mirrored",
            devices=2,
            contract=True,
            turns=1,
        ),
        Target(
            name="pipeline",
            strategy="tfdist.strategies.pipeline:Pipeline",
            devices=2,
            options={"devices": ("cpu:0", "cpu:1"), "microbatches": 4},
            contract=True,
            turns=1,
            lacks=frozenset(
                {
                    *("collectives", "eager", "loops", "own steps", "any model", "replicas"),
                    "whole batch",
                }
            ),
        ),
        Target(
            name="single",
            strategy="tfdist.strategies.single.strategy:Single",
            contract=True,
            turns=1,
            lacks=frozenset({"collectives", "replicas"}),
        ),
        Target(name="toy", strategy="tests.jobs.toy.toy_strategy:make", devices=2, contract=True),
        Target(
            name="multi_worker3",
            strategy="tfdist.strategies.multi_worker.strategy:MultiWorker",
            processes=3,
        ),
        Target(
            name="horovod_zero",
            strategy="tests.harness.rings:make",
            processes=2,
            options={"cycle_ms": 1.0, "zero": 1},
            rests=True,
        ),
        Target(
            name="horovod_zero3",
            strategy="tests.harness.rings:make",
            processes=2,
            options={"cycle_ms": 1.0, "zero": 3},
            rests=True,
        ),
        Target(
            name="mesh_zero1",
            strategy="tests.harness.sharding:make",
            processes=4,
            options={"mesh": "data=2,model=2", "zero": 1},
        ),
        Target(
            name="mesh_zero3",
            strategy="tests.harness.sharding:make",
            processes=4,
            options={"mesh": "data=2,model=2", "zero": 3},
        ),
        Target(name="laid_out", strategy="tests.harness.sharding:make", processes=4),
        Target(name="horovod3", strategy="tests.harness.rings:make", processes=3, rests=True),
    )
}

#: The targets that the contract suite runs on.
STRATEGIES = tuple(target.name for target in TARGETS.values() if target.contract)


#: One of each kind: in one process, in several, and with servers.
KINDS = ("mirrored", "multi_worker", "parameter_server")


def free_ports(count: int) -> list[int]:
    """Distinct free ports of this host, below those that the system hands out by itself.

    They are not held until a server listens, so nobody else may be given one: not the jobs of other
    tests, not the test sessions beside this one (`-n 2`), which take other ones, and no other
    cluster of this session, which may start at the same time.
    """
    session = int((environment.snapshot().get("PYTEST_XDIST_WORKER", "gw0"))[2:]) % _SESSIONS
    random = secrets.SystemRandom()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(_LOWEST_PORT, _HIGHEST_PORT, _SESSIONS) + session
            if port in _given:
                continue
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("", port))  # TensorFlow's servers listen on all interfaces.
                ports.append(port)
                _given.append(port)
        return ports


_SESSIONS = 8
#: The system hands out 32768 and higher ones (/proc/sys/net/ipv4/ip_local_port_range).
_LOWEST_PORT, _HIGHEST_PORT = 20_000, 32_000
#: The last ports that this session, which has 1,500, was given.
_given: collections.deque[int] = collections.deque(maxlen=500)


def server_configs(target: Target) -> list[str]:
    """The TF_CONFIG of the chief, then of each server, of a target with servers."""
    tasks = [("chief", 0), *((kind, i) for kind, n in target.servers for i in range(n))]
    cluster: dict[str, list[str]] = {}
    for (kind, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
        cluster.setdefault(kind, []).append(f"127.0.0.1:{port}")
    return [
        json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        for kind, index in tasks
    ]


def tf_configs(target: Target) -> list[str | None]:
    """The TF_CONFIG of each process of a target; None where it is one process."""
    if target.servers:
        return [json.dumps(server_configs(target))]
    if target.processes == 1:
        return [None]
    workers = [f"127.0.0.1:{port}" for port in free_ports(target.processes)]
    return [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        for index in range(target.processes)
    ]
