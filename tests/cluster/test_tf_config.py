import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster import texts
from tests.cluster.test_spec import addresses
from tfdist.cluster.ports import HeldPorts
from tfdist.cluster.spec import Address, ClusterSpec, ClusterUse, Task, is_loopback
from tfdist.cluster.tf_config import Finding, check_tf_config, parse_tf_config, refuse_gaps
from tfdist.cluster.validation.semantics import Resolution, ThisMachine
from tfdist.config.strategy_spec import spec_of
from tfdist.errors import ConfigError

W2 = ["10.0.0.1:12345", "10.0.0.2:12345"]
FIRST = {"type": "worker", "index": 0}


def use_of(strategy: str | None) -> ClusterUse | None:
    return None if strategy is None else spec_of(strategy).use


def text_of(cluster: Any = None, task: Any = None, **more: Any) -> str:
    return json.dumps({"cluster": cluster or {"worker": W2}, "task": task or FIRST, **more})


# --- Parsing is the inverse of writing ------------------------------------------------------------


def _key(address: Address) -> tuple[str, int]:
    return "localhost" if is_loopback(address.host) else address.host.lower(), address.port


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterSpec, Task]:
    """A valid cluster, dense or with gaps, and a task of it or an evaluator outside of it."""
    counts = {
        "chief": draw(st.integers(0, 1)),
        "worker": draw(st.integers(0, 4)),
        "ps": draw(st.integers(0, 3)),
        "evaluator": draw(st.integers(0, 1)),
    }
    if not counts["chief"]:
        counts["worker"] = max(1, counts["worker"])
    total = sum(counts.values())
    found = draw(st.lists(addresses, min_size=total, max_size=total, unique_by=_key))
    pool = iter(found)
    spec = {kind: tuple(next(pool) for _ in range(count)) for kind, count in counts.items()}
    indices = {}
    for kind in ("worker", "ps"):
        if draw(st.booleans()):
            gaps = st.sets(st.integers(0, 20), min_size=counts[kind], max_size=counts[kind])
            indices[kind] = tuple(sorted(draw(gaps)))
    cluster = ClusterSpec(spec, indices)
    tasks = [task for task, _ in cluster.tasks()]
    if not counts["evaluator"]:
        tasks.append(Task("evaluator", draw(st.integers(0, 3))))
    return cluster, draw(st.sampled_from(tasks))


@given(clusters())
def test_parse_is_the_inverse_of_tf_config(case: tuple[ClusterSpec, Task]) -> None:
    cluster, task = case
    assert parse_tf_config(cluster.tf_config(task)) == (cluster, task)


extras = st.fixed_dictionaries(
    {},
    optional={
        "environment": st.sampled_from(["cloud", ""]),
        "rpc_layer": st.sampled_from(["grpc", ""]),
        "job": st.text(max_size=5) | st.dictionaries(st.text(max_size=3), st.integers()),
        "model_dir": st.just("/tmp/model"),
        "session_master": st.just(""),
    },
)


@given(clusters(), extras, st.booleans(), st.sampled_from([None, 1]))
def test_what_schedulers_add_changes_nothing(
    case: tuple[ClusterSpec, Task], more: dict[str, Any], text_index: bool, indent: int | None
) -> None:
    cluster, task = case
    content = {**more, **json.loads(cluster.tf_config(task))}
    if text_index:
        content["task"] |= {"index": str(task.index), "trial": "1", "cloud": "x"}
    assert parse_tf_config(json.dumps(content, indent=indent)) == (cluster, task)


@given(clusters())
def test_a_list_and_a_map_say_the_same(case: tuple[ClusterSpec, Task]) -> None:
    cluster, task = case
    content = json.loads(cluster.tf_config(task))
    for kind, entries in content["cluster"].items():
        if isinstance(entries, list):
            pairs = list(enumerate(entries))
            content["cluster"][kind] = {str(i): entry for i, entry in reversed(pairs)}
    if "chief" in content["cluster"]:
        content["cluster"]["master"] = content["cluster"].pop("chief")
    assert parse_tf_config(json.dumps(content)) == (cluster, task)


