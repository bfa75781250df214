"""Knobs that go on with what another engine has begun, each beside plain PyTorch that does so."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from torsh_trainer.emulation.common import PhantomStep
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing import reference
from torsh_trainer.testing.cases import Driver
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.tiny import TinyData, TinyModelOptions, TinyTask

BF16 = Precision(params="bf16", compute="bf16", reduce="bf16")
HELD = replace(BF16, gradients="bf16")
SCENARIO = Scenario(data=TinyData(steps=2, accumulate=3), precision=HELD)


def trained(comm, strategy, scenario):
    """Parameters before the first step, and after all."""
    driver, outcome = Driver(comm, strategy, scenario), TrainingOutcome()
    first = whole_state(driver.engine.state_dict(), comm)["model"]
    first = {name: value.clone() for name, value in first.items()}
    for number in range(scenario.data.steps):
        driver.step(number, outcome)
    last = whole_state(driver.engine.state_dict(), comm)["model"]
    last = {name: value.detach().clone() for name, value in last.items()}
    driver.engine.close()
    return first, last


def plain(scenario, ranks):
    """A module in bf16 whose gradients add up in bf16, over fp32 masters; ranks sum in bf16."""
    task = scenario.task
    masters = task.build_model()
    lr = task.build_optimizers(masters.named_parameters())["main"].param_groups[0]["lr"]
    for number in range(scenario.data.steps):
        by_rank = []
        for micro_batches in scenario.data.step(number, ranks):
            low = copy.deepcopy(masters).to(torch.bfloat16)
            for micro in micro_batches:
                loss = task.loss(low(micro.batch["tokens"]).float(), micro.batch)
                (loss / len(micro_batches)).backward()
            by_rank.append([p.grad / ranks for p in low.parameters()])
        with torch.no_grad():
            for p, *gradients in zip(masters.parameters(), *by_rank, strict=True):
                p -= lr * sum(gradients[1:], gradients[0]).float()
    return {name: p.detach() for name, p in masters.named_parameters()}


@pytest.mark.parametrize("strategy", [DDP(), FSDP(reduce_every_micro_batch=True)])
def test_gradients_held_in_bf16_add_up_in_bf16(strategy):
    expected = plain(SCENARIO, 2)
    wide = replace(SCENARIO, precision=BF16)
    (_, found), (_, other) = (
        shared_pool(2).run(trained, strategy, scenario)[0] for scenario in (SCENARIO, wide)
    )
    for name, value in expected.items():
        if isinstance(strategy, DDP):  # FSDP2 has reduced every micro-batch by itself
            assert torch.equal(found[name], value), name
        assert torch.allclose(found[name], value, atol=0.05)
    assert any(not torch.equal(found[name], other[name]) for name in expected)


def test_a_rounded_start_is_what_forward_computes_with():
    scenario = replace(SCENARIO, precision=replace(HELD, rounded_start=True))
    weights = dict(scenario.task.build_model().named_parameters())
    for strategy in (DDP(), FSDP(reduce_every_micro_batch=True)):
        first, _ = shared_pool(2).run(trained, strategy, scenario)[0]
        assert all(torch.equal(first[n], w.bfloat16().float()) for n, w in weights.items())
        assert any(not torch.equal(first[n], w) for n, w in weights.items())


def rounded_once(comm, precision):
    """What a linear layer gives under a precision, and the one that torch itself gives."""
    model = nn.Linear(64, 64)
    job = Job(TinyTask(), lambda: model, BatchPlan(1, 1, 1, comm.world.size), precision)
    engine = DDP().prepare(job, comm)
    inputs = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    low, weight, bias = (t.bfloat16() for t in (inputs, model.weight, model.bias))
    found = engine.module(inputs)
    engine.close()
    return found.detach(), (low @ weight.t() + bias).detach().float()


def test_linear_layers_round_their_product_where_asked_to():
    alike = []
    for rounded in (True, False):
        precision = replace(BF16, rounded_products=rounded)
        found, twice = shared_pool(2).run(rounded_once, precision)[0]
        alike.append(torch.equal(found, twice))
    assert alike == [True, False]


def phantom(comm, strategy, lr, keeps_state=True):
    task = TinyTask(optimizer="adamw")
    plan = BatchPlan(comm.world.size, 1, 1, comm.world.size)
    job = Job(task, task.build_model, plan, emulation=PhantomStep(lr, keeps_state=keeps_state))
    engine = strategy.prepare(job, comm)
    state = whole_state(engine.state_dict(), comm)
    rates = [group["lr"] for group in engine.optimizers["main"].param_groups]
    steps = {float(slots["step"]) for slots in state["optimizer"]["main"]["state"].values()}
    model = {name: value.detach().clone() for name, value in state["model"].items()}
    engine.close()
    return model, rates, steps


@pytest.mark.parametrize("strategy", [DDP(), FSDP()])
def test_a_phantom_step_decays_weights_and_counts_but_keeps_the_rate(strategy):
    task = TinyTask(optimizer="adamw")
    model = task.build_model()
    optimizer = task.build_optimizers(model.named_parameters())["main"]
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    found, rates, steps = shared_pool(2).run(phantom, strategy, 0.25)[0]
    assert rates == kept
    assert steps == {1.0}
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("strategy", [DDP(), DDP(zero1=True)])
def test_a_phantom_step_may_forget_the_optimizers_state(strategy):
    kept, _, steps = shared_pool(2).run(phantom, strategy, 0.25)[0]
    assert steps == {1.0}
    forgot, _, none = shared_pool(2).run(phantom, strategy, 0.25, False)[0]
    assert none <= {0.0}
    assert all(torch.equal(forgot[name], value) for name, value in kept.items())


def test_gradients_are_added_up_over_processes_where_asked_to():
    scenario = Scenario(data=TinyData(steps=2))
    expected = reference.train(scenario, 2, gradient_scale=2.0).parameters
    for strategy in (DDP(op="sum"), DDP(op="sum", overlap=False)):
        _, last = shared_pool(2).run(trained, strategy, scenario)[0]
        same_tensors(last, expected, FP32.parameters, "parameters")
    with pytest.raises(ConfigError, match="op=max is unknown"):
        DDP(op="max")


def test_unused_parameters_decay_where_they_get_gradients_of_zero():
    scenario = Scenario(optimizer="adamw", model=TinyModelOptions(unused=True))
    task = scenario.task
    model = task.build_model()
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    for _ in range(scenario.data.steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    expected = {name: p for name, p in model.named_parameters() if name.startswith("unused")}
    assert expected
    for zeroed in (True, False):
        knobs = {"zero_unused": zeroed}
        for strategy in (DDP(find_unused_parameters=True, **knobs), FSDP(**knobs)):
            first, last = shared_pool(2).run(trained, strategy, scenario)[0]
            for name, value in expected.items():
                if zeroed:
                    assert torch.allclose(last[name], value)
                else:
                    assert torch.equal(last[name], first[name])
            moved = [not torch.equal(first[name], value) for name, value in expected.items()]
            assert any(moved)


def test_gradients_of_zero_want_to_know_which_parameters_are_unused():
    with pytest.raises(ConfigError, match="zero_unused does nothing where"):
        DDP(zero_unused=True)


def refused(comm, strategy, scenario):
    try:
        Driver(comm, strategy, scenario)
    except Unsupported as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", [Gloo(), FSDP()])
def test_who_cannot_hold_gradients_so_refuses_by_name(strategy):
    for words in shared_pool(2).run(refused, strategy, SCENARIO):
        assert "cannot honour precision.gradients=bf16" in words


def test_a_start_is_rounded_to_something_lower():
    with pytest.raises(ConfigError, match="rounded_start rounds to precision"):
        Precision(rounded_start=True)
