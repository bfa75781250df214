"""A small GPT on a mesh, in whole runs and in one step, and the plain loop that it is to equal.

The plain loop is written out below: it knows no processes. Bounds are in units in the last place of
the largest element of a tensor (2^-24 of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.mesh import Groups, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import (
    BatchPlan,
    Clip,
    Job,
    MicroBatch,
    MicroBatchPlace,
    Strategy,
)
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.tasks.models import GPT
from torsh_trainer.testing.compare import U32
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.state import whole_state
from torsh_trainer.testing.whole_runs import RunOutcome
from torsh_trainer.training.trainer import Trainer

WORDS, LENGTH, STEPS, BATCH = 20, 8, 4, 4
TOKENS = torch.randint(WORDS, (10, LENGTH + 1), generator=torch.Generator().manual_seed(3))

ALL_DATA = MeshOptions()


class Source(DataSource):
    """Two global batches of four and a tail of two."""

    train = TensorDataset(TOKENS)
    eval = TensorDataset(TOKENS[:5])
    predict = TensorDataset(TOKENS[:5])


class Words(Task):
    """Next words, by a GPT whose vocabulary has rows that stand for none."""

    data = Source()

    def __init__(
        self,
        optimizer: OptimizerSpec,
        *,
        chunked: bool = False,
        dropout: float = 0.0,
        heads: int = 4,
    ) -> None:
        self.optimizer = optimizer
        self.chunked = chunked
        self.dropout = dropout
        self.heads = heads

    def build_model(self) -> nn.Module:
        torch.manual_seed(5)
        made = GPT(
            vocab_size=WORDS - 1, context=8, layers=2, heads=self.heads, width=12, vocab_multiple=4
        )
        made.dropout.p = self.dropout
        return made

    def forward(self, model: nn.Module, batch: Any) -> Any:
        inputs = batch[0][:, :-1].clamp(max=WORDS - 2)
        return model(inputs, self.targets(batch)) if self.chunked else model(inputs)

    def targets(self, batch: Any) -> Tensor:
        return batch[0][:, 1:].clamp(max=WORDS - 2)

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0][:, :-1].clamp(max=WORDS - 2))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        targets = self.targets(batch)
        if outputs.dim() == 0:
            return outputs / targets.numel()
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Kind:
    """What is asked of a run, and how far it may be from the plain loop: relative, and in units of
    the largest element of a parameter."""

    optimizer: OptimizerSpec
    clip: float | None = None
    chunked: bool = False
    dropout: float = 0.0
    heads: int = 4
    relative: float = 64 * U32
    parameters: float = 128 * U32

    @property
    def task(self) -> Words:
        return Words(self.optimizer, chunked=self.chunked, dropout=self.dropout, heads=self.heads)


# Sums over the width, over words and over samples in another order: each at most (n - 1) u of the
# sum of their sizes, with n at most 80 here, and what cancels in them is small.
SGD = Kind(OptimizerSpec("SGD", lr=0.5))
CLIPPED = Kind(OptimizerSpec("SGD", lr=0.5, momentum=0.9), clip=0.5, chunked=True)
# Adam divides by a gradient's own size: see docs/parallel.md, and testing/compare.py.
ADAMW = Kind(OptimizerSpec("AdamW", lr=0.01, weight_decay=0.1), clip=0.5, relative=2e-4,
             parameters=2e-2)  # fmt: skip


def trainer(kind: Kind, strategy: Strategy, mesh: MeshOptions = ALL_DATA) -> Trainer:
    return Trainer(
        task=kind.task,
        strategy=strategy,
        mesh=mesh,
        loading=Loading(batch_size=BATCH, shuffle=False, eval_batch_size=2),
        max_steps=STEPS,
        max_grad_norm=kind.clip,
        log_every=1,
        eval_every=2,
        eval_every_epochs=None,
        device="cpu",
        log_level="error",
    )


def plain(kind: Kind) -> RunOutcome:
    """The same training in one loop over whole batches."""
    task = kind.task
    model = task.build_model()
    (made,) = kind.optimizer.build_all(model.named_parameters()).values()
    outcome = RunOutcome()
    batches = [TOKENS[start : start + BATCH] for start in range(0, len(TOKENS), BATCH)]
    for step in range(1, STEPS + 1):
        batch = (batches[(step - 1) % len(batches)],)
        made.zero_grad()
        loss = task.loss(task.forward(model, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), kind.clip or 1e9)
        made.step()
        outcome.losses[step], outcome.norms[step] = loss.item(), float(norm)
        if step % 2 == 0:
            with torch.no_grad():
                batch = (TOKENS[:5],)
                outcome.predictions = task.predict(model, batch)
                outcome.metrics[step] = task.loss(task.forward(model, batch), batch).item()
    outcome.parameters = {name: p.detach() for name, p in model.state_dict().items()}
    return outcome


def check(outcome: RunOutcome, kind: Kind, *, first: int = 1) -> None:
    """Every quantity that began at step ``first`` is that of the plain loop."""
    outcome.assert_close(
        plain(kind), relative=kind.relative, parameters=kind.parameters, first=first
    )


# -- one step of an engine -------------------------------------------------------------------------


def step(
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    mesh: MeshOptions,
    wrong: Callable[[], None] | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and the parameters after it."""
    if wrong is not None:
        wrong()
    strategy, made = divide(comm.world, strategy, mesh)
    groups = Groups(made, comm)
    batch = BatchPlan(4 * made.dp, 4, 1, made.dp)
    job = Job(task=task, build_model=task.build_model, batch=batch, groups=groups, **(more or {}))
    engine = strategy.prepare(job, groups.data)
    micro = MicroBatch((TOKENS[:4],), 4.0, 1, MicroBatchPlace(0, 1))
    engine.zero_grad()
    report = engine.forward_backward([micro], 4.0 * made.dp, task)
    engine.step(Clip())
    parameters = whole_state(engine.state_dict(), groups.data)["model"]
    engine.close()
    groups.close()
    return float(report.parts[0][0]), parameters


def refusal(comm: Communicator, *args: Any, **kwargs: Any) -> str:
    """The words that a step is refused with."""
    try:
        step(comm, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def moved_by(
    task: Task,
    wrong: Callable[[], None] | None,
    strategy: Strategy,
    mesh: MeshOptions,
    *,
    ranks: int = 2,
) -> float:
    """How far a step ends from the plain one, in units of the largest element."""
    model = task.build_model()
    (made,) = task.build_optimizers(model.named_parameters()).values()
    batch = (TOKENS[:4],)
    torch.manual_seed(1)  # as an engine does, by the key of the micro-batch
    task.loss(task.forward(model, batch), batch).backward()  # type: ignore[no-untyped-call]
    made.step()
    pool = shared_pool(ranks)
    try:
        answers = pool.run(step, task, strategy, mesh, wrong)
    finally:
        if wrong is not None:
            pool.close()  # its processes have the wrong function
    return max(
        float((parameters[name] - value).abs().max() / value.abs().max()) / U32
        for _, parameters in answers
        for name, value in model.state_dict().items()
    )
