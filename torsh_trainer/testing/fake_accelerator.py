"""A fake accelerator: the real engines take steps on ``gpu:0`` on a machine that has no GPU.

Tensors on the device have shapes and dtypes, and no values (torch's FakeTensorMode); those on the
host are real. The process is rank 0 of as many as asked for, whose collectives do nothing (torch's
``fake`` process group). So nothing is computed, and everything that an engine asks of a device
happens, and is counted.

What it does not show: results, speed, streams that race, kernels of CUDA, and DDP's reducer in C++
with ``overlap=true``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.comm.torch import TorchCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import Clip, Engine, MicroBatch
from torsh_trainer.tasks.base import Task
from torsh_trainer.testing.counting import CountingMode, Counts, watch
from torsh_trainer.testing.fake_device import DEVICE_TYPE, register, synchronise
from torsh_trainer.testing.ranks import RankPool

_Result = TypeVar("_Result")


class FakeAccelerator:
    """What ``fake_accelerator`` gives: the device, a communicator of rank 0, and a counter."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.device = comm.device

    @contextlib.contextmanager
    def count(self) -> Iterator[Counts]:
        """Counts what happens within the block."""
        before, watch.counts = watch.counts, Counts()
        try:
            yield watch.counts
        finally:
            watch.counts = before


@contextlib.contextmanager
def fake_accelerator(
    world_size: int = 1, *, backend: str = "nccl", process_group: bool = False
) -> Iterator[FakeAccelerator]:
    """Rank 0 of ``world_size`` processes, each with a fake device, within the block.

    ``backend`` is the name that its process group goes by; one process has a group only with
    ``process_group``, which some strategies need. At the end of the block modes, group and patches
    are gone; but torch cannot forget a device (``torch.accelerator`` finds one from then
    on), so a test calls this by way of ``run_on_fake_accelerator``, in a process of its own.
    """
    register()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    world = World(rank=0, size=world_size, local_rank=0, local_size=world_size, source="fake")
    with contextlib.ExitStack() as stack:
        comm = _join(world, backend, stack, grouped=process_group or world_size > 1)
        stack.enter_context(patch.object(torch.utils, "swap_tensors", _swapping(mode)))
        stack.enter_context(_settings_of_torch())
        stack.enter_context(patch.object(torch.accelerator, "synchronize", synchronise))
        stack.enter_context(patch.object(FakeTensor, "tolist", _tolist))
        stack.enter_context(mode)
        stack.enter_context(CountingMode(DEVICE_TYPE))
        yield FakeAccelerator(comm)


def count_step(
    engine: Engine,
    task: Task,
    micro_batches: Sequence[MicroBatch],
    *,
    clip: Clip = Clip(),
    total_weight: float | None = None,
    warm: int = 2,
) -> Counts:
    """What one step of ``engine`` costs, as the loop takes it: counts of the step after ``warm``.

    The first steps build what later ones keep (the optimizer's state), so they are not counted.
    Within ``fake_accelerator`` only.
    """
    weight = sum(m.weight for m in micro_batches) * engine_size(engine)
    for _ in range(warm):
        _step(engine, task, micro_batches, clip, total_weight or weight)
    before, watch.counts = watch.counts, Counts()
    try:
        _step(engine, task, micro_batches, clip, total_weight or weight)
        return watch.counts
    finally:
        watch.counts = before


def engine_size(engine: Engine) -> int:
    """How many processes an engine of ours sees."""
    comm: Communicator | None = getattr(engine, "comm", None)
    return 1 if comm is None else comm.world.size


def run_on_fake_accelerator(
    case: Callable[..., _Result],
    *args: Any,
    world_size: int = 1,
    process_group: bool = False,
    timeout_s: float = 480.0,
) -> _Result:
    """``case(accelerator, *args)`` in another process, which all tests share; its answer.

    ``case``, ``args`` and the answer must pickle (cloudpickle: closures do); an answer holds no
    fake tensors.

    Raises:
        RankFailure: the case raised; the text has its traceback.
    """

    def run(world: World, *given: Any) -> _Result:
        with fake_accelerator(world_size, process_group=process_group) as accelerator:
            return case(accelerator, *given)

    answer: _Result = _process().run(run, *args, timeout_s=timeout_s)[0]
    return answer


# -- parts --------------------------------------------------------------------------------------


@functools.cache
def _process() -> RankPool:
    pool = RankPool(1, join=False)
    atexit.register(pool.close)
    return pool


def _step(
    engine: Engine,
    task: Task,
    micro_batches: Sequence[MicroBatch],
    clip: Clip,
    total_weight: float,
) -> None:
    engine.zero_grad()
    engine.forward_backward(micro_batches, total_weight, task)
    engine.step(clip)


def _join(
    world: World, backend: str, stack: contextlib.ExitStack, *, grouped: bool
) -> Communicator:
    device = torch.device(DEVICE_TYPE, 0)
    if not grouped:
        return LocalCommunicator(device, world=world)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.size)
    stack.callback(dist.destroy_process_group)
    replaced = {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": _broadcast_object_list,
        "barrier": _barrier,
        "get_backend": lambda group=None: backend,
    }
    for name, function in replaced.items():
        stack.enter_context(patch.object(dist, name, function))
    return TorchCommunicator(world, device, dist.group.WORLD, timeout_s=60.0, owned=False)


# Objects travel as tensors, which hold nothing here: what rank 0 hands in, all ranks hand in.


def _all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
    watch.communicate("all_gather_object", 0)
    objects[:] = [value] * len(objects)


def _broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
    watch.communicate("broadcast_object", 0)


def _barrier(*_: Any, **__: Any) -> None:
    watch.communicate("barrier", 0)


def _tolist(tensor: Tensor) -> Any:
    """All numbers by one copy, as torch reads a device; a fake tensor reads each by itself."""
    return tensor.to("cpu").tolist()


def _swapping(mode: FakeTensorMode) -> Callable[[Tensor, Tensor], None]:
    """``swap_tensors``, by which a module exchanges fake parameters: no memo may refer to them."""
    swap = torch.utils.swap_tensors

    def swap_fakes(one: Tensor, other: Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    return swap_fakes


@contextlib.contextmanager
def _settings_of_torch() -> Iterator[None]:
    """A module that moves keeps its parameters' identity, and ``torch.tensor(..., device=...)``
    makes its tensor on the host before it copies, both as with a real device."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    lifts = torch._C._only_lift_cpu_tensors()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(lifts)
