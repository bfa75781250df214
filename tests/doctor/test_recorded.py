"""Faults that cannot be made here: variables in this process, and GPUs, fabrics and kernels written
down, in the form that nvidia-smi and the kernel tell of them (no GPU was there to record)."""

from __future__ import annotations

import ast
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import REPOSITORY
from torsh_trainer.doctor.base import Check, CheckResult
from torsh_trainer.doctor.checks import network
from torsh_trainer.doctor.examination import load_checks
from torsh_trainer.doctor.machine import CommandAnswer, Machine
from torsh_trainer.hosts.interfaces import Interface, choose_for_gloo, choose_for_nccl

GPU = "{index}, GPU-{index}a, NVIDIA H100 80GB HBM3, 550.54.15, 81559, {used}, {mode}, {ecc}, {mig}"
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\t{link}\t0-31\t0
GPU1\tNV18\t X \tNV18\t{link}\t0-31\t0
GPU2\tNV18\tNV18\t X \t{link}\t0-31\t0
GPU3\t{link}\t{link}\t{link}\t X \t0-31\t0

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
PEERS = "\tGPU0\tGPU1\nGPU0\tX\t{cell}\nGPU1\t{cell}\tX\n\nLegend:\n  OK\n  NS  = Not supported\n"


def gpu(index: int, *, used: int = 4, mode: str = "Default", ecc: str = "0", mig: str = "[N/A]"):
    return GPU.format(index=index, used=used, mode=mode, ecc=ecc, mig=mig)


class Recorded:
    """Answers of commands: those that begin with the words of a key."""

    def __init__(self, answers: Mapping[str, str | CommandAnswer]) -> None:
        self.answers = answers

    def __call__(self, argv: Sequence[str]) -> CommandAnswer:
        line = " ".join(argv)
        for beginning in sorted(self.answers, key=len, reverse=True):
            if line.startswith(beginning):
                said = self.answers[beginning]
                return CommandAnswer(0, said) if isinstance(said, str) else said
        return CommandAnswer(None, err=f"{argv[0]}: No such file or directory")


def with_gpus(*rows: str, **more: str | CommandAnswer) -> Recorded:
    listed = "\n".join(f"GPU {n}: NVIDIA H100" for n in range(len(rows)))
    named = {name.replace("_", " "): said for name, said in more.items()}
    return Recorded({"nvidia-smi -L": listed, "nvidia-smi --query-gpu": "\n".join(rows), **named})


