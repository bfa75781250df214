"""The same training under Lightning."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts import marks
from torsh_trainer.tasks.models import SmallCNN


class Digits(L.LightningModule):
    """The recipe's model and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SmallCNN(image_size=8)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Cross entropy."""
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        """Notes the first step."""
        marks.first_step()

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int) -> None:
    """Trains for so many steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(y))
    fit = L.Trainer(max_steps=steps, accelerator="cpu", devices=1, enable_checkpointing=False)
    fit.fit(Digits(), DataLoader(data, batch_size=64, shuffle=True))
    marks.finish()


main(int(sys.argv[1]))
