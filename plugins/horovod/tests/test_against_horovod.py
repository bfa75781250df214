"""The engine does what a script of plain Horovod does, and what its options say in arithmetic."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torsh_trainer_horovod import runtime
from torsh_trainer_horovod.strategy import Horovod

from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.testing import cases
from torsh_trainer.testing.compare import FP32, same_tensors
from torsh_trainer.testing.ranks import RankFailure, RankPool, shared_pool
from torsh_trainer.testing.reference import Scenario, TrainingOutcome
from torsh_trainer.testing.tiny import TinyData, TinyModelOptions, TinyTask, total_weight


def script(comm: Any, scenario: Scenario, options: dict[str, Any]) -> TrainingOutcome:
    """A script of plain Horovod, run."""
    with runtime.start(comm, {}) as hvd:
        return written(comm, hvd, scenario, dict(options))


def written(comm: Any, hvd: Any, scenario: Scenario, options: dict[str, Any]) -> TrainingOutcome:
    """What a user of Horovod writes."""
    for name, known in (("op", hvd), ("compression", hvd.Compression)):
        if name in options:
            options[name] = getattr(known, options[name])
    task = scenario.task
    model = task.build_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=scenario.data.accumulate,
        **options,
    )
    outcome = TrainingOutcome()
    for number in range(scenario.data.steps):
        losses: list[float | None] = []
        optimizer.zero_grad()
        for micro in scenario.data.step(number, hvd.size())[hvd.rank()]:
            loss = task.loss(model(micro.batch["tokens"]), micro.batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        outcome.losses.append(comm.all_gather_object(losses))
    outcome.parameters = {name: p.detach() for name, p in model.state_dict().items()}
    return outcome


@pytest.mark.matrix(5)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("knobs", "options"),
    [
        ({}, {}),
        ({"op": "sum"}, {"op": "Sum"}),
        ({"compression": "fp16"}, {"compression": "fp16"}),
        ({"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 2.0}),
        ({"groups": 2}, {"groups": 2}),
    ],
    ids=str,
)
def test_three_steps_are_those_of_a_script_of_plain_horovod(knobs, options, optimizer):
    scenario = Scenario(optimizer=optimizer, data=TinyData(accumulate=2))
    ranks = shared_pool(2)
    # A script does not divide by its backward passes: Horovod adds them up.
    ours = ranks.run(cases.train, Horovod(backward_passes_per_step=2, **knobs), scenario)
    theirs = ranks.run(script, scenario, options)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.losses == plain.losses
        same_tensors(mine.parameters, plain.parameters, 0.0, "parameters")


def test_and_it_would_show_if_they_were_averaged():
    scenario = Scenario(data=TinyData(accumulate=2))
    ours, *_ = shared_pool(2).run(cases.train, Horovod(), scenario)
    theirs, *_ = shared_pool(2).run(script, scenario, {})
    assert ours.losses[0] == theirs.losses[0]
    assert ours.losses[1] != theirs.losses[1]


def rounded(scenario: Scenario, ranks: int) -> dict[str, Any]:
    """Plain PyTorch in which each rank rounds its gradient to fp16, and the sum is one of fp16."""
    task = scenario.task
    model = task.build_model()
    (optimizer,) = task.build_optimizers(model.named_parameters()).values()
    for number in range(scenario.data.steps):
        cut = scenario.data.step(number, ranks)
        sums = [torch.zeros_like(p, dtype=torch.float16) for p in model.parameters()]
        for micros in cut:
            model.zero_grad()
            for batch, weight, *_ in micros:
                loss = task.loss(model(batch["tokens"]), batch)
                (loss * (weight * ranks / total_weight(cut))).backward()
            for whole, parameter in zip(sums, model.parameters(), strict=True):
                whole += parameter.grad.half()
        for whole, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = (whole / ranks).float()
        optimizer.step()
    return {name: p.detach() for name, p in model.state_dict().items()}


def test_fp16_rounds_each_ranks_gradient_and_the_sum_and_nothing_else():
    scenario = Scenario(data=TinyData(tokens=True))
    expected = rounded(scenario, 2)
    for outcome in shared_pool(2).run(cases.train, Horovod(compression="fp16"), scenario):
        same_tensors(outcome.parameters, expected, FP32.parameters, "parameters")
    exact, *_ = shared_pool(2).run(cases.train, Horovod(), scenario)
    with pytest.raises(AssertionError, match="parameters"):
        same_tensors(exact.parameters, expected, FP32.parameters, "parameters")


def test_reducing_in_fp16_is_the_same_thing():
    scenario = Scenario(data=TinyData(tokens=True))
    precision = type(scenario.precision)(reduce="fp16")
    first, *_ = shared_pool(2).run(cases.train, Horovod(compression="fp16"), scenario)
    second, *_ = shared_pool(2).run(
        cases.train, Horovod(), Scenario(data=scenario.data, precision=precision)
    )
    same_tensors(first.parameters, second.parameters, 0.0, "parameters")


# -- models and optimizers of all kinds ------------------------------------------------------------


class SparseTask(TinyTask):
    """An embedding whose gradient is sparse, and an optimizer that takes it."""

    def build_model(self) -> Any:
        model = super().build_model()
        model.embedding.sparse = True
        return model


class Stubborn(SGD):
    """Its constructor wants more than parameters, and it keeps something beside its groups."""

    def __init__(self, params: Any, lr: float, factor: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        """With ``factor`` on every gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.factor)
        return super().step(closure)


