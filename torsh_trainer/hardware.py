"""Facts about the device that a process computes on."""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path

import torch

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.world import World

# Dense peak in FLOP/s from the vendors' data sheets (no sparsity): (bf16 and fp16, fp32 or TF32).
_PEAKS = {
    "H200": (989.4e12, 67.0e12),
    "H100 PCIe": (756.0e12, 51.0e12),
    "H100": (989.4e12, 67.0e12),
    "A100": (312.0e12, 19.5e12),
    "L40S": (362.0e12, 91.6e12),
    "L4": (121.0e12, 30.3e12),
    "A10": (125.0e12, 31.2e12),
    "V100": (125.0e12, 15.7e12),
    "T4": (65.0e12, 8.1e12),
}


def choose_device(kind: str, world: World) -> torch.device:
    """The device of this process: ``auto``, ``cpu`` or ``cuda`` (one GPU for each local rank).

    Raises:
        ResourceError: CUDA was asked for and there is none.
        ConfigError: more processes on this host than it has GPUs.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            f"trainer.device={kind}, but torch sees no CUDA device",
            fix="set trainer.device=auto, or install a CUDA build of torch",
        )
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"{world.local_size} processes on this host, and it has {count} GPUs",
            fix=f"set launcher.num_processes={count}, or trainer.device=cpu",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def peak_flops(device: torch.device, *, low_precision: bool) -> float | None:
    """FLOP/s that the device could reach at most; on a CPU, what a matrix product reaches here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (low, full) in _PEAKS.items():
            if key in name:
                return low if low_precision else full
        return None
    return _measured_matmul()


def _measured_matmul(size: int = 768, repeats: int = 4) -> float:
    a, b = torch.ones(size, size), torch.ones(size, size)
    torch.mm(a, b)
    best = min(_timed(a, b) for _ in range(repeats))
    return 2.0 * size**3 / best


def _timed(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - began


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once so far: on the GPU by torch, else resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory too, from before exec
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"))
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
