"""Servers beside a test's process: started by it, ended with it.

`make` runs in the process of a target with servers. TF_CONFIG there is a list: that of the chief,
then those of the servers.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from typing import Any

from tfdist import environment

#: What a server runs: it ends when its standard input does.
_SERVER = """
import json, os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
sys.modules["sklearn"] = None  # Keras would import it, with all of SciPy.
import tensorflow as tf
config = json.loads(sys.argv[1])
options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=6, intra_op_parallelism_threads=1)
tf.distribute.Server(tf.train.ClusterSpec(config["cluster"]), protocol="grpc", config=options,
    job_name=config["task"]["type"], task_index=config["task"]["index"]).join()
"""

_processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
_configs: dict[tuple[str, int], str] = {}


def start(kind: str, index: int) -> subprocess.Popen[bytes]:
    """Starts a server, or starts it again in the place of one that has ended."""
    environ = environment.merged({"TF_CONFIG": None, "GRPC_FAIL_FAST": "use_caller"})
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, _configs[kind, index]],
        stdin=subprocess.PIPE,
        env=environ,
    )
    _processes[kind, index] = process
    return process


def running(kind: str, index: int) -> subprocess.Popen[bytes]:
    """The process of a server."""
    return _processes[kind, index]


def make(**options: Any) -> Any:
    """Starts the servers and makes the strategy on them."""
    import tensorflow as tf

    from tfdist.servers.cluster import UpdateRule
    from tfdist.strategies.parameter_server import ParameterServer

    chief, *servers = json.loads(environment.read("TF_CONFIG") or "[]")
    for text in servers:
        task = json.loads(text)["task"]
        _configs[task["type"], task["index"]] = text
        start(task["type"], task["index"])
    atexit.register(lambda: [process.kill() for process in _processes.values()])
    workers = sum(kind == "worker" for kind, _ in _configs)
    rule = UpdateRule(**{"workers": workers, **options.pop("rule", {})})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(json.loads(chief)["cluster"]),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    return ParameterServer(resolver, rule=rule, **options)
