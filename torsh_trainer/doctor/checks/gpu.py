"""NVIDIA GPUs of this host: the driver, their health, who may use them, and how they are joined."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torsh_trainer.doctor.base import Check, CheckResult, pass_check, report_finding, skip_check
from torsh_trainer.doctor.machine import Machine

_FIELDS = (
    *("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_mode"),
    *("ecc.errors.uncorrected.volatile.total", "mig.mode.current"),
)
_NO_GPU = "no NVIDIA GPU here"
_HELD_MIB = 2048
"""A desktop alone takes less."""

_VENDOR = "0x10de"
_SWITCHES = {
    "NCCL_P2P_DISABLE": "GPUs exchange through the host's memory",
    "NCCL_IB_DISABLE": "hosts exchange over TCP, not InfiniBand",
    "NCCL_SHM_DISABLE": "processes of a host exchange over sockets",
    "NCCL_NET_GDR_LEVEL": "InfiniBand may not reach the GPU's memory",
}
_FATAL_XIDS = {
    48: "an ECC error of two bits",
    62: "the GPU's own processor stopped",
    64: "a memory row could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    95: "an ECC error, not contained",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
}
"""Those of the hardware; 13, 31 or 43 are a program's own."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as ``nvidia-smi --query-gpu`` tells of it, by the names of its fields."""

    fields: dict[str, str]

    @property
    def index(self) -> str:
        """Its number on this host."""
        return self.fields["index"]

    def number(self, name: str) -> int:
        """A whole number; 0 where the GPU does not know it (``[N/A]``)."""
        text = self.fields.get(name, "")
        return int(text) if text.isdigit() else 0


