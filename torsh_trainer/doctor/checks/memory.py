"""Memory of this host: how much is left, how it is shared, and what else has a hold on it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torsh_trainer.doctor.base import (
    Check,
    CheckResult,
    pass_check,
    report_finding,
    skip_check,
)
from torsh_trainer.doctor.machine import Machine

_GIB = 2**30
_LEAST_SHARED = 256 * 2**20
_PROBE = 8 * 2**20
_LEAST_EACH = _GIB


class SharedMemoryFolder(Check):
    """``/dev/shm`` has room, and gives it."""

    why = (
        "loader workers and NCCL exchange data there: what does not fit kills them with 'Bus "
        "error' or 'unhandled system error'; a container has 64 MB of it unless told otherwise"
    )

    def look(self, machine: Machine) -> CheckResult:
        folder = Path("/dev/shm")
        fix = "mount -o remount,size=50% /dev/shm; docker run --shm-size=8g, or --ipc=host"
        try:
            found = os.statvfs(folder)
            free = found.f_bavail * found.f_frsize
            saw = (
                f"/dev/shm: {say_bytes(free)} free of {say_bytes(found.f_blocks * found.f_frsize)}"
            )
            if free >= _LEAST_SHARED:
                _take(folder, _PROBE)
                return pass_check(saw)
        except OSError as error:
            saw = f"/dev/shm: {error.strerror}"
        return report_finding(saw, fix=fix)


class FreeMemory(Check):
    """Memory is left for the processes of the job, within the limit of its cgroup."""

    why = (
        "past the limit the kernel kills a process without a word (exit code 137, or signal 9), "
        "and the others report that they lost a connection"
    )

    def look(self, machine: Machine) -> CheckResult:
        available, limit = machine.memory.get("MemAvailable"), machine.memory_limit
        if available is None:
            return skip_check("/proc/meminfo cannot be read")
        saw = f"{say_bytes(available)} available"
        room = available
        if limit is not None and limit < machine.memory.get("MemTotal", limit):
            room = min(available, limit - self._measure_held(machine))
            saw += (
                f"; a cgroup grants {say_bytes(limit)}, of which {say_bytes(max(room, 0))} are left"
            )
        if room < _LEAST_EACH * machine.job_processes:
            return report_finding(
                f"{saw}, for {machine.job_processes} process(es)",
                fix="ps aux --sort=-rss | head; end what is not needed, or ask for more "
                "(Slurm: --mem=0, docker: --memory, Kubernetes: resources.limits.memory)",
            )
        return pass_check(saw)

    def _measure_held(self, machine: Machine) -> int:
        """What the cgroup holds and cannot drop."""
        for folder in machine.cgroups("memory"):
            for name in ("memory.current", "memory.usage_in_bytes"):
                held = machine.read_number(f"{folder}/{name}")
                if held is None:
                    continue
                stat = dict(
                    line.split(maxsplit=1)
                    for line in (machine.read(f"{folder}/memory.stat") or "").splitlines()
                    if " " in line
                )
                cache = stat.get("inactive_file", stat.get("total_inactive_file", "0"))
                return held - int(cache)
        return 0


class Swap(Check):
    """What runs here fits into memory without swap."""

    why = (
        "a process whose memory lies on a disk stands still for seconds at a time, and all others "
        "of the job with it; time-outs of collectives are the symptom"
    )

    def look(self, machine: Machine) -> CheckResult:
        total, free = (machine.memory.get(name, 0) for name in ("SwapTotal", "SwapFree"))
        available, memory = (machine.memory.get(name, 1) for name in ("MemAvailable", "MemTotal"))
        if not total:
            return pass_check("no swap")
        saw = f"{say_bytes(total - free)} of {say_bytes(total)} swap in use"
        if total - free > total / 4 and available < memory / 10:
            return report_finding(
                saw, fix="ps aux --sort=-rss | head; end what is not needed; swapoff -a"
            )
        return pass_check(saw)


class HugePages(Check):
    """Huge pages that nobody uses do not hold a large part of memory."""

    why = (
        "pages that vm.nr_hugepages has set aside serve only programs that ask for them: torch "
        "does not, and runs out of memory while free shows none used"
    )

    def look(self, machine: Machine) -> CheckResult:
        free = machine.memory.get("HugePages_Free", 0) * machine.memory.get("Hugepagesize", 0)
        saw = f"{say_bytes(free)} in huge pages that nobody uses"
        if free > machine.memory.get("MemTotal", _GIB) / 4:
            return report_finding(saw, fix="sysctl -w vm.nr_hugepages=0")
        return pass_check(saw)


class Overcommit(Check):
    """The kernel grants memory when it is used, not when it is reserved."""

    why = (
        "with vm.overcommit_memory=2 a process of a large job cannot fork its loader workers, and "
        "CUDA cannot reserve addresses: 'Cannot allocate memory' with memory to spare"
    )

    def look(self, machine: Machine) -> CheckResult:
        mode = machine.read_number("/proc/sys/vm/overcommit_memory")
        limit, held = (machine.memory.get(name, 0) for name in ("CommitLimit", "Committed_AS"))
        if mode == 2:
            return report_finding(
                f"vm.overcommit_memory=2: {say_bytes(held)} of {say_bytes(limit)} are promised",
                fix="sysctl -w vm.overcommit_memory=0",
            )
        return pass_check(f"vm.overcommit_memory={mode}")


def _take(folder: Path, size: int) -> None:
    """Has so many bytes given, and gives them back.

    Raises:
        OSError: they are not to be had.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="torsh-doctor-") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def say_bytes(size: float) -> str:
    """``1.5 GiB``."""
    for unit, name in ((2**40, "TiB"), (_GIB, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1024:.0f} KiB"
