"""Adasum on real ranks equals its paper's formula, computed from all gradients in one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torsh_trainer.comm.adasum import adasum
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.testing.ranks import RankPool, shared_pool


def of_two(a: Tensor, b: Tensor) -> Tensor:
    """Equation 2 of Maleki et al. 2020, in float64."""
    dot = torch.dot(a, b)
    factor_a = 1.0 - dot / (2.0 * torch.dot(a, a)) if a.any() else 1.0
    factor_b = 1.0 - dot / (2.0 * torch.dot(b, b)) if b.any() else 1.0
    return factor_a * a + factor_b * b


def of_many(gradients: list[Tensor]) -> Tensor:
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    return of_two(of_many(gradients[:half]), of_many(gradients[half:]))


def gradient(rank: int, size: int, kind: str) -> Tensor:
    numbers = torch.Generator().manual_seed(rank)
    noise = torch.randn(size, generator=numbers)
    if kind == "equal":
        return torch.randn(size, generator=torch.Generator().manual_seed(99))
    if kind == "orthogonal":
        return torch.where(torch.arange(size) % 4 == rank, noise, 0.0)
    if kind == "one is zero":
        return torch.zeros(size) if rank == 1 else noise
    return noise + torch.linspace(0.0, 2.0, size)


def reduced(
    comm: Communicator, size: int, kind: str, layers: list[int] | None, dtype: torch.dtype
) -> Tensor:
    tensor = gradient(comm.world.rank, size, kind).to(dtype)
    adasum(tensor, comm, layers=layers)
    return tensor


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000, 1003])
def test_it_is_the_formula(ranks: int, size: int) -> None:
    found = shared_pool(ranks).run(reduced, size, "related", None, torch.float32)
    expected = of_many([gradient(rank, size, "related").double() for rank in range(ranks)])
    for one in found:
        assert torch.equal(one, found[0])
        assert torch.allclose(one.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_gradients_give_their_mean_and_orthogonal_ones_their_sum(ranks: int) -> None:
    (equal, *_) = shared_pool(ranks).run(reduced, 100, "equal", None, torch.float32)
    assert torch.allclose(equal, gradient(0, 100, "equal"), rtol=1e-5)
    (summed, *_) = shared_pool(ranks).run(reduced, 100, "orthogonal", None, torch.float32)
    assert torch.allclose(summed, sum(gradient(r, 100, "orthogonal") for r in range(ranks)))


def test_a_gradient_of_zeros_leaves_the_other_as_it_is() -> None:
    (found, _) = shared_pool(2).run(reduced, 100, "one is zero", None, torch.float32)
    assert torch.equal(found, gradient(0, 100, "one is zero"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_are_combined_each_on_its_own(ranks: int) -> None:
    layers = [3, 500, 1, 499]  # halves and quarters cut through them
    (found, *_) = shared_pool(ranks).run(reduced, 1003, "related", layers, torch.float32)
    parts = zip(
        *[gradient(r, 1003, "related").double().split(layers) for r in range(ranks)], strict=True
    )
    expected = torch.cat([of_many(list(part)) for part in parts])
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)
    whole = of_many([gradient(rank, 1003, "related").double() for rank in range(ranks)])
    assert not torch.allclose(found.double(), whole, rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_other_types_are_computed_in_what_they_hold(dtype: torch.dtype, bound: float) -> None:
    (found, *_) = shared_pool(4).run(reduced, 100, "related", None, dtype)
    expected = of_many([gradient(r, 100, "related").to(dtype).double() for r in range(4)])
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=bound, atol=bound)


def refusal(comm: Communicator, tensor: Tensor, layers: list[int] | None) -> str:
    try:
        adasum(tensor, comm, layers=layers)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_it_cannot_do_is_refused() -> None:
    (words, _) = shared_pool(2).run(refusal, torch.ones(3, dtype=torch.int64), None)
    assert "Adasum of torch.int64 values" in words
    (words, _) = shared_pool(2).run(refusal, torch.ones(3), [1, 1])
    assert "the layers have 2 elements together, the tensor 3" in words
    with RankPool(3) as three:
        for words in three.run(refusal, torch.ones(3), None):
            assert "3 processes are no power of two" in words
            assert "use 2 or 4 processes" in words