def list_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs of this host; empty where nvidia-smi gives none."""
    answer = machine.ask(
        ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    )
    if answer.code != 0:
        return []
    rows = [[text.strip() for text in line.split(",")] for line in answer.out.splitlines()]
    return [Gpu(dict(zip(_FIELDS, row, strict=True))) for row in rows if len(row) == len(_FIELDS)]


def has_gpu_hardware(machine: Machine) -> bool:
    """Whether the bus shows an NVIDIA GPU (a display or 3D controller), whatever the driver is."""
    for vendor in machine.glob("sys/bus/pci/devices/*/vendor"):
        kind = machine.read(str(vendor.parent.relative_to(machine.root) / "class")) or ""
        if vendor.read_text().strip() == _VENDOR and kind.startswith(("0x0300", "0x0302")):
            return True
    return bool(machine.glob("dev/nvidia[0-9]*"))


class GpuDriver(Check):
    """Where there is a GPU, its driver answers."""

    why = (
        "torch sees no GPU where nvidia-smi gives no answer: the job stops, or trains on the CPU "
        "a hundred times slower"
    )
    causes = (
        (
            "Driver/library version mismatch",
            "reboot: the driver was updated while it was loaded (in a container: start it anew)",
        ),
        (
            "couldn't communicate with the NVIDIA driver",
            "modprobe nvidia; dkms status; install the driver for this kernel again",
        ),
        (
            "No devices were found",
            "dmesg | grep NVRM; lspci -d 10de:; the GPU failed, or is given to a guest",
        ),
        (
            "Insufficient Permissions",
            "ls -l /dev/nvidia*; add this user to the group that owns them",
        ),
        (
            "nvidia-smi: No such file",
            "install the driver; for a container the container toolkit: docker run --gpus all",
        ),
    )

    def look(self, machine: Machine) -> CheckResult:
        answer = machine.ask(["nvidia-smi", "-L"])
        lines = [line for line in answer.out.splitlines() if line.startswith("GPU ")]
        if answer.code == 0 and lines:
            gpus = list_gpus(machine)
            driver = f", driver {gpus[0].fields['driver_version']}" if gpus else ""
            return pass_check(f"{len(lines)} GPU(s){driver}")
        said = f"{answer.out}\n{answer.err}".strip()
        if answer.code is None and not has_gpu_hardware(machine):
            return skip_check(_NO_GPU)
        first = said.splitlines()[0] if said else f"exit code {answer.code}"
        fix = next((fix for words, fix in self.causes if words in said), "nvidia-smi; dmesg")
        return report_finding(f"nvidia-smi: {first.removeprefix('nvidia-smi: ')}", fix=fix)


class GpuCount(Check):
    """There is a GPU for each process of the job on this host."""

    why = (
        "two processes that share a GPU end in 'Duplicate GPU detected', or wait for one another "
        "for ever; a process beyond the last GPU ends in 'invalid device ordinal'"
    )

    def look(self, machine: Machine) -> CheckResult:
        gpus = list_gpus(machine)
        if not gpus:
            return skip_check(_NO_GPU)
        mask = machine.env.get("CUDA_VISIBLE_DEVICES")
        parts = sum(gpu.fields["mig.mode.current"] == "Enabled" for gpu in gpus)
        count = len(gpus) if mask is None else len([t for t in mask.split(",") if t.strip()])
        saw = f"{machine.job_processes} process(es), {count} GPU(s)"
        if machine.job_processes <= count or parts or _is_one_each(machine):
            return pass_check(saw)
        return report_finding(
            saw,
            fix=f"launcher.num_processes={count} (torchrun --nproc-per-node {count}, "
            f"--ntasks-per-node={count}), or ask the scheduler for {machine.job_processes} GPUs",
        )


class VisibleDevices(Check):
    """CUDA_VISIBLE_DEVICES names GPUs that this host has, each once."""

    why = (
        "a number that the host does not have hides it and all behind it, without an error; an "
        "empty value hides every GPU; one device for several processes is one GPU for all of them"
    )

    def look(self, machine: Machine) -> CheckResult:
        mask = machine.env.get("CUDA_VISIBLE_DEVICES")
        if mask is None:
            return pass_check("CUDA_VISIBLE_DEVICES is not set: all are visible")
        saw, fix = f"CUDA_VISIBLE_DEVICES={mask}", "unset CUDA_VISIBLE_DEVICES"
        names = [text.strip() for text in mask.split(",")]
        gpus = list_gpus(machine)
        if not gpus and not has_gpu_hardware(machine):
            return pass_check(f"{saw}; {_NO_GPU}")
        if mask.strip() in ("", "-1", "NoDevFiles"):
            return report_finding(f"{saw} hides every GPU", fix=fix)
        if len(set(names)) < len(names):
            return report_finding(f"{saw} names a GPU twice", fix=fix)
        known = {gpu.index for gpu in gpus}
        unknown = [name for name in names if name.lstrip("-").isdigit() and name not in known]
        if gpus and unknown:
            return report_finding(f"{saw}, and this host has {', '.join(sorted(known))}", fix=fix)
        if len(names) == 1 and machine.job_processes > 1 and not _is_one_each(machine):
            return report_finding(
                f"{saw} for {machine.job_processes} processes of this host",
                fix=f"{fix}; or one each: srun --gpus-per-task=1",
            )
        return pass_check(saw)


class GpuHealth(Check):
    """No GPU reports memory errors, a fallen link, or an Xid of the driver."""

    why = (
        "a GPU with an uncorrected error gives wrong numbers or fails in the middle of a run; one "
        "that has fallen off the bus hangs every collective"
    )

    def look(self, machine: Machine) -> CheckResult:
        gpus = list_gpus(machine)
        if not gpus and not has_gpu_hardware(machine):
            return skip_check(_NO_GPU)
        log = machine.ask(["dmesg"])
        found = re.findall(r"NVRM: Xid \((PCI:[0-9a-fA-F:.]+)\): (\d+)", log.out)
        fatal = [(bus, int(code)) for bus, code in found if int(code) in _FATAL_XIDS]
        if "fallen off the bus" in log.out and not fatal:
            fatal = [("a GPU", 79)]
        if fatal:
            bus, code = fatal[-1]
            return report_finding(
                f"dmesg: Xid {code} of {bus}: {_FATAL_XIDS[code]}",
                fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT; drain the host, nvidia-smi "
                "--gpu-reset or reboot; run without it: CUDA_VISIBLE_DEVICES",
            )
        for gpu in gpus:
            if count := gpu.number("ecc.errors.uncorrected.volatile.total"):
                return report_finding(
                    f"GPU {gpu.index} ({gpu.fields['name']}): {count} uncorrected ECC error(s)",
                    fix=f"nvidia-smi -i {gpu.index} --gpu-reset; if they return, replace the GPU",
                )
        rows = machine.ask(
            [
                "nvidia-smi",
                "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure",
                "--format=csv,noheader,nounits",
            ]
        )
        for line in rows.out.splitlines() if rows.code == 0 else ():
            uuid, pending, failure = [*line.split(","), "", ""][:3]
            if pending.strip() in ("1", "Yes") or failure.strip() in ("1", "Yes"):
                return report_finding(
                    f"{uuid.strip()}: memory rows wait to be replaced, or could not be",
                    fix="nvidia-smi --gpu-reset; if it says failure, replace the GPU",
                )
        note = "" if log.code == 0 else "; dmesg cannot be read (root reads it)"
        return pass_check(f"{len(gpus)} GPU(s) without uncorrected errors{note}")


class GpuBusy(Check):
    """Nobody else holds the memory of the GPUs, or has them to himself."""

    why = (
        "a process that an earlier job left behind keeps its memory: the new one runs out of it "
        "at a batch size that fitted yesterday"
    )

    def look(self, machine: Machine) -> CheckResult:
        gpus = list_gpus(machine)
        if not gpus:
            return skip_check(_NO_GPU)
        for gpu in gpus:
            mode = gpu.fields["compute_mode"]
            if mode == "Prohibited":
                return report_finding(
                    f"GPU {gpu.index}: compute mode {mode}",
                    fix=f"nvidia-smi -i {gpu.index} -c DEFAULT",
                )
            used, total = gpu.number("memory.used"), gpu.number("memory.total")
            if used > _HELD_MIB:
                return report_finding(
                    f"GPU {gpu.index}: {used} of {total} MiB are taken",
                    fix=f"nvidia-smi -i {gpu.index}; end the process that holds them",
                )
        return pass_check(f"{len(gpus)} GPU(s), free")


class GpuPeers(Check):
    """GPUs that NVLink joins are all joined by it, and read one another's memory."""

    why = (
        "a GPU whose link is down exchanges through the host, and all others wait for it; with "
        "ACS or an IOMMU in the way the first all-reduce hangs"
    )

    def look(self, machine: Machine) -> CheckResult:
        answer = machine.ask(["nvidia-smi", "topo", "-m"])
        text = re.sub(r"\x1b\[[0-9;]*m", "", answer.out)
        rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
        if answer.code != 0 or len(rows) < 2:
            return skip_check("fewer than two GPUs" if answer.code == 0 else _NO_GPU)
        links = {
            (one, other): rows[one][other + 1]
            for one in range(len(rows))
            for other in range(len(rows))
            if one != other and other + 1 < len(rows[one])
        }
        joined = [pair for pair, link in links.items() if link.startswith("NV")]
        apart = [pair for pair, link in links.items() if not link.startswith("NV")]
        kinds = ", ".join(sorted(set(links.values())))
        counted: dict[int, int] = dict.fromkeys(range(len(rows)), 0)
        for one, _ in joined:
            counted[one] += 1
        lonely = [one for one, count in counted.items() if count < max(counted.values()) / 2]
        if joined and apart and lonely:
            return report_finding(
                f"{len(rows)} GPUs joined by {kinds}; GPU {lonely[0]} has fewer links",
                fix=f"nvidia-smi nvlink -s -i {lonely[0]}; systemctl restart nvidia-fabricmanager; "
                "run without it: CUDA_VISIBLE_DEVICES",
            )
        peers = machine.ask(["nvidia-smi", "topo", "-p2p", "r"])
        cells = re.findall(r"\b(NS|CNS|TNS|GNS)\b", peers.out.partition("Legend")[0])
        if cells and joined:
            return report_finding(
                f"{len(rows)} GPUs with {kinds}, and {len(cells)} pairs without peer access",
                fix="nvidia-smi topo -p2p r; disable ACS and the IOMMU (intel_iommu=off), or "
                "export NCCL_P2P_DISABLE=1 and live with less speed",
            )
        return pass_check(f"{len(rows)} GPUs: {kinds}")


