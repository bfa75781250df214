"""What ``deepspeed.accelerator.get_accelerator()`` gives: the device of this process."""

from __future__ import annotations

from typing import Any

import torch

from torsh_trainer.dropin.zero.processes import find_device, local_rank


class Accelerator:
    """A GPU or the CPU, by the names that DeepSpeed has for it."""

    @property
    def _name(self) -> str:
        return find_device().type

    @property
    def _on_gpu(self) -> bool:
        return self._name == "cuda"

    def device_name(self, device_index: int | None = None) -> str:
        """``cpu``, ``cuda`` or ``cuda:N``."""
        if not self._on_gpu or device_index is None:
            return self._name
        return f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which it is the current one."""
        return torch.cuda.device(device_index) if self._on_gpu else _Nothing()

    def set_device(self, device_index: int) -> None:
        """Makes it the current one."""
        if self._on_gpu:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """Its number; on a CPU the number of the process on its host."""
        return torch.cuda.current_device() if self._on_gpu else local_rank()

    def current_device_name(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return f"cuda:{torch.cuda.current_device()}" if self._on_gpu else "cpu"

    def device_count(self) -> int:
        """How many there are."""
        return torch.cuda.device_count() if self._on_gpu else 1

    def is_available(self) -> bool:
        """It is there."""
        return True

    def is_synchronized_device(self) -> bool:
        """Nothing runs on it by itself."""
        return not self._on_gpu

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for it."""
        if self._on_gpu:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Gives memory back."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        """Seeds its generator."""
        torch.cuda.manual_seed(seed) if self._on_gpu else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds all generators of its kind."""
        torch.cuda.manual_seed_all(seed) if self._on_gpu else torch.manual_seed(seed)

    def communication_backend_name(self) -> str:
        """``nccl`` or ``gloo``."""
        return "nccl" if self._on_gpu else "gloo"

    def is_bf16_supported(self) -> bool:
        """It computes in bf16."""
        return torch.cuda.is_bf16_supported() if self._on_gpu else True

    def is_fp16_supported(self) -> bool:
        """It computes in fp16."""
        return self._on_gpu

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on a GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated(device_index) if self._on_gpu else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most of it so far."""
        return torch.cuda.max_memory_allocated(device_index) if self._on_gpu else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Counts the most anew."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"get_accelerator().{name} is not there under drop-in; see docs/migrate/drop-in.md"
        )


class _Nothing:
    def __enter__(self) -> None:
        """Nothing to enter."""

    def __exit__(self, *error: object) -> None:
        """Nothing to leave."""


_ONE = Accelerator()


def get_accelerator() -> Accelerator:
    """That of this process."""
    return _ONE
