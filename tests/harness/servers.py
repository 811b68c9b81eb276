"""Servers beside a test's process: started by it, ended with it.

`make` runs in the process of a target with servers. TF_CONFIG there is a list: that of the chief,
then those of the servers.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from typing import Any

from tests.harness.forking import VARIABLE, Forked, fork
from tfdist import environment

_processes: dict[tuple[str, int], Forked] = {}
_configs: dict[tuple[str, int], str] = {}
#: The write end of every server's standard input: a server ends when it closes.
_ours: list[int] = []


def serve(config: str) -> None:
    """What a server runs: it ends when its standard input does."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    import tensorflow as tf

    threads = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=6, intra_op_parallelism_threads=1
    )
    spec = json.loads(config)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(spec["cluster"]),
        protocol="grpc",
        config=threads,
        job_name=spec["task"]["type"],
        task_index=spec["task"]["index"],
    )
    server.join()


def start(kind: str, index: int) -> Forked:
    """Starts a server, or starts it again in the place of one that has ended."""
    environ = environment.merged({"TF_CONFIG": None, "GRPC_FAIL_FAST": "use_caller"})
    source, ours = os.pipe()
    _ours.append(ours)
    process = fork(
        environ[VARIABLE],
        "tests.harness.servers:serve",
        _configs[kind, index],
        environ=environ,
        files=[source, 1],
    )
    os.close(source)
    _processes[kind, index] = process
    return process


def running(kind: str, index: int) -> Forked:
    """The process of a server."""
    return _processes[kind, index]


def make(**options: Any) -> Any:
    """Starts the servers and makes the strategy on them."""
    import tensorflow as tf

    from tfdist.config.server_options import ServerOptions
    from tfdist.strategies.parameter_server.strategy import ParameterServer

    chief, *servers = json.loads(environment.read("TF_CONFIG") or "[]")
    for text in servers:
        task = json.loads(text)["task"]
        _configs[task["type"], task["index"]] = text
        start(task["type"], task["index"])
    atexit.register(lambda: [process.kill() for process in _processes.values()])
    rule = ServerOptions(**{**options.pop("rule", {}), **options})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(json.loads(chief)["cluster"]),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    return ParameterServer(resolver, rule)
