"""Losses that take gradients themselves, or read the model's weights, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, FP32_ADAM, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import VOCABULARY, WIDTH, TinyData, TinyTask

WEIGHTS = ["penalty on weights", "share of weights", "weights in numbers"]
"""Losses that read parameters after the forward."""
WHOLE = FSDP(find_unused_parameters=True)


class WithinTask(TinyTask):
    def __init__(self, kind: str, optimizer: Any = "sgd") -> None:
        super().__init__(optimizer=optimizer)
        self.kind = kind

    def build_model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Linear(VOCABULARY, WIDTH),
                nn.Tanh(),
                nn.Linear(WIDTH, WIDTH),
                nn.Tanh(),
                nn.Linear(WIDTH, VOCABULARY),
            )

    def forward(self, model: nn.Module, batch: Any) -> Any:
        x = F.one_hot(batch["tokens"], VOCABULARY).float()
        if not torch.is_grad_enabled():
            return model(x)
        self.model, self.x = model, x.requires_grad_()
        if self.kind == "adversary":
            loss = TinyTask.loss(self, model(x), batch)
            (gradient,) = torch.autograd.grad(loss, x)
            x = (x + 0.1 * gradient.sign()).detach()
        return model(x)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if not torch.is_grad_enabled():
            return loss
        if self.kind == "penalty on gradients":
            (gradient,) = torch.autograd.grad(loss, self.x, create_graph=True)
            return loss + gradient.pow(2).sum()
        if self.kind == "penalty on weights":
            return loss + 1e-2 * sum(p.pow(2).sum() for p in self.model.parameters())
        if self.kind == "share of weights":
            stacked = torch.cat([p.detach().flatten() for p in self.model.parameters()])
            return loss * (1 + torch.linalg.vector_norm(stacked))
        if self.kind == "weights in numbers":
            return loss * (1 + sum(float(p.detach().abs().sum()) for p in self.model.parameters()))
        return loss


def train(
    comm: Communicator, strategy: Strategy, scenario: Scenario, kind: str
) -> TrainingOutcome | str:
    """The outcome, or the words of what refused it in the first step."""
    task = WithinTask(kind, scenario.optimizer)
    driver = cases.Driver(comm, strategy, scenario, task=task)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        try:
            driver.step(number, outcome)
        except Unsupported as error:
            return f"step {number}: {error}"
    return driver.finish(outcome)


@pytest.mark.parametrize("kind", ["penalty on gradients", "adversary", *WEIGHTS])
@pytest.mark.parametrize("strategy", [DDP(), Gloo(), WHOLE], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_they_train_as_in_plain_pytorch(strategy: Strategy, kind: str, optimizer: str) -> None:
    clip = Clip() if optimizer == "sgd" else Clip(norm=0.1)
    scenario = Scenario(optimizer=optimizer, clip=clip, data=TinyData(accumulate=2))
    expected = reference.train(scenario, 2, task=WithinTask(kind, optimizer))
    bound = FP32 if optimizer == "sgd" else FP32_ADAM
    for outcome in shared_pool(2).run(train, strategy, scenario, kind):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, bound.parameters, "parameters")


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(reshard_after_forward=False)], ids=str)
def test_a_first_gradient_alone_trains_where_parameters_are_cut(strategy: Strategy) -> None:
    scenario = Scenario(clip=Clip(), data=TinyData(accumulate=2))
    expected = reference.train(scenario, 2, task=WithinTask("adversary"))
    for outcome in shared_pool(2).run(train, strategy, scenario, "adversary"):
        assert isinstance(outcome, TrainingOutcome), outcome
        same_tensors(outcome.parameters, expected.parameters, FP32.parameters, "parameters")


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(reshard_after_forward=False)], ids=str)
def test_a_gradient_of_a_gradient_is_refused_where_parameters_are_cut(strategy: Strategy) -> None:
    for words in shared_pool(2).run(train, strategy, Scenario(), "penalty on gradients"):
        assert isinstance(words, str)
        assert words.startswith("step 0: strategy=fsdp cannot take a gradient with create_graph")
        assert "strategy.find_unused_parameters=true" in words


@pytest.mark.parametrize("kind", WEIGHTS)
def test_shards_in_a_loss_are_named_in_the_first_step(kind: str) -> None:
    for words in shared_pool(2).run(train, FSDP(), Scenario(), kind):
        assert isinstance(words, str)
        assert words.startswith("step 0: strategy=fsdp has cut the parameter '0.weight'")
        assert "strategy.find_unused_parameters=true" in words


def train_by_whole_tensors(comm: Communicator) -> list[bool]:
    """A task that knows of shards, and asks for whole values."""

    class Knowing(WithinTask):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            if torch.is_grad_enabled():
                sizes.extend(p.full_tensor().numel() == p.numel() for p in self.model.parameters())
                sizes.extend(p.to_local().numel() < p.numel() for p in self.model.parameters())
            return TinyTask.loss(self, outputs, batch)

    sizes: list[bool] = []
    driver = cases.Driver(comm, FSDP(), Scenario(), task=Knowing(""))
    driver.step(0, TrainingOutcome())
    return sizes


def test_a_task_may_ask_for_whole_values() -> None:
    for sizes in shared_pool(2).run(train_by_whole_tensors):
        assert sizes
        assert all(sizes)
