"""From `--hosts` to the host of each process."""

from __future__ import annotations

import pytest

from tfdist.cli import hosts
from tfdist.errors import ConfigError
from tfdist.launcher.ssh import Ssh


def test_each_host_is_filled_before_the_next():
    machines = {"a": 2, "b": 1, "c": 2}
    assert hosts.assign(machines, 4) == ("a", "a", "b", "c")
    with pytest.raises(ConfigError, match="-n 6 is more than the 5 slots of the hosts a:2, b:1"):
        hosts.assign(machines, 6)


def test_both_options_are_one_too_many(tmp_path):
    with pytest.raises(ConfigError, match="both name the machines"):
        hosts.of("a:2", tmp_path / "hosts")
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    assert hosts.of(None, tmp_path / "hosts") == {"a": 2, "b": 1}


@pytest.mark.parametrize("text", ["-i 'open", "evil", "-p 22 evil", "--strange", "-p"])
def test_arguments_of_ssh_that_are_no_options(text):
    with pytest.raises(ConfigError, match="--ssh-args"):
        hosts.ssh_of(text, None)


def test_arguments_of_ssh():
    text = "-vp 22 -i '/a b/key' -oStrictHostKeyChecking=no -o 'ProxyCommand nc %h %p'"
    known = ("-vp", "22", "-i", "/a b/key", "-oStrictHostKeyChecking=no")
    assert hosts.ssh_of(text, None).arguments == (*known, "-o", "ProxyCommand nc %h %p")
    with pytest.raises(ConfigError, match="--remote-python is empty"):
        hosts.ssh_of(None, " ")


def test_a_host_is_no_option_of_ssh():
    command = Ssh(arguments=("-p", "22")).command("-Fevil", ["echo", "a b"])
    assert command[-3:] == ("--", "-Fevil", "echo 'a b'")
