"""Every fault that a namespace, a limit or a lie can make for real, and what the doctor says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.isolation import (
    build_lies,
    doctor,
    read_checks,
    run_isolated,
    why_not_isolated,
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
def _isolated() -> None:
    if reason := why_not_isolated():
        pytest.skip(reason)


def told(checks: dict[str, dict[str, Any]], name: str, *words: str) -> str:
    """What a finding saw; it and its mend hold these words."""
    row = checks[name]
    assert row["outcome"] == "finding", row
    assert row["why"]
    for word in words:
        assert word in f"{row['saw']} {row['fix']}", row
    return row["saw"]


def findings(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in checks.items() if row["outcome"] == "finding"]


def test_faults_of_the_network_are_named_and_a_healthy_one_is_not(tmp_path):
    run_isolated(tmp_path, NETWORK)
    many = read_checks(tmp_path / "many.json")
    told(many, "host_name_loopback", "127.0.1.1", "10.98.0.1 doctorlab", "net0")
    told(many, "interfaces", "gloo would take lo", "GLOO_SOCKET_IFNAME=net0")
    told(many, "reverse_lookup", "/etc/hosts")
    told(many, "mtu", "net0 600", "ip link set net0 mtu 1500")
    told(many, "local_ports", "40000-40100")
    told(many, "master_reachable", "10.98.0.2:29500", "iptables")
    told(read_checks(tmp_path / "own.json"), "master_per_node", "is this host", "FIRST_HOST")
    told(read_checks(tmp_path / "rejected.json"), "firewall", "10.98.0.1:29500", "iptables")
    told(read_checks(tmp_path / "dropped.json"), "firewall", "no rule allows 40000-40100")
    nameless = read_checks(tmp_path / "nameless.json")
    told(nameless, "host_name", "nameless has no address", "10.98.0.1 nameless")
    told(nameless, "master_address", "MASTER_ADDR=nosuch has no address")
    # The folder lies on a disk of this host, as is right to say of two.
    assert findings(read_checks(tmp_path / "healthy.json")) in ([], ["run_directory_shared"])


def test_faults_of_places_are_named(tmp_path):
    run_isolated(tmp_path, PLACES)
    readonly = read_checks(tmp_path / "readonly.json")
    told(readonly, "run_directory", "Read-only file system", "remount,rw")
    told(readonly, "cache_folders", "cannot be written", "XDG_CACHE_HOME")
    told(readonly, "shared_memory", "/dev/shm", "--shm-size")
    small = read_checks(tmp_path / "small.json")
    told(small, "disk_space", "32.0 MiB free")
    told(small, "temporary_folder", "small", "TMPDIR")
    told(small, "run_directory_shared", "lies on tmpfs", "2 hosts")
    told(read_checks(tmp_path / "scarce.json"), "disk_space", "more files", "df -i")


def test_limits_of_a_process_are_named(tmp_path):
    run_isolated(tmp_path, LIMITS)
    checks = read_checks(tmp_path / "limits.json")
    told(checks, "open_files", "ulimit -n is 256")
    told(checks, "address_space", "16000000 kB", "ulimit -v unlimited")
    told(checks, "processes", "ulimit -u is 50")
    if (os.cpu_count() or 1) > 1:
        told(checks, "affinity", "1 of", "--bind-to none")


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
    told(clock, "clock", "timedatectl")
    told(clock, "file_clock", "+6000", "chronyc")
    told(read_checks(tmp_path / "locks.json"), "file_locks", "No locks available")


def test_root_whom_a_folder_refuses_is_told_of_root_squash(tmp_path):
    """A user namespace: root within, and somebody else's folder without."""
    python = "/usr/bin/python3"  # what every user may run
    if not Path(python).exists():
        pytest.skip(f"no {python}")
    outer = tmp_path / "theirs"
    outer.mkdir(mode=0o755)
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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    if done.stderr.startswith("unshare: ") or "Permission denied" in done.stderr:
        pytest.skip(f"no user namespace that may read this checkout: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["checks"]
    assert "root_squash" in row["saw"], row
    assert "Permission denied" in row["saw"], row


def test_a_cgroup_that_grants_half_a_core_little_memory_and_few_processes(tmp_path):
    roots = {name: Path(f"/sys/fs/cgroup/{name}") for name in ("cpu", "memory", "pids")}
    if not all((root / "cgroup.procs").exists() for root in roots.values()):
        pytest.skip("no cgroups of the first version; recorded ones of the second are read below")
    name = f"torsh-doctor-{os.getpid()}"
    limits = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max"}
    values = {"cpu": "50000", "memory": str(400 * 2**20), "pids": "40"}
    try:
        for kind, root in roots.items():
            (root / name).mkdir()
            (root / name / limits[kind]).write_text(values[kind])
        joins = "; ".join(f"echo $$ > {root / name}/cgroup.procs" for root in roots.values())
        run_isolated(
            tmp_path,
            f"{joins}; unset OMP_NUM_THREADS; {doctor('--json')} > cgroup.json || [ $? = 1 ]",
        )
    finally:
        for root in roots.values():
            if (root / name).exists():
                (root / name).rmdir()
    checks = read_checks(tmp_path / "cgroup.json")
    told(checks, "cpu_quota", "of which a cgroup grants 0.5", "OMP_NUM_THREADS=1")
    told(checks, "memory", "a cgroup grants 400.0 MiB")
    told(checks, "processes", "the cgroup allows 40")


def test_a_healthy_machine_has_no_finding(tmp_path):
    """A host of its own, so that what stands on this one does not count."""
    if shutil.disk_usage(tmp_path).free < 4 * 2**30:
        pytest.skip("less than 4 GiB free here: the doctor would say so")
    run_isolated(
        tmp_path,
        f"""
        ip link set lo up; hostname healthy; echo '127.0.0.1 localhost healthy' > hosts
        mount --bind hosts /etc/hosts
        {doctor("--json")} > one.json
        """,
    )
    checks = read_checks(tmp_path / "one.json")
    assert findings(checks) == []
    assert len(checks) >= 50