class NcclSwitches(Check):
    """No variable switches off NCCL's fast ways where the host has them."""

    why = (
        "NCCL_P2P_DISABLE=1 and the like are set to get over an error, and stay: every step is "
        "slower from then on, and nothing says so"
    )

    def look(self, machine: Machine) -> CheckResult:
        here = bool(list_gpus(machine))
        fabric = bool(machine.glob("sys/class/infiniband/*"))
        for name, what in _SWITCHES.items():
            value = machine.env.get(name, "").strip()
            is_off = value == "LOC" if name == "NCCL_NET_GDR_LEVEL" else value not in ("", "0")
            has_it = fabric if name in ("NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL") else here
            if is_off and has_it:
                return report_finding(f"{name}={value}: {what}", fix=f"unset {name}")
        return pass_check("none that matters here is set")


class InfiniBand(Check):
    """With several hosts: a port of InfiniBand is up, and this process may use it."""

    why = (
        "where no port is active, or a container lacks the device files, NCCL takes TCP without a "
        "word: ten times slower; a port that waits for its subnet manager never carries a packet"
    )

    def look(self, machine: Machine) -> CheckResult:
        ports = machine.glob("sys/class/infiniband/*/ports/*")
        if not ports:
            return skip_check("no InfiniBand here")
        seen, active, waiting = [], 0, 0
        for port in ports:
            base = str(port.relative_to(machine.root))
            state = (machine.read(f"{base}/state") or "?").strip()
            rate = (machine.read(f"{base}/rate") or "?").strip()
            seen.append(f"{port.parent.parent.name}:{port.name} {state}, {rate}")
            active += "ACTIVE" in state
            waiting += "INIT" in state or "ARMED" in state
        saw = "; ".join(seen)
        if machine.job_nodes < 2:
            return pass_check(saw)
        if not machine.glob("dev/infiniband/uverbs*"):
            return report_finding(
                f"{saw}; /dev/infiniband has no uverbs",
                fix="docker run --device /dev/infiniband --cap-add IPC_LOCK; Kubernetes: the "
                "resource of the RDMA device plugin",
            )
        if waiting or not active:
            return report_finding(saw, fix="ibstat; systemctl start opensm; check the cable")
        return pass_check(saw)


def _is_one_each(machine: Machine) -> bool:
    """The scheduler has given this process a GPU of its own."""
    names = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    return any(machine.env.get(name, "").strip() for name in names)
