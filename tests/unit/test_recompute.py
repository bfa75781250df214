"""What is computed again in backward, and what is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.strategies.recompute import recompute_in_backward
from torsh_trainer.tasks.models import Block
from torsh_trainer.training.trainer import Trainer


class Counts(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(way: bool | str) -> tuple[Counter[str], list[Tensor]]:
    """Operations of one forward and backward, and loss and gradients."""
    torch.manual_seed(0)
    block = Block(width=16, heads=2, dropout=0.0)
    x = torch.randn(2, 5, 16)
    if way:
        recompute_in_backward(block, compiles=False, keeps_products=way == "selective")
    with Counts() as counts:
        loss = block(x).square().sum()
        loss.backward()
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    return counts.of, [loss.detach(), *gradients]


def test_products_and_attention_are_kept_and_the_rest_is_computed_again() -> None:
    kept, right = run(False)
    again, by_all = run(True)
    some, by_some = run("selective")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    products = {name: kept[name] for name in ("addmm", attention)}
    assert products == {"addmm": 4, attention: 1}
    assert {name: some[name] for name in products} == products
    # torch stops a second run once the backward has what it asks for: before the last product.
    assert again[attention] == 2
    assert again["addmm"] > 4
    assert (kept["gelu"], some["gelu"], again["gelu"]) == (1, 2, 2)
    for found in (by_all, by_some):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_an_output_that_is_changed_in_place_is_refused_in_words() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Sigmoid())
    recompute_in_backward(module, compiles=False, keeps_products=True)
    with pytest.raises(Unsupported, match="selective keeps the outputs of matrix products"):
        module(torch.randn(3, 4, requires_grad=True)).sum().backward()


def test_a_way_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing=some"):
        Trainer(task=None, activation_checkpointing="some")  # type: ignore[arg-type]
