"""Hashes of tensors: the same however a tensor is cut, another for other bits in other places."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from torsh_trainer.checkpoint.base import MODULUS, Sum
from torsh_trainer.checkpoint.tensors import hashing
from torsh_trainer.checkpoint.tensors.hashing import hash_of

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]


def whole(tensor: Tensor) -> int:
    return int(hash_of(tensor, (0,) * tensor.dim(), tensor.shape)) % MODULUS


def pieces(tensor: Tensor, *cuts: tuple[int, ...]) -> int:
    """The sum over the boxes into which ``cuts`` of each dimension divide it."""
    edges = [
        list(itertools.pairwise([0, *cut, size]))
        for cut, size in zip(cuts, tensor.shape, strict=True)
    ]
    total = 0
    for box in itertools.product(*edges):
        piece = tensor[tuple(slice(begin, end) for begin, end in box)]
        total += int(hash_of(piece, [begin for begin, _ in box], tensor.shape))
    return total % MODULUS


def word_by_word(tensor: Tensor) -> int:
    weights = hashing._weights(tensor.device).tolist()
    words, _ = hashing._words(tensor)
    row = len(weights)
    return (
        sum(
            value * weights[place % row] * hashing._factor(place // row)
            for place, value in enumerate(words.tolist())
        )
        % MODULUS
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_add_up_to_the_whole_however_it_is_cut(dtype: torch.dtype) -> None:
    tensor = (torch.randn(29, 5, 400, generator=torch.Generator().manual_seed(0)) * 60).to(dtype)
    expected = word_by_word(tensor)
    assert whole(tensor) == expected
    for cuts in (
        ((7, 8), (), ()),
        ((), (2,), ()),
        ((), (), (1, 399)),
        ((3,), (1, 4), (200,)),
        ((7, 7), (5,), ()),  # with empty pieces
    ):
        assert pieces(tensor, *cuts) == expected, cuts


def test_it_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    tensor = torch.randn(6, 7, 8)
    assert whole(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == whole(tensor)
    assert whole(torch.view_as_complex(torch.randn(4, 2)).conj().resolve_conj()) != 0


@pytest.mark.parametrize("fill", ["random", "powers of two"])
def test_other_bits_or_other_places_give_another_hash(fill: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(50, 60, generator=generator, dtype=torch.float64)
    if fill == "powers of two":  # in which the low bits say nothing
        tensor = torch.randint(-3, 3, (50, 60), generator=generator).double().exp2()
    before = whole(tensor)
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    changed = tensor.clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(9.0, dtype=torch.float64))
    for other in (swapped, changed, tensor.flip(0), tensor.flip(1), tensor.roll(1), -tensor):
        assert whole(other) != before
    assert len({whole(torch.roll(tensor, shift)) for shift in range(3000)}) == 3000


def test_scalars_and_tensors_without_elements() -> None:
    assert whole(torch.tensor(1.0)) != whole(torch.tensor(2.0))
    assert whole(torch.empty(0, 3)) == 0
    assert int(hash_of(torch.empty(0, 3), (2, 0), (2, 3))) == 0


def test_replicas_are_the_whole_several_times() -> None:
    one = Sum(6, 77)
    assert Sum(18, 231).covers(one)
    assert not Sum(18, 232).covers(one)
    assert not Sum(17, 231).covers(one)
    assert not Sum(0, 0).covers(one)
