"""What the system lets a process have: files, threads, memory that stays, cores."""

from __future__ import annotations

import os
import resource

from torsh_trainer.doctor.base import (
    Check,
    CheckResult,
    pass_check,
    report_finding,
    skip_check,
)
from torsh_trainer.doctor.machine import Machine

_LEAST_FILES, _LEAST_FILES_OF_MANY, _MANY = 1024, 4096, 8
_THREADS_EACH = 64
_LEAST_LOCKED = 2**30


class OpenFiles(Check):
    """The limit of open files (``ulimit -n``) leaves room for sockets and loaders."""

    why = (
        "sockets to every other process and tensors that loader workers send each take a file: "
        "past the limit they fail with 'received 0 items of ancdata' or 'Too many open files'"
    )

    def look(self, machine: Machine) -> CheckResult:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _LEAST_FILES_OF_MANY if machine.job_processes >= _MANY else _LEAST_FILES
        saw = f"ulimit -n is {_say(soft)}, at most {_say(hard)}"
        if soft != resource.RLIM_INFINITY and soft < wanted:
            if hard != resource.RLIM_INFINITY and hard < wanted:
                return report_finding(
                    saw,
                    fix="in /etc/security/limits.conf: * - nofile 65536 (a container: "
                    "docker run --ulimit nofile=65536)",
                )
            return report_finding(saw, fix=f"ulimit -n {_say(min(hard, 65536), wanted)}")
        return pass_check(saw)


class ProcessLimit(Check):
    """The limits of processes and threads leave room for the job's."""

    why = (
        "every process starts threads and loader workers: past the limit they fail with "
        "'Resource temporarily unavailable' or 'can't start new thread'"
    )

    def look(self, machine: Machine) -> CheckResult:
        wanted = _THREADS_EACH * machine.job_processes
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        pids = [machine.read_number(f"{at}/pids.max") for at in machine.cgroups("pids")]
        used = machine.read_number(f"{(machine.cgroups('pids') or [''])[0]}/pids.current") or 0
        cgroup = min((limit for limit in pids if limit is not None), default=None)
        saw = f"ulimit -u is {_say(soft)}; the cgroup allows {cgroup or 'any number'}"
        if soft != resource.RLIM_INFINITY and soft < wanted:
            return report_finding(saw, fix=f"ulimit -u {max(4096, wanted)}")
        if cgroup is not None and cgroup - used < wanted:
            return report_finding(
                f"{saw}, and {used} are taken",
                fix=f"docker run --pids-limit {used + max(4096, wanted)}; systemd: TasksMax=",
            )
        return pass_check(saw)


class LockedMemory(Check):
    """With several hosts and InfiniBand: memory may be locked without limit (``ulimit -l``)."""

    why = (
        "InfiniBand registers memory by locking it: with a limit NCCL fails with 'ibv_reg_mr ... "
        "Cannot allocate memory', often in the middle of the first step"
    )

    def look(self, machine: Machine) -> CheckResult:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        saw = f"ulimit -l is {_say(soft, unit=1024, name=' kB')}"
        if not machine.glob("sys/class/infiniband/*"):
            return skip_check(f"{saw}; no InfiniBand here")
        is_enough = soft == resource.RLIM_INFINITY or soft >= _LEAST_LOCKED
        if machine.job_nodes < 2 or is_enough:
            return pass_check(saw)
        return report_finding(
            saw,
            fix="in /etc/security/limits.conf: * - memlock unlimited (docker run --ulimit "
            "memlock=-1; Slurm: LimitMEMLOCK=infinity of slurmd)",
        )


class AddressSpace(Check):
    """Neither the address space nor the size of a file is limited (``ulimit -v``, ``-f``)."""

    why = (
        "CUDA reserves far more addresses than memory and fails at once under ulimit -v; under "
        "ulimit -f a checkpoint ends in 'File too large'"
    )

    def look(self, machine: Machine) -> CheckResult:
        space, _ = resource.getrlimit(resource.RLIMIT_AS)
        size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        saw = (
            f"ulimit -v is {_say(space, unit=1024, name=' kB')}, "
            f"-f {_say(size, unit=1024, name=' kB')}"
        )
        if space != resource.RLIM_INFINITY:
            return report_finding(saw, fix="ulimit -v unlimited")
        if size != resource.RLIM_INFINITY:
            return report_finding(saw, fix="ulimit -f unlimited")
        return pass_check(saw)


class CpuQuota(Check):
    """A container's share of the cores is known to those who count cores."""

    why = (
        "os.cpu_count() and torch count the host's cores, not a container's quota: they start so "
        "many threads, which the quota stops for most of each period, many times slower"
    )

    def look(self, machine: Machine) -> CheckResult:
        quota, seen = machine.cpu_quota, os.cpu_count() or 1
        if quota is None or quota >= seen:
            return pass_check(f"{seen} cores, no quota below them")
        saw = f"{seen} cores, of which a cgroup grants {quota:g}"
        if machine.env.get("OMP_NUM_THREADS", "").strip():
            return pass_check(f"{saw}; OMP_NUM_THREADS={machine.env['OMP_NUM_THREADS']}")
        each = max(1, int(quota / machine.job_processes))
        return report_finding(
            saw, fix=f"export OMP_NUM_THREADS={each}, or give the container more: --cpus {seen}"
        )


