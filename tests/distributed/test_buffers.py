"""What training forwards change beside parameters, on several processes as on one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.feed import TrainLoader
from torsh_trainer.data.loading import Loading
from torsh_trainer.data.sampler import BatchPartition, epoch_order
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.ranks import shared_pool

SAMPLES, MICRO, SEED, STEPS = 27, 3, 7, 9
BATCH = 12  # the third step of an epoch has 3 samples: a rank without any, on two processes


class Samples(DataSource):
    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 4, generator=drawn) * 3 + 1
        self.train = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


class Codes(nn.Module):
    """Counts what falls on each code, as an average that training does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.25)
        return x


class Plain(nn.Module):
    """BatchNorm thrice: with the usual momentum, used twice in a forward, and a mean over all."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Codes()
        self.first = nn.Linear(4, 6)
        self.usual = nn.BatchNorm1d(6)
        self.twice = nn.BatchNorm1d(6, momentum=0.3)
        self.mean = nn.BatchNorm1d(6, momentum=None)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.usual(self.first(self.codes(x)))
        x = self.twice(torch.tanh(self.twice(x)) * 2)
        return self.last(self.mean(x).relu())


class Averages(Task):
    def __init__(self, kind: type[nn.Module] = Plain) -> None:
        self.kind = kind
        self.data = Samples()

    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.kind()

    def build_optimizers(self, named_parameters: Any) -> Mapping[str, Any]:
        return {"main": torch.optim.SGD([p for _, p in named_parameters], lr=0.01)}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def running_averages(self, model: nn.Module) -> Mapping[str, float]:
        return {"codes.mean": 0.25} if self.kind is Plain else {}


@dataclass
class Found:
    losses: list[float]
    buffers: dict[str, Tensor]
    changing: list[str]


def train(
    comm: Communicator,
    strategy: Strategy,
    task: Task,
    looks_at: tuple[int, ...] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Found:
    """``STEPS`` steps as the loop takes them; evaluates after those in ``looks_at``."""
    size = comm.world.size
    cut = BatchPartition(BATCH, MICRO, size, comm.world.rank)
    plan = BatchPlan(BATCH, MICRO, BATCH // MICRO // size, size)
    job = Job(task, task.build_model, plan, **options)
    engine = strategy.prepare(job, comm)
    feed = TrainLoader(task, Loading(batch_size=BATCH), cut, comm, seed=SEED).steps()
    losses = []
    for number in range(STEPS):
        step = next(feed)
        engine.zero_grad()
        report = engine.forward_backward(step.micro_batches, step.weight, task)
        engine.step(Clip())
        share = sum(float(loss) * weight for loss, weight in report.parts)
        losses.append(comm.reduce_values([share])[0] / step.weight)
        if number in looks_at:
            engine.evaluate([], task)
    feed.close()
    model = engine.state_dict()["model"]
    buffers = {name: model[name].clone() for name, _ in engine.model.named_buffers()}
    changing = list(engine.changing_buffers())
    engine.close()
    return Found(losses, buffers, changing)


def train_plainly(task: Averages) -> Found:
    """A loop of plain PyTorch over the same micro-batches, in their order."""
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = task.data.train.tensors
    losses: list[float] = []
    epoch = 0
    while True:
        order = epoch_order(SAMPLES, seed=SEED, epoch=epoch, shuffle=True)
        epoch += 1
        for batch in torch.tensor(order).split(BATCH):
            optimizer.zero_grad()
            total = 0.0
            for ids in batch.split(MICRO):
                loss = nn.functional.mse_loss(model(x[ids]), y[ids]) * len(ids) / len(batch)
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            losses.append(total)
            if len(losses) == STEPS:
                return Found(losses, {n: b.clone() for n, b in model.named_buffers()}, [])


STRATEGIES = [DDP(), DDP(overlap=False, broadcast_buffers=False), FSDP(), Gloo()]


def name_of(strategy: Strategy) -> str:
    return strategy.name


@pytest.mark.matrix(8)
@pytest.mark.parametrize("looks_at", [(), (0, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
@pytest.mark.parametrize("size", [2, 4])
def test_running_statistics_are_those_of_one_process(size, strategy, looks_at):
    for found in shared_pool(size).run(train, strategy, Averages(), looks_at):
        assert_alike(found, train_plainly(Averages()))


def test_a_filler_leaves_no_trace_on_one_process_either():
    (found,) = shared_pool(1).run(train, Single(), Averages())
    assert_alike(found, train_plainly(Averages()))


def assert_alike(found: Found, right: Found) -> None:
    torch.testing.assert_close(found.losses, right.losses, rtol=1e-5, atol=1e-6)
    assert found.buffers.keys() == right.buffers.keys()
    for name, buffer in right.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-5, atol=1e-6, msg=name)
    assert found.changing == []


class Reads(nn.Module):
    """A running mean that training reads, and a buffer that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.5)
        return self.layer((x - self.seen) * self.scale)


