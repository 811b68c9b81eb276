import io
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.validation.finding import Finding
from tfdist.cluster.validation.machine import in_range, machine_findings, ranges, version_findings
from tfdist.diagnostics import Report, diagnose
from tfdist.diagnostics.doctor import horovod_finding
from tfdist.errors import ConfigError

NO_CLUSTER = '{"task": {"type": "worker", "index": 0}}'


def found(findings: Any, where: str) -> Finding:
    (one,) = [f for f in findings if f.where == where]
    return one


def plain(tmp_path: pathlib.Path, **more: str) -> dict[str, str]:
    """An environment without a Keras configuration file and without programs."""
    return {"KERAS_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **more}


# --- Versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.21.0", ">=2.21,<2.22", True),
        ("2.22.0", ">=2.21,<2.22", False),
        ("2.20.1", ">=2.21,<2.22", False),
        ("2.21", "==2.21.0", True),
        ("2.21.1", "!=2.21.1", False),
        ("3.9.1", ">=3.15", False),
        ("3.15.0rc1", ">=3.15", True),
        ("1.0", "<=1.0", True),
        ("1.0.1", ">1", True),
        ("1.0", "", True),
    ],
)
def test_in_range(version: str, wanted: str, expected: bool) -> None:
    assert in_range(version, wanted) is expected


def test_ranges_are_read_from_requirements() -> None:
    assert ranges(
        ["keras<3.16,>=3.15", "tensorflow[and-cuda] >=2.21, <2.22", 'pytest>=8; extra == "dev"']
    ) == {"keras": ">=3.15,<3.16", "tensorflow": ">=2.21,<2.22"}
    of_extras = ['tensorflow>=2.21; extra == "cpu"', "torch; extra == 'peer'"]
    assert ranges(of_extras, extra="cpu") == {"tensorflow": ">=2.21"}


def test_the_versions_here_are_good() -> None:
    findings = list(version_findings())
    assert [f.where for f in findings] == ["Python", "TensorFlow", "Keras", "NumPy"]
    assert {f.severity for f in findings} == {"ok"}


def test_a_missing_package_is_an_error_with_the_command_that_installs_it() -> None:
    missing = found(version_findings({"keras": "3.15.0"}.get), "TensorFlow")
    assert missing.severity == "error"
    assert missing.remedy == 'Run: pip install "tfdist[cpu]", or "tfdist[cuda]" for GPUs'


def test_a_package_out_of_range_is_an_error_that_names_both() -> None:
    old = found(version_findings({"tensorflow": "2.15.0"}.get), "TensorFlow")
    assert old.severity == "error"
    named = re.match(r"Version 2\.15\.0 is not (>=2\.\d+,<2\.\d+),", old.problem)
    assert named
    assert f'pip install "tensorflow{named[1]}"' in old.remedy


def test_tensorflow_under_another_name_counts() -> None:
    cpu = found(version_findings({"tensorflow-cpu": "2.21.0"}.get), "TensorFlow")
    assert (cpu.severity, cpu.problem) == ("ok", "2.21.0")


# --- The machine ----------------------------------------------------------------------------------


def test_a_plain_environment_is_well(tmp_path: pathlib.Path) -> None:
    findings = list(machine_findings(plain(tmp_path)))
    assert {f.severity for f in findings} == {"ok"}
    assert "CPU core" in found(findings, "Devices").problem


