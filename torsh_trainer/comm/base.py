"""The contract of a communicator: how the processes of one job exchange values."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torsh_trainer.comm.shared_memory import SharedMemory
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError

_FEW_BYTES = 2**20
_UNPINNED = ("cpu", "meta", "mps")

Reduction = Literal["sum", "mean", "min", "max", "product"]


@dataclass(frozen=True)
class CommOptions:
    """Knobs of the process group.

    ``backend`` is auto, nccl, gloo, mpi, or the name under which a plugin registered another one
    with torch.distributed; auto is nccl beside CUDA devices and gloo elsewhere. ``timeout_s``
    bounds every collective, ``startup_timeout_s`` the wait for all processes to arrive.
    ``network_interface`` names the interface for NCCL and gloo (``eth0``; several with commas).
    ``on_missing`` says what to do when the backend asked for is not available on every process:
    an error, or gloo on all of them.
    """

    backend: str = "auto"
    timeout_s: float = 1800.0
    startup_timeout_s: float = 300.0
    network_interface: str | None = None
    on_missing: Literal["error", "fallback"] = "error"

    def __post_init__(self) -> None:
        for name, default in (("timeout_s", 1800), ("startup_timeout_s", 300)):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"comm.{name}={getattr(self, name)} is not positive",
                    fix=f"the default is {default} seconds",
                )
        if self.on_missing not in ("error", "fallback"):
            raise ConfigError(
                f"comm.on_missing={self.on_missing} is unknown", fix="choose error or fallback"
            )


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Blocks until the operation's tensors hold its result."""


class Communicator(abc.ABC):
    """Collectives among the processes of a job, or of a part of it.

    Every method is collective: all members call it in the same order; ``send``, ``recv`` and
    ``abort`` are the exceptions. Tensors live on ``device`` (``to_device`` moves one there), of
    any strides. Ranks are those within this communicator. With ``async_op=True`` an operation
    returns a ``Work`` at once. ``mean`` is for floating-point tensors; of integers it raises
    ConfigError.
    """

    world: World
    """This process's place among the members."""

    device: torch.device
    """Where tensors must be, and where this process computes."""

    backend: str
    """nccl, gloo, mpi, a registered name, or ``local`` for one process without a group."""

    process_group: Any
    """The torch.distributed process group, or None where there is none."""

    @property
    def shared_memory(self) -> SharedMemory | None:
        """What members do by way of memory that all of them reach; None where there is none."""
        return None

    @property
    def size(self) -> int:
        """How many members there are."""
        return self.world.size

    @property
    def rank(self) -> int:
        """This process's number among the members, in [0, size)."""
        return self.world.rank

    @abc.abstractmethod
    def all_reduce(
        self, tensor: Tensor, *, op: Reduction = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduces ``tensor`` over all members, in place."""

    @abc.abstractmethod
    def reduce(self, tensor: Tensor, *, dst: int, op: Reduction = "sum") -> None:
        """As ``all_reduce``, but only ``dst`` holds the result; the others keep their tensor."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, *, src: int = 0, async_op: bool = False) -> Work | None:
        """Every member's ``tensor`` becomes that of ``src``, in place."""

    @abc.abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank; all of one shape and dtype."""

    @abc.abstractmethod
    def reduce_scatter(
        self, output: Tensor, tensors: Sequence[Tensor], *, op: Reduction = "sum"
    ) -> None:
        """``output`` becomes the reduction of everybody's ``tensors[rank]``."""

    @abc.abstractmethod
    def gather(self, tensor: Tensor, *, dst: int = 0) -> list[Tensor] | None:
        """The tensors of all members on ``dst``, None elsewhere."""

    @abc.abstractmethod
    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, *, src: int = 0) -> None:
        """``output`` becomes ``tensors[rank]`` of ``src``; the others pass None."""

    @abc.abstractmethod
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """``outputs[i]`` becomes member i's ``inputs[rank]``; sizes may differ, dtypes may not."""

    @abc.abstractmethod
    def send(self, tensor: Tensor, *, dst: int, async_op: bool = False) -> Work | None:
        """Sends to one member, which calls ``recv``; messages between two arrive in order."""

    @abc.abstractmethod
    def recv(self, tensor: Tensor, *, src: int, async_op: bool = False) -> Work | None:
        """Receives from one member into ``tensor``."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns once every member has called it."""

    @abc.abstractmethod
    def broadcast_object(self, value: Any, *, src: int = 0) -> Any:
        """``src``'s value on every member; the value must pickle."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every member's value, by rank; the values must pickle."""

    @abc.abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator among ``ranks``, numbered ascending; None on a process outside them.

        Collective over all members of this communicator, in the same order everywhere. Members
        may name different parts at once: [0, 1] on two of them and [2, 3] on the others.

        Raises:
            ConfigError: a rank is not a member, or this communicator is itself a part.
        """

    def duplicate(self) -> Communicator:
        """The same members once more, whose messages meet none of this communicator's.

        Collective; of a part, over all parts of the job at once, as a mesh has them.
        """
        same = self.split(range(self.size))
        assert same is not None
        return same

    def part_of(self, process_group: Any) -> Communicator:
        """The members of a torch.distributed process group that lies within this communicator.

        Collective over that group, whose maker keeps it.
        """
        raise AssertionError(f"{type(self).__name__} has no process groups")

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the process group; calling it twice does no harm."""

    def abort(self) -> None:
        """``close`` for a process that has failed: it waits for no other. Not collective."""
        self.close()

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the device on which this communicator works.

        A few numbers of the host get there by way of pinned memory: else the copy would wait for
        all that an accelerator was given to do.
        """
        if tensor.is_cpu and tensor.nbytes <= _FEW_BYTES and self.device.type not in _UNPINNED:
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def reduce_values(self, values: Sequence[float], *, op: Reduction = "sum") -> list[float]:
        """Python numbers reduced over all members in float64, returned to every one."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = self.to_device(torch.tensor(values, dtype=torch.float64))
        self.all_reduce(tensor, op=op)
        return [float(value) for value in tensor.tolist()]

    def begin_sum(self, value: float) -> Callable[[], float]:
        """Begins to sum a Python number over all members in float64; what it returns waits.

        Where a backend moves memory of the host, the device has no part in it.
        """
        if self.size == 1:
            return lambda: float(value)
        tensor = self.to_device(torch.tensor([value], dtype=torch.float64))
        work = self.all_reduce(tensor, async_op=True)
        assert work is not None

        def total() -> float:
            work.wait()
            return float(tensor.item())

        return total


def check_mean(tensor: Tensor, op: Reduction) -> None:
    """Refuses the mean of integers, which no backend could hold.

    Raises:
        ConfigError: ``op`` is mean and ``tensor`` is neither floating-point nor complex.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"the mean of {tensor.dtype} values is not of that dtype",
            fix="reduce with op='sum' and divide, or convert to a floating-point dtype first",
        )
