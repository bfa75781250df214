"""What DeepSpeed keeps in files (``device: nvme``): in which folder, and what is in them.

Between its uses of a partition of the master weights, DeepSpeed leaves it and its optimizer state
empty: the values lie in files. A checkpoint maps these into memory, so that it takes none of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

PREFIX = "torsh-swap-"


# -- where they lie --------------------------------------------------------------------------------


class SwapFolder:
    """A folder below ``place`` for the files of this process alone, which ``remove`` takes away.

    DeepSpeed calls its files by rank and parameter, and leaves them behind: two runs would write
    the same ones. The folder goes at the latest when the process ends. It is locked as long as the
    process lives; what one left that was killed is removed by the next that comes.

    Raises:
        ResourceError: nothing can be written there, or not directly to the disk.
    """

    def __init__(self, place: str, rank: int) -> None:
        below = folder_of(place)
        try:
            _remove_abandoned(below)
            self.path, lock = _claim_folder(below, rank)
            self.remove = weakref.finalize(self, _remove_folder, self.path, lock, os.getpid())
            probe = os.open(self.path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            os.close(probe)
            (self.path / "probe").unlink()
        except OSError as error:
            raise ResourceError(
                f"nvme_path={place} cannot hold the files of this run: {error.strerror}",
                fix="name a folder of a local disk (not one in memory) that this user may write to",
            ) from error


def folder_of(place: str) -> Path:
    """The folder that ``nvme_path`` names.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(place).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"nvme_path={place} is no folder",
            fix="make it, on the disk that is to hold the files, or name another",
        )
    return folder


def _claim_folder(below: Path, rank: int) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{rank}-", dir=below))
        with contextlib.suppress(FileNotFoundError):  # who removes abandoned ones was faster
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_dir():
                return path, lock
            os.close(lock)


def _remove_abandoned(below: Path) -> None:
    for path in below.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, another user's, or gone
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                log.warning("%s was left by a run that was killed, and is removed", path)
            finally:
                os.close(lock)


