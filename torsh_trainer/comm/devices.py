"""Which device a process computes on, and why there is none."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDES_ALL = ("", "-1", "NoDevFiles")
_LEAST_BYTES = 128 * 2**20
"""Below this not even the libraries of a run find room."""
_SMI = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name"
_SMI_TIMEOUT_S = 20

_STARTED_BY = {
    "slurm": "give Slurm --ntasks-per-node={count}, or --gpus-per-task=1 and a GPU for every task",
    "torchrun": "start torchrun with --nproc-per-node={count}",
    "local": "set launcher.num_processes={count}",
    "openmpi": "start mpirun with --map-by ppr:{count}:node",
    "pmi": "start mpiexec with -ppn {count}",
    "horovod": "give horovodrun {count} slots on each host (-H host:{count})",
    "lsf": "start jsrun with {count} tasks on each host",
    "pbs": "select mpiprocs={count}",
}
"""How many processes a host gets, as whatever started them is told."""

_CAUSES = (
    (
        "not compiled with CUDA",
        "this torch ({torch}) was built without CUDA",
        "install a CUDA build of torch",
    ),
    (
        "no NVIDIA driver",
        "no NVIDIA driver is loaded on this host",
        "install one (nvidia-smi has to answer), or ask the scheduler for a host with GPUs",
    ),
    (
        "Error 802",
        "the GPUs of this host are not ready (error 802)",
        "start the service nvidia-fabricmanager, which hosts with NVSwitch need",
    ),
    (
        "Error 803",
        "the NVIDIA driver and its library on this host are of two versions (error 803)",
        "restart the host after the driver's update, or in a container mount the host's library",
    ),
    (
        "Error 804",
        "the CUDA compatibility library here does not serve this GPU (error 804)",
        "take its directory (cuda/compat) out of LD_LIBRARY_PATH, or update the driver",
    ),
)
"""Words of torch, what they mean, and what helps."""


def choose_device(kind: str, world: World) -> torch.device:
    """The device of this process: ``auto``, ``cpu`` or ``cuda`` (one GPU for each local rank).

    Where a process sees a single GPU and the host has several processes, each is taken to see one
    of its own (``srun --gpus-per-task=1``); when they meet, it is compared whether that is so.

    Raises:
        ResourceError: CUDA was asked for and there is none.
        ConfigError: more processes on this host than this one sees GPUs.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sentence, fix = explain_missing(os.environ)
        raise ResourceError(
            f"trainer.device={kind}: {sentence}", fix=f"{fix}, or set trainer.device=auto"
        )
    device = torch.device("cuda", choose_index(world))
    torch.cuda.set_device(device)
    return device


def choose_index(world: World) -> int:
    """The number of this process's GPU among those that it sees.

    Raises:
        ConfigError: it sees several, and there are more processes on this host.
    """
    count, processes = torch.cuda.device_count(), max(world.local_size, world.local_rank + 1)
    if count == 1:
        return 0
    if processes > count:
        raise ConfigError(
            f"{processes} processes on this host, and each sees {count} GPUs"
            f"{_mask_words(os.environ)}",
            fix=f"{say_processes(world, count)}, or set trainer.device=cpu",
        )
    return world.local_rank


def say_processes(world: World, count: int) -> str:
    """How to have ``count`` processes on each host, in words of whatever started this one."""
    return _STARTED_BY.get(world.source, "start {count} on each host").format(count=count)


