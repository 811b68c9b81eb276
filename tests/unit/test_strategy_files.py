"""A wrong value in a strategy file is one error that names file, key and value; never a trace."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tfdist.cli.main import app
from tfdist.config.resolution import resolve
from tfdist.config.strategy_config import StrategyConfig, all_options
from tfdist.config.strategy_file import load_file
from tfdist.errors import ConfigError

NAMES = list(all_options())

#: Each value that TOML has, extreme ones among them.
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 3, -1, 2**32, 10**400]),
    st.floats(),
    st.sampled_from(["", "a", "60", "auto", "sync", "stale", "multi_worker", "pipeline", "none"]),
    st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8),
    st.just(datetime.date(2020, 1, 1)),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(["a", "kind"]), SCALARS, max_size=2),
)
PROPERTY = settings(
    derandomize=True,
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # TOML writes inf and nan as Python does.
    return value.isoformat() if isinstance(value, datetime.date) else json.dumps(value)


def fits(name: str, value: object) -> bool:
    """Whether a value is of the option's type, said in another way than the program does."""
    kind = all_options()[name].kind
    if type(value) is float:
        return kind is float and abs(value) < float("inf")
    if type(value) is int and kind is int and abs(value) >= 2**63:
        return False
    return type(value) is kind or (type(value) is int and kind is float and abs(value) < 2**1000)


@PROPERTY
@given(name=st.sampled_from(NAMES), value=VALUES)
def test_one_value_of_any_type(tmp_path, name, value):
    file = tmp_path / "s.toml"
    file.write_text(f"{name} = {toml(value)}\n")
    try:
        config = resolve({}, load_file(file), {}).config
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"{file}: ")
        if not fits(name, value):
            assert f"{name}={value!r} is not " in message
            assert "Give one of: " in message or f"Write it as in {name} = " in message
    else:
        assert fits(name, value)
        assert StrategyConfig.from_json(config.to_json()) == config


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("seed = 3\n", encoding="utf-8-sig")
    assert load_file(file).values == {"seed": 3}


@pytest.mark.parametrize("strategy", ["pipeline", "horovod"])
def test_the_ending_of_a_timeline(strategy):
    for ending in ("", ".json", ".JSON"):
        StrategyConfig.of(strategy=strategy, processes=2, timeline=f"step{ending}")
    for ending in (".html", ".json.gz", ".jpg"):
        with pytest.raises(ConfigError, match=r"no timeline is written as.*\.json.*\.png, .*\.pdf"):
            StrategyConfig.of(strategy=strategy, processes=2, timeline=f"step{ending}")


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".PNG"])
def test_a_timeline_that_is_a_picture(ending):
    StrategyConfig.of(strategy="pipeline", timeline=f"step{ending}")
    with pytest.raises(ConfigError, match="asks for a picture"):
        StrategyConfig.of(strategy="horovod", processes=2, timeline=f"step{ending}")


def test_a_whole_number_of_64_bits(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(f"accumulate = {2**63 - 1}\n")
    assert load_file(file).values == {"accumulate": 2**63 - 1}


@settings(PROPERTY, max_examples=120)
@given(content=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_the_command_says_it_without_a_trace(tmp_path, content):
    file, script = tmp_path / "s.toml", tmp_path / "train.py"
    few = {"processes": 2, "devices": 2, "ps": 2}  # Others open a port for each.
    content = {
        name: few.get(name, value) if fits(name, value) else value
        for name, value in content.items()
    }
    file.write_text("".join(f"{name} = {toml(value)}\n" for name, value in content.items()))
    script.write_text("")
    done = CliRunner().invoke(
        app, ["run", "--dry-run", "--strategy", str(file), str(script)], env={"TF_CONFIG": None}
    )
    assert isinstance(done.exception, SystemExit | None), done.exception
    if not all(fits(name, value) for name, value in content.items()):
        assert done.exit_code == 2
    if done.exit_code:
        assert f"tfdist: {file}: " in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '# Two minutes.\nstart_timeout = "60"',
            ["s.toml: line 2: start_timeout='60' is not", "60.0"],
        ),
        ("accumulate = 9223372036854775808", ["accumulate=9223372036854775808 is not", "64 bits"]),
        (f"accumulate = 0x{'f' * 4000}", ["accumulate=a number of 16000 bits is not", "64 bits"]),
        ('cuts = """\nseed = 1"""\nseed = -1', ["s.toml: seed=-1 is not"]),
        ('start_timeout = "60"', ["start_timeout='60' is not a number", "start_timeout = 60.0"]),
        ('seed = "x"', ["seed='x' is not a whole number", "seed = 2"]),
        ("seed = 1.5", ["seed=1.5 is not a whole number"]),
        ("on_stale = []", ["on_stale=[] is not text", "wait, drop, damp"]),
        ('compression = {kind = "topk"}', ["compression={'kind': 'topk'}", "none, fp16"]),
        ('cuts = ["dense2"]', ["cuts=['dense2'] is not text", 'cuts = "dense2,…"']),
        ('report = "no"', ["report='no' is not true or false"]),
        ("start_timeout = inf", ["start_timeout=inf is not a number"]),
        ("start_timeout = 1e300", ["start_timeout=1e+300", "at most 31536000"]),
        ('[device_map]\na = "GPU:0"', ["[device_map]", "tfdist.place(model,", "--strategy single"]),
        (f"seed = {'9' * 5000}", ["is not valid TOML", "digits"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_said_of_a_wrong_value(tmp_path, line, words):
    file = tmp_path / "s.toml"
    file.write_text(line)
    with pytest.raises(ConfigError) as caught:
        resolve({}, load_file(file), {})
    for word in (str(file), *words):
        assert word in str(caught.value)


def test_options_of_a_program_are_checked_as_those_of_a_file(tmp_path):
    with pytest.raises(ConfigError, match="processes='2' is not a whole number"):
        resolve({"processes": "2"})
    with pytest.raises(ConfigError, match=r"Unknown mode '\\udcff'"):
        resolve({"mode": "\udcff"})
    with pytest.raises(ConfigError, match=r"cuts=\['dense2'\] is not text"):
        StrategyConfig.of(strategy="pipeline", cuts=["dense2"])
    made = StrategyConfig.of(strategy="pipeline", timeline=tmp_path / "step.png")
    assert made.values()["timeline"] == str(tmp_path / "step.png")
