"""One part in a process of its own: ``python -m benchmarks.gpu.measure PART --device D FILE``.

FILE gets what was found as JSON, and ``rows`` of the table: what, measured, beside, remarks.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparing import Spread
from benchmarks.gpu import idle, saving, steps, throughput

Row = tuple[str, str, str, str]
PACKAGES = ("torch", "triton", "lightning", "accelerate", "transformers", "numpy")


def facts(device: str) -> dict[str, Any]:
    """The device, its driver, and versions of what takes part."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {package: version_of(package) for package in PACKAGES[1:]}
    found["cuda"] = torch.version.cuda
    if device == "cpu":
        return {"device": "a CPU", "driver": "none", "count": 0, "versions": found}
    known = torch.cuda.get_device_properties(0)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "device": known.name,
        "driver": driver(),
        "count": torch.cuda.device_count(),
        "memory_gib": known.total_memory / 2**30,
        "capability": f"{known.major}.{known.minor}",
        "versions": found,
    }


def version_of(package: str) -> str:
    """Its version, or that it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """The driver's version, as nvidia-smi has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not answer"
    return done.stdout.splitlines()[0].strip()


def rows_of_facts(found: dict[str, Any]) -> list[Row]:
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    count = f"{found['count']} GPU(s), driver {found['driver']}"
    return [("device", found["device"], count, versions)]


def rows_of_throughput(found: dict[str, Any]) -> list[Row]:
    mfu = "no peak known" if found["mfu"] is None else f"{found['mfu']:.1%}"
    how = "compiled" if found["compiled"] else "not compiled"
    return [
        (
            f"{found['contender']}, {found['model']}, bf16, {how}",
            f"{found['tokens_per_s']:,.0f} tokens/s, {found['tflops']:.4g} TFLOP/s, MFU {mfu}",
            # To the tenth of a percent: the aim is at most one.
            f"{Spread(**found['ratio']).ratio(3)} of a bare loop's step",
            f"{found['step_ms']:.1f} ms a step, {found['blocks']} x {found['steps_a_block']}",
        )
    ]


def rows_of_cost(found: dict[str, Any]) -> list[Row]:
    mine, bare = found["operators"]["engine"], found["operators"]["bare"]
    return [
        ("operators a step, eager", str(mine), f"{found['operators_ratio']:.3f} of {bare}", ""),
        (
            "host time a step, eager",
            f"{found['host_ms']:.2f} ms",
            f"{Spread(**found['host_ratio']).ratio()} of a bare loop's",
            f"{found['rounds']} rounds",
        ),
    ]


def rows_of_sharded(found: dict[str, Any]) -> list[Row]:
    return [
        (
            f"a step of strategy=fsdp, {found['ranks']} rank(s), a unit a block, eager",
            f"{found['step_ms']:.1f} ms",
            f"{Spread(**found['ratio']).ratio()} of FSDP2's",
            f"{found['rounds']} rounds",
        )
    ]


def rows_of_saving(found: dict[str, Any]) -> list[Row]:
    rows = []
    for name, seconds in found["saves"].items():
        beside = found["ratios"].get(name)
        remark = f"{found['gigabytes']:.2f} GB, {found['rounds']} rounds"
        words = "" if beside is None else f"{Spread(**beside).ratio()} of torch.save"
        rows.append((f"a save holds up the loop, {name}", f"{seconds:.2f} s", words, remark))
    rows += [(f"a load, {name}", f"{s:.2f} s", "", "") for name, s in found["loads"].items()]
    return rows


def rows_of_idle(found: dict[str, Any]) -> list[Row]:
    what = "the device has nothing to do, of the time"
    return [(what, f"{found['idle']:.1%}", "", f"{found['steps']} steps, by torch's profiler")]


PARTS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[dict[str, Any]], list[Row]]]] = {
    "facts": (facts, rows_of_facts),
    "throughput": (partial(throughput.measure, "ToRSh Trainer"), rows_of_throughput),
    "lightning": (partial(throughput.measure, "Lightning Trainer"), rows_of_throughput),
    "accelerate": (partial(throughput.measure, "Accelerate"), rows_of_throughput),
    "cost": (steps.measure_cost, rows_of_cost),
    "sharded": (steps.measure_sharded, rows_of_sharded),
    "saving": (saving.measure, rows_of_saving),
    "idle": (idle.measure, rows_of_idle),
}


def main() -> None:
    """Measures one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.measure", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    measured, rows_of = PARTS[options.part]
    found = measured(options.device)
    text = json.dumps({"found": found, "rows": rows_of(found)})
    options.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