def test_what_training_reads_is_rank_0s_under_every_engine_and_named():
    task = Averages(Reads)
    all_found = [
        shared_pool(2).run(train, strategy, task)[0] for strategy in (DDP(), FSDP(), Gloo())
    ]
    for found in all_found:
        assert found.changing == ["seen"]
        torch.testing.assert_close(found.losses, all_found[0].losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.buffers, all_found[0].buffers, rtol=1e-6, atol=0)


class Bounded(nn.Module):
    """Its weights are divided by their largest singular value, which each forward refines."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def train_bounded_plainly() -> Found:
    """Plain PyTorch, as rank 0 refines: its micro-batches and another's begin from one estimate."""
    task = Averages(Bounded)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = task.data.train.tensors
    losses: list[float] = []
    for epoch in range(STEPS):
        for batch in torch.tensor(epoch_order(SAMPLES, seed=SEED, epoch=epoch, shuffle=True)).split(
            BATCH
        ):
            optimizer.zero_grad()
            start = {n: b.clone() for n, b in model.named_buffers()}
            total = 0.0
            for rank in (1, 0):
                for name, buffer in model.named_buffers():
                    buffer.copy_(start[name])
                for ids in batch.split(MICRO)[rank::2]:
                    loss = nn.functional.mse_loss(model(x[ids]), y[ids]) * len(ids) / len(batch)
                    loss.backward()
                    total += float(loss.detach())
            optimizer.step()
            losses.append(total)
            if len(losses) == STEPS:
                return Found(losses, {n: b.clone() for n, b in model.named_buffers()}, [])
    raise AssertionError


@pytest.mark.parametrize("strategy", [DDP(), FSDP(), Gloo()], ids=name_of)
def test_spectral_norm_follows_rank_0_and_is_named(strategy):
    right = train_bounded_plainly()
    for found in shared_pool(2).run(train, strategy, Averages(Bounded)):
        torch.testing.assert_close(found.losses, right.losses, rtol=1e-5, atol=1e-6)
        for name, buffer in right.buffers.items():
            torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-5, atol=1e-6, msg=name)
        assert found.changing == list(right.buffers)


def test_a_buffer_that_a_task_names_and_the_model_lacks_is_refused():
    class Wrong(Averages):
        def running_averages(self, model):
            return {"codes.maen": 0.25}

    with pytest.raises(AssertionError, match=r"codes\.mean"):
        shared_pool(1).run(train, Single(), Wrong())


class Stateful(nn.Module):
    """Blocks whose forwards read what they change, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(self.layer(self.norm(x) * self.seen))


@pytest.mark.parametrize("again", [True, "selective"])
def test_a_recomputed_forward_leaves_no_trace_and_reads_what_the_first_one_read(again):
    task = Averages(Stateful)
    options = {"activation_checkpointing": again}
    (found,) = shared_pool(1).run(train, Single(), task, (), options)
    assert_alike(found, train_plainly(task))
