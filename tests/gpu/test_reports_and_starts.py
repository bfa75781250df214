"""What a report, a start and a look for unused parameters ask of an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from torsh_trainer.comm import reducer
from torsh_trainer.comm.compression import GradientReducer, Int8, PowerSGD, Slot, Threshold, TopK
from torsh_trainer.comm.compression.base import Compressing
from torsh_trainer.testing.fake_accelerator import FakeAccelerator, run_on_fake_accelerator
from torsh_trainer.training.loss_meter import LossMeter


@contextlib.contextmanager
def waits_of(accelerator: FakeAccelerator) -> Iterator[list[str]]:
    """The host's waits within the block; ``tolist`` is one copy, as on a real device."""
    waits: list[str] = []
    tolist = FakeTensor.tolist
    with pytest.MonkeyPatch.context() as patch, accelerator.count() as counts:
        patch.setattr(FakeTensor, "tolist", lambda tensor: tolist(tensor.cpu()))
        yield waits
    waits += counts.synchronisations.elements()


def report_waits(accelerator: FakeAccelerator) -> list[str]:
    losses = LossMeter()
    loss = torch.ones((), device=accelerator.device)
    for _ in range(50):
        losses.add(((loss, 1.0), (loss, 1.0)), 8.0)
    with waits_of(accelerator) as waits:
        mine, norm = losses.read(loss)
        accelerator.comm.reduce_values([mine])
    assert norm == float(loss)
    return waits


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_report_reads_losses_and_norm_at_once_and_their_sum_is_the_hosts(world_size: int) -> None:
    waits = run_on_fake_accelerator(report_waits, world_size=world_size)
    assert len(waits) == 1, waits


def unused_waits(accelerator: FakeAccelerator) -> list[str]:
    parameters = [nn.Parameter(torch.zeros(3, device=accelerator.device)) for _ in range(5)]
    made = reducer.BucketReducer(parameters, accelerator.comm, find_unused=True)
    for parameter in parameters[:3]:
        parameter.grad = torch.ones_like(parameter)
    with waits_of(accelerator) as waits:
        made.finish()
    return waits


def test_a_look_for_unused_parameters_waits_once() -> None:
    waits = run_on_fake_accelerator(unused_waits, world_size=4)
    assert len(waits) == 1, waits


def largest_shared(accelerator: FakeAccelerator) -> tuple[int, int, int]:
    """Bytes of the largest new tensor, of what is shared, and the broadcasts."""
    reducer.PIECE_BYTES = 4096
    device = accelerator.device
    tensors = [torch.zeros(100, device=device) for _ in range(100)]
    tensors += [torch.zeros(5000, device=device)]  # as it lies, in parts
    joined = torch.cat
    made = []

    def cat(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(joined(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, accelerator.count() as counts:
        patch.setattr(torch, "cat", cat)
        reducer.share(tensors, accelerator.comm)
    sizes = [one.nbytes for one in made]
    return max(sizes), sum(counts.collective_bytes.values()), sum(counts.collectives.values())


def test_a_start_copies_a_piece_at_a_time_and_gives_every_value_once() -> None:
    largest, shared, broadcasts = run_on_fake_accelerator(largest_shared, world_size=4)
    assert largest == 4000
    assert shared == 4 * (100 * 100 + 5000)
    assert broadcasts == 10 + 5


def bucket_waits(accelerator: FakeAccelerator, knobs: Compressing) -> list[str]:
    shapes = {f"w{i}": (64, 64) for i in range(12)}
    parameters = {n: torch.zeros(shape, device=accelerator.device) for n, shape in shapes.items()}
    made = GradientReducer(knobs, parameters, accelerator.comm)
    slots = Slot.row([(name, 64 * 64) for name in shapes])
    flat = torch.zeros(12 * 64 * 64, device=accelerator.device)
    made.reduce(flat, slots)
    with waits_of(accelerator) as waits:
        made.reduce(flat, slots)
    return waits


@pytest.mark.parametrize(("knobs", "most"), [(TopK(0.05), 0), (Int8(), 0), (Threshold(0.1), 1)])
def test_a_compressed_bucket_waits_at_most_once_for_all_its_parameters(
    knobs: Compressing, most: int
) -> None:
    waits = run_on_fake_accelerator(bucket_waits, knobs, world_size=4)
    assert len(waits) <= most, waits


def test_so_does_one_of_powersgd() -> None:
    waits = run_on_fake_accelerator(bucket_waits, PowerSGD(), world_size=4)
    assert len(waits) <= 1, waits
