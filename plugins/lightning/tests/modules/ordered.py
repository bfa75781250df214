"""A module and data that tell one order of samples from another, and runs over them.

``Plain`` is to the trainer's own loop what ``Net`` and ``Data`` are to Lightning's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from loops import as_alone, as_torchrun, quiet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.callbacks.jsonl import Jsonl
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Task

FEATURES, BATCH = 4, 8
TRAIN, HELD_OUT = 27, 11
"""Tails of 3, which leave the second of two processes without a sample, in training as after it."""

SEED, RATE = 3, 0.2


class Rows(Dataset[Tensor]):
    """Rows, each with noise that is drawn when it is asked for."""

    def __init__(self, count: int, noise: float = 0.0) -> None:
        self.rows = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(count))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + self.noise * torch.randn(FEATURES)


def network(drops: float) -> nn.Module:
    """The same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        layers = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(drops), nn.Linear(8, 1)
        return nn.Sequential(*layers)


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    """A mean over the batch."""
    return functional.mse_loss(net(batch), batch.sum(dim=1, keepdim=True))


class Net(L.LightningModule):
    def __init__(self, drops: float = 0.0) -> None:
        super().__init__()
        self.net = network(drops)
        self.error, self.held_out_error = MeanSquaredError(), MeanSquaredError()
        self.indices: list[int] = []
        self.epochs: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.indices.append(batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.error(self.net(batch), batch.sum(dim=1, keepdim=True))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", loss_of(self.net, batch), sync_dist=True)
        self.held_out_error(self.net(batch), batch.sum(dim=1, keepdim=True))
        self.log("val_error", self.held_out_error)

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        known = self.trainer.callback_metrics
        self.epochs += [float(known[name]) for name in ("mean", "error") if name in known]

    def on_train_end(self) -> None:
        for name, value in self.state_dict().items():
            self.weights[name] = value.full_tensor() if hasattr(value, "full_tensor") else value

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class ByHand(Net):
    def __init__(self, drops: float = 0.0) -> None:
        super().__init__(drops)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer, loss = self.optimizers(), loss_of(self.net, batch)
        self.indices.append(batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Hooked(Net):
    """One that goes through Lightning's own closures."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...


class Data(L.LightningDataModule):
    def __init__(self, train: int = TRAIN, noise: float = 0.0, **loader: Any) -> None:
        super().__init__()
        self.rows = Rows(train, noise)
        self.loader = {"batch_size": BATCH, "shuffle": True, **loader}

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.rows, **self.loader)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(HELD_OUT), batch_size=2)

    test_dataloader = val_dataloader


class Plain(Task):
    """What ``Net`` and ``Data`` are to the trainer's own loop."""

    def __init__(self, drops: float, train: int, noise: float) -> None:
        self.data = DataSource()
        self.data.train, self.data.eval = Rows(train, noise), Rows(HELD_OUT)
        self.optimizer = OptimizerSpec("SGD", lr=RATE)
        self._drops = drops

    def build_model(self) -> nn.Module:
        return network(self._drops)

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model, batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return outputs


def ours(module: Callable[[], Any] = Net, data: Callable[[], Any] = Data, **knobs: Any) -> Any:
    return LightningTask(module, data, **{"order": "ours", **knobs})


def run(folder: Path, task: Task, **knobs: Any) -> dict[str, Any]:
    """What a run came to: losses by step, what was logged, parameters."""
    quiet()
    given = {"strategy": "single", "max_epochs": 2, **knobs}
    options = CheckpointOptions(
        resume=given.pop("resume", "never"),
        every_steps=given.pop("every", None),
        allow=given.pop("allow", ()),
        at_end=False,
    )
    result = Trainer(
        task=task,
        seed=SEED,
        log_every=1,
        run_dir=folder,
        checkpoint=options,
        callbacks=[Jsonl()],
        **given,
    ).run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told: dict[str, Any] = {"content": result.content, "metrics": result.metrics}
    for name in ("loss", "samples"):
        found = {row["step"]: row[name] for row in lines if row["split"] == "train" and name in row}
        told[name] = list(found.values())
    # A sharded model is whole no longer than there are processes.
    weights = getattr(result.model, "weights", None) or result.model.state_dict()
    for name in ("indices", "epochs"):
        told[name] = getattr(result.model, name, None)
    told["weights"] = {name.removeprefix("net."): value for name, value in weights.items()}
    return told


def on_rank(
    world: World, port: int, folder: Path, task: Callable[[], Task], knobs: dict[str, Any]
) -> dict[str, Any] | str:
    """A run on these ranks, or what it refused; a single one on the first alone."""
    folder.mkdir(exist_ok=True)
    if knobs.get("strategy") != "single":
        as_torchrun(world, port, folder)
    elif world.rank:
        return ""
    else:
        as_alone(folder)
    try:
        return run(folder, task(), **knobs)
    except ConfigError as error:
        return str(error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def same(one: dict[str, Any], other: dict[str, Any], *, since: int = 0) -> None:
    """Two runs went the same way, but for rounding, from that step on."""
    assert other["loss"][since:] == pytest.approx(one["loss"][since:], rel=2e-5)
    for name in other["weights"]:
        torch.testing.assert_close(
            one["weights"][name], other["weights"][name], rtol=1e-4, atol=1e-6
        )