@given(clusters())
def test_a_good_tf_config_has_no_errors_of_form(case: tuple[ClusterSpec, Task]) -> None:
    cluster, task = case
    text = cluster.tf_config(task)
    hosts = {a.host for _, a in cluster.tasks()}
    if any(map(is_loopback, hosts)) or hosts & {"0.0.0.0", "::"}:
        return
    findings = check_tf_config(text)
    assert findings[0].severity == "ok"
    assert all(f.severity != "error" for f in findings)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "worker", "ps", "type", "index", "0", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values | st.fixed_dictionaries({"cluster": json_values, "task": json_values}))
def test_any_json_is_read_or_refused_with_reasons(value: Any) -> None:
    text = json.dumps(value)
    errors = [f for f in check_tf_config(text) if f.severity == "error"]
    assert all(f.problem and f.remedy for f in errors)
    try:
        cluster, _ = parse_tf_config(text)
    except ConfigError:
        assert errors
    else:
        assert cluster.addresses


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_reasons(text: str) -> None:
    assert all(f.where and f.problem for f in check_tf_config(text))


# --- What is accepted -----------------------------------------------------------------------------


def test_master_is_the_chief() -> None:
    text = text_of({"master": ["a:1"], "worker": ["b:1"]}, {"type": "master", "index": 0})
    cluster, task = parse_tf_config(text)
    assert cluster.as_dict() == {"chief": ["a:1"], "worker": ["b:1"]}
    assert task == Task("chief", 0)
    warnings = [f for f in check_tf_config(text) if f.severity == "warning"]
    assert [f.where for f in warnings] == ["TF_CONFIG.cluster.master", "TF_CONFIG.task.type"]


@pytest.mark.parametrize(
    "more",
    [{"environment": "cloud"}, {"rpc_layer": "grpc"}, {"environment": "cloud", "job": {"a": 1}}],
)
def test_keys_of_schedulers_are_accepted(more: dict[str, Any]) -> None:
    text = text_of(**more)
    assert parse_tf_config(text)[1] == Task("worker", 0)
    assert [f.severity for f in check_tf_config(text)] == ["ok"]


@pytest.mark.parametrize(
    ("text", "task", "counts"),
    [
        (texts.TFJOB % ("chief", 0), Task("chief", 0), "1 chief, 2 workers, 2 ps"),
        (texts.TFJOB % ("worker", 1), Task("worker", 1), "1 chief, 2 workers, 2 ps"),
        (texts.TFJOB % ("ps", 1), Task("ps", 1), "1 chief, 2 workers, 2 ps"),
        (texts.TFJOB % ("evaluator", 0), Task("evaluator", 0), "1 chief, 2 workers, 2 ps"),
        (texts.VOLCANO, Task("ps", 0), "2 workers, 1 ps"),
        (texts.VERTEX % (1, "worker"), Task("worker", 1), "1 chief, 2 workers, 1 ps"),
        (texts.AI_PLATFORM, Task("chief", 0), "1 chief, 1 worker, 1 ps"),
        (texts.RAY, Task("worker", 2), "3 workers"),
        (texts.SAGEMAKER, Task("worker", 0), "1 chief, 1 worker, 2 ps"),
        (texts.SAGEMAKER_MIRRORED, Task("worker", 1), "2 workers"),
    ],
)
def test_what_schedulers_write_is_read(text: str, task: Task, counts: str) -> None:
    cluster, found = parse_tf_config(text)
    assert found == task
    summary = next(f for f in check_tf_config(text) if f.severity == "ok")
    for number in counts.split(", "):
        assert number in summary.problem
    assert parse_tf_config(cluster.tf_config(task)) == (cluster, task)


def test_a_map_by_index_is_accepted() -> None:
    text = text_of({"worker": {"1": "b:1", "0": "a:1"}, "ps": ["c:1"]})
    assert parse_tf_config(text)[0].as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    sparse = text_of({"worker": {"1": "b:1"}, "ps": ["c:1"]}, {"type": "worker", "index": 1})
    cluster, task = parse_tf_config(sparse)
    assert task is not None
    assert cluster.address(task) == Address("b", 1)
    assert {f.severity for f in check_tf_config(sparse)} == {"ok", "warning"}


def test_an_evaluator_outside_of_the_cluster_is_accepted() -> None:
    text = text_of(task={"type": "evaluator", "index": 0})
    assert parse_tf_config(text)[1] == Task("evaluator", 0)
    (summary,) = check_tf_config(text)
    assert "2 workers; this process is evaluator 0, outside of the cluster" in summary.problem


