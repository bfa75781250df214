"""Optimizer state by parameter name: what comes back, what is matched, what is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.state import load_optimizers, materialise_slots, optimizer_state


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def names_of(net: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in net.named_parameters()}


def train(net: nn.Module, optimizer: Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        net(
            torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        ).square().sum().backward()
        optimizer.step()


def resumed(saved: dict[str, Any], net: nn.Module, optimizer: Optimizer) -> None:
    """Loads what one optimizer left into another, as an engine does."""
    materialise_slots(optimizer)
    load_optimizers({"main": optimizer}, {"main": copy.deepcopy(saved)}, names_of(net))


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def by_dimension(net: nn.Module, *order: int, **settings: Any) -> list[dict[str, Any]]:
    """Matrices decay and vectors do not, in the given order of groups."""
    groups = {
        2: {"params": [p for p in net.parameters() if p.ndim == 2], "weight_decay": 0.1},
        1: {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    }
    return [{**groups[dimension], **settings} for dimension in order]


def one_each(net: nn.Module) -> list[dict[str, Any]]:
    """A group for each parameter, with the settings of ``by_dimension``."""
    return [{"params": [p], "weight_decay": 0.1 if p.ndim == 2 else 0.0} for p in net.parameters()]


@pytest.mark.parametrize("recut", [lambda net: by_dimension(net, 1, 2), one_each])
def test_groups_that_are_cut_otherwise_are_matched_by_parameter(recut: Any) -> None:
    first = model()
    optimizer = AdamW(by_dimension(first, 2, 1), lr=0.1)
    for group in optimizer.param_groups:  # as a task may, while it trains
        group["weight_decay"] *= 2
    train(first, optimizer, range(3))
    saved = optimizer_state(optimizer, names_of(first))

    second = copy.deepcopy(first)
    other = AdamW(recut(second), lr=0.3)
    resumed(saved, second, other)
    train(first, optimizer, range(3, 6))
    train(second, other, range(3, 6))
    assert equal(first, second)

    third = copy.deepcopy(model())
    forgetful = AdamW(recut(third), lr=0.1)
    train(third, forgetful, range(6))
    assert not equal(first, third), "the settings change nothing here"


def test_a_setting_that_parameters_of_one_group_do_not_share_stays_as_configured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = model()
    optimizer = SGD(by_dimension(first, 2, 1, momentum=0.7), lr=0.1)
    saved = optimizer_state(optimizer, names_of(first))
    second = model()
    other = SGD(second.parameters(), lr=0.3, momentum=0.9, weight_decay=0.02)
    with caplog.at_level(logging.WARNING):
        resumed(saved, second, other)
    (group,) = other.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.7, 0.02)
    (told,) = caplog.messages
    assert "weight_decay was saved as 0.1 for 0.weight, 2.weight; 0.0 for 0.bias" in told


class Counting(Optimizer):
    """A user's own: its state has a plain number and a nested dict, its groups a counter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                inner = state.setdefault("inner", {"sum": torch.zeros_like(p)})
                inner["sum"] += p.grad
                p -= group["lr"] * inner["sum"] / (state["steps"] + group["calls"])


def test_numbers_and_nests_in_the_state_of_a_users_own_optimizer_come_back() -> None:
    first = model()
    optimizer = Counting(first.parameters())
    train(first, optimizer, range(3))
    saved = optimizer_state(optimizer, names_of(first))
    assert saved["state"]["0.weight"]["steps"] == 3
    second = copy.deepcopy(first)
    other = Counting(second.parameters())
    resumed(saved, second, other)
    train(first, optimizer, range(3, 6))
    train(second, other, range(3, 6))
    assert equal(first, second)


def test_state_that_belongs_to_no_parameter_is_refused_by_name() -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer, range(1))
    held: Any = optimizer.state
    held["global_step"] = 4
    with pytest.raises(ConfigError, match="SGD keeps state under 'global_step'"):
        optimizer_state(optimizer, names_of(net))


def test_a_parameter_that_was_never_updated_has_no_state_afterwards() -> None:
    first = model()
    first[2].requires_grad_(False)
    optimizer = SGD(first.parameters(), lr=0.1, momentum=0.9)
    train(first, optimizer, range(2))
    saved = optimizer_state(optimizer, names_of(first))
    second = copy.deepcopy(first)
    other = SGD(second.parameters(), lr=0.1, momentum=0.9)
    resumed(saved, second, other)
    assert "momentum_buffer" in other.state[second[0].weight]
    assert second[2].weight not in other.state


def test_sparse_adam_gets_its_slots_without_a_dense_gradient() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    materialise_slots(optimizer)
    slots = optimizer.state[table.weight]
    assert {name for name, value in slots.items() if isinstance(value, Tensor)} >= {
        "exp_avg",
        "exp_avg_sq",
    }
    assert torch.equal(table.weight, before)
    assert table.weight.grad is None


def test_a_group_whose_parameters_other_processes_hold_takes_its_settings_back() -> None:
    net = nn.ModuleDict({"here": nn.Linear(1, 1, bias=False), "there": nn.Linear(1, 1, bias=False)})
    here, there = (net[key].weight for key in ("here", "there"))
    groups = [["here.weight"], ["there.weight"]]
    both = torch.optim.SGD([{"params": [here], "lr": 0.1}, {"params": [there], "lr": 0.2}])
    saved = optimizer_state(both, names_of(net))

    mine = torch.optim.SGD([{"params": [here], "lr": 1.0}, {"params": [there], "lr": 1.0}])
    mine.param_groups[1]["params"] = []
    load_optimizers({"main": mine}, {"main": saved}, names_of(net), {"main": groups})
    assert [group["lr"] for group in mine.param_groups] == [0.1, 0.2]
    assert optimizer_state(mine, names_of(net), groups)["groups"] == saved["groups"]
