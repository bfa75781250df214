"""``deepspeed.comm``: torch.distributed under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torsh_trainer.dropin.deepspeed.comm import comm as comm
from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.dropin.names_deepspeed import COLLECTIVES
from torsh_trainer.dropin.zero import processes

_refuse = refuse_unknown(__name__)


def __getattr__(name: str) -> Any:
    """torch's function of that name, where DeepSpeed has it too."""
    if name in COLLECTIVES:
        return getattr(dist, name)
    return _refuse(name)


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Meets the other processes, over what ``drop-in --comm`` says; the backend that the script
    names is DeepSpeed's."""
    processes.meet()


def is_initialized() -> bool:
    """The processes have met."""
    return dist.is_initialized()


def is_available() -> bool:
    """They can."""
    return dist.is_available()


def get_rank(group: Any = None) -> int:
    """The number of this process."""
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many there are."""
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """The number of this process on its host."""
    return processes.local_rank()


def get_world_group() -> Any:
    """The group of all."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number among all of a member of ``group``."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers of the members."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def new_group(ranks: Any) -> Any:
    """A group of some."""
    return dist.new_group(ranks)


def destroy_process_group(group: Any = None) -> None:
    """Ends it."""
    if group is None:
        processes.leave()
        if not dist.is_initialized():
            return
    dist.destroy_process_group(group)


def log_summary(*args: Any, **kwargs: Any) -> None:
    """Communication is not logged here."""
