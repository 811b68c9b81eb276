"""Puts the checks together."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

from tfdist import environment
from tfdist.cluster.checks.finding import Finding, error, warning
from tfdist.cluster.environments import mpi
from tfdist.cluster.tf_config import (
    PROGRAM_START_HINT,
    Network,
    ThisMachine,
    check_tf_config,
)
from tfdist.doctor.horovod import horovod_finding
from tfdist.doctor.machine import machine_findings
from tfdist.doctor.report import Report
from tfdist.doctor.versions import version_findings
from tfdist.errors import ConfigError

__all__ = ["STANDARD_INPUT", "diagnose"]

#: The file name that means standard input.
STANDARD_INPUT = "-"
_WHERE = "TF_CONFIG"
_THIS_MACHINE = ThisMachine()


@dataclasses.dataclass(frozen=True)
class _Source:
    """A TF_CONFIG and where it came from; `text` is None where there is none."""

    name: str
    text: str | None = None
    problem: Finding | None = None


def diagnose(
    tf_config: str | None = None,
    *,
    file: str | pathlib.Path | None = None,
    strategy: str | None = None,
    environ: Mapping[str, str] | None = None,
    elsewhere: bool = False,
    network: Network = _THIS_MACHINE,
) -> Report:
    """Looks at this machine and a TF_CONFIG, without importing TensorFlow.

    The TF_CONFIG is the argument, or the content of the file, or the environment's.

    Args:
        tf_config: the text of a TF_CONFIG.
        file: a file that holds one; "-" is standard input.
        strategy: the strategy that is to run, or None where it is not known.
        environ: environment variables; by default the process's own.
        elsewhere: whether the TF_CONFIG is for another machine, so that neither its host names nor
            its ports can be checked here.
        network: whom to ask about host names and ports.

    Raises:
        ConfigError: if both a text and a file are given, or the strategy is unknown.
    """
    if tf_config is not None and file is not None:
        raise ConfigError(
            f"Both a TF_CONFIG ({tf_config!r}) and a file ({str(file)!r}) are given. Give one."
        )
    variables = environment.snapshot() if environ is None else environ
    source = _source(tf_config, file, variables)
    findings = (
        *version_findings(),
        *machine_findings(variables),
        horovod_finding(strategy),
        *_tf_config_findings(source, strategy, None if elsewhere else network, variables),
    )
    return Report(
        findings=findings,
        source=source.name if source.text is not None else "",
        hints=(PROGRAM_START_HINT,) if source.text and strategy in (None, "multi_worker") else (),
    )


def _source(
    text: str | None, file: str | pathlib.Path | None, environ: Mapping[str, str]
) -> _Source:
    if text is not None:
        return _Source("the command line", text)
    if file is None:
        return _Source("the environment", environment.read(_WHERE, environ))
    if str(file) == STANDARD_INPUT:
        return _Source("standard input", sys.stdin.read())
    name = f"the file {str(file)!r}"
    try:
        return _Source(name, pathlib.Path(file).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        return _Source(name, problem=error(_WHERE, f"{name} is not UTF-8 text.", "Give a text."))
    except OSError as problem:
        what = f"{name} cannot be read: {problem.strerror}."
        return _Source(name, problem=error(_WHERE, what, "Correct the path."))


def _tf_config_findings(
    source: _Source, strategy: str | None, network: Network | None, environ: Mapping[str, str]
) -> list[Finding]:
    if source.problem is not None:
        return [source.problem]
    if source.text is not None:
        return check_tf_config(source.text, strategy=strategy, network=network)
    if strategy in ("multi_worker", "horovod"):
        launched = _launched(strategy, environ)
        if launched is not None:
            return [launched]
    if strategy in ("multi_worker", "parameter_server", "horovod"):
        return [
            warning(
                _WHERE,
                f'Not set. With strategy "{strategy}" this process would train alone.',
                f"Set it in each process. `tfdist run -n 2 --strategy {strategy}` does so for "
                "its own.",
            )
        ]
    return [Finding("ok", _WHERE, "Not set: this process is not part of a cluster.")]


def _launched(strategy: str, environ: Mapping[str, str]) -> Finding | None:
    """What another launcher than tfdist says of this process."""
    rank, size = (environment.read(f"HOROVOD_{name}", environ) for name in ("RANK", "SIZE"))
    if strategy == "horovod" and rank is not None:
        return Finding("ok", _WHERE, f"Not set: horovodrun started this rank {rank} of {size}.")
    try:
        found = mpi.detect(environ)
    except ConfigError as problem:
        return error("MPI", str(problem), "Correct them.")
    if found is None or found.size < 2:
        return None
    says = f"Not set: {found.launcher} started this rank {found.rank} of {found.size}."
    return Finding("ok", _WHERE, says)
