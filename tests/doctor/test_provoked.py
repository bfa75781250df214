"""Every fault that a namespace, a limit or a lie can make for real, and what the doctor says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import (
    REPOSITORY,
    build_lies,
    doctor,
    read_checks,
    require_isolation,
    run_isolated,
)

NETWORK = f"""
hostname doctorlab
printf '127.0.0.1 localhost\\n127.0.1.1 doctorlab\\n' > hosts; mount --bind hosts /etc/hosts
printf 'nameserver 10.98.0.77\\noptions timeout:1 attempts:1\\n' > resolv
mount --bind resolv /etc/resolv.conf
ip link set lo up
ip link add net0 type veth peer name net1
ip addr add 10.98.0.1/24 dev net0; ip link set net0 mtu 600; ip link set net0 up
ip link set net1 up
ip neigh add 10.98.0.77 lladdr 02:00:00:00:00:01 dev net0
ip neigh add 10.98.0.2 lladdr 02:00:00:00:00:02 dev net0
echo '40000 40100' > /proc/sys/net/ipv4/ip_local_port_range
run() {{ "$@" || [ $? = 1 ]; }}
export MASTER_ADDR=10.98.0.2 MASTER_PORT=29500 NODE_RANK=1 NNODES=2
run {doctor("--json", "--nodes", "2")} > many.json
MASTER_ADDR=10.98.0.1 run {doctor("--json", "--only", "master_per_node")} > own.json
unset MASTER_ADDR NODE_RANK NNODES
iptables -A INPUT -p tcp --dport 29500 -j REJECT
run {doctor("--json", "--only", "firewall")} > rejected.json
iptables -F; iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -p tcp --dport 29500:29510 -j ACCEPT; iptables -P INPUT DROP
run {doctor("--json", "--only", "firewall", "--nodes", "2")} > dropped.json
iptables -P INPUT ACCEPT; iptables -F
hostname nameless
MASTER_ADDR=nosuch run {doctor("--json", "--only", "host_name,master_address")} > nameless.json
printf '127.0.0.1 localhost\\n10.98.0.1 nameless\\n10.98.0.2 other\\n' > hosts
ip link set net0 mtu 1500
echo '32768 60999' > /proc/sys/net/ipv4/ip_local_port_range
run {doctor("--json", "--nodes", "2")} > healthy.json
"""

PLACES = f"""
run() {{ "$@" || [ $? = 1 ]; }}
mkdir readonly small scarce
mount -t tmpfs -o size=1m shm /dev/shm
mount -t tmpfs -o ro none readonly
mount -t tmpfs -o size=32m none small
mount -t tmpfs -o size=4g,nr_inodes=200 none scarce
HOME=$PWD/readonly run {doctor("--json", "--dir", "readonly/runs")} > readonly.json
TMPDIR=$PWD/small run {doctor("--json", "--dir", "small/runs", "--nodes", "2")} > small.json
run {doctor("--json", "--dir", "scarce/runs", "--only", "disk_space")} > scarce.json
"""

LIMITS = f"""
run() {{ "$@" || [ $? = 1 ]; }}
ulimit -n 256; ulimit -v 16000000; ulimit -u 50
run taskset -c 0 {doctor("--json", "--processes", "2")} > limits.json
"""


@pytest.fixture(autouse=True)
def isolation() -> None:
    """Every fault here is one of a namespace."""
    require_isolation()


def assert_finding(checks: dict[str, dict[str, Any]], name: str, *words: str) -> str:
    """What a finding saw; it and its mend hold these words."""
    row = checks[name]
    assert row["outcome"] == "finding", row
    assert row["why"]
    for word in words:
        assert word in f"{row['saw']} {row['fix']}", row
    return row["saw"]


def list_findings(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in checks.items() if row["outcome"] == "finding"]


def test_faults_of_the_network_are_named_and_a_healthy_one_is_not(tmp_path):
    run_isolated(tmp_path, NETWORK)
    many = read_checks(tmp_path / "many.json")
    assert_finding(many, "host_name_loopback", "127.0.1.1", "10.98.0.1 doctorlab", "net0")
    assert_finding(many, "interfaces", "gloo would take lo", "GLOO_SOCKET_IFNAME=net0")
    assert_finding(many, "reverse_lookup", "/etc/hosts")
    assert_finding(many, "mtu", "net0 600", "ip link set net0 mtu 1500")
    assert_finding(many, "local_ports", "40000-40100")
    assert_finding(many, "master_reachable", "10.98.0.2:29500", "iptables")
    assert_finding(
        read_checks(tmp_path / "own.json"), "master_per_node", "is this host", "FIRST_HOST"
    )
    assert_finding(
        read_checks(tmp_path / "rejected.json"), "firewall", "10.98.0.1:29500", "iptables"
    )
    assert_finding(read_checks(tmp_path / "dropped.json"), "firewall", "no rule allows 40000-40100")
    nameless = read_checks(tmp_path / "nameless.json")
    assert_finding(nameless, "host_name", "nameless has no address", "10.98.0.1 nameless")
    assert_finding(nameless, "master_address", "MASTER_ADDR=nosuch has no address")
    # The folder lies on a disk of this host, as is right to say of two.
    assert list_findings(read_checks(tmp_path / "healthy.json")) in ([], ["run_directory_shared"])


def test_faults_of_places_are_named(tmp_path):
    run_isolated(tmp_path, PLACES)
    readonly = read_checks(tmp_path / "readonly.json")
    assert_finding(readonly, "run_directory", "Read-only file system", "remount,rw")
    assert_finding(readonly, "cache_folders", "cannot be written", "XDG_CACHE_HOME")
    assert_finding(readonly, "shared_memory", "/dev/shm", "--shm-size")
    small = read_checks(tmp_path / "small.json")
    assert_finding(small, "disk_space", "32.0 MiB free")
    assert_finding(small, "temporary_folder", "small", "TMPDIR")
    assert_finding(small, "run_directory_shared", "lies on tmpfs", "2 hosts")
    assert_finding(read_checks(tmp_path / "scarce.json"), "disk_space", "more files", "df -i")


def test_limits_of_a_process_are_named(tmp_path):
    run_isolated(tmp_path, LIMITS)
    checks = read_checks(tmp_path / "limits.json")
    assert_finding(checks, "open_files", "ulimit -n is 256")
    assert_finding(checks, "address_space", "16000000 kB", "ulimit -v unlimited")
    assert_finding(checks, "processes", "ulimit -u is 50")
    assert_finding(checks, "affinity", "1 of", "--bind-to none")


def test_a_clock_that_is_wrong_and_locks_that_fail_are_named(tmp_path):
    library = build_lies(tmp_path)
    run_isolated(
        tmp_path,
        f"""
        run() {{ "$@" || [ $? = 1 ]; }}
        export LD_PRELOAD={library}
        LIE_SECONDS=-600000000 run {doctor("--json", "--only", "clock,file_clock")} > clock.json
        LIE_NO_LOCKS=1 run {doctor("--json", "--only", "file_locks")} > locks.json
        """,
    )
    clock = read_checks(tmp_path / "clock.json")
    assert_finding(clock, "clock", "timedatectl")
    assert_finding(clock, "file_clock", "+6000", "chronyc")
    assert_finding(read_checks(tmp_path / "locks.json"), "file_locks", "No locks available")


def test_root_whom_a_folder_refuses_is_told_of_root_squash(tmp_path):
    """A user namespace: root within, and somebody else's folder without."""
    python = "/usr/bin/python3"  # what every user may run
    outer, packages = tmp_path / "theirs", tmp_path / "packages"
    outer.mkdir(mode=0o755)
    shutil.copytree(  # nobody else may be let into this checkout
        REPOSITORY / "torsh_trainer",
        packages / "torsh_trainer",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "unshare"]
    command += ["--user", "--map-root-user", python, "-m", "torsh_trainer", "doctor"]
    done = subprocess.run(
        [*command, "--json", "--only", "run_directory", "--dir", str(outer / "runs")],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(packages)},
    )
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["checks"]
    assert "root_squash" in row["saw"], row
    assert "Permission denied" in row["saw"], row


