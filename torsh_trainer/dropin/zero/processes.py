"""The processes of a DeepSpeed script under drop-in: met once, left when the process ends."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

import torch
import torch.distributed as dist

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.dropin.session import device_of, session
from torsh_trainer.errors import ConfigError

_met: list[Communicator] = []


def meet() -> Communicator:
    """The processes of the job; a process group that the script has made is used as it is.

    Raises:
        ConfigError: this is not a process that drop-in has started.
        ResourceError: the others did not come, or the backend is not available.
    """
    if _met and dist.is_initialized():
        return _met[0]
    place = session.place
    if place is None:
        raise ConfigError(
            "deepspeed.init_distributed() in a process that drop-in has not started",
            fix="call it in the script itself, not in a process that the script starts",
        )
    _met[:] = [create(place.world, place.comm, device_of(place))]
    atexit.register(leave)
    return _met[0]


def leave() -> None:
    """Leaves the others; without effect before they have met."""
    atexit.unregister(leave)
    while _met:
        with contextlib.suppress(RuntimeError, ValueError):
            _met.pop().close()


def find_device() -> torch.device:
    """Where this process computes."""
    if _met:
        return _met[0].device
    place = session.place
    return torch.device("cpu") if place is None else device_of(place)


def local_rank() -> int:
    """The number of this process on its host."""
    return 0 if session.place is None else session.place.world.local_rank


def cuts_models(mpu: Any) -> bool:
    """Whether ``mpu``, a script's functions of who computes what, has processes share a model.

    Without any of the functions that say how many do, nobody knows that they do not.
    """
    if mpu is None:
        return False
    sizes = [getattr(mpu, name)() for name in _SHARING if hasattr(mpu, name)]
    return not sizes or max(sizes) > 1


_SHARING = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
)
"""Names of functions of an ``mpu``, Megatron's and DeepSpeed's, that give numbers of processes."""
