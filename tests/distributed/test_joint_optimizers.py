"""Optimizers that look at all parameters at once are refused where parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Optimizer, Rprop

from torsh_trainer import DDP, FSDP
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.testing import cases, reference
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario
from torsh_trainer.testing.tiny import TinyTask


class Distance(SGD):
    """As Prodigy does: how far all parameters have come says how large the next step is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["d"] = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            total = 0.0
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("start", p.detach().clone())
                if p.grad is not None:
                    total += (p.grad * (state["start"] - p)).sum().item()
            group["d"] = max(group["d"], 1.0 + total)
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(group["d"])
        return super().step(closure)


class Bounded(SGD):
    """Bounds the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.norm()) ** 2 for p in held) ** 0.5
        for p in held:
            p.grad.div_(max(1.0, norm / 0.5))
        return super().step(closure)


class Trusting(SGD):
    """As LARS does: a parameter's own norm scales its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1.0 + float(p.norm()))
        return super().step(closure)


class Signed(SGD):
    """By element, and so right on any part; what its constructor keeps counts too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scale"] = torch.full_like(p.detach(), 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(p.grad.sign() * self.state[p]["scale"] / self.steps)
        return super().step(closure)


def _centre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        mean = sum(float(p.sum()) for p in held) / sum(p.numel() for p in held)
        for p in held:
            p.sub_(0.5 * mean)


def make_hooked(params: Any, lr: float = 0.1) -> SGD:
    optimizer = SGD(params, lr=lr)
    optimizer.register_step_post_hook(_centre)
    return optimizer


def closed_over(params: Any, lr: float = 0.1) -> SGD:
    """Its hook has the parameters, and a count, from where it was made."""
    held, seen = list(params), []
    optimizer = SGD(held, lr=lr)

    def bound(*_: Any) -> None:
        seen.append(1)
        total = sum(float(p.detach().square().sum()) for p in held) ** 0.5
        with torch.no_grad():
            for p in held:
                p.mul_(min(1.0, (len(seen) + 1) / total))

    optimizer.register_step_post_hook(bound)
    return optimizer


class OwnTask(TinyTask):
    make: Any = None

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        return {"main": type(self).make([p for _, p in named_parameters], lr=0.1)}


@dataclass(frozen=True)
class OwnScenario(Scenario):
    make: Any = None

    @property
    def task(self) -> TinyTask:
        kind = type("OwnTask", (OwnTask,), {"make": staticmethod(self.make)})
        return kind(self.model)  # type: ignore[no-any-return]


def drawn(comm: Any, strategy: Strategy, scenario: Scenario) -> tuple[Any, list[Any], list[Any]]:
    """The generator after the engine's start; the optimizer's steps, and those that it says."""
    torch.manual_seed(3)
    driver = cases.Driver(comm, strategy, scenario)
    held = [getattr(o, "optim", o) for o in driver.engine.optimizers.values()]
    scales = [slot for o in held for slots in o.state.values() for slot in slots.values()]
    local = [getattr(scale, "_local_tensor", scale) for scale in scales]
    return torch.get_rng_state(), [getattr(o, "steps", 0) for o in held], local


def refuse(comm: Any, strategy: Strategy, scenario: Scenario) -> str:
    with pytest.raises(Unsupported) as caught:
        cases.Driver(comm, strategy, scenario)
    return str(caught.value)


CUT = [DDP(zero1=True), Gloo(zero1=True)]


@pytest.mark.parametrize("strategy", CUT, ids=lambda s: s.name)
@pytest.mark.parametrize("make", [Distance, Bounded, make_hooked, closed_over])
def test_zero1_refuses_an_optimizer_that_looks_across_parameters(
    strategy: Strategy, make: Any
) -> None:
    for sentence in shared_pool(2).run(refuse, strategy, OwnScenario(make=make)):
        assert "strategy.zero1=true" in sentence
        assert "depends on others" in sentence
        assert "strategy=ddp" in sentence


@pytest.mark.parametrize("strategy", CUT, ids=lambda s: s.name)
@pytest.mark.parametrize("make", [Trusting, Signed])
def test_zero1_takes_an_optimizer_of_a_users_own_that_steps_one_by_one(
    strategy: Strategy, make: Any
) -> None:
    check_plain(strategy, make)


@pytest.mark.parametrize(
    "make", [Distance, Bounded, make_hooked, closed_over, Trusting, Adafactor, Rprop]
)
def test_fsdp_refuses_an_optimizer_that_does_not_know_shards(make: Any) -> None:
    for sentence in shared_pool(2).run(refuse, FSDP(), OwnScenario(make=make)):
        assert "cannot step parameters that are sharded" in sentence
        assert "strategy=ddp" in sentence


def test_fsdp_takes_an_optimizer_of_a_users_own_that_steps_by_element() -> None:
    check_plain(FSDP(), Signed)


@pytest.mark.parametrize("make", [Distance, Bounded, make_hooked, closed_over, Trusting])
def test_ddp_trains_what_is_refused_elsewhere(make: Any) -> None:
    check_plain(DDP(), make)


@pytest.mark.parametrize("strategy", [*CUT, FSDP()], ids=lambda s: s.name)
def test_trying_leaves_the_optimizer_and_the_generators_alone(strategy: Strategy) -> None:
    untried = OwnScenario(make=SGD)
    tried = OwnScenario(make=Signed)
    for one, other in zip(
        shared_pool(2).run(drawn, strategy, untried),
        shared_pool(2).run(drawn, strategy, tried),
        strict=True,
    ):
        assert torch.equal(one[0], other[0])
        assert other[1] == [0]
        assert other[2]
        assert all(bool((scale == 0.5).all()) for scale in other[2])


def check_plain(strategy: Strategy, make: Any) -> None:
    scenario = OwnScenario(make=make)
    plain = reference.train(scenario, 2)
    for outcome in shared_pool(2).run(cases.train, strategy, scenario):
        for name, value in plain.parameters.items():
            torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=1e-5)
