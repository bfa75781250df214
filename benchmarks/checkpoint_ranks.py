"""(e) on two processes: how long the loop waits when every rank writes its share."""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.checkpoint_ways import MODELS, build_model
from benchmarks.comparing import Spread, in_turns, on_ranks, one_by_one
from torsh_trainer import Task
from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import BatchPlan, Clip, Engine, Job, MicroBatch, Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP

RANKS = 2
STRATEGIES: dict[str, Strategy] = {"ddp": DDP(), "fsdp": FSDP()}
MODES: tuple[Literal["sync", "async"], ...] = ("sync", "async")
HEAD = (
    "strategy, two processes",
    "mode=sync: loop waits (ms)",
    "mode=async: loop waits (ms)",
    "of mode=sync's wait",
    "on disk after (s), sync",
    "async",
    "bytes by each rank over the state's own",
)


class _Task(Task):
    def __init__(self, size: str) -> None:
        self.size = size

    def build_model(self) -> nn.Module:
        return build_model(self.size)

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        return {"main": AdamW([p for _, p in named_parameters])}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return outputs.square().mean()


def measure(*, size: str = "20M", saves: int = 8) -> list[dict[str, Any]]:
    """One row for each strategy; the wait of the slower rank, medians of all but the first save."""
    return one_by_one(
        STRATEGIES,
        lambda name: on_ranks(RANKS, _rank, name, size, saves),
        lambda row: (
            f"{row['strategy']} on {RANKS} processes: the loop waits "
            f"{1e3 * row['async_wait_s']:.0f} ms, with mode=sync {1e3 * row['sync_wait_s']:.0f}"
        ),
    )


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table, as ``HEAD`` names it."""
    return (
        row["strategy"],
        f"{1e3 * row['sync_wait_s']:.0f}",
        f"{1e3 * row['async_wait_s']:.0f}",
        Spread(**row["wait_ratio"]).percent(),
        f"{row['sync_total_s']:.2f}",
        f"{row['async_total_s']:.2f}",
        " + ".join(f"{count / row['own_bytes']:.3f}" for count in row["written_bytes"]),
    )


def note(rows: list[dict[str, Any]]) -> str:
    """What the table is of."""
    own, saves = rows[0]["own_bytes"], len(rows[0]["async_waits_s"])
    return f"The state is {own / 2**20:.0f} MiB; {saves} saves of each mode, in turns."


def _rank(world: World, name: str, size: str, saves: int, folder: Path) -> dict[str, Any]:
    comm = create(world, CommOptions(backend="gloo"), torch.device("cpu"))
    task = _Task(size)
    plan = BatchPlan(batch_size=RANKS, micro_batch_size=1, accumulate=1, dp_size=RANKS)
    job = Job(task=task, build_model=task.build_model, batch=plan)
    engine = STRATEGIES[name].prepare(job, comm)
    _step(engine, task, torch.randn(1, MODELS[size][0]))
    savers = {
        mode: DcpCheckpointer(folder / mode, comm, CheckpointOptions(mode=mode)) for mode in MODES
    }
    for saver in savers.values():
        saver.prepare(lambda: {"engine": engine.state_dict()})
    numbers = itertools.count()
    seen = in_turns(
        MODES,
        lambda mode: _save(savers[mode], next(numbers), engine, comm),
        rounds=saves + 1,
    )
    for saver in savers.values():
        saver.close()
    comm.close()
    return _found(name, size, {mode: found[1:] for mode, found in seen.items()})


class _Save(NamedTuple):
    """What the slower rank took, and how much each of them wrote."""

    waited_s: float
    total_s: float
    written_bytes: list[int]


def _save(saver: DcpCheckpointer, number: int, engine: Engine, comm: Communicator) -> _Save:
    time.sleep(0.1)
    comm.barrier()
    began = time.perf_counter()
    path = saver.save(number, {"engine": engine.state_dict()}, {})
    waited_s = time.perf_counter() - began
    saver.wait()
    waited_s = _slowest(comm, waited_s)
    total_s = _slowest(comm, time.perf_counter() - began)
    written_bytes = _sizes(Path(str(path)))
    comm.barrier()
    if comm.world.is_rank_zero:
        shutil.rmtree(Path(str(path)))
    return _Save(waited_s, total_s, written_bytes)


def _step(engine: Engine, task: Task, x: Tensor) -> None:
    engine.forward_backward([MicroBatch((x,), 1.0, rng_key=None)], float(RANKS), task)
    engine.step(Clip())
    engine.zero_grad()


def _slowest(comm: Communicator, seconds: float) -> float:
    return max(comm.all_gather_object(seconds))


def _sizes(checkpoint: Path) -> list[int]:
    """Bytes of the files of tensors, one of each rank."""
    return [file.stat().st_size for file in sorted(checkpoint.glob("*.distcp"))]


def _found(name: str, size: str, seen: Mapping[str, Sequence[_Save]]) -> dict[str, Any]:
    parameters = list(build_model(size).parameters())
    own = sum(3 * p.nbytes + 4 for p in parameters)  # AdamW: two moments, and its count of steps
    sync, later = seen["sync"], seen["async"]
    sync_s = statistics.median(save.waited_s for save in sync)
    return {
        "strategy": name,
        "own_bytes": own,
        "written_bytes": later[-1].written_bytes,
        "sync_wait_s": sync_s,
        "async_wait_s": statistics.median(save.waited_s for save in later),
        "async_waits_s": [save.waited_s for save in later],
        "wait_ratio": asdict(Spread.extremes(save.waited_s / sync_s for save in later)),
        "sync_total_s": statistics.median(save.total_s for save in sync),
        "async_total_s": statistics.median(save.total_s for save in later),
    }