class Threads(Check):
    """Threads of all processes of the job fit into the cores of this host."""

    why = (
        "with more threads than cores every operation waits for threads that do not run, and all "
        "processes wait for the slowest: steps take several times as long"
    )

    def look(self, machine: Machine) -> CheckResult:
        said, cores = machine.env.get("OMP_NUM_THREADS", "").strip(), max(1, int(machine.cores))
        processes = machine.job_processes
        if _is_started_apart(machine) and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
            processes = 1  # bound: these cores are this process's alone
        if processes < 2 and (not said.isdigit() or int(said) <= cores):
            return pass_check(f"one process, {cores} cores")
        fix = f"export OMP_NUM_THREADS={max(1, cores // processes)}"
        if not said:
            if "TORCHELASTIC_RUN_ID" in machine.env or not _is_started_apart(machine):
                return pass_check(f"{processes} processes: the launcher sets OMP_NUM_THREADS")
            return report_finding(
                f"OMP_NUM_THREADS is not set: each of {processes} processes takes {cores} threads",
                fix=fix,
            )
        if not said.isdigit() or int(said) < 1:
            return report_finding(f"OMP_NUM_THREADS={said} is no number of threads", fix=fix)
        saw = f"{processes} processes with OMP_NUM_THREADS={said} on {cores} cores"
        if int(said) > 1 and processes * int(said) > cores:
            return report_finding(saw, fix=fix)
        if processes > 2 * cores:
            return report_finding(saw, fix=f"start {cores} processes on this host")
        return pass_check(saw)


class Affinity(Check):
    """The cores that this process may use are as many as the job has processes here."""

    why = (
        "mpirun and schedulers bind a process to a core by default: its threads, its loader "
        "workers and NCCL's helpers then share that one core"
    )

    def look(self, machine: Machine) -> CheckResult:
        allowed, seen = len(os.sched_getaffinity(0)), os.cpu_count() or 1
        saw = f"this process may run on {allowed} of {seen} cores"
        is_one_of = _is_started_apart(machine)
        wanted = 1 if is_one_of else machine.job_processes
        if allowed < seen and allowed < max(2 if seen > 1 else 1, wanted):
            return report_finding(
                saw,
                fix="mpirun --bind-to none; srun --cpus-per-task N, or --cpu-bind=none; "
                f"taskset -cp 0-{seen - 1} $$",
            )
        return pass_check(saw)


class Numa(Check):
    """Memory may come from the NUMA nodes on which this process runs."""

    why = (
        "memory of another node than the cores' own is reached over the link between sockets: "
        "loading and collectives through shared memory take up to twice as long"
    )

    def look(self, machine: Machine) -> CheckResult:
        nodes = machine.glob("sys/devices/system/node/node[0-9]*")
        if len(nodes) < 2:
            return skip_check("one NUMA node")
        status = machine.read("/proc/self/status") or ""
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        cores = _parse_list(fields.get("Cpus_allowed_list", ""))
        memory = _parse_list(fields.get("Mems_allowed_list", ""))
        mine, bare = set(), set()
        for node in nodes:
            number = int(node.name[4:])
            listed = machine.read(f"/sys/devices/system/node/{node.name}/cpulist") or ""
            if _parse_list(listed) & cores:
                mine.add(number)
            total = machine.read(f"/sys/devices/system/node/{node.name}/meminfo") or ""
            if "MemTotal:       0 kB" in " ".join(total.split(" ")) and _parse_list(listed):
                bare.add(number)
        saw = f"{len(nodes)} NUMA nodes; cores on {_join(mine)}, memory from {_join(memory)}"
        if memory and not mine <= memory:
            return report_finding(saw, fix=f"numactl --cpunodebind={_join(mine)} --localalloc ...")
        if mine & bare:
            return report_finding(
                f"{saw}; node {_join(mine & bare)} has no memory",
                fix="dmidecode -t memory; fill its slots, or start on another node: numactl -N",
            )
        return pass_check(saw)


def _is_started_apart(machine: Machine) -> bool:
    """This process is one of several that a launcher has started, and not the one before them."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
    return any(machine.env.get(name, "").strip() for name in names)


def _say(limit: int, least: int = 0, *, unit: int = 1, name: str = "") -> str:
    if limit in (resource.RLIM_INFINITY, -1):
        return "unlimited" if not least else str(least)
    return f"{max(limit // unit, least)}{name}"


def _parse_list(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _join(numbers: set[int]) -> str:
    return ",".join(map(str, sorted(numbers))) or "none"
