"""Truncated backpropagation through time, split by hand as the documentation does it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from modules.data import sequences


class Tbptt(L.LightningModule):
    def __init__(self, splits: int = 2, hidden: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, hiddens: Any) -> tuple[Tensor, Any]:
        out, hiddens = self.rnn(x, hiddens)
        return self.head(out), hiddens

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        hiddens, losses = None, []
        for x, y in zip(
            batch[0].split(self.hparams.splits, dim=1),
            batch[1].split(self.hparams.splits, dim=1),
            strict=True,
        ):
            out, hiddens = self(x, hiddens)
            loss = F.mse_loss(out, y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            hiddens = tuple(hidden.detach() for hidden in hiddens)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        self.log("loss", mean, prog_bar=True, on_step=True, on_epoch=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        return {"last": losses[-1]}

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(sequences(8, 6, seed=1), batch_size=2, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
