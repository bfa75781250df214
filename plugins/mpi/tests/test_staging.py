"""What MPI is handed of a GPU's tensor. There is no GPU: a CPU's tensor says it lies on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torsh_mpi import staging

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 11 /usr/lib/libc.so.6
7f0000001000-7f0000002000 r-xp 00000000 08:01 12 /opt/my mpi/lib/libmpi.so.40.30.6
7f0000002000-7f0000003000 r--p 00000000 08:01 12 /opt/my mpi/lib/libmpi.so.40.30.6
7f0000003000-7f0000004000 r-xp 00000000 08:01 13 /opt/cray/libmpi_gnu_123.so.12
7f0000004000-7f0000005000 r-xp 00000000 08:01 14 /usr/lib/libmpi_cxx.so.40
7f0000005000-7f0000006000 rw-p 00000000 00:00 0
"""


class OnGPU(Tensor):
    """Says of itself what a CUDA tensor says."""

    # What comes of it is on the CPU.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cpu = property(lambda tensor: False)
    is_cuda = property(lambda tensor: True)
    device = property(lambda tensor: torch.device("cuda", 0))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What room is asked for; a build without CUDA cannot pin any."""
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def note(*size: Any, pin_memory: bool = False, **kind: Any) -> Tensor:
        asked.append({"pin_memory": pin_memory, **kind})
        return empty(*size, **kind)

    monkeypatch.setattr(torch, "empty", note)
    return asked


@pytest.mark.parametrize("aware", [False, True])
def test_a_tensor_of_a_gpu_goes_through_pinned_memory_unless_the_library_takes_it(
    aware: bool, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "cuda_aware", lambda: aware)
    tensor = torch.arange(6.0).view(2, 3).as_subclass(OnGPU)
    sent, received = staging.readable(tensor), staging.writable(tensor)
    assert (sent is tensor, received is tensor) == (aware, aware)
    assert made == ([] if aware else [{"pin_memory": True, "dtype": torch.float32}] * 2)
    assert sent.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    received.fill_(7.0)
    staging.put_back(tensor, received)
    assert tensor.tolist() == [[7.0] * 3] * 2


def test_the_librarys_own_word_is_asked_for_where_it_lies() -> None:
    found = staging.loaded_libraries(MAPS)
    assert found == ["/opt/my mpi/lib/libmpi.so.40.30.6", "/opt/cray/libmpi_gnu_123.so.12"]
