"""Configurations of other engines as a strategy of Lightning's Trainer."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torsh_trainer_lightning import TorshStrategy

from torsh_trainer import DDP, FSDP
from torsh_trainer.errors import ConfigError, Unsupported


class Line(L.LightningModule):
    """The least that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: TorshStrategy, **flags) -> L.Trainer:
    """Two steps on one process."""
    trainer = L.Trainer(
        strategy=strategy,
        devices=1,
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
    return trainer


def test_a_configuration_of_deepspeeds_becomes_a_strategy_with_its_report(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    zero = {"stage": 3, "overlap_comm": True}
    path.write_text(json.dumps({"gradient_clipping": 0.5, "zero_optimization": zero}))
    strategy = TorshStrategy.from_deepspeed(path)
    said = capsys.readouterr().out
    assert "zero_optimization.stage" in said
    assert "performance-only" in said
    assert isinstance(strategy.chosen, FSDP)
    assert strategy.chosen.reshard_after_forward
    with pytest.raises(ConfigError, match=r"gradient_clip_val=0[.]5, and the Trainer has None"):
        fit(strategy)
    strategy = TorshStrategy.from_deepspeed(path)
    assert fit(strategy, gradient_clip_val=0.5).global_step == 2


def test_what_the_module_brings_itself_is_refused_in_the_file(tmp_path):
    path = tmp_path / "ds_config.json"
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    path.write_text(json.dumps({"optimizer": adam, "zero_optimization": {"stage": 1}}))
    with pytest.raises(ConfigError, match="brings its own optimizer, adamw; return it from conf"):
        TorshStrategy.from_deepspeed(path)


def test_a_horovod_job_becomes_a_strategy_with_its_report(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text("HOROVOD_FUSION_THRESHOLD=33554432 horovodrun -np 2 python train.py\n")
    strategy = TorshStrategy.from_horovod(path)
    assert "HOROVOD_FUSION_THRESHOLD" in capsys.readouterr().out
    assert isinstance(strategy.chosen, DDP)
    assert strategy.chosen.bucket_cap_mb == 32.0
    assert strategy.translation is not None
    assert strategy.translation.left == {"launcher.num_processes": 2}
    assert fit(strategy).global_step == 2


def test_sums_where_lightning_takes_means_are_refused():
    with pytest.raises(Unsupported, match="gradients that are summed"):
        fit(TorshStrategy("ddp", backward_passes_per_step=2), accumulate_grad_batches=2)
