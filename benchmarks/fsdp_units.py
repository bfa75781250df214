"""(u) A step of FSDP on two processes, by how the model is cut into units, beside torch's FSDP2.

Blocks of steps alternate as in (b); the other block is FSDP2 with every block wrapped.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.comparing import Between, Blocks, Spread, on_ranks, one_by_one
from benchmarks.contenders import endless, trainer
from benchmarks.step_cost import ours
from benchmarks.work import BareLoop, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.trainer import run_in
from torsh_trainer.world import World

TITLE = "a step of FSDP by its units"
EVERYTHING = 2**50

CONTENDERS: dict[str, FSDP | None] = {
    "FSDP2, one unit": None,
    "strategy=fsdp, every block a unit": FSDP(wrap_min_bytes=0),
    "strategy=fsdp, one unit": FSDP(wrap_min_bytes=EVERYTHING),
    "strategy=fsdp": FSDP(),
}
"""None is a bare loop."""


@dataclass(frozen=True)
class Case:
    """So many square layers of a width, measured in blocks of steps."""

    model: str
    width: int
    layers: int
    block: int
    blocks: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width,) * (self.layers + 1)


CASES = (
    Case("25k (6 x 64)", 64, 6, block=8, blocks=14),
    Case("1.6M (6 x 512)", 512, 6, block=4, blocks=14),
    Case("6.3M (24 x 512)", 512, 24, block=2, blocks=12),
    Case("6.3M (6 x 1024)", 1024, 6, block=2, blocks=12),
    Case("25M (6 x 2048)", 2048, 6, block=1, blocks=12),
)


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each case and contender; on CPUs, whatever ``device`` is."""
    return one_by_one(
        itertools.product(CASES, CONTENDERS),
        lambda pair: _row(*pair, quick=quick),
        lambda row: f"{row['model']}, {row['contender']}: {row['ratio']['value']:.2f}",
    )


def _row(case: Case, contender: str, *, quick: bool) -> dict[str, Any]:
    found = on_ranks(2, _rank, case, contender, 4 if quick else case.blocks)
    return {
        "model": case.model,
        "contender": contender,
        "ratio": asdict(found.ratio),
        "bare_us": found.bare_us,
        "blocks": len(found.contender),
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("model", "loop", "of FSDP2, every block", "95% interval", "its step (ms)", "blocks")
    cells = [
        (
            row["model"],
            row["contender"],
            *Spread(**row["ratio"]).cells(".2f"),
            f"{row['bare_us'] / 1000:.1f}",
            row["blocks"],
        )
        for row in rows
    ]
    title = "### (u) A step of FSDP on two processes, beside FSDP2 with every block wrapped"
    return f"{title}\n\n{table(head, cells)}"


def _rank(world: World, case: Case, contender: str, blocks: int, folder: Path) -> Blocks:
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    strategy = CONTENDERS[contender]
    source = endless if strategy is None else ours
    wrapped = _cut(build_model(case.widths), every_block=True)
    bare = BareLoop(wrapped, iter(source(Samples(features=case.width))))
    data = Between(bare.run, block=case.block, features=case.width)
    steps = data.steps(blocks)
    if strategy is None:
        loop = BareLoop(_cut(build_model(case.widths), every_block=False), iter(endless(data)))
        loop.run(steps)
    else:
        run_in(world, trainer(data, steps, case.widths, folder, "cpu", strategy=strategy, ranks=2))
    comm.close()
    return data.blocks


def _cut(model: nn.Module, *, every_block: bool) -> nn.Module:
    """As ``strategy=fsdp`` does by default, gathered parameters are freed after each forward."""
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    for part in [*(layers if every_block else []), model]:
        fully_shard(part, reshard_after_forward=True)
    return model
