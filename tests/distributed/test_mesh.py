"""Whole runs on data 2 x the same model 2 equal a plain loop, and resume on other meshes.

The plain loop is written out below: it knows no processes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.quantised import Int8
from torsh_trainer.data.loading import Loading
from torsh_trainer.mesh import Groups, Mesh, MeshOptions
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import DataSource, Task
from torsh_trainer.testing.mesh import ReplicatedModel
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import as_dicts, differences
from torsh_trainer.testing.whole_runs import RunOutcome, run_on_rank
from torsh_trainer.training.loop import Loop
from torsh_trainer.training.trainer import Trainer

ALL_DATA = MeshOptions()
TWO_BY_TWO = ReplicatedModel(model_replicate=2)
STEPS, BATCH, SAMPLES = 6, 8, 22
DECAY = 0.5

_DRAW = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 6, generator=_DRAW)
Y = X[:, :2].sin().sum(1, keepdim=True)
WEIGHTS = 0.25 + torch.rand(SAMPLES, 1, generator=_DRAW)


class Source(DataSource):
    """Two global batches of eight and a tail of six."""

    train = TensorDataset(X, Y, WEIGHTS)
    eval = TensorDataset(X[:11], Y[:11], WEIGHTS[:11])
    predict = TensorDataset(X[:13], Y[:13], WEIGHTS[:13])


def mean_loss(outputs: Tensor, batch: Any) -> Tensor:
    _, targets, weights = batch
    return (weights * (outputs - targets) ** 2).sum() / weights.sum()


class Weighted(Task):
    """A regression in which samples weigh differently."""

    data = Source()
    sample_weight = None

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self.optimizer = optimizer

    def build_model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return mean_loss(outputs, batch)

    def weight(self, batch: Any) -> float:
        return float(batch[2].sum())


@dataclass(frozen=True)
class Kind:
    """What is asked of a run beside the plainest."""

    optimizer: str = "SGD"
    lr: float = 0.1
    max_grad_norm: float | None = None
    ema_decay: float | None = None
    micro_batch_size: int = 4


KINDS = {
    "sgd": Kind(),
    "clipped": Kind(max_grad_norm=0.2),
    "adamw": Kind("AdamW", lr=0.01, max_grad_norm=0.5, ema_decay=DECAY, micro_batch_size=2),
}


def trainer(kind: Kind, strategy: Strategy, mesh: MeshOptions = ALL_DATA) -> Trainer:
    return Trainer(
        task=Weighted(OptimizerSpec(kind.optimizer, lr=kind.lr, weight_decay=0.0)),
        strategy=strategy,
        mesh=mesh,
        loading=Loading(
            batch_size=BATCH,
            micro_batch_size=kind.micro_batch_size,
            shuffle=False,
            eval_batch_size=2,
        ),
        max_steps=STEPS,
        max_grad_norm=kind.max_grad_norm,
        ema_decay=kind.ema_decay,
        log_every=1,
        eval_every=2,
        eval_every_epochs=None,
        deterministic=True,
        device="cpu",
        log_level="error",
    )


def plain(kind: Kind) -> RunOutcome:
    """The same training in one loop over whole batches."""
    model = Weighted(OptimizerSpec()).build_model()
    made = getattr(torch.optim, kind.optimizer)(model.parameters(), lr=kind.lr, weight_decay=0.0)
    outcome = RunOutcome()
    averages: dict[str, Tensor] = {}
    batches = [range(start, min(start + BATCH, SAMPLES)) for start in range(0, SAMPLES, BATCH)]
    for step in range(1, STEPS + 1):
        ids = list(batches[(step - 1) % len(batches)])
        made.zero_grad()
        loss = mean_loss(model(X[ids]), (X[ids], Y[ids], WEIGHTS[ids]))
        loss.backward()  # type: ignore[no-untyped-call]
        most = kind.max_grad_norm or math.inf
        outcome.norms[step] = float(nn.utils.clip_grad_norm_(model.parameters(), most))
        outcome.losses[step] = loss.item()
        made.step()
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        averages = {
            name: DECAY * averages[name] + (1 - DECAY) * value if averages else value
            for name, value in values.items()
        }
        with torch.no_grad():
            used = averages if kind.ema_decay else values
            outputs = torch.func.functional_call(model, used, X[:13])
        if step % 2 == 0:
            batch = (X[:11], Y[:11], WEIGHTS[:11])
            outcome.metrics[step] = mean_loss(outputs[:11], batch).item()
    outcome.parameters, outcome.predictions = values, outputs
    return outcome


def check(outcome: RunOutcome, expected: RunOutcome, *, first: int = 1) -> None:
    """Every quantity that began at step ``first`` equals the plain loop's."""
    for what, ours, theirs in outcome.pair_numbers(expected, first=first):
        assert ours == pytest.approx(theirs, rel=2e-5), what
    for name, value in expected.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(outcome.predictions, expected.predictions, rtol=2e-5, atol=2e-6)


def on_four(made: Trainer, folder: Path, *args: Any) -> list[RunOutcome]:
    answers = shared_pool(4).run(run_on_rank, made, folder, *args)
    for mine, first in ((1, 0), (3, 2)):
        differing = differences(as_dicts(answers[mine]), as_dicts(answers[first]))
        assert not differing, f"rank {mine} has the samples of rank {first}, and not {differing}"
    return answers


STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(),
    "flat": DDP(overlap=False),
    "zero1": DDP(zero1=True),
    "fsdp": FSDP(wrap_min_bytes=0),
    "gloo": Gloo(),
    "gloo-zero1": Gloo(zero1=True),
}


