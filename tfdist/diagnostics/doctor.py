"""Puts the checks together."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from tfdist import environment
from tfdist.cluster.environments import mpi
from tfdist.cluster.spec import Topology
from tfdist.cluster.tf_config import PROGRAM_START_HINT, Network, ThisMachine, check_tf_config
from tfdist.cluster.validation.finding import Finding, Severity, error, warning
from tfdist.cluster.validation.machine import installed_version, machine_findings, version_findings
from tfdist.config.strategy_spec import StrategySpec, spec_of
from tfdist.errors import ConfigError
from tfdist.horovod.installer.install import operations
from tfdist.strategies.horovod.library import BUILD_COMMAND, built_for, is_installed

__all__ = ["STANDARD_INPUT", "Report", "diagnose", "horovod_finding"]


# Checks the installed Horovod, without importing it.

_HOROVOD = "Horovod"


def horovod_finding(strategy: str | None) -> Finding:
    """Whether Horovod is there and was built for the installed TensorFlow.

    Args:
        strategy: the strategy that is to run, or None if it is not known.
    """
    wanted = strategy is not None and spec_of(strategy).problem is not None
    if not is_installed():
        if wanted:
            return error(_HOROVOD, "Not installed, and strategy horovod needs it.", _run())
        return Finding("ok", _HOROVOD, "not installed: only strategy horovod needs it", _run())
    version = installed_version("horovod") or "of an unknown version"
    problem = _problem(version)
    if problem is None:
        ways = ", ".join(operations()) or "nothing to exchange tensors"
        return Finding(
            "ok", _HOROVOD, f"{version}, built for TensorFlow {built_for()}, with {ways}"
        )
    if wanted:
        return error(_HOROVOD, problem, _run())
    return warning(_HOROVOD, f"{problem} Only strategy horovod needs it.", _run())


def _problem(version: str) -> str | None:
    against, here = built_for(), installed_version("tensorflow")
    if against is None:
        return f"Version {version} was built without TensorFlow."
    if here is None:
        return f"Version {version} was built for TensorFlow {against}, and none is installed."
    if against != here:
        return f"Version {version} was built for TensorFlow {against}; this is TensorFlow {here}."
    return None


def _run() -> str:
    return f"Run: {BUILD_COMMAND}"


# The report of the doctor.


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnosis.

    Attributes:
        findings: all that was looked at, first the machine, then the TF_CONFIG.
        source: where the TF_CONFIG came from; empty if there is none.
        hints: advice on mistakes that no check can see.
    """

    findings: tuple[Finding, ...]
    source: str = ""
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing must be changed. There may be warnings."""
        return self.count("error") == 0

    def count(self, severity: Severity) -> int:
        """The number of findings that have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


#: The file name that means standard input.
STANDARD_INPUT = "-"
_TF_CONFIG = "TF_CONFIG"
_THIS_MACHINE = ThisMachine()


@dataclasses.dataclass(frozen=True)
class _Source:
    """A TF_CONFIG and where it came from; `text` is None if there is none."""

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
        strategy: the strategy that is to run, or None if it is not known.
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
    spec = None if strategy is None else spec_of(strategy)
    connects = spec is None or spec.tensorflow_connects
    findings = (
        *version_findings(),
        *machine_findings(variables),
        horovod_finding(strategy),
        *_tf_config_findings(source, spec, None if elsewhere else network, variables),
    )
    return Report(
        findings=findings,
        source=source.name if source.text is not None else "",
        hints=(PROGRAM_START_HINT,) if source.text and connects else (),
    )


def _source(
    text: str | None, file: str | pathlib.Path | None, environ: Mapping[str, str]
) -> _Source:
    if text is not None:
        return _Source("the command line", text)
    if file is None:
        return _Source("the environment", environment.read(_TF_CONFIG, environ))
    if str(file) == STANDARD_INPUT:
        return _Source("standard input", sys.stdin.read())
    name = f"the file {str(file)!r}"
    try:
        return _Source(name, pathlib.Path(file).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        return _Source(
            name, problem=error(_TF_CONFIG, f"{name} is not UTF-8 text.", "Give a text.")
        )
    except OSError as problem:
        what = f"{name} cannot be read: {problem.strerror}."
        return _Source(name, problem=error(_TF_CONFIG, what, "Correct the path."))


def _tf_config_findings(
    source: _Source,
    spec: StrategySpec | None,
    network: Network | None,
    environ: Mapping[str, str],
) -> list[Finding]:
    if source.problem is not None:
        return [source.problem]
    if source.text is not None:
        return check_tf_config(source.text, use=None if spec is None else spec.use, network=network)
    if spec is not None and spec.topology is Topology.WORKERS:
        launched = _launched(spec, environ)
        if launched is not None:
            return [launched]
    if spec is not None and spec.is_clustered and not spec.has_stages:
        return [
            warning(
                _TF_CONFIG,
                f'Not set. With strategy "{spec.name}" this process would train alone.',
                f"Set it in each process. `tfdist run -n 2 --strategy {spec.name}` does so for "
                "its own.",
            )
        ]
    return [Finding("ok", _TF_CONFIG, "Not set: this process is not part of a cluster.")]


def _launched(spec: StrategySpec, environ: Mapping[str, str]) -> Finding | None:
    """The variables that another launcher than tfdist has set for this process."""
    rank, size = (environment.read(f"HOROVOD_{name}", environ) for name in ("RANK", "SIZE"))
    if spec.started_elsewhere and rank is not None:
        return Finding("ok", _TF_CONFIG, f"Not set: horovodrun started this rank {rank} of {size}.")
    try:
        launched = mpi.detect(environ)
    except ConfigError as problem:
        return error("MPI", str(problem), "Correct them.")
    if launched is None or launched.size < 2:
        return None
    says = f"Not set: {launched.launcher} started this rank {launched.rank} of {launched.size}."
    return Finding("ok", _TF_CONFIG, says)