class StubbornTask(TinyTask):
    """Trains with it."""

    def build_optimizers(self, named_parameters: Any) -> dict[str, Optimizer]:
        return {"main": Stubborn([p for _, p in named_parameters], lr=0.5, factor=0.25)}


def of_task(comm: Any, strategy: Any, task: type[TinyTask], data: TinyData) -> TrainingOutcome:
    driver = cases.Driver(comm, strategy, Scenario(data=data), task=task())
    outcome = TrainingOutcome()
    for number in range(data.steps):
        driver.step(number, outcome)
    return driver.finish(outcome)


@pytest.mark.parametrize(
    ("task", "knobs"),
    [
        (SparseTask, {}),
        (SparseTask, {"sparse_as_dense": True}),
        (SparseTask, {"op": "average", "groups": None, "compression": "none"}),
        (StubbornTask, {}),
    ],
)
def test_sparse_gradients_and_optimizers_of_ones_own_give_what_ddp_gives(task, knobs):
    data = TinyData(tokens=True)
    theirs = shared_pool(2).run(of_task, DDP(), task, data)
    ours = shared_pool(2).run(of_task, Horovod(**knobs), task, data)
    for mine, plain in zip(ours, theirs, strict=True):
        same_tensors(mine.parameters, plain.parameters, FP32.parameters, "parameters")


def test_groups_of_names_give_what_no_groups_give():
    scenario = Scenario(optimizer="two")
    groups = (("head.weight", "norm.weight"), ("embedding.weight", "head.bias"))
    plain, *_ = shared_pool(2).run(cases.train, Horovod(), scenario)
    for outcome in shared_pool(2).run(cases.train, Horovod(groups=groups), scenario):
        same_tensors(outcome.parameters, plain.parameters, FP32.parameters, "parameters")


class Wandering(nn.Module):
    """A buffer that training changes and reads: each rank's own samples move it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)
        self.embedding = nn.Embedding(11, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.embedding(tokens)
        logits = self.head(hidden - self.mean)
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return logits


class WanderingTask(TinyTask):
    """Trains it."""

    def build_model(self) -> Any:
        torch.manual_seed(0)
        return Wandering()


@pytest.mark.parametrize("shared_buffers", [True, False])
def test_a_buffer_that_training_reads_is_rank_0s_unless_one_says_otherwise(shared_buffers):
    theirs, *_ = shared_pool(2).run(of_task, DDP(), WanderingTask, TinyData())
    knobs = Horovod(broadcast_buffers=shared_buffers)
    ours, *_ = shared_pool(2).run(of_task, knobs, WanderingTask, TinyData())
    apart = (ours.parameters["head.weight"] - theirs.parameters["head.weight"]).abs().max()
    assert (float(apart) < 1e-6) == shared_buffers


# -- what goes wrong -------------------------------------------------------------------------------


def blamed(comm: Any, strategy: Any, scenario: Scenario) -> None:
    cases.train(comm, strategy, Scenario(model=TinyModelOptions(unused=True)))


def test_a_parameter_without_a_gradient_is_named():
    with RankPool(2) as ranks, pytest.raises(RankFailure) as failure:
        ranks.run(blamed, Horovod(), Scenario())
    assert "2 parameters got no gradient: unused.weight, unused.bias" in str(failure.value)


def left_alone(comm: Any) -> None:
    """Rank 1 is gone when rank 0 wants to reduce the gradients of the third step."""
    driver = cases.Driver(comm, Horovod(broadcast_buffers=False), Scenario())
    total = total_weight(driver.scenario.data.step(0, 2))
    for step in range(3):
        driver.engine.zero_grad()
        driver.engine.forward_backward(driver.micro_batches(0), total, driver.task)
        if comm.world.rank == 1 and step == 1:
            os._exit(7)


def test_a_rank_that_dies_is_an_error_on_the_others():
    with RankPool(2) as ranks, pytest.raises(RankFailure) as failure:
        ranks.run(left_alone)
    assert "rank 1 died with exit code 7" in str(failure.value)
    assert "CommunicationError: Horovod could not reduce the gradients" in str(failure.value)