def machine(tmp_path: Path, files: Mapping[str, str] | None = None, **options: Any) -> Machine:
    for name, text in (files or {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    options.setdefault("env", {})
    options.setdefault("run", Recorded({}))
    return Machine(root=tmp_path, **options)


def look(name: str, seen: Machine) -> CheckResult:
    check: Check = load_checks([name])[name]
    return check.look(seen)


def assert_finding(result: CheckResult, *words: str) -> None:
    assert result.outcome == "finding", result
    for word in words:
        assert word in f"{result.saw} | {result.fix}", result


# -- GPUs ------------------------------------------------------------------------------------------

FOUR = tuple(gpu(index) for index in range(4))
MISMATCH = CommandAnswer(18, "Failed to initialize NVML: Driver/library version mismatch\n")


@pytest.mark.parametrize(
    ("name", "run", "env", "processes", "words"),
    [
        ("gpu_driver", Recorded({"nvidia-smi": MISMATCH}), {}, 1, ("mismatch", "reboot")),
        ("gpu_count", with_gpus(*FOUR), {}, 8, ("8 process(es), 4 GPU(s)",)),
        (
            "visible_devices",
            with_gpus(*FOUR),
            {"CUDA_VISIBLE_DEVICES": "0,7"},
            2,
            ("this host has",),
        ),
        ("visible_devices", with_gpus(*FOUR), {"CUDA_VISIBLE_DEVICES": "1,1"}, 2, ("twice",)),
        ("visible_devices", with_gpus(*FOUR), {"CUDA_VISIBLE_DEVICES": ""}, 1, ("hides every",)),
        (
            "visible_devices",
            with_gpus(*FOUR),
            {"CUDA_VISIBLE_DEVICES": "0"},
            4,
            ("for 4 processes", "--gpus-per-task=1"),
        ),
        ("gpu_health", with_gpus(*FOUR[:3], gpu(3, ecc="2")), {}, 1, ("GPU 3", "2 uncorrected")),
        (
            "gpu_health",
            with_gpus(
                *FOUR,
                dmesg="[1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
            ),
            {},
            1,
            ("Xid 79", "PCI:0000:3b:00", "off the bus"),
        ),
        ("gpu_busy", with_gpus(*FOUR[:3], gpu(3, used=70000)), {}, 1, ("70000 of 81559 MiB",)),
        ("gpu_busy", with_gpus(gpu(0, mode="Prohibited")), {}, 1, ("Prohibited", "-c DEFAULT")),
        (
            "gpu_peers",
            Recorded({"nvidia-smi topo -m": TOPOLOGY.format(link="SYS")}),
            {},
            1,
            ("GPU 3 has fewer links", "nvlink -s -i 3"),
        ),
        (
            "gpu_peers",
            Recorded(
                {
                    "nvidia-smi topo -m": TOPOLOGY.format(link="NV18"),
                    "nvidia-smi topo -p2p r": PEERS.format(cell="NS"),
                }
            ),
            {},
            1,
            ("without peer access", "IOMMU"),
        ),
        ("nccl_switches", with_gpus(*FOUR), {"NCCL_P2P_DISABLE": "1"}, 4, ("unset NCCL_P2P",)),
    ],
)
def test_faults_of_gpus(tmp_path, name, run, env, processes, words):
    seen = machine(tmp_path, run=run, env=env, processes=processes)
    assert_finding(look(name, seen), *words)


@pytest.mark.parametrize(
    "name",
    [
        "gpu_driver",
        "gpu_count",
        "visible_devices",
        "gpu_health",
        "gpu_busy",
        "gpu_peers",
        "nccl_switches",
    ],
)
def test_four_healthy_gpus_have_no_finding(tmp_path, name):
    run = Recorded(
        {
            **with_gpus(*FOUR, dmesg="usb 1-1: new device").answers,
            "nvidia-smi topo -m": TOPOLOGY.format(link="NV18"),
            "nvidia-smi topo -p2p r": PEERS.format(cell="OK"),
        }
    )
    assert look(name, machine(tmp_path, run=run, processes=4)).outcome == "fine"


@pytest.mark.parametrize("served", ["12.4", "13.0"])
def test_a_driver_older_than_the_cuda_of_torch(served, tmp_path):
    """A torch, of which nothing but the version is there, and an nvidia-smi that prints."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    said = f"| NVIDIA-SMI 550.54  CUDA Version: {served}     |"
    driver.write_text(
        f'#!/bin/sh\ncase "$*" in *query-gpu*) echo "{FOUR[0]}";; *) echo "{said}";; esac\n'
    )
    driver.chmod(0o755)
    paths = [str(package.parent), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "torsh_trainer", "doctor", "--json", "--only", "cuda_versions"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{driver.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    (row,) = json.loads(done.stdout)["checks"]
    result = CheckResult(row["outcome"], row["saw"], row["fix"])
    if served == "12.4":
        assert_finding(result, "CUDA 13.0", "serves 12.4", "update the driver")
    else:
        assert result.outcome == "fine", row


# -- fabric, kernel --------------------------------------------------------------------------------

PORT = "sys/class/infiniband/mlx5_{n}/ports/1/{what}"


def fabric(*states: str, uverbs: bool = True) -> dict[str, str]:
    files = {}
    for n, state in enumerate(states):
        files[PORT.format(n=n, what="state")] = f"{state}\n"
        files[PORT.format(n=n, what="rate")] = "200 Gb/sec (4X HDR)\n"
    return {**files, **({"dev/infiniband/uverbs0": ""} if uverbs else {})}


def test_ports_of_infiniband(tmp_path):
    up, down, waits = "4: ACTIVE", "1: DOWN", "2: INIT"

    def look_at(name: str, *states: str, **options: Any) -> CheckResult:
        nodes = options.pop("nodes", 2)
        return look("infiniband", machine(tmp_path / name, fabric(*states, **options), nodes=nodes))

    assert look_at("up", up, up).outcome == "fine"
    assert look_at("half", up, down).outcome == "fine", "NCCL passes over a port that is down"
    assert_finding(look_at("down", down), "mlx5_0:1 1: DOWN", "opensm")
    assert_finding(look_at("waits", up, waits), "mlx5_1:1 2: INIT", "opensm")
    assert_finding(look_at("boxed", up, uverbs=False), "uverbs", "--device /dev/infiniband")
    assert look_at("alone", down, nodes=1).outcome == "fine"


def test_memory_that_may_not_be_locked_beside_infiniband(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, before[1]))
    try:
        two = machine(tmp_path, fabric("4: ACTIVE"), nodes=2)
        assert_finding(look("locked_memory", two), "ulimit -l is 64 kB", "memlock unlimited")
        assert look("locked_memory", machine(tmp_path, fabric("4: ACTIVE"))).outcome == "fine"
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


MEMINFO = """\
MemTotal:       65536000 kB
MemAvailable:   {available} kB
SwapTotal:      8388608 kB
SwapFree:       {free} kB
CommitLimit:    40000000 kB
Committed_AS:   39000000 kB
HugePages_Free: {pages}
Hugepagesize:   2048 kB
"""


def test_swap_huge_pages_and_overcommit(tmp_path):
    bad = machine(
        tmp_path / "bad",
        {
            "proc/meminfo": MEMINFO.format(available=900000, free=1000000, pages=20000),
            "proc/sys/vm/overcommit_memory": "2\n",
        },
    )
    assert_finding(look("swap", bad), "of 8.0 GiB swap in use")
    assert_finding(look("huge_pages", bad), "39.1 GiB", "vm.nr_hugepages=0")
    assert_finding(look("overcommit", bad), "vm.overcommit_memory=0")
    good = machine(
        tmp_path / "good",
        {
            "proc/meminfo": MEMINFO.format(available=60000000, free=8388608, pages=0),
            "proc/sys/vm/overcommit_memory": "0\n",
        },
    )
    for name in ("swap", "huge_pages", "overcommit", "memory"):
        assert look(name, good).outcome == "fine"


def test_numa_nodes_without_their_memory(tmp_path):
    nodes = {
        "sys/devices/system/node/node0/cpulist": "0-15",
        "sys/devices/system/node/node1/cpulist": "16-31",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 32000000 kB",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 32000000 kB",
    }
    status = "Cpus_allowed_list:\t{}\nMems_allowed_list:\t{}\n"
    far = machine(tmp_path / "far", {**nodes, "proc/self/status": status.format("16-31", "0")})
    assert_finding(look("numa", far), "cores on 1, memory from 0", "numactl --cpunodebind=1")
    near = machine(tmp_path / "near", {**nodes, "proc/self/status": status.format("16-31", "1")})
    assert look("numa", near).outcome == "fine"
    nodes["sys/devices/system/node/node1/meminfo"] = "Node 1 MemTotal:       0 kB"
    bare = machine(tmp_path / "bare", {**nodes, "proc/self/status": status.format("0-31", "0-1")})
    assert_finding(look("numa", bare), "node 1 has no memory")


def test_a_cgroup_of_the_second_version(tmp_path):
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n",
        "sys/fs/cgroup/jobs/one/memory.max": f"{2**31}\n",
        "sys/fs/cgroup/jobs/one/memory.current": f"{2**31 - 2**28}\n",
        "sys/fs/cgroup/jobs/one/memory.stat": "anon 1\ninactive_file 0\n",
        "sys/fs/cgroup/jobs/one/pids.max": "100\n",
        "sys/fs/cgroup/jobs/one/pids.current": "90\n",
        "proc/meminfo": MEMINFO.format(available=60000000, free=8388608, pages=0),
    }
    seen = machine(tmp_path, files, processes=1)
    assert seen.cpu_quota == 1.5
    assert_finding(look("memory", seen), "a cgroup grants 2.0 GiB, of which 256.0 MiB are left")
    assert_finding(look("processes", seen), "the cgroup allows 100, and 90 are taken")


NFT = """\
table inet filter {{
	chain input {{
		type filter hook input priority filter; policy drop;
		iif "lo" accept
		ct state established,related accept
		tcp dport {ports} accept
	}}
}}
"""


def test_a_firewall_of_nftables_that_opens_one_port(tmp_path):
    def open_ports(ports: str) -> Machine:
        return machine(tmp_path, run=Recorded({"nft": NFT.format(ports=ports)}), nodes=2)

    assert_finding(look("firewall", open_ports("29500")), "no rule allows 32768-60999")
    assert look("firewall", open_ports("1024-65535")).outcome == "fine"


def test_links_that_are_slow_or_lose(tmp_path, monkeypatch):
    """What the kernel tells of a link's speed and errors; no link here can be made to have them."""
    only = [Interface("eth9", "10.0.0.1", is_up=True, is_loopback=False)]
    monkeypatch.setattr(network, "list_interfaces", lambda: only)
    base = "sys/class/net/eth9"
    packets = {f"{base}/statistics/rx_packets": "100000", f"{base}/statistics/rx_errors": "0"}
    slow = machine(tmp_path / "slow", {**packets, f"{base}/speed": "100"}, nodes=2)
    assert_finding(look("link_speed", slow), "100 Mbit/s", "ethtool eth9")
    lossy = machine(
        tmp_path / "lossy",
        {**packets, f"{base}/speed": "25000", f"{base}/statistics/rx_errors": "5000"},
    )
    assert_finding(look("link_speed", lossy), "5000 errors")
    good = machine(tmp_path / "good", {**packets, f"{base}/speed": "25000"}, nodes=2)
    assert look("link_speed", good).outcome == "fine"


def test_interfaces_are_chosen_as_gloo_and_nccl_choose_them():
    lo = Interface("lo", "127.0.0.1", is_up=True, is_loopback=True)
    docker = Interface("docker0", "172.17.0.1", is_up=True, is_loopback=False)
    eth = Interface("eth0", "10.0.0.1", is_up=True, is_loopback=False)
    ib = Interface("ib0", "10.1.0.1", is_up=True, is_loopback=False)
    assert choose_for_gloo([lo, docker, eth], {}, {"10.0.0.1"}) == eth
    assert choose_for_gloo([lo, eth], {}, {"127.0.1.1"}) == lo
    assert choose_for_gloo([lo, eth], {"GLOO_SOCKET_IFNAME": "eth0"}, set()) == eth
    assert choose_for_nccl([lo, docker, eth], {}) == [eth]
    assert choose_for_nccl([lo, docker, eth, ib], {}) == [ib]
    assert choose_for_nccl([lo, docker], {}) == [docker]
    assert choose_for_nccl([lo, docker, eth], {"NCCL_SOCKET_IFNAME": "^docker,lo"}) == [eth]
    assert choose_for_nccl([lo, docker, eth], {"NCCL_SOCKET_IFNAME": "=eth"}) == []


# -- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "env", "words"),
    [
        ("interface_variables", {"GLOO_SOCKET_IFNAME": "ib7"}, ("ib7", "export GLOO_SOCKET")),
        ("interface_variables", {"GLOO_SOCKET_IFNAME": "^lo"}, ("^lo",)),
        ("interface_variables", {"NCCL_SOCKET_IFNAME": "ib7"}, ("ib7",)),
        ("proxies", {"http_proxy": "http://proxy:3128"}, ("no_proxy=", "localhost")),
        ("rank_variables", {"WORLD_SIZE": "$SLURM_NTASKS", "RANK": "0"}, ("filled it in",)),
        ("rank_variables", {"WORLD_SIZE": "", "RANK": "0"}, ("it is empty",)),
        ("rank_variables", {"WORLD_SIZE": "4", "RANK": "4"}, ("RANK=4 in WORLD_SIZE=4",)),
        ("rank_variables", {"RANK": "1"}, ("WORLD_SIZE is not set",)),
        ("rank_variables", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, ("above WORLD_SIZE=2",)),
        ("rank_variables", {"MASTER_PORT": "99999"}, ("no port",)),
        ("duplicate_ranks", {"RANK": "0", "SLURM_PROCID": "3"}, ("unset RANK",)),
        ("duplicate_ranks", {"RANK": "0", "OMPI_COMM_WORLD_RANK": "1"}, ("unset RANK",)),
        ("scheduler_tasks", {"WORLD_SIZE": "8", "SLURM_NTASKS": "4"}, ("SLURM_NTASKS=4",)),
        (
            "rank_environment",
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"},
            ("SLURM_NTASKS",),
        ),
        ("master_address", {"MASTER_ADDR": "localhost", "NNODES": "2"}, ("for 2 hosts",)),
        ("python_path", {"PYTHONPATH": "/opt/lib/python3.7/site-packages"}, ("python3.7",)),
        ("debug_variables", {"CUDA_LAUNCH_BLOCKING": "1"}, ("unset CUDA_LAUNCH_BLOCKING",)),
        ("local_ports", {"MASTER_PORT": "45000"}, ("45000 in it",)),
    ],
)
def test_faults_of_variables(name, env, words):
    assert_finding(look(name, Machine(env)), *words)


def test_threads_that_outnumber_the_cores():
    allowed = os.sched_getaffinity(0)
    cores = len(allowed)
    many = {"OMP_NUM_THREADS": str(cores)}
    assert_finding(look("threads", Machine(many, processes=4)), "4 processes", "OMP_NUM_THREADS=1")
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert_finding(look("threads", Machine(started)), "OMP_NUM_THREADS is not set")
    assert look("threads", Machine({"OMP_NUM_THREADS": "1"}, processes=cores)).outcome == "fine"
    # Bound to a core, as srun and mpirun bind a task: the core is this process's alone.
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert look("threads", Machine(started)).outcome == "fine"
        assert look("threads", Machine({**started, "OMP_NUM_THREADS": "1"})).outcome == "fine"
        assert_finding(look("threads", Machine({**started, "OMP_NUM_THREADS": "4"})), "on 1 cores")
    finally:
        os.sched_setaffinity(0, allowed)


def test_variables_of_a_job_that_is_right_have_no_finding():
    env = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "http_proxy": "http://p:1",
        "no_proxy": "localhost,127.0.0.1",
    }
    names = "rank_variables duplicate_ranks scheduler_tasks rank_environment proxies threads "
    for name in (names + "interface_variables local_ports python_path").split():
        assert look(name, Machine(env)).outcome == "fine", name


