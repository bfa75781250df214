"""Steps of engines beside the same in plain PyTorch: operators, time on the host, FSDP."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.comparing import Spread, in_turns, on_ranks
from benchmarks.gpu.size import BF16, CLIP, BareSteps, Size, Tokens, size_for, task_of, waiting
from torsh_trainer.comm.base import CommOptions, Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import World
from torsh_trainer.strategies.base import BatchPlan, Clip, Job, MicroBatch, Strategy
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.models import Block

ROUNDS = 20


class Operators(TorchDispatchMode):
    """How many operators torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def engine_steps(
    strategy: Strategy, size: Size, comm: Communicator, batch: torch.Tensor
) -> Callable[[int], None]:
    """So many steps of the strategy's engine, driven as the loop drives it."""
    task = task_of(size)
    ranks = comm.world.size
    plan = BatchPlan(size.micro_batch * ranks, size.micro_batch, 1, ranks)
    job = Job(
        task=task, build_model=task.build_model, batch=plan, precision=BF16, clip=Clip(norm=CLIP)
    )
    engine = strategy.prepare(job, comm)
    weight = float(size.tokens_a_step)
    work, clip = [MicroBatch(batch, weight, None)], Clip(norm=CLIP)

    def run(steps: int) -> None:
        for _ in range(steps):
            engine.zero_grad()
            engine.forward_backward(work, weight * ranks, task)
            engine.step(clip)

    return run


def one_batch(size: Size, device: torch.device) -> torch.Tensor:
    """The first batch of the tokens, on the device."""
    return Tokens(size, device.type).tokens[: size.micro_batch].to(device)


def measure_cost(device: str) -> dict[str, Any]:
    """Operators of a step, and how long the host takes to hand a step to the device."""
    size = size_for(device)
    place = torch.device(device)
    batch = one_batch(size, place)
    # Neither is compiled: what is counted is what each asks of torch.
    runs = {
        "bare": BareSteps(size, device, itertools.repeat(batch), compiles=False),
        "engine": engine_steps(Single(), size, LocalCommunicator(place), batch),
    }
    operators = {}
    for name, run in runs.items():
        run(2)
        with Operators() as seen:
            run(1)
        operators[name] = seen.count

    def host_s(name: str) -> float:
        with waiting(device):
            pass
        began = time.perf_counter()
        runs[name](1)
        return time.perf_counter() - began

    rounds = ROUNDS if device == "cuda" else 4
    seen_s = in_turns(runs, host_s, rounds=rounds)
    ratios = [mine / bare for mine, bare in zip(seen_s["engine"], seen_s["bare"], strict=True)]
    return {
        "model": size.name,
        "operators": operators,
        "operators_ratio": operators["engine"] / operators["bare"],
        "host_ratio": asdict(Spread.confident(ratios)),
        "host_ms": 1e3 * statistics.median(seen_s["engine"]),
        "rounds": rounds,
    }


def measure_sharded(device: str) -> dict[str, Any]:
    """A step of ``strategy=fsdp`` beside FSDP2 with the same blocks wrapped, on all devices."""
    count = torch.cuda.device_count() if device == "cuda" else 1
    found: dict[str, Any] = on_ranks(count, _measure_rank, device)
    return found


def _measure_rank(world: World, device: str, folder: Path) -> dict[str, Any]:
    size = size_for(device)
    place = torch.device(device, world.local_rank) if device == "cuda" else torch.device("cpu")
    comm = create(world, CommOptions(), place, process_group=True)
    batch = one_batch(size, place)
    bare = BareSteps(size, str(place), itertools.repeat(batch), compiles=False, cut=_cut)
    engine = engine_steps(FSDP(wrap_modules=("Block",)), size, comm, batch)
    runs = {"bare": bare, "engine": engine}

    def step_s(name: str) -> float:
        comm.barrier()
        began = time.perf_counter()
        with waiting(device):
            runs[name](3)
        return (time.perf_counter() - began) / 3

    in_turns(runs, step_s)  # a warm-up
    rounds = ROUNDS if device == "cuda" else 4
    seen_s = in_turns(runs, step_s, rounds=rounds)
    comm.close()
    ratios = [mine / bare for mine, bare in zip(seen_s["engine"], seen_s["bare"], strict=True)]
    return {
        "model": size.name,
        "ranks": world.size,
        "ratio": asdict(Spread.confident(ratios)),
        "step_ms": 1e3 * statistics.median(seen_s["engine"]),
        "bare_ms": 1e3 * statistics.median(seen_s["bare"]),
        "rounds": rounds,
    }


def _cut(model: nn.Module) -> nn.Module:
    """FSDP2 by its guide: each block, then the rest. Autocast computes, as in the engine."""
    for part in [*(m for m in model.modules() if isinstance(m, Block)), model]:
        fully_shard(part, mp_policy=MixedPrecisionPolicy())
    return model
