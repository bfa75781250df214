"""Batches of every kind go to an accelerator with one copy a tensor, and nothing waits for it."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from torsh_trainer.data.moving import mover_to
from torsh_trainer.testing.fake_accelerator import FakeAccelerator, run_on_fake_accelerator


@dataclass(frozen=True)
class Labelled:
    x: Tensor
    label: Tensor


Pair = namedtuple("Pair", "x to")


class Graph:
    """Moves itself, as PyTorch Geometric's ``Data`` does."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device, non_blocking=False):
        return Graph(self.x.to(device, non_blocking=non_blocking))


def encode():
    return BatchEncoding({"input_ids": torch.ones(2, 3), "mask": torch.ones(2, 3)})


KINDS = {
    "tensor": (lambda: torch.ones(2), 1),
    "nested mappings and sequences": (lambda: {"a": [torch.ones(2)], "b": (torch.ones(2), 3)}, 2),
    "UserDict": (lambda: UserDict(x=torch.ones(2)), 1),
    "BatchEncoding": (encode, 2),
    "frozen dataclass": (lambda: Labelled(torch.ones(2), torch.ones(2)), 2),
    "named tuple": (lambda: Pair(torch.ones(2), "text"), 1),
    "object with to": (lambda: Graph(torch.ones(2)), 1),
    "PackedSequence": (lambda: pack_sequence([torch.ones(3), torch.ones(2)]), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_is_copied_once_and_waited_for_by_nobody(kind):
    make, tensors = KINDS[kind]

    def case(accelerator: FakeAccelerator):
        batch = make()
        with accelerator.count() as counts:
            moved = mover_to(accelerator.device)(batch)
        kept = isinstance(moved, type(batch))
        return kept, counts.copies.total(), counts.synchronisations.total()

    assert run_on_fake_accelerator(case) == (True, tensors, 0)
