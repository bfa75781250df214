"""trainer.sync_batchnorm: one BatchNorm over the samples of all processes, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.sync_batchnorm import count_normalised, separate, synchronise
from torsh_trainer.testing.ranks import shared_pool

INPUTS = torch.randn(10, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build_norm(momentum: float | None = 0.1, **options: Any) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(4, momentum=momentum, dtype=torch.float64, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.arange(1.0, 5.0))
    return norm


def run_norm(norm: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and a gradient that has been through a gradient, of the inputs."""
    inputs = inputs.clone().requires_grad_(True)
    outputs = norm(inputs)
    (slope,) = torch.autograd.grad(outputs.pow(3).sum(), inputs, create_graph=True)
    slope.square().sum().backward()
    assert inputs.grad is not None
    return outputs.detach(), inputs.grad


def run_part(comm: Communicator, options: dict[str, Any]) -> tuple[Any, ...]:
    """This rank's samples (7 and 3 of 10, then 10 and a filler): outputs, gradients, statistics."""
    norm = build_norm(**options)
    synchronise(norm, comm)
    mine = INPUTS[:7] if comm.world.rank == 0 else INPUTS[7:]
    found = run_norm(norm, mine)
    norm.counts = comm.world.rank == 0
    norm(INPUTS if comm.world.rank == 0 else 1000 * INPUTS[:1])
    return *found, norm.state_dict(), norm.eval()(INPUTS).detach()


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=repr
)
def test_uneven_parts_a_filler_and_a_second_derivative_are_as_in_one_norm(
    options: dict[str, Any],
) -> None:
    plain = build_norm(**options)
    outputs, gradient = run_norm(plain, INPUTS)
    plain(INPUTS)
    ranks = shared_pool(2).run(run_part, options)
    torch.testing.assert_close(torch.cat([found[0] for found in ranks]), outputs)
    torch.testing.assert_close(torch.cat([found[1] for found in ranks]), gradient)
    expected = plain.eval()(INPUTS).detach()
    for found in ranks:
        assert found[2].keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[2][name], value)
        if plain.running_mean is not None:
            torch.testing.assert_close(found[3], expected)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def convert_own(comm: Communicator) -> str:
    try:
        synchronise(nn.Sequential(OwnNorm(3)), comm)
    except Unsupported as error:
        return str(error)
    return ""


def test_a_norm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    for words in shared_pool(2).run(convert_own):
        assert "sync_batchnorm" in words
        assert "'0' is a OwnNorm" in words


def give_one_value(comm: Communicator) -> str:
    norm = build_norm()
    synchronise(norm, comm)
    norm.counts = comm.world.rank == 0
    try:
        norm(INPUTS[:1, :, 0])
    except ValueError as error:
        return str(error)
    return ""


def test_one_value_of_all_processes_is_refused_on_all_of_them() -> None:
    for words in shared_pool(2).run(give_one_value):
        assert "more than 1 value per channel" in words


def count_seen(comm: Communicator) -> list[int]:
    model, counts = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), []
    counts.append(count_normalised(nn.Linear(3, 4), 5, comm.world.size))
    counts.append(count_normalised(model, 5, comm.world.size))
    synchronise(model, comm)
    counts.append(count_normalised(model, 5, comm.world.size))
    separate(model)
    assert type(model[1]) is nn.BatchNorm1d
    counts.append(count_normalised(model, 5, comm.world.size))
    return counts


def test_the_samples_that_are_normalised_together_are_counted() -> None:
    assert shared_pool(2).run(count_seen) == [[0, 5, 10, 5]] * 2