def _remove_folder(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and no process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


# -- what is in them -------------------------------------------------------------------------------


def put(values: Tensor, parameter: Any) -> None:
    """Makes ``values`` what this rank holds of a parameter of stage 3, be it in a file."""
    part = parameter.ds_tensor
    if part.status.name != "NOT_AVAILABLE":
        part.narrow(0, 0, values.numel()).copy_(values)
        return
    swapper = parameter.nvme_swapper
    path = swapper.get_path(parameter, must_exist=True)
    _map_file(path, part.ds_numel, swapper.dtype).narrow(0, 0, values.numel()).copy_(values)
    _sync(path)


def _read_once(swapper: Any) -> None:
    """Lets a parameter be read ahead that is used twice soon, as at the turn of the passes.

    DeepSpeed 0.19.8 asks for it twice at once, and stops at that.
    """
    swap_in = swapper.swap_in

    def once(parameters: Any, *args: Any, **kwargs: Any) -> None:
        swap_in(
            list({parameter.ds_id: parameter for parameter in parameters}.values()), *args, **kwargs
        )

    swapper.swap_in = once


def _sync(path: str) -> None:
    with Path(path).open("r+b") as file:
        os.fsync(file.fileno())


def _map_file(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    with Path(path).open("r+b") as file:
        held = mmap.mmap(file.fileno(), numel * dtype.itemsize)
    return torch.frombuffer(held, dtype=dtype, count=numel)


class Files:
    """The partitions of master weights, with their optimizer state, that lie in files."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._indices: Mapping[int, int] = {}
        if getattr(zero, "swap_optimizer", False):
            self._swapper = zero.optimizer_swapper
            self._indices = {
                id(flat): index
                for index, flat in enumerate(zero.fp32_partitioned_groups_flat)
                if zero._swappable_optimizer_subgroup(index)
            }
            self._keep_gradients()
        if getattr(zero, "params_in_nvme_and_cpu", False):
            _read_once(zero.fp16_groups[0][0].nvme_swapper)

    def _keep_gradients(self) -> None:
        """Keeps in memory, until the step, those gradients that DeepSpeed could not read back.

        It writes them all, and reads each to its place in the gradient of the partition. Past the
        page cache, a disk reads to multiples of 512 bytes alone: elsewhere the read fails, nobody
        is told, and the step takes what lay in the buffer (DeepSpeed 0.19.8).
        """
        swap_out, aligned = self._swapper.swap_out_gradients, self._swapper.numel_alignment

        def keep(parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
            tensors = []
            for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
                kept = gradient
                if offset % aligned:
                    kept = gradient.cpu()
                    kept.swappable = False
                tensors.append(kept)
            swap_out(parameter, gradient_offsets, tensors)

        self._swapper.swap_out_gradients = keep

    def __len__(self) -> int:
        return len(self._indices)

    def tell(self) -> None:
        """Says how much lies in files: DeepSpeed leaves small partitions in memory."""
        if getattr(self._zero, "swap_optimizer", False):
            log.log(
                logging.INFO if len(self) else logging.WARNING,
                "%d of %d partitions of the optimizer's state lie in files; one that takes less "
                "than %.1f MiB stays in memory",
                len(self),
                len(self._zero.fp32_partitioned_groups_flat),
                self._zero.optimizer_swapper.min_aio_bytes / 2**20,
            )

    def hold(self, flat: Tensor) -> bool:
        """Whether ``flat`` lies in a file."""
        return id(flat) in self._indices

    def whole(self, value: Any, *, of: Tensor) -> Any:
        """``value``, the partition ``of`` or a slot of its state; its file where it lies in one.

        What is written there is in force after ``flush``.
        """
        if self.hold(of):
            info = self._info(of)
            for part in info.tensors:
                if part.compute_tensor is value:
                    return _map_file(part.swap_path, info.numel(), info.dtype())
        return value

    @contextlib.contextmanager
    def lend(self, flat: Tensor) -> Iterator[None]:
        """Within, ``flat`` can be read."""
        whole = self.whole(flat, of=flat)
        if whole is flat:
            yield
            return
        empty = flat.data
        flat.data = whole
        try:
            yield
        finally:
            flat.data = empty

    @contextlib.contextmanager
    def swap_in(self, flat: Tensor) -> Iterator[None]:
        """Within, ``flat`` is in memory; what it then has of state goes to files with it."""
        if not self.hold(flat):
            yield
            return
        index = self._indices[id(flat)]
        self._zero._optimizer_states_and_gradient_swap_in(index)
        yield
        self._zero._optimizer_states_and_gradient_swap_out(index)

    def forget(self, flat: Tensor) -> None:
        """Takes the state of ``flat`` for gone."""
        if self.hold(flat):
            info = self._info(flat)
            del info.tensors[1:]
            info.has_state_tensors = False

    def drop_gradients(self) -> None:
        """After a step that was skipped: what is still to be written would meet the next one's."""
        if len(self):
            self._swapper.flush_gradients()

    def flush(self) -> None:
        """Puts on the disk what was written to ``whole``: DeepSpeed reads past the page cache."""
        for flat in filter(self.hold, self._zero.fp32_partitioned_groups_flat if len(self) else ()):
            for path in self._info(flat).get_swap_paths():
                _sync(path)

    def close(self) -> None:
        """Gives back the memory of DeepSpeed's buffers, which outlives it otherwise."""
        if len(self):
            for under_way in getattr(self._swapper, "swap_ops", {}).values():
                if under_way is not None and under_way.wait_required:
                    under_way.wait()
            self._swapper.flush_gradients()
            manager = self._swapper.swap_buffer_manager
            for buffer in manager.all_buffers:
                manager.aio_handle.free_cpu_locked_tensor(buffer)
            manager.all_buffers = []

    def _info(self, flat: Any) -> Any:
        return self._swapper.swap_params_info[flat.ds_id]
