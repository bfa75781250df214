"""What of a cut optimizer's parameters travels in one message."""

from __future__ import annotations

import torch

from torsh_trainer.strategies.packed_zero1 import SMALL_BYTES, _pack


def test_small_ones_travel_together_by_dtype_and_large_ones_alone():
    small, other = torch.zeros(3), torch.zeros(2, 2)
    low, large = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(SMALL_BYTES // 4 + 1)
    packed = _pack([small, large, low, other])
    assert [[id(t) for t in message] for message in packed] == [
        [id(small), id(other)],
        [id(low)],
        [id(large)],
    ]
    assert _pack([]) == []
