"""A run that is interrupted and goes on equals the one that was not, bit for bit.

On the same strategy and as many processes, deterministic, on CPUs. ``RUNS`` together have what a
resumed run can get wrong. Each is interrupted after every step, on two journeys that differ in how
many steps lie between, so that what an engine does only in its second step shows too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.comm.base import Communicator
from torsh_trainer.data.loading import Loading
from torsh_trainer.errors import Unsupported
from torsh_trainer.optim.optimizers import short_names
from torsh_trainer.optim.precision import LossScaling, Precision
from torsh_trainer.optim.schedule.plateau import ReduceOnPlateau
from torsh_trainer.optim.schedule.shapes import Cosine
from torsh_trainer.optim.schedule.torch_scheduler import TorchSchedule
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.tasks.base import Mean, Task
from torsh_trainer.testing.compare import close
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import (
    SAMPLES,
    Leg,
    SentenceTask,
    differences,
    live,
    lives,
    saving,
)
from torsh_trainer.testing.tiny import VOCABULARY, TinyModelOptions
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.trainer import Trainer

STEPS = 6
SMALL = 0.0005  # MiB: six buckets of the tiny model
STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(bucket_cap_mb=SMALL),
    "zero1": DDP(bucket_cap_mb=SMALL, zero1=True),
    "flat": DDP(bucket_cap_mb=SMALL, overlap=False),
    "own-gradients": DDP(bucket_cap_mb=SMALL, gradient_as_bucket_view=False),
    "fsdp": FSDP(wrap_min_bytes=0),
    "no-reshard": FSDP(reshard_after_forward=False),
    "offload": FSDP(cpu_offload=True),
}


def hybrid(size: int) -> FSDP:
    return FSDP(shard_size=max(1, size // 2))


@cache
def trainer(run: str, strategy: Strategy) -> Trainer:
    """Six steps, three an epoch: of 8, 8 and a tail of 6 samples."""
    everything = TinyModelOptions(dropout=0.3, batch_norm=True)
    common: dict[str, Any] = {
        "strategy": strategy,
        "log_every": 1,
        "eval_every": 2,
        "eval_every_epochs": None,
        "max_steps": STEPS,
        "deterministic": True,
        "device": "cpu",
        "log_level": "error",
    }
    if run == "sgd":  # accumulation, a schedule, an average
        return Trainer(
            task=SentenceTask(everything, optimizers="sgd"),
            loading=Loading(batch_size=8, micro_batch_size=1),
            schedule=Cosine(warmup_steps=3),
            ema_decay=0.8,
            **common,
        )
    if run == "adamw":  # clipping, a scaler that meets an overflow, reduce on plateau
        scaling = LossScaling(initial_scale=1024.0, growth_interval=2)
        return Trainer(
            task=SentenceTask(everything, optimizers="adamw", spoilt=5),
            loading=Loading(batch_size=8),
            schedule=ReduceOnPlateau(patience=0, threshold=0.5, gamma=0.5, warmup_steps=3),
            precision=Precision(compute="fp16", loss_scaling=scaling),
            max_grad_norm=0.5,
            **common,
        )
    # Two optimizers, tied and frozen parameters, a scheduler of torch that cycles momentum too.
    options = TinyModelOptions(dropout=0.3, tied=True)
    cycle = {"max_lr": 0.05, "total_steps": STEPS + 1, "cycle_momentum": True}
    return Trainer(
        task=SentenceTask(options, optimizers="two"),
        loading=Loading(batch_size=8, micro_batch_size=2),
        schedule=TorchSchedule(scheduler="OneCycleLR", options=cycle),
        precision=Precision(params="bf16", compute="bf16"),
        frozen=("norm.*",),
        max_grad_value=0.1,
        **common,
    )


RUNS = ("sgd", "adamw", "two")
EVERY_STEP = tuple(range(1, STEPS + 1))
JOURNEYS = ((1, 3, 4, STEPS), (2, 5, STEPS))
"""Where two runs are interrupted; together after every step."""


def journey(made: Trainer, size: int, folder: Path, stops: tuple[int, ...]) -> list[Leg]:
    """Each rank's whole journey, with a checkpoint and a new engine at every stop."""
    options = saving(folder / "-".join(map(str, stops)), keep_last=1)
    return shared_pool(size).run(
        lives, dataclasses.replace(made, checkpoint=options), folder, stops
    )


