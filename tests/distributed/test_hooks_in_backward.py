"""What a hook sees in a backward does not depend on the number of processes, under any engine.

Every hook here is not linear, so that a gradient times a factor would show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Clip, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.compare import FP32, close, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyData, TinyModel, TinyTask

UNEVEN = TinyData(steps=4, accumulate=2, tokens=True, ragged=True)
"""Weights that differ, a micro-batch without any, and fillers in a ragged last step."""
HOOKS = ["parameter", "activation", "module", "function"]
WHOLE: list[Strategy] = [
    DDP(),
    DDP(overlap=False),
    DDP(find_unused_parameters=True),
    DDP(static_graph=True),
    DDP(gradient_as_bucket_view=False),
    DDP(zero1=True),
    Gloo(),
    Gloo(overlap=False, zero1=True),
]
SHARDED: list[Strategy] = [
    FSDP(wrap_min_bytes=0),
    FSDP(reduce_every_micro_batch=True),
    FSDP(reshard_after_forward=False),
    FSDP(find_unused_parameters=True),
    FSDP(shard_size=1),
]


def squash(gradient: Tensor) -> Tensor:
    """Nearly the gradient itself where it is small, and nowhere a multiple of it."""
    return torch.tanh(gradient * 300) / 300


class Squash(torch.autograd.Function):
    """The identity, whose gradient is squashed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return squash(gradients[0])


class Hooked(TinyModel):
    """The tiny model with a ``hook`` in its backward."""

    def __init__(self, options: Any, hook: str) -> None:
        super().__init__(options)
        self.hook = hook
        if hook == "parameter":
            for parameter in self.parameters():
                parameter.register_hook(squash)
        if hook == "module":
            self.blocks[0].register_full_backward_hook(lambda module, into, out: (squash(into[0]),))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
            if self.hook == "function":
                hidden = Squash.apply(hidden)
            if self.hook == "activation" and hidden.requires_grad:
                hidden.register_hook(squash)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class HookedTask(TinyTask):
    def __init__(self, hook: str, optimizer: Any = "sgd") -> None:
        super().__init__(optimizer=optimizer)
        self.hook = hook

    def build_model(self) -> TinyModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return Hooked(self.options, self.hook)


def train(comm: Communicator, strategy: Strategy, scenario: Scenario, hook: str) -> TrainingOutcome:
    task = HookedTask(hook, scenario.optimizer)
    driver = cases.Driver(comm, strategy, scenario, task=task)
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


def equal_plain(
    strategy: Strategy, hook: str, scenario: Scenario, *, ranks: int = 2, within: float = 1.0
) -> None:
    expected = reference.train(scenario, ranks, task=HookedTask(hook, scenario.optimizer))
    unhooked = reference.train(scenario, ranks, task=HookedTask("", scenario.optimizer))
    assert abs(unhooked.norms[0] - expected.norms[0]) > 5e-4, "the hook changes nothing"
    for outcome in shared_pool(ranks).run(train, strategy, scenario, hook):
        for step, norm in enumerate(expected.norms):
            close(outcome.norms[step], norm, within * FP32.relative, f"step {step}: gradient norm")
        bound = within * FP32.parameters
        same_tensors(outcome.parameters, expected.parameters, bound, "parameters")


@pytest.mark.matrix(12)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("strategy", WHOLE, ids=str)
def test_hooks_see_what_they_see_in_plain_pytorch(strategy: Strategy, hook: str) -> None:
    equal_plain(strategy, hook, Scenario(data=UNEVEN))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("strategy", SHARDED, ids=str)
def test_hooks_see_the_same_where_parameters_are_cut(strategy: Strategy, hook: str) -> None:
    equal_plain(strategy, hook, Scenario(data=UNEVEN))


@pytest.mark.parametrize("hook", ["activation", "module"])
@pytest.mark.parametrize("strategy", [DDP(), Gloo(), FSDP()], ids=str)
def test_they_do_on_three_processes_with_adamw_and_clipping(strategy: Strategy, hook: str) -> None:
    scenario = Scenario(data=replace(UNEVEN, samples=2), optimizer="adamw", clip=Clip(norm=0.1))
    equal_plain(strategy, hook, scenario, ranks=3, within=80)


@pytest.mark.parametrize(
    "strategy", [DDP(), DDP(overlap=False), FSDP(), FSDP(shard_size=1)], ids=str
)
def test_they_do_where_gradients_travel_in_another_dtype(strategy: Strategy) -> None:
    scenario = Scenario(data=UNEVEN, precision=Precision(reduce="bf16"))
    equal_plain(strategy, "activation", scenario, within=1e3)
