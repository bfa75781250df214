"""(b) A DDP step on two processes beside bare DDP, in blocks that alternate."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import endless, lightning_module, loader, trainer
from benchmarks.step_cost import ours
from benchmarks.work import BareLoop, Between, Blocks, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.launchers.base import LaunchContext
from torsh_trainer.launchers.local import Local
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.trainer import run_in
from torsh_trainer.world import World

TITLE = "DDP step on two processes"
WIDTHS = (32, 512, 512, 10)
BLOCK = 20
CONTENDERS = ("bare DDP against itself", "ToRSh Trainer, strategy=ddp", "Lightning, strategy=ddp")


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """One row for each contender: the ratio of its step to bare DDP's step beside it.

    Lightning, far from the aim, runs a quarter of the blocks. On CPUs, whatever ``device``.
    """
    blocks = 10 if quick else 800
    rows = []
    for name in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            launcher = Local(num_processes=2, threads_per_process=1)
            found: Blocks = launcher.launch(
                _rank,
                name,
                blocks // (4 if name.startswith("Lightning") else 1),
                Path(folder),
                context=LaunchContext(env={}),
            )
        ratio = found.ratio
        rows.append(
            {
                "contender": name,
                "ratio": asdict(ratio),
                "bare_us": found.bare_us,
                "blocks": len(found.contender),
            }
        )
        print(f"  {name}: {ratio.value:.3f} of bare DDP", flush=True)
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("loop", "ratio to bare DDP", "95% interval", "bare step (us)", "blocks")
    cells = [
        (
            row["contender"],
            f"{row['ratio']['value']:.3f}",
            f"{row['ratio']['low']:.3f} to {row['ratio']['high']:.3f}",
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
    steps = BLOCK * (blocks + 4)
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
