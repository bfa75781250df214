"""A GAN: manual optimization of two optimizers, one toggled at a time."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.data import FEATURES


class GAN(L.LightningModule):
    def __init__(self, latent: int = 4, width: int = 8, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent, width), nn.LeakyReLU(0.2), nn.Linear(width, FEATURES)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )
        self.validation_z = torch.randn(2, latent)
        self.seen: list[Tensor] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, judged: Tensor, real: bool) -> Tensor:
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        rows, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(rows.shape[0], self.hparams.latent).type_as(rows)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), real=True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.clip_gradients(optimizer_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(rows), real=True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), real=False)
        d_loss = (real_loss + fake_loss) / 2
        self.log_dict({"d_loss": d_loss, "real_loss": real_loss}, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, _ = batch
        self.log("val_real", torch.sigmoid(self.discriminator(rows)).mean())

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self(self.validation_z.type_as(self.generator[0].weight)))

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9))
        opt_d = torch.optim.Adam(
            self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9)
        )
        schedulers = [torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5) for opt in (opt_g, opt_d)]
        return [opt_g, opt_d], schedulers