def test_a_port_that_is_taken_is_told_with_who_has_it():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        result = look("master_port", Machine({}, port=port))
        assert_finding(result, f"port {port}", f"pid {os.getpid()}", "MASTER_PORT=")
    assert look("master_port", Machine({}, port=port)).outcome == "fine"


# -- software --------------------------------------------------------------------------------------


def test_two_nccl_packages_and_one_in_a_variable(tmp_path, monkeypatch):
    for name in ("nvidia_nccl_cu12-2.21.5", "nvidia_nccl_cu13-2.27.3"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        title, _, version = name.rpartition("-")
        text = f"Metadata-Version: 2.1\nName: {title.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = look("nccl_libraries", Machine({}))
    assert_finding(result, "nvidia-nccl-cu12 2.21.5", "pip uninstall nvidia-nccl-cu12")
    monkeypatch.undo()
    (tmp_path / "libnccl.so.2").write_text("")
    result = look("nccl_libraries", Machine({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}))
    assert_finding(result, "LD_LIBRARY_PATH has another", "unset LD_LIBRARY_PATH")


def test_two_installations_of_torch(tmp_path, monkeypatch):
    folder = tmp_path / "torch-2.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = look("versions", Machine({}))
    assert_finding(result, "torch 2.1.0", "pip install --upgrade")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    assert_finding(look("versions", Machine({})), "installed twice", str(tmp_path))


def test_a_file_that_hides_a_library(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert_finding(look("shadowed_modules", Machine({})), "hides the library torch", "mv torch.py")


def test_text_that_is_not_utf8_is_named(tmp_path):
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    done = subprocess.run(
        [sys.executable, "-m", "torsh_trainer", "doctor", "--json", "--only", "locale"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, **plain},
    )
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)["checks"]
    assert_finding(CheckResult(row["outcome"], row["saw"], row["fix"]), "ascii", "LC_ALL=C.UTF-8")


def test_a_check_that_fails_itself_is_a_finding(monkeypatch):
    from torsh_trainer.doctor.checks.clock import Clock
    from torsh_trainer.doctor.examination import examine

    def fail(self, machine):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(Clock, "look", fail)
    (report,) = examine(Machine({}), only=["clock"]).findings
    assert "the check itself failed: ZeroDivisionError" in report.result.saw


def test_a_check_that_hangs_is_a_finding_and_keeps_no_other(monkeypatch):
    import threading

    from torsh_trainer.doctor import examination
    from torsh_trainer.doctor.checks.disk import DiskSpace

    never = threading.Event()
    monkeypatch.setattr(DiskSpace, "look", lambda self, machine: never.wait())
    monkeypatch.setattr(examination, "_LOOK_TIMEOUT_S", 0.2)
    disk, clock = examination.examine(Machine({}), only=["disk_space", "clock"]).reports
    never.set()
    assert "no answer within 0.2 s" in disk.result.saw
    assert clock.result.outcome == "fine"


def test_every_check_is_provoked():
    """By its name, in a test of this folder that asserts a finding."""
    tests = [
        ast.get_source_segment(text, node) + "".join(map(ast.unparse, node.decorator_list))
        for file in sorted(Path(__file__).parent.glob("test_*.py"))
        for text in [file.read_text()]
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name != "test_every_check_is_provoked"
    ]
    provoking = [text.replace("'", '"') for text in tests if "assert_finding(" in text]
    names = load_checks()
    assert len(names) >= 50
    assert [n for n in names if not any(f'"{n}"' in text for text in provoking)] == []
