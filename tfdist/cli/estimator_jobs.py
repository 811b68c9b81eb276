"""Jobs of `tfdist.estimator`: each task runs the script, which finds its part in TF_CONFIG."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from tfdist.cli.request import Request
from tfdist.cluster.tf_config import own_tf_config
from tfdist.config.strategy_spec import having
from tfdist.errors import ConfigError

__all__ = ["settled", "use_in"]

_MODULE = "tfdist.estimator"


def settled(request: Request) -> Request:
    """The request, with `every_task` if a job on parameter servers is one of Estimators.

    Raises:
        ConfigError: for `--evaluator` if there is no Estimator that it could evaluate.
    """
    name = request.named
    if name in (None, "auto"):
        text = own_tf_config()
        name = "parameter_server" if text is not None and '"ps"' in text else None
    line = None if request.every_task or request.env_only else use_in(request.script)
    if line is not None and name in having(lambda spec: spec.has_servers):
        why = f"line {line} of {request.script} uses {_MODULE}"
        return dataclasses.replace(request, every_task=True, why_every_task=why)
    if request.evaluator and not request.every_task:
        raise ConfigError(
            "--evaluator starts a task that evaluates the checkpoints of an Estimator. It goes "
            f"with --strategy parameter_server and a script that uses {_MODULE}, or with "
            "--every-task. Leave it out."
        )
    return request


def use_in(script: str) -> int | None:
    """The line on which a script first uses `tfdist.estimator`, or None.

    Only the script's own text is read, not what it imports.
    """
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # The script that runs it reports the mistake.
    aliases = {"tfdist"}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "tfdist" and a.asname}
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        lines += [node.lineno for name in names if f"{name}.".startswith(f"{_MODULE}.")]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    lines += [each.lineno for each in attributes if _is_it(each, aliases)]
    return min(lines, default=None)


def _is_it(node: ast.Attribute, aliases: set[str]) -> bool:
    value = node.value
    return node.attr == "estimator" and isinstance(value, ast.Name) and value.id in aliases
