"""The device ``gpu`` of the fake accelerator, as a backend of torch's in Python."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torsh_trainer.testing import fake_autocast
from torsh_trainer.testing.counting import watch

DEVICE_TYPE = "gpu"


def synchronise(device: Any = None) -> None:
    """A wait of the host for all that the device has to do."""
    watch.synchronise("synchronize")


class _Stream:
    """A stream, on which nothing runs; ``synchronize`` is a wait of the host."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device(DEVICE_TYPE, 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        watch.synchronise("stream.synchronize")


class _Event:
    """An event that has happened; ``synchronize`` is a wait of the host."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        watch.synchronise("event.synchronize")

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Generator:
    """A generator of the device: a seed that nothing draws from."""

    def __init__(self) -> None:
        self.device = torch.device(DEVICE_TYPE, 0)
        self._seed = 0

    def manual_seed(self, seed: int) -> _Generator:
        self._seed = seed
        return self

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None: ...


class _Backend:
    """What torch asks of a device's module, as ``torch.cuda`` answers it."""

    def __init__(self) -> None:
        self.Stream, self.Event = _Stream, _Event

    @functools.cached_property
    def default_generators(self) -> tuple[_Generator, ...]:
        return (_Generator(),)

    @functools.cached_property
    def _stream(self) -> _Stream:
        return _Stream()

    def init(self) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    def synchronize(self, device: Any = None) -> None:
        synchronise()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return "a fake accelerator"

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def empty_cache(self) -> None: ...


@functools.cache
def register() -> None:
    """Makes ``gpu`` a device of this process; torch has no way back."""
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Backend())
    fake_autocast.install(DEVICE_TYPE)
