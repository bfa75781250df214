"""A run whose checkpoints go to other formats and back, and the same in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import (
    Callback,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.checkpoint.cli.export import Export
from torsh_trainer.data.sampler import epoch_order

SAMPLES, BATCH, HALF, WHOLE = 48, 8, 5, 10  # half-way is in the middle of an epoch
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """Tied weights, a norm with buffers of both kinds, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.body.weight
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(x))
        out: Tensor = self.head(self.tied(torch.tanh(self.body(hidden))))
        return out


class Source(DataSource):
    train = TensorDataset(X, Y)
    eval = TensorDataset(X[:10], Y[:10])


class Fitting(Task):
    data = Source()

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self.optimizer = optimizer

    def build_model(self) -> nn.Module:
        return Net()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


ADAMW = OptimizerSpec("AdamW", lr=0.02, options={"weight_decay": 0.1})


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, report: StepReport) -> None:
        if report.metrics:
            self.values.append(report.metrics["loss"])


class Run(NamedTuple):
    """What training with our trainer left, and the losses of its steps."""

    model: nn.Module
    losses: list[float]
    checkpoint: Path


def train(folder: Path, steps: int, **knobs: Any) -> Run:
    losses = Losses()
    defaults: dict[str, Any] = {
        "task": Fitting(ADAMW),
        "strategy": "single",
        "loading": Loading(batch_size=BATCH),
        "callbacks": [losses],
        "max_steps": steps,
        "log_every": 1,
        "eval_every_epochs": None,
        "run_dir": folder,
        "device": "cpu",
    }
    result = Trainer(**{**defaults, **knobs}).fit()
    assert result.model is not None
    assert result.checkpoint is not None
    return Run(result.model, losses.values, Path(result.checkpoint))


def batches(first: int, last: int) -> list[list[Tensor]]:
    """What our trainer sees in steps ``first`` to ``last``, from the documented order."""
    found = []
    for step in range(first, last):
        epoch, at = divmod(step * BATCH, SAMPLES)
        ids = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)[at : at + BATCH]
        found.append([X[ids], Y[ids]])
    return found


def plainly(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """The same steps written out in plain PyTorch."""
    losses = []
    for x, y in batches(first, last):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_model(checkpoint: Path) -> dict[str, Tensor]:
    """The weights as plain PyTorch reads them."""
    state = {"engine": {"model": dict(Net().state_dict())}}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state["engine"]["model"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def options(output: Path, **more: Any) -> Export:
    return Export(**{"format": "safetensors", "output": output, **more})
