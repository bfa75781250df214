"""(v) Memory of the host while a model starts on several processes, beside torchtitan's way.

Each way has processes of its own. What is told is the most that a process had resident over what
it had before, from ``/proc``, of the process that had most. torchtitan's way: the model on the
device meta, ``fully_shard``, ``to_empty``, and each process draws its shards' initial values for
itself; they are other numbers on another number of processes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.comparing import on_ranks, one_by_one
from benchmarks.work import table
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.start import create
from torsh_trainer.deferred.recording import DeferredInit
from torsh_trainer.environments.world import World
from torsh_trainer.strategies import fsdp
from torsh_trainer.strategies.base import BatchPlan, Job
from torsh_trainer.tasks.base import Task
from torsh_trainer.tasks.models import GPT, Block

TITLE = "memory while a model starts"
BEFORE = "strategy=fsdp, whole on the host of every process first"
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A GPT with 2048 vectors a layer; ``whole`` says whether ``BEFORE`` fits this machine."""

    model: str
    layers: int
    processes: int
    whole: bool

    def build(self) -> GPT:
        """Seeded."""
        torch.manual_seed(0)
        return GPT(vocab_size=50257, context=1024, layers=self.layers, heads=16, width=2048)


CASES = (Case("0.36B", 5, processes=2, whole=True), Case("1.3B", 24, processes=4, whole=False))


class WholeFirst(DeferredInit):
    """Records nothing, so that all stays in memory: what ``strategy=fsdp`` did before."""

    def __enter__(self) -> DeferredInit:
        return self


class _Starting(Task):
    def __init__(self, case: Case) -> None:
        self.case = case

    def build_model(self) -> nn.Module:
        return self.case.build()

    def loss(self, outputs: Any, batch: Any) -> Any:
        raise NotImplementedError

    def build_optimizers(self, named_parameters: Any) -> Any:
        return {"main": torch.optim.SGD([p for _, p in named_parameters], lr=0.1)}


def start_ours(case: Case, comm: Communicator) -> object:
    """An engine of ``strategy=fsdp``."""
    task = _Starting(case)
    plan = BatchPlan(comm.size, 1, 1, comm.size)
    return fsdp.FSDP().prepare(Job(task=task, build_model=task.build_model, batch=plan), comm)


def start_whole(case: Case, comm: Communicator) -> object:
    """The same, as it was before."""
    with mock.patch.object(fsdp, "DeferredInit", WholeFirst):
        return start_ours(case, comm)


def start_as_torchtitan(case: Case, comm: Communicator) -> object:
    """A module cut by FSDP2."""
    mesh = init_device_mesh("cpu", (comm.size,))
    with torch.device("meta"):
        model = case.build()
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model._initialise()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model


WAYS: dict[str, Callable[[Case, Communicator], object]] = {
    "torchtitan's": start_as_torchtitan,
    "strategy=fsdp": start_ours,
    BEFORE: start_whole,
}


def measure(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """A row for each case and way; on CPUs, whatever ``device`` is."""
    pairs = [
        (case, way)
        for case in (CASES[:1] if quick else CASES)
        for way in WAYS
        if case.whole or way != BEFORE
    ]
    return one_by_one(
        pairs,
        lambda pair: on_ranks(pair[0].processes, _rank, *pair),
        lambda row: f"{row['model']} {row['way']}: {row['peak_mib']:.0f} MiB in {row['s']:.0f} s",
    )


def text(rows: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    head = ("model", "processes", "way", "whole model", "its shard", "largest unit", "peak")
    cells = [
        (
            row["model"],
            str(row["processes"]),
            row["way"],
            *(f"{row[key]:,.0f} MiB" for key in ("whole_mib", "shard_mib", "unit_mib", "peak_mib")),
        )
        for row in rows
    ]
    title = "### (v) Memory of a process while a GPT starts, fp32, over what it had before"
    return f"{title}\n\n{table(head, cells)}"


def _rank(world: World, case: Case, way: str, folder: Path) -> dict[str, Any]:
    comm = create(world, CommOptions(backend="gloo", timeout_s=1800), torch.device("cpu"))
    with torch.device("meta"):
        model = case.build()
    whole = _nbytes(model)
    blocks = [_nbytes(module) for module in model.modules() if isinstance(module, Block)]
    with ExitStack() as stack:
        stack.callback(comm.close)
        # What a first cut loads stays: it is no memory of the model's.
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (comm.size,)))
        comm.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, began_s = _resident_mib("VmRSS"), time.perf_counter()
        held = WAYS[way](case, comm)
        comm.barrier()
        seconds = time.perf_counter() - began_s
        (peak,) = comm.reduce_values([_resident_mib("VmHWM") - before], op="max")
        del held
    return {
        "model": case.model,
        "processes": case.processes,
        "way": way,
        "whole_mib": whole / MIB,
        "shard_mib": whole / MIB / case.processes,
        "unit_mib": max(*blocks, whole - sum(blocks)) / MIB,
        "peak_mib": peak,
        "s": seconds,
    }


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _resident_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024
