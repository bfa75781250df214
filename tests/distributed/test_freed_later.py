"""Parameters that a callback frees, and freezes, while the trainer's own loop runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.comm.compression import NoCompression, TopK
from torsh_trainer.comm.compression.base import Compression
from torsh_trainer.data.loading import Loading
from torsh_trainer.optim.precision import Precision
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.strategies.single import Single
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.resuming import Leg, SentenceTask, differences, lives, saving
from torsh_trainer.testing.tiny import TinyModel
from torsh_trainer.training.trainer import Trainer

STEPS, FREED_AT, FROZEN_AT = 6, 2, 4
SMALL = 0.0005  # MiB: several buckets
NONE = NoCompression()
TOPK = TopK(0.1, min_size=8)
LOW = Precision(params="bf16", compute="bf16")


class Thawing(SentenceTask):
    """A block and a norm are frozen at first; ``free`` gives them to the optimizer."""

    def build_model(self) -> TinyModel:
        self.model = super().build_model()
        self.late = [self.model.blocks[0], self.model.norm]
        for module in self.late:
            module.requires_grad_(False)
        return self.model

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        self.made = super().build_optimizers(named_parameters)
        return self.made

    def free(self) -> None:
        for module in self.late:
            module.requires_grad_(True)
        freed = [p for module in self.late for p in module.parameters()]
        self.made["main"].add_param_group({"params": freed, "lr": 0.05})


class Hand(Callback):
    """Frees after one step, and freezes after another."""

    every_step = True

    def __init__(self, task: Thawing) -> None:
        self.task = task

    def on_step(self, report: StepReport) -> None:
        if report.step == FREED_AT:
            self.task.free()
        if report.step == FROZEN_AT:
            self.task.model.blocks[1].requires_grad_(False)


def journey(
    strategy: Strategy,
    size: int,
    folder: Path,
    *stops: int,
    compression: Compression = NONE,
    **knobs: Any,
) -> list[Leg]:
    task = Thawing()
    made = Trainer(
        task=task,
        callbacks=(Hand(task),),
        strategy=strategy,
        compression=compression,
        loading=Loading(batch_size=8, micro_batch_size=2),
        eval_every=None,
        eval_every_epochs=None,
        max_steps=STEPS,
        ema_decay=0.5,
        deterministic=True,
        device="cpu",
        log_level="error",
        checkpoint=saving(folder / "-".join(map(str, stops)), keep_last=1),
        **knobs,
    )
    return shared_pool(size).run(lives, made, folder, stops)


def near(one: Any, other: Any) -> None:
    """Makes sure that two nests of tensors agree within rounding."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for name in one:
            near(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Leg:
    return journey(Single(), 1, tmp_path_factory.mktemp("alone"), STEPS)[0]


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(bucket_cap_mb=SMALL),
        DDP(overlap=False),
        Gloo(bucket_cap_mb=SMALL),
        FSDP(wrap_min_bytes=0),
    ],
    ids=["ddp", "ddp, after backward", "gloo", "fsdp"],
)
def test_two_ranks_do_what_one_does_and_so_they_do_after_interruptions(
    strategy: Strategy, alone: Leg, tmp_path: Path
) -> None:
    found = journey(strategy, 2, tmp_path, STEPS)
    for leg in found:
        near(alone.norms, leg.norms)
    if not isinstance(strategy, FSDP):
        near(
            {k: alone.state[k] for k in ("model", "ema")},
            {k: found[1].state[k] for k in ("model", "ema")},
        )
    for leg, plain in zip(journey(strategy, 2, tmp_path, 3, 5, STEPS), found, strict=True):
        for kind in ("losses", "norms", "rates"):
            assert differences(getattr(leg, kind), getattr(plain, kind), kind) == []
        assert differences(leg.state, plain.state) == []
    assert found[0].state["trains"]["blocks.0.linear.weight"] is True
    assert found[0].state["trains"]["blocks.1.linear.weight"] is False


@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [
        (DDP(bucket_cap_mb=SMALL), {"compression": TOPK}),
        (Gloo(bucket_cap_mb=SMALL), {"compression": TOPK}),
        (DDP(), {"precision": dataclasses.replace(LOW, reduce="bf16")}),
        (FSDP(wrap_min_bytes=0), {"precision": LOW}),
    ],
    ids=["ddp, topk", "gloo, topk", "ddp, bf16", "fsdp, bf16"],
)
def test_what_is_freed_is_compressed_and_rounded_as_the_rest(
    strategy: Strategy, knobs: dict[str, Any], tmp_path: Path
) -> None:
    found = journey(strategy, 2, tmp_path, STEPS, **knobs)
    again = journey(strategy, 2, tmp_path, 3, 5, STEPS, **knobs)
    for leg, plain in zip(again, found, strict=True):
        assert differences(leg.state, plain.state) == []
    if "compression" in knobs:
        one, other = found
        assert differences(one.state["model"], other.state["model"]) == []
        assert one.state["compression"]["residual"]["blocks.0.linear.weight"].any()


@pytest.mark.parametrize("strategy", [DDP(zero1=True), Gloo(zero1=True)], ids=["ddp", "gloo"])
def test_an_optimizer_that_was_cut_at_the_start_refuses_them_by_name(
    strategy: Strategy, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"frozen at the start and train now: blocks\.0\.n"):
        journey(strategy, 2, tmp_path, STEPS)
