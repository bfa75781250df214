"""Hosts as users write them, and what ssh is given of them."""

from __future__ import annotations

import os

import pytest

from torsh_trainer.errors import ConfigError
from torsh_trainer.hosts.names import JobHost, read_hostfile, read_hosts
from torsh_trainer.hosts.ssh import KnobNames, SshWords, explain_end, quote_remote
from torsh_trainer.hosts.versions import hash_code

A, B = JobHost("a", 2), JobHost("b")


def test_a_list_names_hosts_with_and_without_slots():
    assert read_hosts(["a:2", " b "], option="launcher.hosts") == (A, B)
    found = read_hosts(["me@node-1.x:4", "[fd00::1]:2", "me@[fd00::2]"], option="launcher.hosts")
    assert found == (JobHost("me@node-1.x", 4), JobHost("fd00::1", 2), JobHost("me@fd00::2"))
    assert found[2].bare == "fd00::2"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "names no host"),
        (["a", "b", "a:2"], "names a twice"),
        (["a", "root@a"], "names a twice"),
        (["a:0"], "'0' is no number of slots"),
        (["a:b"], "'a:b' is no name of a host"),
        (["fd00::1"], "in brackets"),
        (["-oProxyCommand=reboot"], "is no name of a host"),
        (["a b"], "is no name of a host"),
        (["$(reboot)"], "is no name of a host"),
        ([""], "is no name of a host"),
        (["x@-oProxyCommand=reboot"], "is no name of a host"),
    ],
)
def test_what_is_no_host_is_refused(entries, words):
    with pytest.raises(ConfigError, match=r"launcher\.hosts") as error:
        read_hosts(entries, option="launcher.hosts")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb\n",  # Open MPI
        "# workers\n\na slots=2 # the large one\nb",  # DeepSpeed
        "a:2\nb\n",  # MPICH, Intel MPI
        "a   slots=2\r\nb\r\n",
    ],
)
def test_hostfiles_of_all_dialects_are_read(text, tmp_path):
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts", option="launcher.hostfile") == (A, B)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=2\na slots=2\n", "names a twice"),
        ("a slots=two\n", "line 1: 'two' is no number of slots"),
        ("a\nb slots=2 max-slots=4\n", "line 2: 'max-slots=4' is not understood"),
        ("a:2 slots=3\n", "line 1: 'slots=3' is not understood"),
        ("a 2\n", "'2' is not understood"),
        ("slots=2\n", "is no name of a host"),
        ("# nobody\n", "names no host"),
        ("a\0b\n", "is no name of a host"),
    ],
)
def test_what_a_hostfile_may_not_say_is_told_by_its_line(text, words, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=r"launcher\.hostfile=") as error:
        read_hostfile(tmp_path / "hosts", option="launcher.hostfile")
    assert words in str(error.value)


def test_a_hostfile_that_is_none_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("none", "there is no such file"), ("pipe", "is a named pipe")):
        with pytest.raises(ConfigError, match=words):
            read_hostfile(tmp_path / name, option="launcher.hostfile")
    (tmp_path / "large").write_bytes(b"a" * (2 << 20))
    with pytest.raises(ConfigError, match="too large"):
        read_hostfile(tmp_path / "large", option="launcher.hostfile")


def test_words_for_another_shell_stay_what_they_are_but_for_the_home():
    assert quote_remote(["a b", "$(x)"]) == "'a b' '$(x)'"
    assert quote_remote(["~/my env/bin/python", "~root"]) == "~/'my env/bin/python' '~root'"
    words = SshWords(("-p", "2222"), further=("-T",)).running("a", "true")
    assert words[:4] == ["ssh", "-T", "-p", "2222"], "what the user says comes before our own"
    assert words[-3:] == ["--", "a", "true"]
    assert not any("StrictHostKeyChecking" in word for word in words)


def test_an_end_that_is_not_known_is_told_in_the_words_of_ssh():
    knobs = KnobNames("launcher.hosts", "launcher.ssh_port=2222", "launcher.python=X")
    error = explain_end("me@a", ["kex: odd"], code=255, knobs=knobs, tried="ssh -p 1 me@a")
    assert str(error) == "me@a: kex: odd; ssh -p 1 me@a -v"
    assert "ssh ended with 255; ssh -v a" in str(explain_end("a", [], code=255, knobs=knobs))


def test_a_hash_follows_names_and_contents_of_python_files_alone(tmp_path):
    assert hash_code(tmp_path) == ""
    (tmp_path / "a.py").write_text("A = 1\n")
    first = hash_code(tmp_path)
    (tmp_path / "notes.txt").write_text("other")
    assert hash_code(tmp_path) == first
    (tmp_path / "a.py").write_text("A = 2\n")
    assert hash_code(tmp_path) != first
