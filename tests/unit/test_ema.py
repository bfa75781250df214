"""The moving average is torch's own, and evaluation leaves no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.ema import Ema


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def drift(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.1)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_equals_torchs_averaged_model(decay: float) -> None:
    module = model()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    ema = Ema(named(module), decay=decay)
    for seed in range(20):
        drift(module, seed)
        averaged.update_parameters(module)
        ema.update()
        with ema.swap_in():
            for mine, theirs in zip(module.parameters(), averaged.parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_warm_up_takes_the_smaller_decay_of_tensorflows_formula() -> None:
    value = nn.Parameter(torch.zeros((), dtype=torch.float64))
    ema = Ema({"w": value}, decay=0.6, warmup=True)
    average = 0.0
    for update in range(30):
        with torch.no_grad():
            value.fill_(math.sin(update))
        ema.update()
        decay = min(0.6, (1 + update) / (10 + update)) if update else 0.0
        average = decay * average + (1 - decay) * math.sin(update)
        assert float(ema.state_dict()["averages"]["w"]) == pytest.approx(average, rel=1e-12)


def test_swapping_gives_everything_back_even_after_an_error() -> None:
    module = model()
    ema = Ema(named(module), decay=0.9)
    for seed in range(3):
        drift(module, seed)
        ema.update()
    before = values(module)
    averages = copy.deepcopy(ema.state_dict()["averages"])

    def fail_in_evaluation() -> None:
        with ema.swap_in():
            assert not torch.equal(before[0], values(module)[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_evaluation()
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))
    kept = ema.state_dict()["averages"]
    assert all(torch.equal(averages[name], kept[name]) for name in averages)


def test_before_the_first_update_evaluation_sees_the_parameters() -> None:
    module = model()
    ema = Ema(named(module), decay=0.9)
    drift(module, 0)  # weights that were loaded after the average was made
    before = values(module)
    with ema.swap_in():
        assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))


def test_frozen_parameters_have_no_average() -> None:
    module = model()
    module[0].requires_grad_(False)
    assert set(Ema(named(module), decay=0.9).state_dict()["averages"]) == {"2.weight", "2.bias"}


def test_a_bf16_parameter_is_averaged_in_fp32_and_comes_back_as_it_was() -> None:
    module, reference = model().bfloat16(), model().bfloat16()
    ema = Ema(named(module), decay=0.99)
    wide = reference.float()
    averaged = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for seed in range(10):
        drift(module, seed)
        wide.load_state_dict(module.state_dict())
        averaged.update_parameters(wide)
        ema.update()
    kept = ema.state_dict()["averages"]
    for name, theirs in averaged.module.named_parameters():
        assert torch.equal(kept[name], theirs)
    before = values(module)
    with ema.swap_in():
        for mine, theirs in zip(module.parameters(), averaged.parameters(), strict=True):
            assert torch.equal(mine, theirs.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(before, values(module), strict=True))


def test_an_average_goes_on_from_its_state() -> None:
    straight, stopped = model(), model()
    whole, first = Ema(named(straight), decay=0.9), Ema(named(stopped), decay=0.9)
    for seed in range(4):
        for module, ema in ((straight, whole), (stopped, first)):
            drift(module, seed)
            ema.update()
    second = Ema(named(stopped), decay=0.9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in range(4, 8):
        for module, ema in ((straight, whole), (stopped, second)):
            drift(module, seed)
            ema.update()
    one, other = whole.state_dict(), second.state_dict()
    assert one["updates"] == other["updates"]
    for name, average in one["averages"].items():
        assert torch.equal(average, other["averages"][name])


def test_a_state_of_other_parameters_is_refused() -> None:
    module = model()
    state = Ema(named(module), decay=0.9).state_dict()
    module[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"2 differ, 0\.bias among them"):
        Ema(named(module), decay=0.9).load_state_dict(state)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=f"trainer.ema_decay={decay}"):
        Ema(named(model()), decay=decay)
