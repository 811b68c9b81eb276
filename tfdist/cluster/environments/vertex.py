"""A replica of a training job of Vertex AI.

Vertex AI sets CLUSTER_SPEC in every replica of a custom job: the addresses of its worker pools, and
the pool and index of this replica. It sets TF_CONFIG too, with the pools under TensorFlow's names;
if both are there, TF_CONFIG is read. Pool 0 is the chief, pool 1 the workers, pool 2 the ps,
pool 3 the evaluators (Vertex AI, "Distributed training"). A Reduction Server also sits in pool 2:
it is not a ps, and such a job is described by TF_CONFIG or a host file of its own.
"""

from __future__ import annotations

import json

from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments.base import Absent, ProcessContext, TaskAssignment, seen
from tfdist.errors import ConfigError

__all__ = ["resolve"]

_NAME = "CLUSTER_SPEC"
_POOLS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task of this replica.

    Raises:
        ConfigError: if CLUSTER_SPEC or TF_CONFIG has mistakes of form.
    """
    environ = context.environ
    text = environ.get(_NAME)
    if not text:
        return Absent(f"{_NAME} is not set")
    if environ.get("TF_CONFIG"):
        reason = seen(environ, [_NAME, "TF_CONFIG"])
        return tf_config.resolve_text(context, environ["TF_CONFIG"], "vertex", reason)
    reason = seen(environ, [_NAME])
    return tf_config.resolve_text(
        context, _in_tensorflows_words(text), "vertex", reason, name=_NAME
    )


def _in_tensorflows_words(text: str) -> str:
    """CLUSTER_SPEC with task types for worker pools; what cannot be read stays as it is."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{_NAME}={text!r} is not JSON: {error}. Vertex AI sets it; unset it elsewhere."
        ) from None
    if not isinstance(content, dict):
        return text
    cluster, task = content.get("cluster"), content.get("task")
    if isinstance(cluster, dict):
        cluster = {_POOLS.get(pool, pool): entries for pool, entries in cluster.items()}
    if isinstance(task, dict):
        kind = task.get("type")
        kind = _POOLS.get(kind, kind) if isinstance(kind, str) else kind
        task = {"type": kind, "index": task.get("index")}
    return json.dumps({"cluster": cluster, "task": task})