ON_FOUR = {
    "ddp": RUNS,
    "zero1": ("adamw",),
    "flat": ("sgd",),
    "own-gradients": ("two",),
    "fsdp": ("sgd", "adamw"),
    "no-reshard": ("two",),
    "offload": ("adamw",),
    "hybrid": ("sgd",),
}
ON_TWO = {
    "ddp": ("sgd",),
    "zero1": ("sgd", "two"),
    "flat": ("adamw",),
    "own-gradients": ("adamw",),
    "fsdp": ("two",),
    "no-reshard": ("sgd",),
    "offload": ("two",),
    "hybrid": ("adamw",),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "size", "run"),
    [
        (name, size, run)
        for size, chosen in ((1, {"single": RUNS}), (2, ON_TWO), (4, ON_FOUR))
        for name, runs in chosen.items()
        for run in runs
    ],
)
def test_a_run_interrupted_at_any_step_equals_the_one_that_was_not(
    name: str, size: int, run: str, tmp_path: Path
) -> None:
    strategies = {**STRATEGIES, "single": Single(), "hybrid": hybrid(size)}
    made = trainer(run, strategies[name])
    expected = journey(made, size, tmp_path, (STEPS,))
    for stops in JOURNEYS:
        for found, plain in zip(journey(made, size, tmp_path, stops), expected, strict=True):
            same(found, plain)
    sampled(expected)
    if run == "adamw":
        assert any(expected[0].skipped.values()), "no step met the overflow"
    assert len({expected[0].rates[step][0] for step in EVERY_STEP}) > 2, "a constant schedule"
    masters = expected[0].state["model"].values()
    assert {tensor.dtype for tensor in masters} <= {torch.float32, torch.int64}


def same(found: Leg, plain: Leg) -> None:
    for name in ("consumed", "weights", "losses", "norms", "skipped", "rates"):
        assert differences(getattr(found, name), getattr(plain, name), name) == []
    for step, metrics in plain.evaluations.items():
        assert differences(found.evaluations[step], metrics, f"evaluation at {step}") == []
    assert differences(found.state, plain.state) == []


