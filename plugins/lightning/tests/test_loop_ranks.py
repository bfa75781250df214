"""A run's own checkpoints of a LightningModule, across engines and numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from loops import as_alone, as_torchrun, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torsh_trainer_lightning.task import LightningTask

from torsh_trainer import CheckpointOptions, Trainer
from torsh_trainer.environments.world import World

SAMPLES, BATCH = 16, 2


class Rows(L.LightningDataModule):
    """The same samples everywhere, in the order of Lightning's sampler."""

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def trained(
    world: World, port: int, folder: Path, run: str, strategy: str, knobs: dict[str, Any]
) -> tuple[float, str | None] | str:
    """(train loss, checkpoint) of a run on these ranks, or what it refused."""
    if strategy != "single":
        as_torchrun(world, port, folder)
    else:  # on the first rank alone
        as_alone(folder)
        if world.rank:
            return ""
    quiet()
    options = CheckpointOptions(
        resume=knobs.pop("resume", "never"), every_steps=knobs.pop("every", None)
    )
    trainer = Trainer(
        task=LightningTask(Net, Rows),
        strategy=strategy,
        seed=3,
        log_every=1,
        run_dir=folder / run,
        checkpoint=options,
        **knobs,
    )
    try:
        content = trainer.fit().content
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return content["train_loss"], content["checkpoint"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "gloo"])
def test_a_run_goes_on_under_another_engine_from_the_end_of_an_epoch(strategy, on_ranks, tmp_path):
    (whole, _), _ = on_ranks(trained, tmp_path, "whole", "ddp", {"max_epochs": 3})
    (_, saved), _ = on_ranks(trained, tmp_path, "part", "ddp", {"max_epochs": 1})
    for resumed in on_ranks(
        trained, tmp_path, "more", strategy, {"max_epochs": 3, "resume": saved}
    ):
        assert not isinstance(resumed, str), resumed
        assert resumed[0] == pytest.approx(whole, rel=1e-5)


def test_in_the_middle_of_an_epoch_it_asks_for_as_many_processes(on_ranks, tmp_path):
    (whole, _), _ = on_ranks(trained, tmp_path, "whole", "ddp", {"max_epochs": 2, "every": 6})
    saved = str(tmp_path / "whole" / "checkpoints" / "step-00000006")
    again = {"max_epochs": 2, "resume": saved}
    resumed, _ = on_ranks(trained, tmp_path, "fsdp", "fsdp", dict(again))
    assert not isinstance(resumed, str), resumed
    assert resumed[0] == pytest.approx(whole, rel=1e-5)
    told, _ = on_ranks(trained, tmp_path, "alone", "single", dict(again))
    assert "middle of an epoch of 2 processes" in str(told)
