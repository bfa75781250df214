"""What this machine offers, counted without importing torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from torsh_trainer.environments.reading import is_set

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DEVICE_FILES = ("nvidia[0-9]*", "dri/renderD*", "accel/accel[0-9]*", "davinci[0-9]*")
_COUNT = "import torch; print(torch.accelerator.device_count())"
_COUNT_TIMEOUT_S = 120


def cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _quota(Path("/sys/fs/cgroup/cpu.max"))))


def accelerators(env: Mapping[str, str]) -> int:
    """Accelerators that torch would see in a process with the variables ``env``; 0 without any.

    A machine without device files answers at once. Elsewhere a short-lived process asks torch,
    which alone knows whether it was built for these devices and what the masks leave.
    """
    if any(env.get(name, "x").strip() in ("", "-1") for name in _VISIBLE):
        return 0
    found = max(len(list(Path("/dev").glob(pattern))) for pattern in _DEVICE_FILES)
    masked = [len(env[name].split(",")) for name in _VISIBLE if is_set(env, name)]
    if min([found, *masked]) < 2:
        return min(found, 1)
    answer = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=_COUNT_TIMEOUT_S,
        check=False,
    )
    return int(answer.stdout) if answer.returncode == 0 else 0


def _quota(file: Path) -> int:
    """Whole cores of a cgroup's ``cpu.max`` (``"200000 100000"`` is 2), or very many."""
    try:
        quota, _, period = file.read_text().partition(" ")
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return sys.maxsize
