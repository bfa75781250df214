"""A script of Lightning's that takes a strategy by name, and what it trains."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from loops import as_torchrun, quiet

from torsh_trainer.environments.world import World

SCRIPT = """
import os
import sys
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import torsh_trainer_lightning
from torsh_trainer_lightning import TorshStrategy

if __name__ == "__main__":
    how, path = sys.argv[1:]
    L.seed_everything(3, verbose=False)
    strategy = TorshStrategy(how[6:]) if how.startswith("torsh-") else how
    trainer = L.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=3, limit_val_batches=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)
    said = f"rank {trainer.global_rank} of {trainer.world_size}\\n"
    os.write(1, said.encode())  # whole, beside what the other process says
"""
"""``python script.py ddp FILE``: Lightning's own; ``torsh_ddp``, ``torsh-ddp``: ours."""


def trained(world: World, port: int, folder: Path) -> dict[str, Any]:
    """What the script trains with Lightning's own ``ddp``."""
    as_torchrun(world, port, folder)
    quiet()
    Path("script.py").write_text(SCRIPT)
    words, sys.argv[:] = sys.argv[:], ["script.py", "ddp", "ddp.ckpt"]
    try:
        runpy.run_path("script.py", run_name="__main__")
    finally:
        sys.argv[:] = words
    torch.distributed.destroy_process_group()
    return state("ddp.ckpt")


def state(path: str | Path) -> dict[str, Any]:
    """The parameters in a ``.ckpt``."""
    found: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return found