def identify(device: torch.device) -> str | None:
    """What tells a GPU, or a part of one (MIG), from all others; None on a CPU, or if unknown."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    named = [name.strip() for name in os.environ.get(_MASKS[0], "").split(",")]
    if index < len(named) and named[index].startswith("MIG-"):
        return named[index]  # parts of one GPU may have its UUID
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    places = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in places else ":".join(map(str, (socket.gethostname(), *places)))


def check_apart(gpus: Mapping[int, str | None], world: World, *, shares: bool) -> None:
    """Refuses two processes on one GPU; ``gpus`` by rank, as ``identify`` tells them.

    With ``shares`` that is on purpose, and only said in the log.

    Raises:
        ConfigError: two processes compute on one GPU.
    """
    on: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        if gpu is not None:
            on.setdefault(gpu, []).append(rank)
    gpu, ranks = max(on.items(), key=lambda item: len(item[1]), default=("", []))
    if len(ranks) < 2:
        return
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    sentence = f"ranks {names} compute on one GPU, {gpu}"
    if shares:
        log.warning("%s, over gloo, as comm.backend asks for", sentence)
        return
    raise ConfigError(
        sentence,
        fix=f"{say_processes(world, max(1, len(on) // world.nodes))}, or share it on purpose with "
        "comm.backend=gloo",
        ranks=ranks,
    )


def explain_missing(env: Mapping[str, str]) -> tuple[str, str]:
    """Why torch sees no CUDA device in a process with the variables ``env``, and what helps."""
    words = "No CUDA GPUs are available"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        words = str(error)
    for said, sentence, fix in _CAUSES:
        if said in words:
            return sentence.format(torch=torch.__version__), fix
    if found := re.search(r"driver on your system is too old \(found version (\d+)\)", words):
        has = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
        sentence = f"the NVIDIA driver serves CUDA to {has}: too old for torch {torch.__version__}"
        return sentence, f"update it, or install a torch built for CUDA {has} or older"
    if "No CUDA GPUs" not in words:
        return (
            f"CUDA does not start: {(words.strip().splitlines() or ['no reason given'])[0]}",
            "see nvidia-smi",
        )
    masks = [(name, env[name].strip()) for name in _MASKS if name in env]
    for name, mask in masks:
        if mask in _HIDES_ALL:
            return f"{name}={mask} hides every GPU", f"unset {name}"
    if masks:
        name, mask = masks[0]
        return (
            f"{name}={mask} names no GPU of this host",
            "choose among those that nvidia-smi -L lists",
        )
    return (
        "this host shows torch no GPU",
        "ask for one (Slurm: --gpus-per-task=1, docker: --gpus all)",
    )


def warn_of_unused(kind: str, device: torch.device, env: Mapping[str, str]) -> None:
    """Says why ``trainer.device=auto`` came down to the CPU on a host that has a GPU."""
    if kind != "auto" or device.type != "cpu" or torch.cuda.is_available():
        return
    hidden = any(env.get(name, "x").strip() in _HIDES_ALL for name in _MASKS)
    if not hidden and _has_device_files():
        sentence, fix = explain_missing(env)
        log.warning("this host has a GPU, and the run uses the CPU: %s; %s", sentence, fix)


def check_room(device: torch.device) -> None:
    """Refuses a GPU that others have filled, or have for themselves, and names them.

    Raises:
        ResourceError: nothing can be allocated there.
    """
    if device.type != "cuda":
        return
    try:
        torch.empty(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        words = str(error)
        if "busy or unavailable" in words:
            raise _device_error(
                device, "is another process's alone (its compute mode is exclusive)"
            ) from error
        if "out of memory" not in words:
            raise
        raise _device_error(device, "is full") from error
    if free < _LEAST_BYTES:
        raise _device_error(
            device, f"is full ({free / 1e6:.0f} MB of {total / 1e9:.1f} GB are free)"
        )
    if free < total / 2:
        held, who = f"{(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB", _say_holders(device)
        log.warning("%s of %s are taken before the run begins%s", held, device, who)


def holders(device: torch.device) -> list[tuple[int, int | None, str]]:
    """Other processes on a GPU, the largest first: (pid, bytes or None, name), as nvidia-smi says.

    Empty where it does not say: in a container, or without that program.
    """
    command = ["nvidia-smi", _SMI, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
        )
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    except (OSError, subprocess.SubprocessError, RuntimeError):
        return []
    rows = [[field.strip() for field in line.split(",", 3)] for line in answer.stdout.splitlines()]
    found = [
        (int(row[1]), int(row[2]) * 2**20 if row[2].isdigit() else None, row[3])
        for row in rows
        if len(row) == 4 and uuid in row[0] and row[1].isdigit() and int(row[1]) != os.getpid()
    ]
    return sorted(found, key=lambda holder: holder[1] or 0, reverse=True)


def _device_error(device: torch.device, why: str) -> ResourceError:
    return ResourceError(
        f"{device} {why}{_say_holders(device)}",
        fix="end that process, choose another GPU with CUDA_VISIBLE_DEVICES, or set "
        "trainer.device=cpu",
    )


def _say_holders(device: torch.device) -> str:
    told: Sequence[str] = [
        f"pid {pid} ({Path(name).name}{'' if held is None else f', {held / 1e9:.1f} GB'})"
        for pid, held, name in holders(device)[:4]
    ]
    return f": {', '.join(told)}" if told else ""


def _mask_words(env: Mapping[str, str]) -> str:
    name = next((name for name in _MASKS if name in env), None)
    return f" ({name}={env[name]})" if name else ""


def _has_device_files() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
