"""Numbers that are not finite, on several ranks: weights of one shard, and means over nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer, load_weights
from torsh_trainer.environments.world import World
from torsh_trainer.errors import TrainingError
from torsh_trainer.testing.ranks import RankPool
from torsh_trainer.training.trainer import run_in

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


class Source(DataSource):
    train = TensorDataset(X, X.sum(1, keepdim=True).expand(32, 4).contiguous())


class Edge(Task):
    """In the second step the last output alone has a gradient that is not finite: one row."""

    data = Source()
    optimizer = OptimizerSpec("SGD", lr=0.05)

    def __init__(self) -> None:
        self.calls = 0

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 4)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        loss = F.mse_loss(outputs, batch[1])
        return loss + (outputs[:, -1] * 0).sum().sqrt() if self.calls == 2 else loss


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, join=False) as pool:
        yield pool


def fit_in(world: World, folder: Path, strategy: str) -> str:
    trainer = Trainer(
        task=Edge(),
        strategy=strategy,
        loading=Loading(batch_size=8),
        max_steps=2,
        log_every=100,
        run_dir=folder,
        device="cpu",
    )
    try:
        run_in(world, trainer)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "gloo"])
def test_all_ranks_name_the_parameter_and_nothing_is_saved(ranks, tmp_path, strategy) -> None:
    first, second = ranks.run(fit_in, tmp_path / "run", strategy)
    assert first == second
    assert "the weights are not finite after step 2, first weight" in first
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


class Masked(Task):
    """A mean over the samples whose target counts: 0/0 for a batch in which none does."""

    sample_weight = None
    optimizer = OptimizerSpec("SGD", lr=0.05)

    class Source(DataSource):
        counts = torch.tensor([1.0] * 5 + [0.0] * 11)
        train = TensorDataset(X, X.sum(1, keepdim=True), torch.ones(32))
        eval = TensorDataset(X[:16], X[:16].sum(1, keepdim=True), counts)

    data = Source()

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def weight(self, batch: Any) -> float:
        return float(batch[2].sum())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return ((outputs - batch[1]).square().squeeze(1) * batch[2]).sum() / batch[2].sum()


def evaluate_in(world: World, folder: Path, strategy: str) -> tuple[float, Path]:
    trainer = Trainer(
        task=Masked(),
        strategy=strategy,
        loading=Loading(batch_size=8, eval_batch_size=3),
        max_steps=2,
        run_dir=folder,
        device="cpu",
    )
    result = run_in(world, trainer)
    return result.metrics["loss"], result.run_dir


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "gloo"])
def test_a_rank_whose_batches_weigh_nothing_leaves_a_metric_alone(
    ranks, tmp_path, strategy
) -> None:
    (found, folder), _ = ranks.run(evaluate_in, tmp_path / "run", strategy)
    model = Masked().build_model()
    load_weights(model, folder)
    with torch.no_grad():
        expected = F.mse_loss(model(X[:5]), X[:5].sum(1, keepdim=True)).item()
    assert found == pytest.approx(expected)
