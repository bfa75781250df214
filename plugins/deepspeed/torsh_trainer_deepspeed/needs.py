"""What files take of disk and memory, held against what there is before anything is made."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.strategies.state import materialise_slots
from torsh_trainer_deepspeed import library, operators
from torsh_trainer_deepspeed.config import DeepSpeedConfig
from torsh_trainer_deepspeed.engine import without_state
from torsh_trainer_deepspeed.files import SwapFolder, folder_of
from torsh_trainer_deepspeed.recipe import OPTIMIZER


def prepare_swaps(
    swaps: Sequence[str],
    config: DeepSpeedConfig,
    zero: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    comm: Communicator,
) -> list[SwapFolder]:
    """Folders for the blocks ``swaps`` of ``zero``, the run's zero_optimization, which then has
    them as paths, and numbers of buffers that suffice.

    Raises:
        ConfigError: the place is not there, or there are too few buffers.
        ResourceError: disk or memory do not suffice, or DeepSpeed's operators cannot be compiled.
    """
    if not swaps:
        return []
    world = comm.world
    groups = [group["params"] for group in optimizer.param_groups]
    parts = partitions(groups, world.size, most=int(zero.get("sub_group_size", 1e9)))
    on_disk: dict[str, int] = {}
    locked = 0
    for block in swaps:
        place = str(zero[block]["nvme_path"])
        if block == OPTIMIZER:
            slots = slots_of(optimizer)
            buffers = _buffers(config, zero[block], slots)
            # Masters, gradients and state, in fp32.
            taken, pinned = 4 * (2 + slots) * sum(parts), 4 * buffers * max(parts)
        else:
            sizes = [-(-p.numel() // world.size) for p in model.parameters()]
            size = int(zero[block].setdefault("buffer_size", max(sizes)))
            count = int(zero[block].get("buffer_count", 5))
            taken, pinned = 2 * sum(sizes), 2 * (count * size + max(parts))
        on_disk[place] = on_disk.get(place, 0) + taken
        locked += pinned
    for place, taken in on_disk.items():
        check_space(place, taken * world.local_size, shutil.disk_usage(folder_of(place)).free)
    library.check_buffers(
        locked, world, library.lockable_bytes(), available=library.available_bytes()
    )
    operators.compile_operators(operators.FILES, comm)
    folders = {place: SwapFolder(place, world.rank) for place in on_disk}
    for block in swaps:
        zero[block]["nvme_path"] = str(folders[str(zero[block]["nvme_path"])].path)
    return list(folders.values())


def check_fp16(values: Mapping[str, Any], place: str = "") -> None:
    """Refuses fp16 where DeepSpeed would, before the minutes of compiling that come before.

    ``place`` is the file's, where one says it.

    Raises:
        ConfigError: the device has no fp16 of DeepSpeed's.
    """
    # Imported here: see ``library.load``.
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if values.get("fp16", {}).get("enabled") and not accelerator.is_fp16_supported():
        raise ConfigError(
            f"DeepSpeed refuses the configuration: {place + ': ' if place else ''}Type fp16 is not "
            f"supported on your device, {accelerator.device_name()}",
            fix="run on a GPU, or set bf16 instead, which a CPU has as well",
        )


def partitions(groups: Iterable[Iterable[Tensor]], ranks: int, *, most: int) -> list[int]:
    """Elements of a rank's partitions: parameters of a group, until they are ``most`` or more."""
    found = []
    for group in groups:
        elements = 0
        for parameter in group:
            if parameter.requires_grad:
                elements += -(-parameter.numel() // ranks)
            if elements >= most:
                found.append(elements)
                elements = 0
        found.append(elements)
    return found


def slots_of(optimizer: Optimizer) -> int:
    """Tensors, each the size of a parameter, that the optimizer keeps for one."""
    counts = []
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(2))
        twin = without_state(optimizer)
        twin.param_groups = [{**group, "params": [probe]}]
        materialise_slots(twin)
        slots = twin.state.get(probe, {}).values()
        counts.append(sum(isinstance(one, Tensor) and one.shape == probe.shape for one in slots))
    return max(counts)


def _buffers(config: DeepSpeedConfig, block: dict[str, Any], slots: int) -> int:
    """How many of DeepSpeed's buffers the optimizer takes: as many as are said, or needed."""
    # A partition, its gradient and its state; those of the next while they are read ahead, and of
    # the one before while they are written.
    at_once = 1 + bool(block.get("pipeline_read")) + bool(block.get("pipeline_write"))
    needed = (2 + slots) * at_once
    said = int(block.setdefault("buffer_count", needed))
    if said < needed:
        raise ConfigError(
            f"{config.place('zero_optimization', OPTIMIZER, 'buffer_count')} is {said}, and the "
            f"optimizer takes {needed}: {at_once} x (a partition, its gradient, {slots} of state)",
            fix=f"set it to {needed}, or leave it out",
        )
    return said


def check_space(place: str, needed: int, free: int) -> None:
    """Holds what will be written against what is free, before anything is.

    Raises:
        ResourceError: it is more, and a write would fail in the middle of the run.
    """
    if needed > free:
        raise ResourceError(
            f"nvme_path={place} would hold {needed / 2**30:.1f} GiB of this run, and "
            f"{free / 2**30:.1f} GiB are free there",
            fix="free some space, name another disk, or run on more machines",
        )
