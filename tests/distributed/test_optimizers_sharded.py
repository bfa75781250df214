"""Over FSDP2's shards, optimizers and averages do what plain torch does in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.ema import Ema
from torsh_trainer.optim.optimizers import OptimizerSpec, short_names
from torsh_trainer.testing.ranks import shared_pool

REFUSED = ("adafactor", "rprop")
TRAINED = sorted(set(short_names()) - {"lbfgs", "sparseadam", "muon", *REFUSED})


def model_and_shards() -> tuple[nn.Sequential, nn.Sequential]:
    """Rows that do not divide by two."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded[0])
    fully_shard(sharded)
    return plain, sharded


def steps(plain: nn.Module, sharded: nn.Module, *both: Any, after: Any = None) -> float:
    """Trains both on the same batches; the largest difference between them."""
    for seed in range(4):
        torch.manual_seed(seed)
        batch = torch.randn(4, 6)
        for model, optimizer in zip((plain, sharded), both, strict=True):
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if after is not None:
            after()
    return distance(plain, sharded)


def distance(plain: nn.Module, sharded: nn.Module) -> float:
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return max(float((p - s.full_tensor()).abs().max()) for p, s in pairs)


def train_each(comm: Any) -> dict[str, float]:
    differences = {}
    for name in TRAINED:
        plain, sharded = model_and_shards()
        optimizer = OptimizerSpec(name, lr=0.01, no_decay=False).build(sharded.named_parameters())
        reference = short_names()[name](plain.parameters(), lr=0.01)
        differences[name] = steps(plain, sharded, reference, optimizer)
    return differences


def refusals(comm: Any) -> list[str]:
    told = []
    specs = [OptimizerSpec(name) for name in REFUSED]
    for spec in [*specs, OptimizerSpec("SGD", fused=True), OptimizerSpec("Adagrad", fused=True)]:
        _, sharded = model_and_shards()
        with pytest.raises(Unsupported) as caught:
            spec.build(sharded.named_parameters())
        told.append(str(caught.value))
    return told


def average(comm: Any) -> tuple[float, float, float]:
    """Differences: averages, and parameters within and after ``swapped``."""
    plain, sharded = model_and_shards()
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema = Ema(dict(sharded.named_parameters()), decay=0.9)

    def update() -> None:
        averaged.update_parameters(plain)
        ema.update()

    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    steps(plain, sharded, reference, torch.optim.SGD(sharded.parameters(), lr=0.1), after=update)
    before = [p.full_tensor().clone() for p in sharded.parameters()]
    with ema.swap_in():
        within = distance(averaged.module, sharded)
    pairs = zip(before, sharded.parameters(), strict=True)
    after = max(float((b - p.full_tensor()).abs().max()) for b, p in pairs)
    kept = ema.state_dict()["averages"]
    stored = max(
        float((kept[name].full_tensor() - p).abs().max())
        for name, p in averaged.module.named_parameters()
    )
    return stored, within, after


def test_every_optimizer_trains_shards_as_torch_trains_the_whole() -> None:
    for differences in shared_pool(2).run(train_each):
        assert {n: d for n, d in differences.items() if not d < 1e-6} == {}


def test_what_shards_cannot_have_is_refused_before_the_first_step() -> None:
    for told in shared_pool(2).run(refusals):
        assert "Adafactor cannot step parameters that are sharded" in told[0]
        assert "Rprop cannot step parameters that are sharded" in told[1]
        assert all("none over sharded parameters" in text for text in told[2:])


def test_an_average_of_shards_is_the_average_of_the_whole() -> None:
    for stored, within, after in shared_pool(2).run(average):
        assert stored < 1e-6
        assert within < 1e-6
        assert after == 0.0
