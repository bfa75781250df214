"""State that an optimizer makes in a later step than its first is saved, and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, Task, Trainer
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TorshError
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training import resume
from torsh_trainer.training.trainer import run_in

EVERY, STEPS = 3, 8
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))


class LooksAhead(SGD):
    """Every third step it goes half the way back to where it was at the last such step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            for parameter in group["params"] if group["taken"] % EVERY == 0 else ():
                state = self.state[parameter]
                slow = state.get("slow")
                with torch.no_grad():
                    if slow is None:
                        state["slow"] = parameter.detach().clone()
                        state["meetings"] = torch.tensor(1.0)
                    else:
                        slow.lerp_(parameter.detach(), 0.5)
                        parameter.copy_(slow)
                        state["meetings"] += 1
        return result


class Rows(Task):
    def __init__(
        self, momentum: float, kind: type[Optimizer] = LooksAhead, **settings: Any
    ) -> None:
        self.data = DataSource()
        self.data.train = TensorDataset(X, X.sum(1, keepdim=True))
        self.kind, self.settings = kind, settings
        if kind is LooksAhead:
            self.settings = {"momentum": momentum}

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        return {"main": self.kind([p for _, p in named_parameters], lr=0.05, **self.settings)}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def train(world: World, task: Task, strategy: Strategy, folder: Path, steps: int) -> Any:
    """The last loss, or the refusal."""
    trainer = Trainer(
        task=task,
        strategy=strategy,
        loading=Loading(batch_size=8),
        max_steps=steps,
        run_dir=folder / f"run{steps}",
        checkpoint=CheckpointOptions(dir=str(folder / "saved")),
        log_every=1,
        device="cpu",
    )
    try:
        return run_in(world, trainer).content["train_loss"]
    except TorshError as error:
        return str(error)


@pytest.fixture(scope="module")
def pools() -> Iterator[Mapping[int, RankPool]]:
    with RankPool(1, join=False) as one, RankPool(2, join=False) as two:
        yield {1: one, 2: two}


@pytest.fixture
def on(pools: Mapping[int, RankPool]) -> Any:
    """Trains on so many processes."""
    return lambda ranks, *arguments: pools[ranks].run(train, *arguments)[0]


WAYS = {
    "single": (Single(), 1),
    "ddp": (DDP(), 2),
    "zero1": (DDP(zero1=True), 2),
    "gloo with zero1": (Gloo(zero1=True), 2),
    "fsdp": (FSDP(), 2),
}


@pytest.mark.matrix(10)
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["no other slot", "momentum"])
@pytest.mark.parametrize(
    ("before", "after"),
    [*((way, way) for way in WAYS), ("fsdp", "single"), ("zero1", "fsdp"), ("single", "zero1")],
)
@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_goes_on_with_slots_of_a_later_step(before, after, momentum, stop, on, tmp_path):
    task = Rows(momentum)
    right = on(1, task, Single(), tmp_path / "whole", STEPS)
    strategy, ranks = WAYS[before]
    on(ranks, task, strategy, tmp_path / "parts", stop)
    strategy, ranks = WAYS[after]
    found = on(ranks, task, strategy, tmp_path / "parts", STEPS)
    assert found == pytest.approx(right, rel=1e-5)


def test_a_slot_that_a_setting_has_made_is_still_a_difference(on, tmp_path):
    on(1, Rows(0.0, AdamW, amsgrad=True), Single(), tmp_path, 2)
    said = on(1, Rows(0.0, AdamW), Single(), tmp_path, 4)
    assert "amsgrad was true and is false" in said


def test_without_them_a_run_does_not_go_on(tmp_path, monkeypatch):
    train(World(), Rows(0.9), Single(), tmp_path, 4)
    monkeypatch.setattr(resume, "grow_template", lambda *_: None)
    assert "slow" in train(World(), Rows(0.9), Single(), tmp_path, 8)
