"""(u) A step of FSDP on two processes, by how the model is cut into units, beside torch's FSDP2.

All contenders are in the same two processes and take their blocks of steps in turns; every second
round goes in the opposite order. What is told are ratios to FSDP2 with every block wrapped, in the
same round, and of the shortest to the shortest: on a busy machine it says more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.comparing import Spread, in_turns, on_ranks, one_by_one
from benchmarks.contenders import BenchTask
from benchmarks.work import BATCH, BareLoop, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch
from torsh_trainer.strategies.fsdp import FSDP

TITLE = "a step of FSDP by its units"
EVERYTHING = 2**50
PEER = "FSDP2, every block"

CONTENDERS: dict[str, FSDP | None] = {
    PEER: None,
    "FSDP2, one unit": None,
    "strategy=fsdp, every block a unit": FSDP(wrap_min_bytes=0),
    "strategy=fsdp, one unit": FSDP(wrap_min_bytes=EVERYTHING),
    "strategy=fsdp": FSDP(),
}
"""None is a bare loop; the others are engines, driven as the loop drives them."""


@dataclass(frozen=True)
class Case:
    """So many square layers of a width, measured in rounds of blocks of steps."""

    model: str
    width: int
    layers: int
    block: int
    rounds: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width,) * (self.layers + 1)


CASES = (
    Case("25k (6 x 64)", 64, 6, block=10, rounds=40),
    Case("1.6M (6 x 512)", 512, 6, block=5, rounds=40),
    Case("6.3M (24 x 512)", 512, 24, block=2, rounds=30),
    Case("6.3M (6 x 1024)", 1024, 6, block=2, rounds=30),
    Case("25M (6 x 2048)", 2048, 6, block=1, rounds=20),
)


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each case and contender; on CPUs, whatever ``device`` is."""
    found = one_by_one(
        CASES,
        lambda case: on_ranks(2, _rank, case, 4 if quick else case.rounds),
        lambda rows: "; ".join(f"{r['contender']} {r['ratio']['value']:.2f}" for r in rows),
    )
    return [row for rows in found for row in rows]


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = (
        "model",
        "loop",
        "of FSDP2, every block",
        "95% interval",
        "of its shortest",
        "its step (ms)",
        "rounds",
    )
    cells = [
        (
            row["model"],
            row["contender"],
            *Spread(**row["ratio"]).cells(".2f"),
            f"{row['shortest']:.2f}",
            f"{row['bare_us'] / 1000:.1f}",
            row["blocks"],
        )
        for row in rows
    ]
    title = "### (u) A step of FSDP on two processes, beside FSDP2 with every block wrapped"
    return f"{title}\n\n{table(head, cells)}"


def _rank(world: World, case: Case, rounds: int, folder: Path) -> list[dict[str, Any]]:
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    batch = Samples(features=case.width).__getitems__(list(range(BATCH)))
    runs = {name: _steps(name, case, batch, comm) for name in CONTENDERS}

    def block(name: str) -> float:
        comm.barrier()
        began_s = time.perf_counter()
        runs[name](case.block)
        comm.barrier()
        return (time.perf_counter() - began_s) / case.block

    in_turns(CONTENDERS, block)  # a warm-up
    seen = in_turns(CONTENDERS, block, rounds=rounds)
    comm.close()
    return [
        {
            "model": case.model,
            "contender": name,
            "ratio": asdict(
                Spread.confident(t / b for t, b in zip(times, seen[PEER], strict=True))
            ),
            "shortest": min(times) / min(seen[PEER]),
            "bare_us": 1e6 * statistics.median(seen[PEER]),
            "blocks": rounds,
        }
        for name, times in seen.items()
        if name != PEER
    ]


def _steps(name: str, case: Case, batch: Any, comm: Communicator) -> Callable[[int], None]:
    """Takes so many steps."""
    strategy = CONTENDERS[name]
    if strategy is None:
        wrapped = _cut(build_model(case.widths), every_block=name == PEER)
        return BareLoop(wrapped, iter(lambda: batch, None)).run
    task = BenchTask([], case.widths)
    plan = BatchPlan(batch_size=2 * BATCH, micro_batch_size=BATCH, accumulate=1, dp_size=2)
    engine = strategy.prepare(Job(task=task, build_model=task.build_model, batch=plan), comm)
    work, clip = [MicroBatch(batch, BATCH, None)], Clip()

    def run(steps: int) -> None:
        for _ in range(steps):
            engine.zero_grad()
            engine.forward_backward(work, 2 * BATCH, task)
            engine.step(clip)

    return run


def _cut(model: nn.Module, *, every_block: bool) -> nn.Module:
    """As ``strategy=fsdp`` does by default, gathered parameters are freed after each forward."""
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    for part in [*(layers if every_block else []), model]:
        fully_shard(part, reshard_after_forward=True)
    return model
