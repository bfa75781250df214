"""The members of a group of processes, and which groups this process is in."""

from __future__ import annotations

import atexit
import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.ending import destroy
from torsh_trainer.comm.failures import BackendNotInitialized
from torsh_trainer.comm.torch import TorchCommunicator
from torsh_trainer.environments.world import World

_INIT = "call init_process_group first, or start training with python -m torsh_trainer"
_OPTIONS = CommOptions()


class BackendType(str, enum.Enum):
    """What moves the values: NCCL between GPUs, gloo between CPUs, MPI on clusters."""

    NCCL = "nccl"
    GLOO = "gloo"
    MPI = "mpi"
    AUTO = "auto"
    Nccl = "nccl"  # noqa: PIE796 - the same, as the guides write it
    Gloo = "gloo"  # noqa: PIE796
    Mpi = "mpi"  # noqa: PIE796


class ReduceOp:
    """How values become one: torch's operations, by torch's names and by those of the guides."""

    SUM = Sum = dist.ReduceOp.SUM
    AVG = Mean = dist.ReduceOp.AVG
    PRODUCT = Product = dist.ReduceOp.PRODUCT
    MIN = Min = dist.ReduceOp.MIN
    MAX = Max = dist.ReduceOp.MAX
    BAND = Band = dist.ReduceOp.BAND
    BOR = Bor = dist.ReduceOp.BOR
    BXOR = Bxor = dist.ReduceOp.BXOR


class ProcessGroup:
    """Processes that exchange values; leaving a ``with`` block over it destroys the group.

    ``process_group`` is torch's own. Functions of torch.distributed take that one, functions of
    torsh_trainer.comm take either.
    """

    def __init__(
        self,
        process_group: Any,
        *,
        timeout_s: float = _OPTIONS.timeout_s,
        device: torch.device | None = None,
    ) -> None:
        self.process_group = process_group
        self.timeout_s = timeout_s
        self.is_member = process_group is not dist.GroupMember.NON_GROUP_MEMBER
        self._device = device
        self._backend = str(dist.get_backend(process_group)).lower() if self.is_member else ""
        self.ranks: list[int] = (
            dist.get_process_group_ranks(process_group) if self.is_member else []
        )
        """The members, by torch's numbers in the whole job."""

    def rank(self) -> int:
        """This process's number among the members; -1 on a process that is none of them."""
        return dist.get_rank(self.process_group) if self.is_member else -1

    def world_size(self) -> int:
        """How many members there are; -1 on a process that is none of them."""
        return len(self.ranks) if self.is_member else -1

    size = world_size

    def backend_type(self) -> BackendType | str:
        """What moves the values; the name itself for a backend that a plugin has registered."""
        known = {kind.value for kind in BackendType}
        return BackendType(self._backend) if self._backend in known else self._backend

    @property
    def backend(self) -> str:
        """The name of the backend, in lower case."""
        return self._backend

    @property
    def device(self) -> torch.device:
        """Where tensors for this group are made when nothing else says."""
        if self._device is None and self._backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return self._device or torch.device("cpu")

    def communicator(self) -> Communicator:
        """The same members behind the contract that strategies use; closing it leaves the group."""
        rank, size = self.rank(), self.world_size()
        world = World(
            rank=rank, size=size, local_rank=rank, local_size=size, source="process group"
        )
        return TorchCommunicator(
            world, self.device, self.process_group, timeout_s=self.timeout_s, owned=False
        )

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *error: object) -> None:
        destroy_process_group(self)

    def __repr__(self) -> str:
        return f"ProcessGroup({self._backend or 'not a member'}, ranks {self.ranks})"


Group = Any
"""A ``ProcessGroup``, torch's own, or None for all processes."""

_whole: ProcessGroup | None = None
_leaving: list[Callable[[], None]] = []


def on_leaving(forget: Callable[[], None]) -> None:
    """Has ``forget`` called when this process leaves all groups, and when it ends.

    A group that is still held when Python ends takes the process down with it: its threads run on.
    """
    _leaving.append(forget)


@atexit.register
def _forget_groups() -> None:
    global _whole  # noqa: PLW0603 - see above
    _whole = None
    for forget in _leaving:
        forget()


def resolve(group: Group = None) -> ProcessGroup:
    """``group`` as a ``ProcessGroup``; None is the group of all processes.

    Raises:
        BackendNotInitialized: there is no group yet, or none any more.
    """
    global _whole  # noqa: PLW0603 - kept, so that a call need not find out again
    if not dist.is_initialized():
        raise BackendNotInitialized("there is no process group", fix=_INIT)
    if isinstance(group, ProcessGroup):
        return group
    if group is not None and group is not dist.group.WORLD:
        return ProcessGroup(group)
    if _whole is None or _whole.process_group is not dist.group.WORLD:
        _whole = ProcessGroup(dist.group.WORLD)
    return _whole


def hold(group: ProcessGroup) -> None:
    """Makes ``group`` the one of all processes, of which there is one."""
    global _whole  # noqa: PLW0603 - see above
    _whole = group


def destroy_process_group(group: Group = None) -> None:
    """Leaves ``group``, or all of them; without a group it does nothing."""
    if not dist.is_initialized():
        _forget_groups()
        return
    chosen = resolve(group)
    if chosen.process_group is dist.group.WORLD:
        _forget_groups()
    if chosen.is_member:
        destroy(chosen.process_group)
