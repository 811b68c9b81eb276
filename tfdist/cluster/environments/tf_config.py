"""A process whose TF_CONFIG has everything: cluster, addresses, type and index.

TensorFlow's own variable; people, Kubeflow, Volcano, Vertex AI, Ray Train and SageMaker write it.
The environments that know more of who wrote it read it by `resolve_text`.
"""

from __future__ import annotations

from collections import Counter

from tfdist.cluster.environments.base import Absent, ProcessContext, TaskAssignment, seen
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.errors import ConfigError

__all__ = ["resolve", "resolve_text"]


def resolve(context: ProcessContext) -> TaskAssignment | Absent:
    """The task that TF_CONFIG names.

    Raises:
        ConfigError: if it has mistakes of form, or other roles were asked for than it gives.
    """
    text = context.environ.get("TF_CONFIG")
    if not text:
        return Absent("TF_CONFIG is not set")
    return resolve_text(context, text, "tf_config", seen(context.environ, ["TF_CONFIG"]))


def resolve_text(
    context: ProcessContext,
    text: str,
    environment: str,
    reason: str,
    *,
    name: str = "TF_CONFIG",
    devices: int | None = None,
) -> TaskAssignment:
    """The task that a text in the form of TF_CONFIG names.

    Args:
        context: the roles that were asked for.
        text: the JSON text.
        environment: the environment's name.
        reason: the variables that were seen.
        name: the variable that holds the text, for messages.
        devices: GPUs of each task that computes.

    Raises:
        ConfigError: if it has mistakes of form, or other roles were asked for than it gives.
    """
    try:
        cluster, task = parse_tf_config(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("TF_CONFIG", name)) from None
    counts = dict(Counter(listed.type for listed, _ in cluster.tasks()))
    if task is not None and task.type not in counts:
        counts[task.type] = 1  # An evaluator, which need not be listed.
    context.roles.check(counts, name)
    return TaskAssignment(
        environment=environment,
        reason=reason,
        counts=counts,
        task=task,
        cluster=cluster,
        devices=devices,
    )
