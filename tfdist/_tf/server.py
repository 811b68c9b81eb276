"""TensorFlow's gRPC server without TensorFlow's Python API, checked on TensorFlow 2.21.

A server runs the graphs of its chief and no Python. `import tensorflow` takes 4 s of a processor
all the same, for each server of a job. Here empty packages stand for `tensorflow` and
`tensorflow.python`, so that only the modules below are imported, which takes 1 s. Nothing else of
TensorFlow can be used in the process after that.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["ServerError", "start_server"]


class ServerError(Exception):
    """TensorFlow could not start a server."""


def start_server(
    cluster: Mapping[str, Mapping[int, str]], job: str, index: int, inter_op_threads: int
) -> Any:
    """Starts the server of a task; it cannot be stopped but by the end of this process.

    Args:
        cluster: the address, `host:port`, of each task, by type and index.
        job: the task's type.
        index: the task's index.
        inter_op_threads: how many operations the server runs at a time.

    Returns:
        The server, which must be kept.

    Raises:
        ServerError: if it cannot listen at its address.
    """
    _leave_out_the_api()
    from tensorflow.core.protobuf.tensorflow_server_pb2 import ServerDef
    from tensorflow.python.client import _pywrap_tf_session
    from tensorflow.python.framework.errors_impl import OpError

    definition = ServerDef(protocol="grpc", job_name=job, task_index=index)
    for name, addresses in sorted(cluster.items()):
        tasks = definition.cluster.job.add(name=name).tasks
        for number, address in addresses.items():
            tasks[number] = address
    session = definition.default_session_config
    session.inter_op_parallelism_threads = inter_op_threads
    session.gpu_options.allow_growth = True
    try:
        server = _pywrap_tf_session.TF_NewServer(definition.SerializeToString())
        _pywrap_tf_session.TF_ServerStart(server)
    except OpError as error:
        raise ServerError(error.message) from error
    return server


def _leave_out_the_api() -> None:
    """Puts empty packages where TensorFlow's `__init__` modules would run, if they have not yet."""
    if "tensorflow" in sys.modules:
        return
    spec = importlib.util.find_spec("tensorflow")
    folders = (spec and spec.submodule_search_locations) or []
    for name, below in (("tensorflow", ""), ("tensorflow.python", "/python")):
        package = types.ModuleType(name)
        package.__path__ = [f"{folder}{below}" for folder in folders]
        sys.modules[name] = package
