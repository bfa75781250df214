"""Cumulative sums of weights, which the ranks of a host hold together.

They lie in memory without a name in any file system, which the other ranks reach through the
process that made it: nothing is left over when all of them are killed.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torsh_trainer.comm.base import Communicator

Sums = npt.NDArray[np.float64]

_BOOT = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


def cumulative_sums(weights: Tensor) -> Sums:
    """The sums of ``weights``, shape (size,), up to and with each.

    They are added up one after another, so that they are the same numbers everywhere, whatever the
    number of threads.
    """
    return np.cumsum(weights.double().numpy())


def common_sums(weights: Tensor, comm: Communicator) -> Sums:
    """``cumulative_sums`` of weights that are the same on every rank: collective.

    The first rank of each host adds them up and the others read them there; a rank that does not
    reach them, in a container of its own say, or on another system than Linux, has its own.
    """
    rank = comm.rank
    hosts = comm.all_gather_object(_host()) if comm.size > 1 else [""]
    here = [other for other, host in enumerate(hosts) if host and host == hosts[rank]]
    sums, descriptor, told = None, -1, None
    if len(here) > 1 and rank == here[0]:
        try:
            descriptor = os.memfd_create("torsh-weights")
            sums = _sum_into(descriptor, weights)
            told = (os.getpid(), descriptor, _identity(descriptor))
        except OSError as error:
            log.info("no memory to share sums of weights in: %s", error)
    if comm.size > 1:
        everybody = comm.all_gather_object(told)
        if len(here) > 1 and rank != here[0]:
            sums = _open_shared(everybody[here[0]])
        comm.barrier()  # till then the descriptor is there to be opened
    if descriptor >= 0:
        os.close(descriptor)
    return cumulative_sums(weights) if sums is None else sums


def _host() -> str:
    """The host that runs this process; nothing where there is no memory to share."""
    return _BOOT.read_text() if hasattr(os, "memfd_create") and _BOOT.exists() else ""


def _identity(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size


def _sum_into(descriptor: int, weights: Tensor) -> Sums:
    os.ftruncate(descriptor, weights.numel() * np.dtype(np.float64).itemsize)
    sums: Sums = np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.float64)
    np.cumsum(weights.double().numpy(), out=sums)
    return sums


def _open_shared(told: tuple[int, int, tuple[int, int, int]] | None) -> Sums | None:
    """What the first rank has told of; None where this one does not reach it."""
    if told is None:
        return None
    process, number, identity = told
    try:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.info("the sums of weights of another rank cannot be reached: %s", error)
        return None
    try:
        # In another namespace of processes the path leads to anything, or to nothing.
        if _identity(descriptor) != identity:
            return None
        return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), dtype=np.float64)
    except OSError as error:
        log.info("no memory to share sums of weights in: %s", error)
        return None
    finally:
        os.close(descriptor)
