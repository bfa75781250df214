"""What a step in two stages costs beside torch's own ``Schedule1F1B.step`` on the same model.

    python benchmarks/pipeline_overhead.py [width] [micro-batches] [rounds]

Two processes over gloo take turns: a step of ours, a step of torch's, on the same micro-batches and
the same stages, without an optimizer. Printed are medians of the time and of the processor time of
both processes, and of the ratio of neighbours, which a loaded machine moves less.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torsh_trainer.comm.base import Communicator
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.strategies.base import BatchPlan, Job, MicroBatch, MicroBatchPlace
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.tasks.base import Task
from torsh_trainer.tasks.models import Block
from torsh_trainer.testing.ranks import shared_pool

WORDS, TOKENS, SAMPLES, LAYERS = 256, 64, 4, 4


class Language(nn.Module):
    """Blocks of the GPT between an embedding and a head of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=4, dropout=0.0) for _ in range(LAYERS))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Half(nn.Module):
    """One of two stages, as torch wants them."""

    def __init__(self, whole: Language, rank: int) -> None:
        super().__init__()
        half = LAYERS // 2
        self.before = whole.tokens if rank == 0 else nn.Identity()
        self.blocks = whole.blocks[rank * half : (rank + 1) * half]
        self.after = whole.head if rank == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class Words(Task):
    """The token itself, for something to learn."""

    def __init__(self, width: int) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return Language(self.width)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch.flatten())


def measure(comm: Communicator, width: int, count: int, rounds: int) -> list[list[float]]:
    """Seconds of ours and of torch's, and their processor seconds, by round."""
    task = Words(width)
    strategy, mesh = divide(comm.world, Parallel(), MeshOptions(pp=2))
    groups = Groups(mesh, comm)
    job = Job(task, task.build_model, BatchPlan(SAMPLES * count, SAMPLES, count, 1), groups=groups)
    engine = strategy.prepare(job, groups.data)
    tokens = torch.randint(WORDS, (count * SAMPLES, TOKENS))
    micro = [
        MicroBatch(part, float(SAMPLES), i, MicroBatchPlace(i, count))
        for i, part in enumerate(tokens.split(SAMPLES))
    ]
    half = Half(Language(width), comm.rank)
    stage = PipelineStage(half, comm.rank, 2, torch.device("cpu"), group=comm.process_group)
    schedule = Schedule1F1B(
        stage,
        count,
        loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )

    def run_ours() -> None:
        engine.zero_grad()
        engine.forward_backward(micro, float(SAMPLES * count), task)

    def run_torchs() -> None:
        half.zero_grad()
        if comm.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=[], return_outputs=False)

    def clock(run: Any) -> tuple[float, float]:
        comm.barrier()
        began, used = time.perf_counter(), time.process_time()
        run()
        used = time.process_time() - used
        comm.barrier()
        took = time.perf_counter() - began
        return took, comm.reduce_values([used])[0]

    for run in (run_ours, run_torchs) * 3:  # forwards that are watched, and shapes that are told
        run()
    pairs = ((clock(run_ours), clock(run_torchs)) for _ in range(rounds))
    return [[ours[0], torchs[0], ours[1], torchs[1]] for ours, torchs in pairs]


def main(width: int = 128, count: int = 8, rounds: int = 60) -> None:
    """Prints a line of time, and one of processor time."""
    times = shared_pool(2).run(measure, width, count, rounds)[0]
    for what, at in (("time", 0), ("processor time", 2)):
        ours, torchs = (statistics.median(row[at + i] for row in times) for i in (0, 1))
        ratio = statistics.median(row[at] / row[at + 1] for row in times)
        print(
            f"width {width}, {count} micro-batches, {what}: ours {1e3 * ours:.1f} ms, torch's "
            f"schedule {1e3 * torchs:.1f} ms, ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