@pytest.mark.parametrize(
    ("variables", "where", "value", "remedy"),
    [
        ({"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS", '"1"', "unset TF_USE_LEGACY_KERAS"),
        ({"TF_USE_LEGACY_KERAS": "True"}, "TF_USE_LEGACY_KERAS", '"True"', "unset"),
        ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND", '"jax"', "unset KERAS_BACKEND"),
    ],
)
def test_a_variable_that_breaks_a_training(
    tmp_path: pathlib.Path, variables: Mapping[str, str], where: str, value: str, remedy: str
) -> None:
    bad = found(machine_findings(plain(tmp_path, **variables)), where)
    assert bad.severity == "error"
    assert value in bad.problem
    assert remedy in bad.remedy


@pytest.mark.parametrize(
    "variables", [{"TF_USE_LEGACY_KERAS": "0"}, {"KERAS_BACKEND": "tensorflow"}]
)
def test_a_variable_that_does_no_harm(tmp_path: pathlib.Path, variables: Mapping[str, str]) -> None:
    findings = machine_findings(plain(tmp_path, **variables))
    assert {f.severity for f in findings} == {"ok"}


def test_the_backend_of_the_configuration_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    bad = found(machine_findings(plain(tmp_path)), "KERAS_BACKEND")
    assert bad.severity == "error"
    assert '"torch"' in bad.problem
    assert str(tmp_path / "keras.json") in bad.problem
    environ = plain(tmp_path, KERAS_BACKEND="tensorflow")
    assert found(machine_findings(environ), "KERAS_BACKEND").severity == "ok"


@pytest.mark.parametrize(
    ("seen", "severity", "words"),
    [
        ((2, True), "ok", ["2 GPUs (number 0, 3)"]),
        ((0, False), "error", ["CUDA_VISIBLE_DEVICES=0,3 names 2 GPUs", "built without CUDA"]),
        ((0, True), "error", ["TensorFlow sees none", "libraries are missing"]),
        ((1, True), "error", ["TensorFlow sees 1", "MIG"]),
        (None, "warning", ["2 GPUs (number 0, 3), but TensorFlow could not be asked"]),
    ],
)
def test_gpus_are_compared_with_tensorflows(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: tuple[int, bool] | None,
    severity: str,
    words: list[str],
) -> None:
    monkeypatch.setattr("tfdist.cluster.validation.machine._of_tensorflow", lambda environ: seen)
    environ = plain(tmp_path, CUDA_VISIBLE_DEVICES="0,3")
    devices = found(machine_findings(environ), "Devices")
    assert devices.severity == severity
    assert all(word in devices.problem for word in words)
    if severity == "error":
        assert "pip install 'tfdist[cuda]'" in devices.remedy


def test_hidden_gpus_are_a_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.cluster.resources._installed", lambda: 4)
    environ = plain(tmp_path, CUDA_VISIBLE_DEVICES="-1")
    devices = found(machine_findings(environ), "Devices")
    assert devices.severity == "warning"
    assert 'CUDA_VISIBLE_DEVICES="-1" hides 4 GPUs' in devices.problem


# --- Horovod --------------------------------------------------------------------------------------


def horovod(
    monkeypatch: pytest.MonkeyPatch,
    strategy: str | None,
    built_for: str | None = None,
    installed: bool = True,
    tensorflow: str | None = "2.21.0",
) -> Finding:
    """What is said of a Horovod 0.28.1."""
    versions = {"horovod": "0.28.1", "tensorflow": tensorflow}
    place = "tfdist.diagnostics.doctor"
    monkeypatch.setattr(f"{place}.is_installed", lambda: installed)
    monkeypatch.setattr(f"{place}.built_for", lambda: built_for)
    monkeypatch.setattr(f"{place}.operations", lambda: ("Gloo", "NCCL"))
    monkeypatch.setattr(f"{place}.installed_version", versions.get)
    return horovod_finding(strategy)


@pytest.mark.parametrize("strategy", [None, "multi_worker", "horovod"])
def test_a_horovod_that_fits(monkeypatch: pytest.MonkeyPatch, strategy: str | None) -> None:
    good = horovod(monkeypatch, strategy, built_for="2.21.0")
    assert good.severity == "ok"
    assert good.problem == "0.28.1, built for TensorFlow 2.21.0, with Gloo, NCCL"


@pytest.mark.parametrize(("strategy", "severity"), [(None, "ok"), ("horovod", "error")])
def test_a_missing_horovod_matters_to_its_strategy_only(
    monkeypatch: pytest.MonkeyPatch, strategy: str | None, severity: str
) -> None:
    missing = horovod(monkeypatch, strategy, installed=False)
    assert missing.severity == severity
    assert "ot installed" in missing.problem
    assert "strategy horovod" in missing.problem
    assert missing.remedy == "Run: tfdist build-horovod"


@pytest.mark.parametrize(("strategy", "severity"), [(None, "warning"), ("horovod", "error")])
@pytest.mark.parametrize(
    ("built_for", "tensorflow", "says"),
    [
        ("2.20.0", "2.21.0", "was built for TensorFlow 2.20.0; this is TensorFlow 2.21.0"),
        ("2.20.0", None, "was built for TensorFlow 2.20.0, and none is installed"),
        (None, "2.21.0", "was built without TensorFlow"),
    ],
)
def test_a_horovod_for_another_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
    strategy: str | None,
    severity: str,
    built_for: str | None,
    tensorflow: str | None,
    says: str,
) -> None:
    other = horovod(monkeypatch, strategy, built_for=built_for, tensorflow=tensorflow)
    assert other.severity == severity
    assert "0.28.1" in other.problem
    assert says in other.problem
    assert other.remedy == "Run: tfdist build-horovod"


# --- The whole ------------------------------------------------------------------------------------


