"""Which kernel attention takes on a device, asked for and left to torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torsh_trainer import DataSource, Loading, OptimizerSpec, Task, Trainer
from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.precision import Precision

BF16 = Precision(compute="bf16")
FP32 = Precision(compute="fp32")


class Attending(Task):
    """One attention over tokens of noise, in a head dimension that every fused kernel takes."""

    optimizer = OptimizerSpec("SGD", lr=0.1)

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, 64, 128, generator=generator)
        self.data = DataSource()
        self.data.train = TensorDataset(x, x.flip(1))

    def build_model(self) -> nn.Module:
        return nn.MultiheadAttention(128, 2, dropout=self.dropout, batch_first=True)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        mixed: Tensor = model(batch[0], batch[0], batch[0], need_weights=False)[0]
        return mixed

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs.float(), batch[1])


def kernels(folder: Path, device: str, precision: Precision, **knobs: Any) -> set[str]:
    """Those that a run of three steps says it took."""
    knobs.setdefault("task", Attending())
    Trainer(
        strategy="single",
        loading=Loading(batch_size=8),
        precision=precision,
        max_steps=3,
        run_dir=folder,
        device=device,
        eval_every_epochs=None,
        **knobs,
    ).fit()
    provenance = json.loads((folder / "provenance.json").read_text())
    return {*provenance["attention"]["kernels"]}


@pytest.mark.parametrize(
    ("precision", "asked", "taken"),
    [
        (BF16, "flash", {"flash"}),
        (BF16, "efficient", {"efficient"}),
        (BF16, "math", {"math"}),
        (BF16, ("flash", "efficient"), {"flash", "efficient"}),
        (FP32, "efficient", {"efficient"}),
    ],
)
def test_a_run_takes_the_kernel_that_is_asked_for(
    precision: Precision, asked: Any, taken: set[str], device: str, tmp_path: Path
) -> None:
    if device == "cpu":  # which has flash and math alone, in fp32 and in bf16
        asked, taken = ("math", {"math"}) if asked == "math" else ("flash", {"flash"})
    found = kernels(tmp_path, device, precision, attention=asked)
    assert found
    assert found <= taken


def test_left_to_torch_bf16_takes_a_fused_kernel(device: str, tmp_path: Path) -> None:
    assert not kernels(tmp_path, device, BF16) & {"math"}


def test_what_the_kernel_cannot_is_refused_in_one_sentence(device: str, tmp_path: Path) -> None:
    task = Attending(dropout=0.5 if device == "cpu" else 0.0)  # flash on a GPU has no fp32
    with pytest.raises(ConfigError, match=r"trainer\.attention=flash"):
        kernels(tmp_path, device, FP32, task=task, attention="flash")
