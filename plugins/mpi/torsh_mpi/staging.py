"""Tensors that MPI cannot take as they lie: not contiguous, or in the memory of a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from torsh_trainer.comm.failures import CollectiveArgumentError

log = logging.getLogger(__name__)

_LIBRARIES = ("libmpi.so", "libmpi_gnu", "libmpi_cray", "libmpi_intel", "libmpich.so")
"""What Open MPI, Intel's, Cray's and MPICH call theirs."""


def readable(tensor: Tensor) -> Tensor:
    """``tensor`` as MPI can read it: itself, or a copy."""
    return _reachable(tensor).contiguous()


def writable(tensor: Tensor) -> Tensor:
    """Where MPI may write what ``tensor`` is to become: itself, or memory of the same shape."""
    here = _reachable(tensor, copies=False)
    if here is tensor and tensor.is_contiguous():
        return tensor
    if here.device != tensor.device:
        return _host_memory(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=here.device)


def put_back(tensor: Tensor, memory: Tensor) -> None:
    """Copies a result from where MPI wrote it, if that is not the tensor itself."""
    if memory is not tensor:
        tensor.copy_(memory.view(tensor.shape))


def is_direct(tensor: Tensor) -> bool:
    """Whether a thread may hand this tensor to MPI without regard for a device's streams."""
    return tensor.is_cpu


def synchronise(tensor: Tensor) -> None:
    """Waits until what the device was asked to do before has been done."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _reachable(tensor: Tensor, *, copies: bool = True) -> Tensor:
    if tensor.layout is not torch.strided:
        raise CollectiveArgumentError(
            f"the mpi backend moves dense tensors, and this one is {tensor.layout}",
            fix="call to_dense() first",
        )
    if tensor.is_cpu or (tensor.is_cuda and cuda_aware()):
        return tensor.resolve_conj().resolve_neg()
    warn_of_staging(tensor.device.type)
    return _host_memory(tensor).copy_(tensor) if copies else tensor.new_empty(0, device="cpu")


def _host_memory(tensor: Tensor) -> Tensor:
    """Room for ``tensor`` on the host: pinned for CUDA, which moves it several times as fast."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@functools.cache
def warn_of_staging(device_type: str) -> None:
    """Says once that tensors of ``device_type`` are copied to the host and back."""
    log.warning(
        "this MPI library cannot reach %s memory: tensors are copied to the host and back; an MPI "
        "built for the device, or comm=nccl, is faster",
        device_type,
    )


@functools.cache
def cuda_aware() -> bool:
    """Whether the MPI library says that it takes pointers to CUDA memory.

    ``MPIX_Query_cuda_support`` is an extension of Open MPI that MPICH has taken over; a library
    without it is taken to reach the host's memory alone.
    """
    for path in loaded_libraries(Path("/proc/self/maps").read_text()):
        with contextlib.suppress(AttributeError, OSError):
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    return False


def loaded_libraries(maps: str) -> list[str]:
    """The MPI libraries that a process has mapped, by path; ``maps`` is its /proc/self/maps."""
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return [path for path in paths if Path(path).name.startswith(_LIBRARIES)]
