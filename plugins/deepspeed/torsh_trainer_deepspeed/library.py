"""The deepspeed package, loaded when the first engine is made: where, for what, and how told."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torsh_trainer.comm.base import Communicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.utils.importing import collector_at_rest
from torsh_trainer_deepspeed import operators

MISSING = "pip install torsh-trainer-deepspeed"

_REPLACED = ("linear", "embedding")
"""What stage 3 replaces in torch.nn.functional: the second when weights are quantised."""


def load(comm: Communicator) -> Any:
    """The package, on the accelerator that ``comm`` is on.

    DeepSpeed chooses its accelerator once, when it is imported, and by what it finds installed. A
    run without an accelerator says so beforehand: ``DS_ACCELERATOR=cpu``. It also looks up its
    device in LOCAL_RANK, now and later, which a launcher of ours does not set.

    Raises:
        ResourceError: it is not installed.
        ConfigError: it was imported before, for another kind of device.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(operators.extensions_dir()))
    device = comm.device  # its number is not the local rank where a process sees one GPU alone
    os.environ["LOCAL_RANK"] = str(comm.world.local_rank if device.index is None else device.index)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        # Imported here: it takes seconds, and chooses its accelerator.
        with collector_at_rest():
            import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise ResourceError(f"DeepSpeed cannot be imported: {error}", fix=MISSING) from error
    # torch's names for collectives have changed, and DeepSpeed uses the old ones.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    operators.find_ninja()
    _leave_former_group()
    chosen = get_accelerator().device_name()
    if chosen != device.type:
        raise ConfigError(
            f"DeepSpeed drives {chosen} in this process, and the run is on {device.type}",
            fix=f"set DS_ACCELERATOR={device.type}, or trainer.device={chosen}",
        )
    return deepspeed


def _leave_former_group() -> None:
    """Makes DeepSpeed forget the process group of an earlier run in this process, if it is gone."""
    # Imported here: see ``load``.
    from deepspeed.comm import comm as theirs
    from deepspeed.utils import groups

    if theirs.cdb is not None and groups._WORLD_GROUP is not None:
        known = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
        if groups._WORLD_GROUP not in known:
            groups._release_process_group_references(group=None)
            theirs.cdb = None


def available_bytes() -> int | None:
    """Host memory that this machine could give now; None where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def check_memory(elements: int, world: World, available: int | None) -> None:
    """Holds what an offloaded optimizer takes against what there is, before anything is made.

    Raises:
        ResourceError: it is more, and the kernel would end the run in the middle.
    """
    # fp32 masters, gradients and two moments, spread over all ranks.
    needed = 16 * elements * world.local_size // world.size
    if available is not None and needed > available:
        raise ResourceError(
            f"offloading the optimizer of {elements:,} parameters takes {needed / 2**30:.1f} GiB "
            f"of memory here, and {available / 2**30:.1f} GiB are available",
            fix="run on more machines, or leave offload_optimizer out",
        )


def lockable_bytes() -> int | None:
    """Memory that this process may keep from being paged out; None where that has no bound."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        held = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text("ascii"))
    except OSError:
        held = None
    unbound = held is not None and bool(int(held[1], 16) >> _CAP_IPC_LOCK & 1)
    return None if unbound or limit == resource.RLIM_INFINITY else limit


_CAP_IPC_LOCK = 14


def check_buffers(
    needed: int, world: World, lockable: int | None, *, available: int | None
) -> None:
    """Holds what a rank's buffers for files lock of memory against what there is.

    Raises:
        ResourceError: it is more; DeepSpeed would go on with buffers that are not there.
    """
    fix = "make the buffers smaller: strategy.sub_group_size"
    takes = f"DeepSpeed's buffers for files lock {needed / 2**20:.0f} MiB of memory a process"
    if lockable is not None and needed > lockable:
        raise ResourceError(
            f"{takes}, and this one may lock {lockable / 2**20:.0f} MiB",
            fix=f"raise that bound (ulimit -l), or {fix}",
        )
    if available is not None and needed * world.local_size > available:
        raise ResourceError(
            f"{takes}, and {available / 2**20:.0f} MiB are available to {world.local_size}", fix=fix
        )


@contextlib.contextmanager
def putting_back() -> Iterator[dict[str, Any]]:
    """Undoes, at its end, what making an engine replaces in the whole process; gives it, by name.

    DeepSpeed never does. Its ``linear`` rounds once more than torch's in bf16 and fp16, for every
    model that this process trains from then on.
    """
    before = {name: getattr(functional, name) for name in _REPLACED}
    theirs: dict[str, Any] = {}
    try:
        yield theirs
    finally:
        for name, function in before.items():
            if getattr(functional, name) is not function:
                theirs[name] = getattr(functional, name)
                setattr(functional, name, function)


class Replacement:
    """Functions of ``torch.nn.functional`` that are DeepSpeed's while a model of it computes."""

    def __init__(self, theirs: Mapping[str, Any]) -> None:
        self._theirs = theirs
        self._before: list[dict[str, Any]] = []

    def within(self, model: nn.Module) -> None:
        """Puts them in force during every forward of ``model``."""
        if self._theirs:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end, always_call=True)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Within backward, which computes forward again where activations were not kept."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, *_: Any) -> None:
        self._before.append({name: getattr(functional, name) for name in self._theirs})
        for name, function in self._theirs.items():
            setattr(functional, name, function)

    def _end(self, *_: Any) -> None:
        if self._before:  # a hook before ours may have failed
            for name, function in self._before.pop().items():
                setattr(functional, name, function)
