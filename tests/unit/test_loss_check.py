"""A loss that is no mean over the weight of a batch is refused where a batch is cut, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.errors import ConfigError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))
Y = torch.arange(24) % 3
CLASSES = torch.tensor([0.2, 1.0, 3.0])


class Source(DataSource):
    train = TensorDataset(X, Y)


class Three(Task):
    """Three classes; a subclass has the loss under test."""

    data = Source()
    optimizer = OptimizerSpec("SGD", lr=0.1)

    def build_model(self) -> nn.Module:
        model = nn.Linear(5, 3)
        with torch.no_grad():
            model.weight.copy_(X[:3])
            model.bias.zero_()
        return model

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs


class Summed(Three):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], reduction="sum")


class SummedSquares(Three):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs[:, 0], batch[1].float(), reduction="sum")


class DividedByHand(Three):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], reduction="sum") / len(outputs)


class ByClasses(Three):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], weight=CLASSES)


class Ignoring(Three):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1], ignore_index=0)


class WeighedByClasses(ByClasses):
    sample_weight = None

    def weight(self, batch: Any) -> float:
        return float(CLASSES[batch[1]].sum())


def fit(task: Task, folder: Path, *, micro_batch_size: int) -> nn.Module:
    """One step of SGD over the 24 samples, in micro-batches of so many."""
    model = (
        Trainer(
            task=task,
            loading=Loading(batch_size=24, micro_batch_size=micro_batch_size, shuffle=False),
            max_steps=1,
            run_dir=folder,
            callbacks=[],
        )
        .fit()
        .model
    )
    assert model is not None
    return model


@pytest.mark.parametrize("task", [Summed(), SummedSquares(), ByClasses(), Ignoring()])
def test_a_loss_that_is_no_mean_is_refused_where_a_step_has_several_micro_batches(
    task: Task, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"micro-batches and processes") as caught:
        fit(task, tmp_path, micro_batch_size=8)
    by_hand = isinstance(task, ByClasses | Ignoring)
    assert ("define weight(self, batch)" if by_hand else "reduction='mean'") in str(caught.value)


@pytest.mark.parametrize("task", [Summed(), ByClasses()])
def test_with_one_micro_batch_a_step_it_trains_as_in_plain_pytorch_and_the_log_tells(
    task: Three, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fit(task, tmp_path, micro_batch_size=24)
    assert "with several micro-batches a step this would be refused" in caplog.text
    torch.testing.assert_close(model.state_dict(), plain(task))


@pytest.mark.parametrize("task", [DividedByHand(), WeighedByClasses()])
def test_a_mean_over_the_weight_is_the_gradient_of_the_whole_batch(
    task: Three, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fit(task, tmp_path, micro_batch_size=8)
    assert "would be refused" not in caplog.text
    torch.testing.assert_close(model.state_dict(), plain(task))


def plain(task: Three) -> dict[str, Tensor]:
    """A step of SGD over all samples at once."""
    model = task.build_model()
    task.loss(model(X), (X, Y)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return model.state_dict()