def limit_cgroup(name: str) -> list[Path]:
    """A group with half a core, 400 MiB and 40 processes, of whichever version is mounted here;
    its folders, each of which takes processes."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        (top / "cgroup.subtree_control").write_text("+cpu +memory +pids")
        limits = {"cpu.max": "50000 100000", "memory.max": str(400 * 2**20), "pids.max": "40"}
        written = {top / name: limits}
    else:
        written = {
            top / "cpu" / name: {"cpu.cfs_quota_us": "50000"},
            top / "memory" / name: {"memory.limit_in_bytes": str(400 * 2**20)},
            top / "pids" / name: {"pids.max": "40"},
        }
    for folder, values in written.items():
        folder.mkdir()
        for file, value in values.items():
            (folder / file).write_text(value)
    return list(written)


def test_a_cgroup_that_grants_half_a_core_little_memory_and_few_processes(tmp_path):
    folders = limit_cgroup(f"torsh-doctor-{os.getpid()}")
    joins = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in folders)
    try:
        run_isolated(
            tmp_path,
            f"{joins}; unset OMP_NUM_THREADS; {doctor('--json')} > cgroup.json || [ $? = 1 ]",
        )
    finally:
        for folder in folders:
            folder.rmdir()
    checks = read_checks(tmp_path / "cgroup.json")
    assert_finding(checks, "cpu_quota", "of which a cgroup grants 0.5", "OMP_NUM_THREADS=1")
    assert_finding(checks, "memory", "a cgroup grants 400.0 MiB")
    assert_finding(checks, "processes", "the cgroup allows 40")


def test_a_healthy_machine_has_no_finding(tmp_path):
    """A host of its own, so that what stands on this one does not count; nor do its disks."""
    run_isolated(
        tmp_path,
        f"""
        ip link set lo up; hostname healthy; echo '127.0.0.1 localhost healthy' > hosts
        mount --bind hosts /etc/hosts
        mount -t tmpfs -o size=8g own /srv; export TMPDIR=/srv
        {doctor("--json", "--dir", "/srv/runs")} > one.json || [ $? = 1 ]
        """,
    )
    checks = read_checks(tmp_path / "one.json")
    assert list_findings(checks) == []
    assert len(checks) >= 50