def test_without_a_tf_config_all_is_well(tmp_path: pathlib.Path) -> None:
    report = diagnose(environ=plain(tmp_path))
    assert report.ok
    assert report.source == ""
    assert "not part of a cluster" in found(report.findings, "TF_CONFIG").problem


def test_multi_worker_without_a_tf_config_is_a_warning(tmp_path: pathlib.Path) -> None:
    report = diagnose(environ=plain(tmp_path), strategy="multi_worker")
    assert report.ok
    assert "train alone" in found(report.findings, "TF_CONFIG").problem


@pytest.mark.parametrize(
    ("strategy", "variables", "severity", "says"),
    [
        ("horovod", {}, "warning", "train alone"),
        ("horovod", {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, "ok", "rank 1 of 4"),
        ("multi_worker", {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, "warning", "train alone"),
        ("horovod", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "ok", "MPICH (PMI) started this rank 0"),
        ("multi_worker", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "ok", "rank 0 of 2"),
        ("horovod", {"PMI_RANK": "0", "PMI_SIZE": "1"}, "warning", "train alone"),
    ],
)
def test_other_launchers_need_no_tf_config(
    tmp_path: pathlib.Path,
    strategy: str,
    variables: Mapping[str, str],
    severity: str,
    says: str,
) -> None:
    report = diagnose(environ=plain(tmp_path, **variables), strategy=strategy)
    finding = found(report.findings, "TF_CONFIG")
    assert finding.severity == severity
    assert says in finding.problem


def test_a_rank_that_is_no_number_is_an_error(tmp_path: pathlib.Path) -> None:
    environ = plain(tmp_path, PMI_RANK="a", PMI_SIZE="2")
    wrong = found(diagnose(environ=environ, strategy="horovod").findings, "MPI")
    assert wrong.severity == "error"
    assert "PMI_RANK='a'" in wrong.problem


def test_the_tf_config_comes_from_the_environment(tmp_path: pathlib.Path) -> None:
    report = diagnose(environ=plain(tmp_path, TF_CONFIG=NO_CLUSTER))
    assert not report.ok
    assert report.source == "the environment"
    assert found(report.findings, "TF_CONFIG.cluster").severity == "error"


def test_a_file_goes_before_the_environment(tmp_path: pathlib.Path) -> None:
    with HeldPorts(1) as held:
        content = {
            "cluster": {"worker": [str(held.addresses[0])]},
            "task": {"type": "worker", "index": 0},
        }
        path = tmp_path / "tf_config.json"
        path.write_text(json.dumps(content), encoding="utf-8-sig")
        report = diagnose(file=path, environ=plain(tmp_path, TF_CONFIG=NO_CLUSTER))
    assert report.ok
    assert str(path) in report.source


def test_standard_input_is_a_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(NO_CLUSTER))
    report = diagnose(file="-", environ=plain(tmp_path))
    assert report.source == "standard input"
    assert not report.ok


@pytest.mark.parametrize(("name", "says"), [("missing", "No such file"), ("", "directory")])
def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: pathlib.Path, name: str, says: str
) -> None:
    path = tmp_path / name
    report = diagnose(file=path, environ=plain(tmp_path))
    assert not report.ok
    problem = found(report.findings, "TF_CONFIG").problem
    assert says in problem
    assert str(path) in problem


def test_a_binary_file_is_an_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\xfd")
    report = diagnose(file=path, environ=plain(tmp_path))
    assert "not UTF-8" in found(report.findings, "TF_CONFIG").problem


def test_a_text_and_a_file_contradict_each_other(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="Give one"):
        diagnose("{}", file=tmp_path / "x", environ={})


def test_elsewhere_asks_nothing_of_this_machine(tmp_path: pathlib.Path) -> None:
    text = json.dumps(
        {
            "cluster": {"worker": ["no-such-host.invalid:12345"]},
            "task": {"type": "worker", "index": 0},
        }
    )
    assert diagnose(text, environ=plain(tmp_path), elsewhere=True).ok
    assert not diagnose(text, environ=plain(tmp_path)).ok


def test_the_hint_about_the_start_of_a_program(tmp_path: pathlib.Path) -> None:
    (hint,) = diagnose(NO_CLUSTER, environ=plain(tmp_path)).hints
    assert "before it runs any TensorFlow operation" in hint
    assert diagnose(NO_CLUSTER, environ=plain(tmp_path), strategy="mirrored").hints == ()


def test_a_report_is_json() -> None:
    report = Report((Finding("warning", "x", "y", "z"),), "the environment", ("h",))
    assert json.loads(json.dumps(report.as_dict())) == {
        "ok": True,
        "findings": [{"severity": "warning", "where": "x", "problem": "y", "remedy": "z"}],
        "source": "the environment",
        "hints": ["h"],
    }
