"""A line, fitted by short runs with dropout, and what they leave behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import (
    Callback,
    CheckpointOptions,
    DataSource,
    Loading,
    OptimizerSpec,
    Task,
    Trainer,
)
from torsh_trainer.callbacks.base import StepReport
from torsh_trainer.training.trainer import Result

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.arange(6.0)).unsqueeze(1)
TIMES = ("samples_per_s", "data_wait_s", "step_s", "wall_s", "elapsed_s")


class Line(Task):
    """Linear regression with dropout; keeps the model that was built last."""

    built: nn.Module | None = None

    def __init__(self, optimizer: OptimizerSpec | None = None, *, size: int = 48) -> None:
        self.optimizer = optimizer or OptimizerSpec("SGD", lr=0.01, options={"momentum": 0.9})
        self.data = DataSource()
        self.data.train = TensorDataset(X[:size], Y[:size])
        self.data.eval = TensorDataset(X[:10], Y[:10])

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 1))
        Line.built = model
        return model

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def trainer(folder: Path, **knobs: Any) -> Trainer:
    """Eight steps of six an epoch, saved at their end, on one process."""
    defaults: dict[str, Any] = {
        "task": Line(),
        "strategy": "single",
        "loading": Loading(batch_size=8),
        "max_steps": 8,
        "log_every": 1,
        "eval_every_epochs": None,
        "run_dir": folder,
        "device": "cpu",
    }
    return Trainer(**{**defaults, **knobs})


def allowing(*words: str, **options: Any) -> CheckpointOptions:
    return CheckpointOptions(allow=words, **options)


def parameters(result: Result) -> dict[str, Tensor]:
    assert result.model is not None
    return result.model.state_dict()


def equal(one: Result, other: Result) -> bool:
    mine, theirs = parameters(one), parameters(other)
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Dice(Callback):
    """Draws from every stream of the process at each step."""

    def __init__(self) -> None:
        self.drawn: list[tuple[Any, ...]] = []

    def on_step(self, report: StepReport) -> None:
        python = random.random(), random.gauss(0, 1)
        numpy = np.random.rand(), np.random.randn()  # noqa: NPY002 - the global stream is meant
        self.drawn.append((float(torch.rand(())), *python, *numpy))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - see Dice