def test_a_chief_and_workers_are_fine() -> None:
    text = text_of({"chief": ["c:1"], "worker": W2}, {"type": "worker", "index": 1})
    (summary,) = check_tf_config(text, use=use_of("multi_worker"))
    assert summary.severity == "ok"
    assert '1 chief, 2 workers; this process is worker 1, at "10.0.0.2:12345"' in summary.problem


def test_a_missing_task_is_none_to_the_parser_and_an_error_to_the_check() -> None:
    text = json.dumps({"cluster": {"worker": W2}})
    assert parse_tf_config(text)[1] is None
    (found,) = check_tf_config(text)
    assert (found.severity, found.where) == ("error", "TF_CONFIG.task")
    assert '"index": 0' in found.remedy


# --- One case for each mistake: (text, strategy, where, named in the problem, in the remedy) ------

ERRORS: dict[str, tuple[str, str | None, str, str, str]] = {
    "no task at all": (
        json.dumps({"cluster": {"worker": {}}}),
        "multi_worker",
        "TF_CONFIG.cluster",
        '"cluster" is {"worker": {}}, which lists no task. A job operator writes so',
        "(enableDynamicWorker: false), or unset TF_CONFIG",
    ),
    "empty": (" ", None, "TF_CONFIG", '" " is empty', "Unset"),
    "not JSON": ("{oops", None, "TF_CONFIG", "line 1, column 2, near `{oops`", "Correct it there"),
    "later line": ('{\n "cluster": ,\n}', None, "TF_CONFIG", "line 2, column 13", "A good one"),
    "single quotes": ("{'cluster': {}}", None, "TF_CONFIG", "{'cluster'", 'it is {"cluster": {}}'),
    "Python's None": ('{"task": None}', None, "TF_CONFIG", "None", '{"task": null}'),
    "shell's quotes": ("'{\"cluster\": {}}'", None, "TF_CONFIG", "near `'{", "shell's quotes"),
    "quotes lost": ("{cluster: {worker: [a:1]}}", None, "TF_CONFIG", "{cluster", "single quotes"),
    "escaped": (r"{\"cluster\": 1}", None, "TF_CONFIG", "column 2", "Backslashes"),
    "assignment": ("export TF_CONFIG={}", None, "TF_CONFIG", "export", "`export TF_CONFIG=`"),
    "typographic": ("{\u201ccluster\u201d: 1}", None, "TF_CONFIG", "\u201c", "typographic"),
    "last comma": ('{"cluster": [1,]}', None, "TF_CONFIG", "[1,]", "Remove the comma"),
    "cut off": ('{"cluster": {"worker": [', None, "TF_CONFIG", "column 25", "ends too early"),
    "twice encoded": (json.dumps("{}"), None, "TF_CONFIG", '"{}"', "Encode it once"),
    "a list": ("[1]", None, "TF_CONFIG", "[1]", "Give an object"),
    "key twice": ('{"cluster": {}, "cluster": {}}', None, "TF_CONFIG", '"cluster"', "Keep one"),
    "no cluster": (
        '{"model_dir": ""}',
        None,
        "TF_CONFIG.cluster",
        "silently",
        '"cluster": {"worker"',
    ),
    "typo in cluster": ('{"clusters": 1}', None, "TF_CONFIG.cluster", "no", 'Rename "clusters"'),
    "empty cluster": ('{"cluster": {}}', None, "TF_CONFIG.cluster", "{}", '{"worker"'),
    "cluster a list": (text_of(W2), None, "TF_CONFIG.cluster", '"10.0.0.1:12345"', '{"worker"'),
    "unknown type": (
        text_of({"wroker": W2, "worker": W2}),
        None,
        "TF_CONFIG.cluster.wroker",
        '"wroker"',
        'Did you mean "worker"',
    ),
    "no list": (
        text_of({"worker": "a:1,b:1"}),
        None,
        "TF_CONFIG.cluster.worker",
        '"a:1,b:1"',
        '{"worker": ["a:1", "b:1"]}',
    ),
    "empty list": (
        text_of({"worker": W2, "ps": []}),
        None,
        "TF_CONFIG.cluster.ps",
        "[] lists no task",
        'remove "ps"',
    ),
    "null list": (
        text_of({"worker": W2, "ps": None}),
        None,
        "TF_CONFIG.cluster.ps",
        "null is not a list",
        "even for one task",
    ),
    "no string": (
        text_of({"worker": [12345]}),
        None,
        "TF_CONFIG.cluster.worker[0]",
        "12345",
        '"host:port"',
    ),
    "no number": (
        text_of({"worker": {"a": "a:1", "0": "b:1"}}),
        None,
        "TF_CONFIG.cluster.worker[a]",
        '"a"',
        '"0"',
    ),
    "malformed": (
        text_of({"worker": ["a:1", "a:b"]}),
        None,
        "TF_CONFIG.cluster.worker[1]",
        '"b" in "a:b"',
        "1 to 65535",
    ),
    "no port": (
        text_of({"worker": ["hosta"]}),
        None,
        "TF_CONFIG.cluster.worker[0]",
        '"hosta"',
        '"hosta:12345"',
    ),
    "same address": (
        text_of({"worker": ["a:1", "A:1"], "ps": ["a:2"]}),
        None,
        "TF_CONFIG.cluster.worker[1]",
        '"A:1" is the address of worker 0, worker 1',
        "of its own",
    ),
    "same loopback": (
        text_of({"worker": ["localhost:1", "127.0.0.1:1"]}),
        None,
        "TF_CONFIG.cluster.worker[1]",
        '"127.0.0.1:1"',
        "port of its own",
    ),
    "two chiefs": (
        text_of({"chief": ["a:1"], "master": ["b:1"], "worker": W2}),
        None,
        "TF_CONFIG.cluster.chief",
        'There are 2 chiefs: "a:1", "b:1"',
        '"worker"',
    ),
    "two evaluators": (
        text_of({"worker": W2, "evaluator": ["a:1", "b:1"]}),
        None,
        "TF_CONFIG.cluster.evaluator",
        "There are 2 evaluators",
        "Keep one",
    ),
    "only ps": (
        text_of({"ps": ["a:1"]}, {"type": "ps", "index": 0}),
        None,
        "TF_CONFIG.cluster",
        "only ps",
        '"worker"',
    ),
    "task a string": (text_of(task="worker 0"), None, "TF_CONFIG.task", '"worker 0"', '"type"'),
    "no type": (text_of(task={"index": 0}), None, "TF_CONFIG.task.type", 'no "type"', '"worker"'),
    "unknown task": (
        text_of(task={"type": "Worker", "index": 0}),
        None,
        "TF_CONFIG.task.type",
        '"Worker"',
        '"worker"',
    ),
    "not listed": (
        text_of(task={"type": "ps", "index": 0}),
        None,
        "TF_CONFIG.task.type",
        '"ps" is not in the cluster, which lists worker',
        "List this task",
    ),
    "no index": (
        text_of(task={"type": "worker", "id": 0}),
        None,
        "TF_CONFIG.task.index",
        'no "index"',
        'Rename "id"',
    ),
    "out of range": (
        text_of(task={"type": "worker", "index": 2}),
        None,
        "TF_CONFIG.task.index",
        "2 is out of range: the cluster lists worker 0 to 1",
        "Use one of these",
    ),
    "index a word": (
        text_of(task={"type": "worker", "index": "one"}),
        None,
        "TF_CONFIG.task.index",
        '"one"',
        "without quotes",
    ),
    "index negative": (
        text_of(task={"type": "worker", "index": -1}),
        None,
        "TF_CONFIG.task.index",
        "-1",
        "from 0",
    ),
    "index true": (
        text_of(task={"type": "worker", "index": True}),
        None,
        "TF_CONFIG.task.index",
        "true",
        "whole number",
    ),
    "protocol": (text_of(rpc_layer="http"), None, "TF_CONFIG.rpc_layer", '"http"', '"grpc"'),
    "localhost mixed": (
        text_of({"worker": ["localhost:1", "hostb:1"]}),
        None,
        "TF_CONFIG.cluster.worker[0]",
        '"localhost:1" means another machine to each task',
        "reach worker 0",
    ),
    "any address": (
        text_of({"worker": ["0.0.0.0:1", "10.0.0.1:1"]}),
        None,
        "TF_CONFIG.cluster.worker[0]",
        '"0.0.0.0:1"',
        "name or address",
    ),
    "ps under multi_worker": (
        text_of({"worker": W2, "ps": ["a:1"]}),
        "multi_worker",
        "TF_CONFIG.cluster.ps",
        "1 ps task is listed. multi_worker waits",
        'Remove "ps"',
    ),
    "gap under multi_worker": (
        text_of({"worker": {"0": "a:1", "2": "b:1"}}),
        "multi_worker",
        "TF_CONFIG.cluster.worker",
        "worker 0, 2 but not 1",
        "without gaps",
    ),
    "evaluator under multi_worker": (
        text_of(task={"type": "evaluator", "index": 0}),
        "multi_worker",
        "TF_CONFIG.task",
        "evaluator 0 is not in the cluster",
        "single",
    ),
    "no ps": (
        text_of({"worker": W2, "chief": ["c:1"]}),
        "parameter_server",
        "TF_CONFIG.cluster",
        "no ps",
        '"ps"',
    ),
    "no worker": (
        text_of({"ps": ["a:1"], "chief": ["c:1"]}, {"type": "chief", "index": 0}),
        "parameter_server",
        "TF_CONFIG.cluster",
        "no worker",
        '"worker"',
    ),
    "no chief": (
        text_of({"worker": W2, "ps": ["c:1"]}),
        "parameter_server",
        "TF_CONFIG.cluster",
        "no chief",
        '"chief"',
    ),
    "two chiefs of servers": (
        text_of({"worker": W2, "ps": ["p:1"], "chief": ["c:1", "d:1"]}),
        "parameter_server",
        "TF_CONFIG.cluster.chief",
        "2 chiefs",
        'others to "worker"',
    ),
    "evaluator of servers": (
        text_of({"worker": W2, "ps": ["p:1"], "chief": ["c:1"]}, {"type": "evaluator", "index": 0}),
        "parameter_server",
        "TF_CONFIG.task",
        "runs on the workers",
        "Start no evaluator",
    ),
    "gap of servers": (
        text_of({"worker": {"0": "a:1", "3": "b:1"}, "ps": ["p:1"], "chief": ["c:1"]}),
        "parameter_server",
        "TF_CONFIG.cluster.worker",
        "but not 1, 2",
        "without gaps",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_named_with_its_value_and_remedy(name: str) -> None:
    text, strategy, where, problem, remedy = ERRORS[name]
    errors = [f for f in check_tf_config(text, use=use_of(strategy)) if f.severity == "error"]
    found = next((f for f in errors if f.where == where), None)
    assert found is not None, errors
    assert problem in found.problem
    assert remedy in found.remedy
    if name not in ("key twice", "cluster a list"):
        assert [f.where for f in errors] == [where]


WARNINGS: dict[str, tuple[str, str | None, str, str, str]] = {
    "empty map": (
        text_of({"worker": W2, "ps": {}}),
        None,
        "TF_CONFIG.cluster.ps",
        "{} lists no task",
        'remove "ps"',
    ),
    "ignored": (text_of(), "mirrored", "TF_CONFIG", '"mirrored"', "unset TF_CONFIG"),
    "ignored too": (text_of(), "single", "TF_CONFIG", '"single"', "multi_worker"),
    "index a string": (
        text_of(task={"type": "worker", "index": "1"}),
        "multi_worker",
        "TF_CONFIG.task.index",
        '"1" is a string',
        'Write "index": 1.',
    ),
    "gap": (
        text_of({"worker": {"0": "a:1", "3": "b:1"}, "ps": ["c:1"]}),
        None,
        "TF_CONFIG.cluster.worker",
        "but not 1, 2",
        "without gaps",
    ),
    "an evaluator of servers": (
        text_of(
            {"worker": W2, "ps": ["p:1"], "chief": ["c:1"], "evaluator": ["e:1"]},
            {"type": "chief", "index": 0},
        ),
        "parameter_server",
        "TF_CONFIG.cluster.evaluator",
        "starts no evaluator",
        'Remove "evaluator"',
    ),
    "ps": (
        text_of({"worker": W2, "ps": ["a:1"]}),
        None,
        "TF_CONFIG.cluster.ps",
        "Only parameter-server",
        'remove "ps"',
    ),
    "typo in key": (text_of(tasks={}), None, "TF_CONFIG", '"tasks"', 'Did you mean "task"?'),
    "typo in task": (
        text_of(task={**FIRST, "idx": 1}),
        None,
        "TF_CONFIG.task",
        '"idx"',
        '"index"',
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_doubt_is_named_with_its_value_and_remedy(name: str) -> None:
    text, strategy, where, problem, remedy = WARNINGS[name]
    findings = check_tf_config(text, use=use_of(strategy))
    assert all(f.severity != "error" for f in findings)
    (found,) = [f for f in findings if f.severity == "warning" and f.where == where]
    assert problem in found.problem
    assert remedy in found.remedy


def test_all_mistakes_are_found_at_once() -> None:
    text = text_of(
        {"worker": ["a", "b:1", "b:1", "localhost:1"], "ps": [], "boss": ["c:1"]},
        {"type": "worker", "index": 9},
    )
    wheres = {f.where.removeprefix("TF_CONFIG.") for f in check_tf_config(text)}
    assert wheres == {
        "cluster.worker[0]",
        "cluster.worker[2]",
        "cluster.worker[3]",
        "cluster.ps",
        "cluster.boss",
        "task.index",
    }
    with pytest.raises(ConfigError) as caught:
        parse_tf_config(text)
    assert "TF_CONFIG has 5 mistakes:" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 6


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mirorred'.*multi_worker"):
        use_of("mirorred")


# --- What only the machine can tell ---------------------------------------------------------------


@dataclasses.dataclass
class FakeNetwork:
    names: Mapping[str, str]
    own: frozenset[str]
    busy: frozenset[int] = frozenset()
    late: frozenset[str] = frozenset()

    def resolve(self, hosts: Iterable[str]) -> Mapping[str, Resolution]:
        return {host: self._resolve(host) for host in hosts}

    def _resolve(self, host: str) -> Resolution:
        if host in self.late:
            return Resolution(late=True)
        if host[0].isdigit():
            return Resolution((host,))
        number = self.names.get(host)
        return Resolution((number,)) if number else Resolution(failure="Name not known")

    def owns(self, address: str) -> bool:
        return address in self.own

    def port_is_free(self, port: int) -> bool:
        return port not in self.busy


NETWORK = FakeNetwork({"hosta": "10.0.0.1", "hostb": "10.0.0.2"}, frozenset({"10.0.0.1"}))


def severe(text: str, network: FakeNetwork) -> list[Finding]:
    findings = check_tf_config(text, use=use_of("multi_worker"), network=network)
    return [f for f in findings if f.severity != "ok"]


@pytest.mark.parametrize("workers", [W2, ["hosta:1", "hostb:1"], ["hosta:1", "10.0.0.2:1"]])
def test_a_good_network_has_nothing_to_say(workers: list[str]) -> None:
    assert severe(text_of({"worker": workers}), NETWORK) == []


def test_own_port_in_use() -> None:
    network = dataclasses.replace(NETWORK, busy=frozenset({7777}))
    (found,) = severe(text_of({"worker": ["hosta:7777", "hostb:7777"]}), network)
    assert (found.severity, found.where) == ("error", "TF_CONFIG.cluster.worker[0]")
    assert 'Port 7777 of this task\'s address "hosta:7777" is in use' in found.problem
    assert "another port" in found.remedy


@pytest.mark.parametrize("strategy", ["single", "mirrored"])
def test_what_is_ignored_is_not_checked_further(strategy: str) -> None:
    network = dataclasses.replace(NETWORK, busy=frozenset({12345}))
    text = text_of({"worker": [W2[0], "localhost:1"]})
    (summary, ignored) = check_tf_config(text, use=use_of(strategy), network=network)
    assert (summary.severity, ignored.severity) == ("ok", "warning")


def test_the_index_of_another_machine() -> None:
    (found,) = severe(text_of(task={"type": "worker", "index": 1}), NETWORK)
    assert (found.severity, found.where) == ("error", "TF_CONFIG.task")
    assert 'worker 1 at "10.0.0.2", but this machine is that of worker 0' in found.problem
    assert found.remedy == 'Set "type": "worker", "index": 0.'


def test_an_address_of_no_machine_known_here() -> None:
    network = dataclasses.replace(NETWORK, own=frozenset({"192.168.7.7"}))
    (found,) = severe(text_of({"worker": ["hosta:1", "hostb:1"]}), network)
    assert (found.severity, found.where) == ("warning", "TF_CONFIG.cluster.worker[0]")
    assert '"hosta" (10.0.0.1), the host of worker 0, is not this machine' in found.problem
    assert "Correct the address" in found.remedy


def test_a_host_that_does_not_resolve() -> None:
    (found,) = severe(text_of({"worker": ["hosta:1", "hostc:1", "hostc:2"]}), NETWORK)
    assert (found.severity, found.where) == ("error", "TF_CONFIG.cluster.worker[1]")
    assert '"hostc" of worker 1, worker 2 does not resolve here: Name not known' in found.problem
    assert "getent hosts hostc" in found.remedy


def test_a_lookup_that_takes_too_long() -> None:
    network = dataclasses.replace(NETWORK, late=frozenset({"hostb"}))
    (found,) = severe(text_of({"worker": ["hosta:1", "hostb:1"]}), network)
    assert (found.severity, found.where) == ("warning", "TF_CONFIG.cluster.worker[1]")
    assert '"hostb"' in found.problem
    assert "IP address" in found.remedy


def test_two_names_of_one_machine_with_one_port() -> None:
    (found,) = severe(text_of({"worker": ["hosta:1", "10.0.0.1:1"]}), NETWORK)
    assert (found.severity, found.where) == ("error", "TF_CONFIG.cluster.worker[1]")
    assert '"hosta" and "10.0.0.1" are one machine, 10.0.0.1' in found.problem
    assert "port of its own" in found.remedy


def test_this_machine_knows_itself() -> None:
    with HeldPorts(2) as held:
        workers = [str(address) for address in held.addresses]
        text = text_of({"worker": workers})
        (summary,) = check_tf_config(text, use=use_of("multi_worker"), network=ThisMachine())
    assert summary.severity == "ok"


def test_this_machine_does_not_own_a_documentation_address() -> None:
    assert not ThisMachine().owns("203.0.113.1")


def test_lookups_end_at_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> list[object]:
        time.sleep(6.0)
        return []

    monkeypatch.setattr("socket.getaddrinfo", slow)
    start = time.monotonic()
    found = ThisMachine(lookup_seconds=0.1).resolve(["a", "b"])
    assert time.monotonic() - start < 5
    assert all(resolution.late for resolution in found.values())


def test_a_type_without_tasks_is_read_as_by_tensorflows_cluster_spec() -> None:
    for cluster in ({"worker": {}, "ps": ["p:1"]}, {"worker": {"1": "b:1"}, "ps": ["p:1"]}):
        read, _ = parse_tf_config(text_of(cluster, {"type": "ps", "index": 0}))
        known = {kind: entries for kind, entries in cluster.items() if entries}
        assert read.as_dict() == known


@pytest.mark.parametrize(
    ("cluster", "task", "listed"),
    [
        (
            {"worker": {"1": "b:1"}, "ps": ["p:1", "q:1"]},
            {"type": "worker", "index": 1},
            {"worker": {"1": "b:1"}, "ps": ["p:1", "q:1"]},
        ),
        ({"worker": {}, "ps": ["q:1"]}, {"type": "ps", "index": 1}, {"ps": {"1": "q:1"}}),
        ({"worker": {"0": "a:1"}, "ps": None}, {"type": "worker", "index": 0}, {"worker": ["a:1"]}),
    ],
    ids=["worker", "ps", "without servers"],
)
def test_the_cluster_of_a_task_whose_workers_come_and_go(cluster, task, listed) -> None:
    text = json.dumps({"sparseCluster": cluster, "task": task})
    read, own = parse_tf_config(text)
    assert read.as_dict() == listed
    assert own == Task(task["type"], task["index"])
    assert not [f for f in check_tf_config(text) if f.severity == "error"]


def test_what_needs_all_tasks_refuses_a_part() -> None:
    cluster, _ = parse_tf_config(text_of({"worker": {"1": "b:1"}}, {"type": "worker", "index": 1}))
    with pytest.raises(
        ConfigError, match="lists worker 1 but not worker 0, and an Estimator needs"
    ):
        refuse_gaps(cluster, "an Estimator")
    whole, _ = parse_tf_config(text_of())
    refuse_gaps(whole, "an Estimator")