def sampled(legs: list[Leg]) -> None:
    """Every epoch took each sample once, over all ranks."""
    for epoch in range(STEPS // 3):
        steps = range(3 * epoch + 1, 3 * epoch + 4)
        taken = [i for leg in legs for step in steps for micro in leg.consumed[step] for i in micro]
        assert sorted(taken) == list(range(SAMPLES))


# -- every optimizer of torch ----------------------------------------------------------------------

OPTIMIZERS = {n: c for n, c in short_names().items() if n != "lbfgs"}  # which needs a closure
UNSHARDED = ("adafactor", "rprop", "sparseadam")  # refused by name over shards


class Tables(nn.Module):
    """A table for each name, looked up with the same tokens."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(VOCABULARY, 3, sparse=name == "sparseadam") for name in names}
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.stack([table(tokens) for table in self.tables.values()])


class OneOfEach(SentenceTask):
    """A table and an optimizer of its own for each class of torch."""

    def __init__(self, *, leave: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = sorted(set(OPTIMIZERS) - set(leave))

    def build_model(self) -> nn.Module:
        return Tables(self.names)

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        named = dict(named_parameters)
        return {
            name: OPTIMIZERS[name]([named[f"tables.{name}.weight"]], lr=0.05) for name in self.names
        }

    def forward(self, model: Any, batch: Any) -> Any:
        return model(batch["tokens"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        wanted = batch["targets"].clamp(min=0).unsqueeze(-1) / VOCABULARY
        return (outputs - wanted).square().mean() * batch["factor"].mean()

    def weight(self, batch: Any) -> float:
        return float(len(batch["tokens"]))

    def evaluate(self, model: Any, batch: Any) -> Mapping[str, Mean]:
        return Task.evaluate(self, model, batch)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("strategy", "size", "leave"),
    [
        (Single(), 1, ()),
        (DDP(), 2, ()),
        (DDP(zero1=True), 2, ()),
        (FSDP(wrap_modules=("Embedding",)), 2, UNSHARDED),
    ],
    ids=["single", "ddp", "zero1", "fsdp"],
)
def test_every_optimizer_of_torch_goes_on_bit_for_bit(
    strategy: Strategy, size: int, leave: tuple[str, ...], tmp_path: Path
) -> None:
    task = OneOfEach(leave=leave)
    made = dataclasses.replace(trainer("sgd", strategy), task=task, schedule=None, ema_decay=None)
    expected, found = (journey(made, size, tmp_path, stops) for stops in ((STEPS,), (1, 3, STEPS)))
    for ours, plain in zip(found, expected, strict=True):
        same(ours, plain)
        assert set(plain.state["optimizer"]) == set(task.names)


@pytest.mark.parametrize("knobs", [FSDP(), DDP(overlap=False)], ids=["fsdp", "flat"])
def test_a_sparse_gradient_is_refused_by_name_where_it_cannot_be_had(
    knobs: Strategy, tmp_path: Path
) -> None:
    made = dataclasses.replace(trainer("sgd", knobs), task=OneOfEach(leave=UNSHARDED[:2]))
    for words in shared_pool(2).run(refusal, made, tmp_path):
        assert "the embedding 'tables.sparseadam' was built with sparse=True" in words


def refusal(comm: Communicator, made: Trainer, folder: Path) -> str:
    try:
        live(comm, made, folder)
    except Unsupported as error:
        return str(error)
    return ""


# -- why the order of DDP's buckets is kept -------------------------------------------------------


def test_without_the_order_of_its_buckets_ddp_sums_otherwise_on_four_ranks(tmp_path: Path) -> None:
    made = trainer("sgd", STRATEGIES["ddp"])
    expected = journey(made, 4, tmp_path / "plain", (STEPS,))
    legs = shared_pool(4).run(
        without_order, dataclasses.replace(made, checkpoint=saving(tmp_path / "forgetful"))
    )
    for (order, first, second), truth in zip(legs, expected, strict=True):
        assert len(order) == len(set(order)) > 10
        assert first.norms == {step: truth.norms[step] for step in (1, 2, 3, 4)}
        assert differences(second.state["model"], truth.state["model"]) != []
        for step in range(5, STEPS + 1):
            close(second.norms[step], truth.norms[step], 1e-5, "more than rounding was lost")


def without_order(comm: Communicator, made: Trainer) -> tuple[list[str], Leg, Leg]:
    """Two legs, the second of which is not told the order; and the order."""
    kept: list[str] = []

    def forget(parts: RunParts) -> None:
        load = parts.engine.load_state_dict
        taking: Any = parts.engine

        def meddled(state: dict[str, Any]) -> None:
            kept.extend(state["layout"]["ddp_ready_order"])
            load({key: value for key, value in state.items() if key != "layout"})

        taking.load_state_dict = meddled

    folder = Path(made.checkpoint.dir or "")
    first = live(comm, made, folder, until=4)
    return kept, first, live(comm, made, folder, change=forget)


def test_a_sum_over_four_ranks_is_the_same_each_time_and_another_in_another_place() -> None:
    """What all of this stands on: gloo adds in an order that only the place in a buffer decides."""
    for same_again, elsewhere in shared_pool(4).run(sums):
        assert same_again
        assert elsewhere


def sums(comm: Communicator) -> tuple[bool, bool]:
    """Whether sums come out the same when taken again, and otherwise when the buffer is turned."""
    same_again, elsewhere = True, False
    for size in (1, 7, 100, 10_000):
        generator = torch.Generator().manual_seed(comm.world.rank)
        mine = torch.randn(size, generator=generator) * 10 ** torch.randn(size, generator=generator)
        once = summed(comm, mine)
        same_again &= all(torch.equal(summed(comm, mine), once) for _ in range(5))
        turn = size // 3
        turned = summed(comm, mine.roll(turn)).roll(-turn)
        elsewhere |= not torch.equal(turned, once)
    return same_again, elsewhere


def summed(comm: Communicator, tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    comm.all_reduce(tensor)
    return tensor
