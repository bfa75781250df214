"""(b) A DDP step on two processes beside bare DDP, in blocks that alternate."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparing import Between, Blocks, Spread, on_ranks, one_by_one
from benchmarks.contenders import endless, lightning_module, loader, trainer
from benchmarks.step_cost import ours
from benchmarks.work import BareLoop, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.training.trainer import run_in

TITLE = "DDP step on two processes"
WIDTHS = (32, 512, 512, 10)
BLOCK = 20
CONTENDERS = ("bare DDP against itself", "ToRSh Trainer, strategy=ddp", "Lightning, strategy=ddp")


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """One row for each contender: the ratio of its step to bare DDP's step beside it.

    Lightning, far from the aim, runs a quarter of the blocks. On CPUs, whatever ``device``.
    """
    return one_by_one(
        CONTENDERS,
        lambda name: _row(name, 10 if quick else 800),
        lambda row: f"{row['contender']}: {row['ratio']['value']:.3f} of bare DDP",
    )


def _row(name: str, blocks: int) -> dict[str, Any]:
    found = on_ranks(2, _rank, name, blocks // (4 if name.startswith("Lightning") else 1))
    return {
        "contender": name,
        "ratio": asdict(found.ratio),
        "bare_us": found.bare_us,
        "blocks": len(found.contender),
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("loop", "ratio to bare DDP", "95% interval", "bare step (us)", "blocks")
    cells = [
        (
            row["contender"],
            *Spread(**row["ratio"]).cells(".3f"),
            f"{row['bare_us']:.0f}",
            row["blocks"],
        )
        for row in rows
    ]
    return f"### (b) DDP step, two processes, beside bare DDP\n\n{table(head, cells)}"


def _rank(world: World, name: str, blocks: int, folder: Path) -> Blocks:
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    source = ours if name.startswith("ToRSh") else endless
    wrapped = DistributedDataParallel(build_model(WIDTHS))
    loop = BareLoop(wrapped, iter(source(Samples())))
    data = Between(loop.run, block=BLOCK)
    steps = data.steps(blocks)
    if name.startswith("bare"):
        BareLoop(DistributedDataParallel(build_model(WIDTHS)), iter(endless(data))).run(steps)
    elif name.startswith("ToRSh"):
        # The global batch is cut over the ranks: twice as large, so that a rank sees as many.
        run_in(world, trainer(data, steps, WIDTHS, folder, "cpu", strategy=DDP(), ranks=2))
    else:
        _lightning(data, steps, folder)
    comm.close()
    return data.blocks


def _lightning(data: Any, steps: int, folder: Path) -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    warnings.filterwarnings("ignore")
    fit = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        default_root_dir=folder,
        enable_model_summary=False,
    )
    fit.fit(lightning_module(WIDTHS, logs=True), loader(data))
