"""(f) A step of data parallel training on several processes, over a step of one process alone.

Blocks alternate as in (b), but the other block is rank 0 alone, while the other ranks sleep in a
socket: what is compared is the step that a user of one process has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparing import Between, Blocks, Spread, on_ranks, one_by_one
from benchmarks.contenders import endless, trainer
from benchmarks.step_cost import ours
from benchmarks.work import BareLoop, Samples, build_model, table
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import MPI, Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.training.trainer import run_in

TITLE = "a data parallel step over a step alone"


@dataclass(frozen=True)
class Contender:
    """What takes the steps; ``strategy`` None is a bare loop, of torch's DDP if it exchanges."""

    name: str
    backend: str
    strategy: Strategy | None = None
    exchanges: bool = True


CONTENDERS = (
    Contender("bare loop, a barrier a step and no exchange", "mpi", exchanges=False),
    Contender("bare DDP, gloo", "gloo"),
    Contender("bare DDP, mpi", "mpi"),
    Contender("ToRSh Trainer, strategy=gloo", "gloo", Gloo()),
    Contender("ToRSh Trainer, strategy=ddp comm=mpi", "mpi", DDP()),
    Contender("ToRSh Trainer, strategy=mpi", "mpi", MPI()),
    Contender("ToRSh Trainer, strategy=mpi, zero1", "mpi", MPI(zero1=True)),
)


@dataclass(frozen=True)
class Case:
    """A model of equal square layers, on so many processes, measured in blocks of steps."""

    model: str
    widths: tuple[int, ...]
    processes: int
    block: int
    blocks: int


CASES = (
    Case("1.6M (6 x 512)", (512,) * 7, 2, block=20, blocks=60),
    Case("25M (6 x 2048)", (2048,) * 7, 2, block=4, blocks=30),
    Case("1.6M (6 x 512)", (512,) * 7, 4, block=10, blocks=30),
)


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each case and contender; on CPUs, whatever ``device`` is."""
    return one_by_one(
        itertools.product(CASES, CONTENDERS),
        lambda pair: _row(*pair, quick=quick),
        lambda row: (
            f"{row['model']}, {row['processes']} processes, {row['contender']}: "
            f"{row['ratio']['value']:.2f} of a step alone"
        ),
    )


def _row(case: Case, contender: Contender, *, quick: bool) -> dict[str, Any]:
    found = on_ranks(case.processes, _rank, case, contender, 5 if quick else case.blocks)
    return {
        "model": case.model,
        "processes": case.processes,
        "contender": contender.name,
        "ratio": asdict(found.ratio),
        "alone_us": found.bare_us,
        "blocks": len(found.contender),
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("model", "processes", "loop", "of a step alone", "95% interval", "a step alone (us)")
    cells = [
        (
            row["model"],
            row["processes"],
            row["contender"],
            *Spread(**row["ratio"]).cells(".2f"),
            f"{row['alone_us']:.0f}",
        )
        for row in rows
    ]
    return f"### (f) A data parallel step over a step of one process alone\n\n{table(head, cells)}"


class Turns:
    """Has rank 0 do something while the other ranks sleep; called by all of them."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._count = 0
        told = folder / "port"
        if world.is_rank_zero:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            told.with_suffix(".new").write_text(str(self._store.port), encoding="ascii")
            told.with_suffix(".new").rename(told)
        else:
            while not told.exists():
                pass
            self._store = dist.TCPStore("127.0.0.1", int(told.read_text(encoding="ascii")))

    def alone(self, work: Callable[[], None]) -> None:
        """Returns on every rank when rank 0 has done ``work``."""
        self._count += 1
        turn, others = f"turn {self._count}", range(1, self._world.size)
        if not self._world.is_rank_zero:
            self._store.set(f"{turn}, rank {self._world.rank} is here", "")
            self._store.wait([f"{turn} is over"])
            return
        self._store.wait([f"{turn}, rank {rank} is here" for rank in others])
        work()
        self._store.set(f"{turn} is over", "")


def _rank(world: World, case: Case, contender: Contender, blocks: int, folder: Path) -> Blocks:
    turns = Turns(world, folder)
    features = case.widths[0]
    source = endless if contender.strategy is None else ours
    alone = BareLoop(build_model(case.widths), iter(source(Samples(features=features))))
    data = Between(
        lambda steps: turns.alone(lambda: alone.run(steps)), block=case.block, features=features
    )
    steps = data.steps(blocks)
    options = CommOptions(backend=contender.backend)
    if contender.strategy is None:
        comm = create(world, options, torch.device("cpu"))
        model = build_model(case.widths)
        wrapped = DistributedDataParallel(model) if contender.exchanges else model
        loop = BareLoop(wrapped, iter(endless(data)))
        if not contender.exchanges:
            # This opens the memory that ranks share: they meet there from now on.
            comm.shared_memory.shares(1)
            loop.optimizer.register_step_pre_hook(lambda *_: comm.barrier())
        loop.run(steps)
        comm.close()
    else:
        run_in(
            world,
            trainer(
                data,
                steps,
                case.widths,
                folder,
                "cpu",
                strategy=contender.strategy,
                comm=options,
                ranks=world.size,
            ),
        )
    return data.blocks
