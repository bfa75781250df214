"""zero1 steps the optimizer that the task built, with all that it keeps outside its defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from torsh_trainer import DDP
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import MPI, Gloo
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.ranks import OPTIONS, shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyTask


class Scaled(SGD):
    """Multiplies gradients by what its constructor keeps as an attribute, and must be given."""

    def __init__(self, params: Any, factor: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.factor)
        return super().step(closure)


def _bound(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)


class AttributeTask(TinyTask):
    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        return {"main": Scaled([p for _, p in named_parameters], factor=3.0)}


class HookTask(TinyTask):
    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        optimizer = SGD([p for _, p in named_parameters], lr=0.1)
        optimizer.register_step_post_hook(_bound)
        return {"main": optimizer}


@dataclass(frozen=True)
class KeptScenario(Scenario):
    kind: type[TinyTask] = HookTask

    @property
    def task(self) -> TinyTask:
        return self.kind(self.model)


@pytest.mark.parametrize(
    "strategy", [DDP(zero1=True), Gloo(zero1=True), MPI(zero1=True)], ids=lambda s: s.name
)
@pytest.mark.parametrize("kind", [AttributeTask, HookTask])
def test_attributes_and_hooks_of_an_optimizer_are_those_of_plain_torch(
    strategy: Strategy, kind: type[TinyTask]
) -> None:
    scenario = KeptScenario(kind=kind)
    plain = reference.train(scenario, 2)
    backend = "mpi" if isinstance(strategy, MPI) else OPTIONS.backend
    pool = shared_pool(2, options=replace(OPTIONS, backend=backend))
    for outcome in pool.run(cases.train, strategy, scenario):
        for name, value in plain.parameters.items():
            torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-5, atol=1e-6)