@pytest.mark.matrix(7)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_on_two_by_two_equals_a_plain_loop(
    kind: Kind, strategy: Strategy, tmp_path: Path
) -> None:
    for outcome in on_four(trainer(kind, strategy, TWO_BY_TWO), tmp_path):
        check(outcome, plain(kind))


def written(folder: Path) -> tuple[int, set[str]]:
    """Bytes of tensors in the last checkpoint, and whose random numbers it holds."""
    (path,) = (folder / "saved").glob(f"step-{STEPS:08d}")
    size = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    return size, set(json.loads((path / "state.json").read_text())["rng"])


@pytest.mark.parametrize("strategy", [DDP(), DDP(zero1=True), FSDP()], ids=["ddp", "zero1", "fsdp"])
def test_a_checkpoint_has_every_byte_once(strategy: Strategy, tmp_path: Path) -> None:
    kind = KINDS["adamw"]
    on_four(trainer(kind, strategy, TWO_BY_TWO), tmp_path / "mesh")
    shared_pool(2).run(run_on_rank, trainer(kind, strategy), tmp_path / "two")
    size, ranks = written(tmp_path / "mesh")
    assert (size, ranks) == written(tmp_path / "two")
    assert ranks == {"rank_0", "rank_1"}


PLACES: dict[str, tuple[int, Strategy, MeshOptions]] = {
    "dp=4": (4, DDP(), MeshOptions()),
    "dp=1": (1, Single(), MeshOptions()),
    "fsdp": (4, FSDP(), MeshOptions()),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("goes_to", [True, False], ids=["to", "from"])
def test_a_run_goes_on_on_another_mesh(
    goes_to: bool, place: tuple[int, Strategy, MeshOptions], tmp_path: Path
) -> None:
    kind = KINDS["adamw"]
    ranks, strategy, mesh = place
    there = (ranks, trainer(kind, strategy, mesh))
    here = (4, trainer(kind, DDP(), TWO_BY_TWO))
    first, second = (here, there) if goes_to else (there, here)
    shared_pool(first[0]).run(run_on_rank, first[1], tmp_path, 3)
    expected = plain(kind)
    for outcome in shared_pool(second[0]).run(run_on_rank, second[1], tmp_path):
        check(outcome, expected, first=4)


def test_compressed_gradients_are_those_of_two_ranks(tmp_path: Path) -> None:
    kind = KINDS["clipped"]
    for strategy, memory in ((DDP(), "residual"), (Gloo(), "residual"), (FSDP(), "none")):
        made = replace(trainer(kind, strategy), compression=Int8(memory=memory))
        folder = tmp_path / strategy.name
        two = shared_pool(2).run(run_on_rank, made, folder / "two")
        four = on_four(replace(made, mesh=TWO_BY_TWO), folder / "mesh")
        assert not differences(as_dicts(four[::2]), as_dicts(two))


def groups_of_data_alone(comm: Communicator) -> tuple[bool, int]:
    """Whether the groups of a mesh of data alone are the run's, and how many more were made."""
    before = len(dist.distributed_c10d._world.pg_map)
    groups = Groups(Mesh.data_parallel(comm.world), comm)
    same = groups.data is groups.loss is comm and groups.norm.size == groups.model.size == 1
    cut = Groups(Mesh.data_parallel(comm.world, shard=comm.size), comm)
    same = same and cut.norm is cut.data is comm
    return same, len(dist.distributed_c10d._world.pg_map) - before


def test_where_only_data_ranks_exist_no_group_is_made() -> None:
    assert shared_pool(2).run(groups_of_data_alone) == [(True, 0), (True, 0)]


def a_part_twice(comm: Communicator) -> tuple[float, list[int]]:
    """The sum of ranks over a duplicate of this process's part."""
    part = comm.split([0, 2] if comm.rank % 2 == 0 else [1, 3])
    assert part is not None
    again = part.duplicate()
    assert again is not part
    assert again.process_group is not part.process_group
    return again.reduce_values([comm.rank])[0], [again.rank, again.size]


def test_a_part_can_be_had_twice() -> None:
    expected = [(2.0, [0, 2]), (4.0, [0, 2]), (2.0, [1, 2]), (4.0, [1, 2])]
    assert shared_pool(4).run(a_part_twice) == expected


# -- negative controls -----------------------------------------------------------------------------


def _lose_groups(name: str) -> None:
    """The loop asks the world in the place of a group."""
    made = Loop.__post_init__

    def spoilt(self: Loop) -> None:
        self.groups = _World(self.groups, name)  # type: ignore[assignment]
        made(self)

    Loop.__post_init__ = spoilt  # type: ignore[method-assign]


class _World:
    def __init__(self, groups: Any, name: str) -> None:
        self._groups, self._name = groups, name

    def __getattr__(self, name: str) -> Any:
        return self._groups.whole if name == self._name else getattr(self._groups, name)


def test_a_loop_that_adds_losses_up_over_the_world_is_found_out(tmp_path: Path) -> None:
    pool = shared_pool(4)
    made = trainer(KINDS["sgd"], DDP(), TWO_BY_TWO)
    try:
        outcomes = pool.run(run_on_rank, made, tmp_path, STEPS, lambda: _lose_groups("loss"))
    finally:
        pool.close()  # its processes have the wrong loop
    with pytest.raises(AssertionError, match="losses of step 1"):
        check(outcomes[0], plain(KINDS["sgd"]))
