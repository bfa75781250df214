"""(a) What a step costs over the bare PyTorch loop, in one process."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparing import Between, Spread, one_by_one
from benchmarks.contenders import ALL, as_is, bare, endless, torsh, torsh_lightning
from benchmarks.work import BATCH, MODELS, BareLoop, Samples, build_model, table
from torsh_trainer.data.feed import in_order_of
from torsh_trainer.data.loading import Loading

TITLE = "cost of a step over the bare loop"
BLOCK = 50
PRECISELY = {bare: 5, torsh: 5, torsh_lightning: 5}
"""So many times as many blocks for what the aim is about; the peers are far from it."""


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """One row for each model and contender: microseconds a step over the bare loop beside it."""
    return one_by_one(
        itertools.product(MODELS, ALL),
        lambda pair: _row(*pair, 10 if quick else 60, device),
        lambda row: (
            f"{row['model']}: {row['contender']}: {row['extra_us']['value']:+.1f} us a step"
        ),
    )


def _row(model: str, name: str, blocks: int, device: str) -> dict[str, Any]:
    widths, contender = MODELS[model], ALL[name]
    # The bare loop reads through the contender's own kind of loader: only the loop differs.
    source = ours if contender is torsh else endless
    loop = BareLoop(build_model(widths).to(device), iter(source(Samples())), device)
    data = Between(loop.run, block=BLOCK, device="cpu")
    steps = data.steps(blocks * PRECISELY.get(contender, 1))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        contender(data, steps, widths, Path(folder), device)
    return {
        "model": model,
        "contender": name,
        "extra_us": asdict(data.blocks.extra_us),
        "bare_us": data.blocks.bare_us,
        "blocks": len(data.blocks.contender),
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("model", "loop", "microseconds over bare", "95% interval", "bare step (us)", "blocks")
    cells = [
        (
            row["model"],
            row["contender"],
            *Spread(**row["extra_us"]).cells("+.1f"),
            f"{row['bare_us']:.0f}",
            row["blocks"],
        )
        for row in rows
    ]
    return f"### (a) Cost of a step over the bare loop, one process\n\n{table(head, cells)}"


def ours(data: Any) -> Any:
    """Batches through this product's loader, without its loop."""
    return in_order_of(data, Loading(batch_size=BATCH), seed=0, collate=as_is)
