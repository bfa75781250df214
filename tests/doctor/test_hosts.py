"""``doctor --hosts``: real hosts in namespaces, ssh between them, and faults on one of them."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import build_lies, doctor, in_lab, require_isolation
from torsh_trainer.doctor import agent
from torsh_trainer.doctor.between import _COMPARISONS, _look_for_marker
from torsh_trainer.doctor.explain import explain_logs
from torsh_trainer.doctor.links import LinkResult, _judge
from torsh_trainer.doctor.ssh import Agent, SshOptions
from torsh_trainer.errors import ResourceError


def say(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Name -> what was seen, and what mends it."""
    return {row["name"]: f"{row['saw']} {row['fix']}" for row in rows}


@pytest.fixture
def lab() -> None:
    """Hosts are namespaces."""
    require_isolation()


LEFT = """
sleep 0.5
echo left $(cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c doctor[.]agent || true)
"""


@pytest.mark.usefixtures("lab")
def test_healthy_hosts_and_then_one_fault_after_the_other(tmp_path):
    """Three hosts; what is wrong with one is told of that one, by name."""
    (tmp_path / "runs").mkdir()
    driver = Path(__file__).parent / "lab_faults.py"
    said = in_lab(tmp_path, 3, f"{sys.executable} {driver} {tmp_path}; {LEFT}")
    assert "left 0" in said, "an agent outlived its leash"
    told = json.loads((tmp_path / "told.json").read_text())
    assert say(told["healthy"]) == {}
    whole = told["network"]["all"]
    assert whole["stage"] == ""
    assert whole["bandwidth"] > 1e6

    large = say(told["large"])
    assert list(large) == ["network"]
    assert "the link of lab3 (to each of 2 others)" in large["network"]
    assert "small messages pass, and large ones are lost" in large["network"]
    assert "ping -M do -s 1472" in large["network"]

    slow = say(told["slow"])
    assert list(slow) == ["network"]
    assert "the link of lab3 (to each of 2 others): " in slow["network"]
    assert "iperf3" in slow["network"]

    names = say(told["names"])
    assert "lab2 is 127.0.1.1" in names["lab2 host_name_loopback"]
    assert "lab2 interfaces" in names
    assert "on lab3 lab1 is 10.99.0.3" in names["peer_names"]
    assert "1400 on lab2" in names["mtu_differs"]
    assert "is not seen by lab3" in names["shared_folder"]

    assert told["mesh"].startswith("they cannot connect (Gloo connectFullMesh failed")
    explained = explain_logs(["-"], io.StringIO(told["mesh"])).explanations
    assert "loopback_host_name" in [one.symptom.name for one in explained], told["mesh"]

    refusals = told["refusals"]
    assert "its host key is not known here; compare it: ssh lab1" in refusals["unknown"]
    assert "its host key is another than the one that is known" in refusals["changed"]
    assert "it lets nobody in with the keys that are here; ssh-copy-id lab1" in refusals["key"]
    assert "nothing listens for ssh there" in refusals["port"]
    assert "the Python of this host is not there" in refusals["python"]


