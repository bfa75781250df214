"""``doctor --hosts``: real hosts in namespaces, ssh between them, and faults on one of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.isolation import REPOSITORY, build_lies, doctor, why_not_isolated
from torsh_trainer.doctor.between import _COMPARISONS
from torsh_trainer.doctor.links import LinkResult, _judge
from torsh_trainer.doctor.ssh import Agent, SshOptions
from torsh_trainer.errors import ResourceError

LAB = Path(__file__).parent / "lab.sh"


def in_lab(folder: Path, count: int, script: str, *, timeout_s: float = 300) -> str:
    """Runs a script beside so many hosts; ``ask NAME WORDS`` leaves the doctor's JSON in NAME."""
    hosts = ",".join(f"lab{i}" for i in range(1, count + 1))
    words = ["--json", "--hosts", hosts, f"--ssh=-F{folder}/ssh_config", "--seconds", "1"]
    ask = f'ask() {{ out=$1; shift; {doctor(*words)} "$@" > $out || [ $? = 1 ]; }}; '
    done = subprocess.run(
        [LAB, folder, str(count), "bash", "-euc", ask + script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def findings(told: dict[str, Any]) -> dict[str, str]:
    """Name -> what was seen: between hosts, and on each as ``host name``."""
    found = {row["name"]: f"{row['saw']} {row['fix']}" for row in told["between"]}
    for host in told["hosts"]:
        for row in host["checks"]:
            if row["outcome"] == "finding":
                found[f"{host['host']} {row['name']}"] = row["saw"]
    return found


@pytest.fixture
def _lab() -> None:
    if reason := why_not_isolated():
        pytest.skip(reason)
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("openssh-server is not installed")


@pytest.mark.usefixtures("_lab")
def test_healthy_hosts_and_then_one_fault_after_the_other(tmp_path):
    """Three hosts; what is wrong with one is told of that one, by name."""
    script = """
    mkdir runs
    ask healthy.json --dir runs
    ./run-lab3 iptables -A INPUT -m length --length 1200:65535 -j DROP
    ask large.json --only clock --dir runs
    ./run-lab3 iptables -F
    ./run-lab3 tc qdisc add dev eth0 root tbf rate 8mbit burst 32kbit latency 400ms
    ask slow.json --only clock --dir runs
    ./run-lab3 tc qdisc del dev eth0 root
    sed -i 's/10.99.0.2 lab2/127.0.1.1 lab2/' hosts-lab2
    sed -i 's/10.99.0.1 lab1/10.99.0.3 lab1/' hosts-lab3
    ./run-lab2 ip link set eth0 mtu 1400
    ./run-lab3 mount -t tmpfs own runs
    ask names.json --only host_name_loopback,interfaces --dir runs --seconds 0.1
    ask unreached.json --hosts lab1,nosuch --only clock --dir runs
    sleep 0.5
    echo left $(cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c doctor.agent || true)
    """
    said = in_lab(tmp_path, 3, script)
    read = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert findings(read["healthy"]) == {}
    whole = read["healthy"]["network"]["all"]
    assert whole["stage"] == ""
    assert whole["bandwidth"] > 1e6
    assert len(read["healthy"]["hosts"]) == 3

    large = findings(read["large"])
    assert list(large) == ["network"], large
    assert "the link of lab3 (to each of 2 others)" in large["network"]
    assert "small messages pass, and large ones are lost" in large["network"]
    assert "ping -M do -s 1472" in large["network"]

    slow = findings(read["slow"])
    assert list(slow) == ["network"], slow
    assert "lab3" in slow["network"]
    assert "iperf3" in slow["network"]

    names = findings(read["names"])
    assert "lab2 is 127.0.1.1" in names["lab2 host_name_loopback"]
    assert "on lab3 lab1 is 10.99.0.3" in names["peer_names"]
    assert "1400 on lab2" in names["mtu_differs"]
    assert "is not seen by lab3" in names["shared_folder"]
    assert "cannot connect" in names["network"]

    assert "this name has no address here" in read["unreached"]["unreached"]["nosuch"]
    assert "left 0" in said, f"an agent outlived its leash: {said}"


@pytest.mark.usefixtures("_lab")
def test_a_clock_ahead_and_a_rank_of_the_login_are_told_of_their_host(tmp_path):
    """Two hosts whose logins have RANK=0, one of them with a clock that is half a minute ahead."""
    library = build_lies(tmp_path)
    (tmp_path / "more-lab1").write_text("SetEnv RANK=0 WORLD_SIZE=2\n")
    lies = f"SetEnv RANK=0 WORLD_SIZE=2 LD_PRELOAD={library} LIE_SECONDS=30\n"
    (tmp_path / "more-lab2").write_text(lies)
    in_lab(tmp_path, 2, "mkdir runs; ask told.json --only versions --dir runs")
    told = findings(json.loads((tmp_path / "told.json").read_text()))
    assert "lab2 is the farthest" in told["clock_skew"] or "lab1" in told["clock_skew"]
    assert "clocks are 30." in told["clock_skew"] or "clocks are 29." in told["clock_skew"]
    assert "0 on lab1, lab2" in told["ranks_twice"]


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
        Agent("node1", SshOptions((), "python")) as agent,
        pytest.raises(ResourceError, match=f"node1: .*{words}"),
    ):
        agent.ask("tell_time")


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


def test_the_slow_link_is_named_among_quick_ones():
    quick = [LinkResult(pair, bandwidth=1e9) for pair in (("a", "b"), ("a", "c"), ("b", "c"))]
    assert list(_judge(quick, 1e8)) == []
    slow = [*quick, LinkResult(("a", "d"), bandwidth=1e6)]
    (report,) = _judge(slow, 1e8)
    assert "link a - d: 1 MB/s" in report.result.saw
    lost = [*quick, *(LinkResult((n, "d"), stage="large", error="x") for n in "abc")]
    (report,) = _judge(lost, 1e8)
    assert "the link of d (to each of 3 others): small messages pass" in report.result.saw