@pytest.mark.usefixtures("lab")
def test_the_command_tells_of_each_host_and_of_one_that_is_not_reached(tmp_path):
    """Two hosts whose logins have RANK=0, one of them with a clock that is half a minute ahead."""
    library = build_lies(tmp_path)
    (tmp_path / "more-lab1").write_text("SetEnv RANK=0 WORLD_SIZE=2\n")
    lies = f"SetEnv RANK=0 WORLD_SIZE=2 LD_PRELOAD={library} LIE_SECONDS=30\n"
    (tmp_path / "more-lab2").write_text(lies)
    (tmp_path / "runs").mkdir()
    ssh = f"--ssh=-F{tmp_path}/ssh_config"
    words = [ssh, "--seconds", "0.5", "--only", "clock", "--dir", str(tmp_path / "runs")]
    asked = doctor("--json", "--hosts", "lab1,lab2,nosuch", *words)
    in_lab(tmp_path, 2, f"{asked} > told.json || [ $? = 1 ]")
    told = json.loads((tmp_path / "told.json").read_text())
    assert [host["host"] for host in told["hosts"]] == ["lab1", "lab2"]
    assert "this name has no address here" in told["unreached"]["nosuch"]
    between = say(told["between"])
    assert set(between) == {"clock_skew", "ranks_twice"}
    assert "clocks are 30." in between["clock_skew"] or "clocks are 29." in between["clock_skew"]
    assert "0 on lab1, lab2" in between["ranks_twice"]
    assert told["network"]["all"]["bandwidth"] > 1e6


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", r"ssh-keygen -R node1"),
        ("Host key verification failed.", r"not known here"),
        ("me@node1: Permission denied (publickey).", r"ssh-copy-id node1"),
        ("ssh: connect to host node1 port 22: Connection timed out", r"firewall drops"),
        ("ssh: connect to host node1 port 22: No route to host", r"no way leads there"),
        ("/usr/bin/python3: No module named torsh_trainer", r"torsh_trainer is not"),
        ("env: '/x/python': No such file or directory", r"--python /usr/bin/python3"),
        ("something else", r"something else; ssh -v node1"),
    ],
)
def test_what_keeps_a_host_out_is_told_in_words(tmp_path, monkeypatch, said, words):
    """ssh itself, which says what it says when the fault is there."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        Agent("node1", SshOptions((), "python")) as node,
        pytest.raises(ResourceError, match=f"node1: .*{words}"),
    ):
        node.ask("tell_time")


FACTS = {
    "host": "a",
    "addresses": ["10.0.0.1"],
    "mtu": {"eth0": 1500},
    "peers": {},
    "versions": {"Python": "3.11.7", "torch": "2.13.0"},
    "code": {"torsh_trainer": "aa", "/job": "bb"},
    "variables": {},
    "speed": {},
}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"versions": {"Python": "3.11.9", "torch": "2.12.1"}}, "versions_differ", "2.12.1 on b"),
        ({"versions": {"Python": "3.12.0", "torch": "2.13.0"}}, "versions_differ", "3.12 on b"),
        ({"code": {"torsh_trainer": "aa", "/job": "cc"}}, "code_differs", "of /job"),
        ({"code": {"torsh_trainer": "aa", "/job": ""}}, "code_differs", "none on b"),
        ({"host": "a"}, "same_host", "a and b"),
        ({"addresses": ["10.0.0.1"]}, "same_host", "10.0.0.1"),
        ({"mtu": {"eth0": 9000}}, "mtu_differs", "9000 on b"),
        ({"variables": {"RANK": "0"}}, "ranks_twice", "0 on a, b"),
        ({"peers": {"a": []}}, "peer_names", "b knows no address of a"),
        ({"peers": {"a": ["127.0.0.1"]}}, "peer_names", "on b a is 127.0.0.1"),
    ],
)
def test_what_differs_between_two_hosts_is_told(change, name, words):
    one = {**FACTS, "variables": {"RANK": "0"}}
    other = {**FACTS, "host": "b", "addresses": ["10.0.0.2"]}
    right = {"a": one, "b": {**other, "versions": {**FACTS["versions"], "Python": "3.11.9"}}}
    assert [report for compare in _COMPARISONS for report in compare(right)] == []
    wrong = {"a": one, "b": {**other, **change}}
    (report,) = [report for compare in _COMPARISONS for report in compare(wrong)]
    assert report.name == name
    assert words in report.result.saw
    assert report.result.fix


class InThisProcess:
    """An agent without a host: it does here what it would do there."""

    def __init__(self, host: str) -> None:
        self.host = host

    def ask(self, do: str, **request: Any) -> Any:
        return agent._REQUESTS[do](request)


def test_a_folder_that_the_first_host_may_not_write_is_a_finding_and_nothing_stays(tmp_path):
    hosts = [InThisProcess("a"), InThisProcess("b")]
    (report,) = _look_for_marker(hosts, Path("/proc/none/runs"), 1.0)
    assert "a cannot write to /proc: " in report.result.saw
    assert list(_look_for_marker(hosts, tmp_path / "runs" / "mine", 1.0)) == []
    assert list(tmp_path.iterdir()) == [], "a folder or a file was left"


def test_the_slow_link_is_named_among_quick_ones():
    quick = [LinkResult(pair, bandwidth=1e9) for pair in (("a", "b"), ("a", "c"), ("b", "c"))]
    assert list(_judge(quick, 1e8)) == []
    slow = [*quick, LinkResult(("a", "d"), bandwidth=1e6)]
    (report,) = _judge(slow, 1e8)
    assert "link a - d: 1 MB/s" in report.result.saw
    lost = [*quick, *(LinkResult((n, "d"), stage="large", error="x") for n in "abc")]
    (report,) = _judge(lost, 1e8)
    assert "the link of d (to each of 3 others): small messages pass" in report.result.saw
